"""What an option is worth: top-1 and KL against the preset as it stands, at equal updates and at equal minutes.

Run from the repository root: ``python tests/bench/bench_verdicts.py --options muon lamb [--preset quick] [--seeds 3]
[--updates 2000]``. The base and every option are trained with the same seeds for the same updates, in turns; then each
option whose updates take longer or shorter once more, for as many as fit into the base's time. What an update takes is
measured apart from the trainings: those of option and base alternate, and the medians count, so that a busy machine
meets both alike. Runs and times go to the reports folder (MATRIXLIB_REPORTS): stopped and started again, it goes on.
The table is Markdown, a row an option, with 95 % intervals of the differences by pairs of one seed; it is printed after
every option. The sentence at its end is what the intervals say, no more.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FIGURES = {"top-1": ("top1", 100, " %"), "KL": ("policy kl", 1, "")}
SLACK = 0.03
"""Share of an update's time that is noise: an option within it is not trained again for equal minutes."""
BASE: dict[str, Any] = {
    "optim": {"optimiser": "adamw", "decay_share": 1.0},
    "model": {"policy": {"kind": "conv", "rank": 96}},
}
"""What `quick` was before it got what the table showed to help; every other option is over it."""
OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"optim": {"optimiser": "muon"}},
    "muon_half_rate": {"optim": {"optimiser": "muon", "learning_rate": 0.0025}},
    "muon_double_rate": {"optim": {"optimiser": "muon", "learning_rate": 0.01}},
    "normuon": {"optim": {"optimiser": "normuon"}},
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
    "swa": {"optim": {"swa": 0.25}},
    "swa_constant": {"optim": {"swa": 0.25, "schedule": "constant"}},
    "dropout": {"model": {"dropout": 0.1}},
    "dropout_schedule": {"model": {"dropout": 0.1}, "train": {"dropout_stages": [1, 0.75, 0.5, 0.25, 0]}},
    "attention_6": {"model": {"attention": {"every": 6}}},
    "policy_attention": {"model": {"policy": {"kind": "attention", "rank": 32}}},
    "muon_policy_attention": {"optim": {"optimiser": "muon"}, "model": {"policy": {"kind": "attention", "rank": 32}}},
    "muon_policy_attention_rank_64": {
        "optim": {"optimiser": "muon"},
        "model": {"policy": {"kind": "attention", "rank": 64}},
    },
    "muon_double_rate_policy_attention": {
        "optim": {"optimiser": "muon", "learning_rate": 0.01},
        "model": {"policy": {"kind": "attention", "rank": 32}},
    },
    "channels_64": {"model": {"channels": 64}},
    "channels_64_blocks_5": {"model": {"channels": 64, "blocks": 5}},
    "channels_96_blocks_4": {"model": {"channels": 96, "blocks": 4}},
    "batch_norm": {"model": {"norm": {"blocks": "batch", "stem_heads": "batch"}}},
    "relu": {"model": {"activation": "relu"}},
    "without_ssl": {"model": {"ssl": []}},
    "ssl_third": {"loss": {"ssl": {"threat": 0.5, "control": 0.5}}},
    "best_move": {"loss": {"best_move": True}},
    "decay_last_third": {"optim": {"decay_share": 0.35}},
    "linear": {"optim": {"schedule": "linear", "final_fraction": 0.0}},
    "ema_0998": {"optim": {"ema_decay": 0.998}},
    "batch_64": {"train": {"batch_size": 64}, "optim": {"learning_rate": 0.0035}},
    "batch_256": {"train": {"batch_size": 256}, "optim": {"learning_rate": 0.007}},
    "muon_wide_attention": {
        "optim": {"optimiser": "muon"},
        "model": {"channels": 64, "policy": {"kind": "attention", "rank": 32}},
    },
}
"""Option -> what it changes of the preset. Rates other than AdamW's were not searched for."""


