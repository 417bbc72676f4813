"""What an option is worth: top-1 and KL against the preset as it stands, at equal updates and at equal minutes.

Run from the repository root: ``python tests/bench/bench_verdicts.py --options muon lamb [--preset quick] [--seeds 3]
[--updates 2000]``. The base and every option are trained with the same seeds for the same updates, in turns; then each
option whose updates take longer or shorter once more, for as many as fit into the base's time. Runs go to the reports
folder (MATRIXLIB_REPORTS) and are resumed where they were stopped. The table is Markdown, a row an option, with 95 %
intervals of the differences by pairs of one seed; it is printed after every option.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FIGURES = {"top-1": ("top1", 100, " %"), "KL": ("policy kl", 1, "")}
SLACK = 0.03
"""Share of an update's time that is noise: an option within it is not trained again for equal minutes."""
OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"optim": {"optimiser": "muon"}},
    "muon_half_rate": {"optim": {"optimiser": "muon", "learning_rate": 0.0025}},
    "muon_double_rate": {"optim": {"optimiser": "muon", "learning_rate": 0.01}},
    "schedule_free": {"optim": {"optimiser": "schedule_free", "schedule": "constant"}},
    "lamb": {"optim": {"optimiser": "lamb"}},
    "nadam": {"optim": {"optimiser": "nadam"}},
    "radam": {"optim": {"optimiser": "radam"}},
    "adafactor": {"optim": {"optimiser": "adafactor"}},
    "adamw_8bit": {"optim": {"optimiser": "adamw_8bit"}},
    "sgd": {"optim": {"optimiser": "sgd", "learning_rate": 0.05}},
    "value_pooled": {"model": {"value": {"pool": "pooled"}}},
    "value_attention": {"model": {"value": {"pool": "attention"}}},
    "noise": {"optim": {"noise": 0.01}},
    "restarts": {"optim": {"restarts": 2}},
    "policy_factored": {"model": {"policy": {"kind": "factored"}}},
    "policy_dense": {"model": {"policy": {"kind": "dense"}}},
    "bottleneck": {"model": {"block": "bottleneck"}},
    "squeeze_excite": {"model": {"se_ratio": 0.25}},
    "attention_3": {"model": {"attention": {"every": 3}}},
}
"""Option -> what it changes of the preset. Rates other than AdamW's were not searched for."""


def train(arms: dict[str, dict[str, Any]], steps: int, run: str, options: argparse.Namespace) -> dict[str, list[Path]]:
    from matrixlib.runs.compare import train_arms

    presets = {arm: (options.preset, changes) for arm, changes in arms.items()}
    return train_arms(presets, "auto", 0, options.seeds, steps, run, lambda text: print(text, flush=True))


def gains(option: list[Path], base: list[Path]) -> list[str]:
    """Differences with their intervals, a text for each of FIGURES."""
    from matrixlib.runs.compare import read_result, t_interval

    own, other = ([read_result(folder).held_out for folder in side] for side in (option, base))
    texts = []
    for name, factor, unit in FIGURES.values():
        pairs = [factor * (a[name] - b[name]) for a, b in zip(own, other, strict=True)]
        interval = t_interval(pairs)
        ends = f" ({interval[0]:+.3g} to {interval[1]:+.3g})" if interval else ""
        texts.append(f"{statistics.fmean(pairs):+.3g}{unit}{ends}")
    return texts


def seconds(folders: list[Path]) -> float:
    """Of a median update, the mean over the seeds."""
    from matrixlib.runs.compare import read_result

    return statistics.fmean(1 / read_result(folder).speeds["updates/s"] for folder in folders)


def state(folder: Path) -> float:
    """MiB of the optimiser's state, as the newest checkpoint holds it."""
    from matrixlib.engine.checkpoint import Checkpoints

    checkpoint = Checkpoints(folder / "checkpoints", 2).newest()
    assert checkpoint is not None, "a finished run has one"
    return sum(tensor.nbytes for tensor in checkpoint.tensors["optimiser"].values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    stem = f"verdicts-{options.preset}-{options.updates}"
    columns = [f"{figure}, equal {what}" for what in ("updates", "minutes") for figure in FIGURES]
    table = [f"| option | {' | '.join(columns)} | time of an update | optimiser |", "|---" * (len(columns) + 3) + "|"]
    for name in options.options:
        folders = train({"base": {}, name: OPTIONS[name]}, options.updates, stem, options)
        ratio = seconds(folders[name]) / seconds(folders["base"])
        fair = folders[name]
        if abs(ratio - 1) > SLACK:
            fit = max(1, round(options.updates / ratio))
            fair = train({name: OPTIONS[name]}, fit, f"{stem}-minutes-{fit}", options)[name]
        cells = [*gains(folders[name], folders["base"]), *gains(fair, folders["base"])]
        memory = f"{state(folders[name][0]):.2f} MiB ({state(folders['base'][0]):.2f})"
        table.append(f"| `{name}` | {' | '.join(cells)} | {ratio:.2f} times | {memory} |")
        print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