def over_base(preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The option's changes over what the preset was."""
    from matrixlib.config import merge

    return merge(BASE if preset == "quick" else {}, changes)


def train(arms: dict[str, dict[str, Any]], steps: int, run: str, options: argparse.Namespace) -> dict[str, list[Path]]:
    from matrixlib.runs.compare import train_arms

    presets = {arm: (options.preset, over_base(options.preset, changes)) for arm, changes in arms.items()}
    return train_arms(presets, "auto", 0, options.seeds, steps, run, lambda text: print(text, flush=True))


def gains(option: list[Path], base: list[Path]) -> tuple[list[str], str]:
    """Differences with their intervals, a text for each of FIGURES; and what that of the KL says of the option."""
    from matrixlib.runs.compare import read_result, t_interval

    own, other = ([read_result(folder) for folder in side] for side in (option, base))
    if bad := [result.name for result in (*own, *other) if not result.complete]:
        return ["-"] * len(FIGURES), f"{', '.join(bad)} did not reach the end"
    texts, word = [], "shows nothing"
    for name, factor, unit in FIGURES.values():
        pairs = [factor * (a.held_out[name] - b.held_out[name]) for a, b in zip(own, other, strict=True)]
        interval = t_interval(pairs)
        ends = f" ({interval[0]:+.3g} to {interval[1]:+.3g})" if interval else ""
        texts.append(f"{statistics.fmean(pairs):+.3g}{unit}{ends}")
        if name == "policy kl" and interval and interval[0] * interval[1] > 0:
            word = "helps" if interval[1] < 0 else "hurts"
    return texts, word


def time_ratio(name: str, stem: str, options: argparse.Namespace) -> float:
    """Seconds of the option's update in those of the base, measured once and kept with the runs."""
    from matrixlib import files
    from matrixlib.bench.workloads import Update
    from matrixlib.hardware.benchmark import make_plan
    from matrixlib.hardware.speed import turns
    from matrixlib.tasks import load_config

    kept = files.reports_root() / f"{stem}-times.json"
    times = files.read_json(kept)
    if name not in times:
        plan, rows = make_plan(), load_config(options.preset).train.batch_size
        changes = {arm: over_base(options.preset, OPTIONS.get(arm, {})) for arm in ("base", name)}
        works = {arm: Update(plan, options.preset, change, rows) for arm, change in changes.items()}
        times[name] = turns(works, options.seconds)
        files.write_json(kept, times)
    return float(times[name][name] / times[name]["base"])


def state(folder: Path) -> float:
    """MiB of the optimiser's state, as the newest checkpoint holds it."""
    from matrixlib.engine.checkpoint import Checkpoints

    checkpoint = Checkpoints(folder / "checkpoints", 2).newest()
    assert checkpoint is not None, "a finished run has one"
    return sum(tensor.nbytes for tensor in checkpoint.tensors["optimiser"].values()) / 2**20


def main() -> None:
    from matrixlib.engine.optim import optimiser_kind
    from matrixlib.tasks import load_config

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(OPTIONS))
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the turns that time an option's update")
    options = parser.parse_args()
    for name in options.options:  # a library that is missing is told before anything is trained
        config = load_config(options.preset, over_base(options.preset, OPTIONS[name])).optim
        if optimiser_kind(config) != config.optimiser:
            raise SystemExit(f"{name}: its library is not installed: pip install 'matrixlib[optimisers]'")
    stem = f"verdicts-{options.preset}-{options.updates}"
    columns = [f"{figure}, equal {what}" for what in ("updates", "minutes") for figure in FIGURES]
    table = [f"| option | {' | '.join(columns)} | cost | in a sentence |", "|---" * (len(columns) + 3) + "|"]
    for name in options.options:
        folders = train({"base": {}, name: OPTIONS[name]}, options.updates, stem, options)
        ratio = time_ratio(name, stem, options)
        fair = folders[name]
        if abs(ratio - 1) > SLACK:
            fit = max(1, round(options.updates / ratio))
            fair = train({name: OPTIONS[name]}, fit, f"{stem}-minutes-{fit}", options)[name]
        (updates, one), (minutes, other) = gains(folders[name], folders["base"]), gains(fair, folders["base"])
        cost = (
            f"{ratio:.2f} times the time; optimiser {state(folders[name][0]):.2f} MiB ({state(folders['base'][0]):.2f})"
        )
        sentence = f"{one} at equal updates, {other} at equal minutes"
        table.append(f"| `{name}` | {' | '.join([*updates, *minutes])} | {cost} | {sentence} |")
        print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
