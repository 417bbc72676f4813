"""What an option is worth: top-1 and KL against a preset, at equal updates and at equal minutes.

Run from the repository root: ``python tests/bench/bench_verdicts.py --options muon lamb [--preset quick] [--base now]
[--seeds 3] [--updates 600]``. The base and every option are trained with the same seeds for the same updates, in turns;
then each option whose updates take longer or shorter once more, for as many as fit into the base's time. What an update
takes is measured apart from the trainings: those of option and base alternate, and the medians count, so that a busy
machine meets both alike. Runs and times go to the reports folder (MATRIXLIB_REPORTS): stopped and started again, it
goes on.

The table is Markdown as `notebooks/guides/verdicts.md` has it, what gains most first, with 95 % intervals of the
differences by pairs of one seed; it is printed after every option, ``--table`` prints what has been measured so far and
trains nothing. The sentence at its end is what the intervals say, no more.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FIGURES = {"top-1": ("top1", 100, "+.2f", " %"), "KL": ("policy kl", -1, "+.3f", "")}
"""Column -> name of the held-out figure, by what a gain is multiplied so that more is better, format, unit."""
SECONDS = 40.0
"""Of the turns that time updates of option and base."""
SLACK = 0.03
"""Share of an update's time that is noise: an option within it is not trained again for equal minutes."""
_ADAMW_AND_CONV: dict[str, Any] = {
    "optim": {"optimiser": "adamw", "decay_share": 1.0},
    "model": {"policy": {"kind": "conv", "rank": 96}},
}
BEFORE = {"quick": _ADAMW_AND_CONV, "small": _ADAMW_AND_CONV}
"""What presets were before they got what the table showed to help."""
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
    "policy_temperature_05": {"loss": {"policy_temperature": 0.5}},
    "policy_temperature_07": {"loss": {"policy_temperature": 0.7}},
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
LATER: dict[str, dict[str, Any]] = {
    "momentum_090": {"optim": {"momentum": 0.9}},
    "momentum_098": {"optim": {"momentum": 0.98}},
    "decay_01": {"optim": {"weight_decay": 0.1}},
    "policy_rank_64": {"model": {"policy": {"rank": 64}}},
    "policy_channels_96": {"model": {"policy": {"channels": 96}}},
    "value_half": {"loss": {"value": 0.5}},
    "policy_temperature_05_half": {"loss": {"policy_temperature": 0.5, "policy": 0.5}},
    "policy_temperature_033": {"loss": {"policy_temperature": 0.33}},
}
"""More options, which mean something for `quick` as it is alone."""
CHANGES = OPTIONS | LATER


class Bench:
    """Trainings of options beside a base, their times, and what comes of both; runs and times lie below the reports."""

    def __init__(self, preset: str, base: str, updates: int, seeds: int) -> None:
        from matrixlib import files

        self.preset, self.updates, self.seeds = preset, updates, seeds
        self.before = BEFORE.get(preset, {}) if base == "before" else {}
        self.root = files.reports_root()
        self.stem = "-".join(["verdicts", preset, str(updates), *(["now"] if base == "now" else [])])
        self.file = self.root / f"{self.stem}-costs.json"
        self.costs: dict[str, Any] = files.read_json(self.file)

    def changes(self, name: str) -> dict[str, Any]:
        from matrixlib.config import merge

        return merge(self.before, CHANGES.get(name, {}))

    def config(self, name: str) -> Any:
        from matrixlib.tasks import load_config

        return load_config(self.preset, self.changes(name))

    def measure(self, name: str) -> None:
        """Train base and option for equal updates, time their updates in turns, train the option for equal minutes."""
        from matrixlib import files

        self.train(("base", name), self.updates, self.stem)
        if name not in self.costs:
            self.costs[name] = dict(zip(("base", "own"), self.cost(name), strict=True))
            files.write_json(self.file, self.costs)
        updates, run = self.equal_minutes(name)
        if run != self.stem:
            self.train((name,), updates, run)

    def train(self, arms: tuple[str, ...], updates: int, run: str) -> None:
        from matrixlib.runs.compare import train_arms

        presets = {arm: (self.preset, self.changes(arm)) for arm in arms}
        train_arms(presets, "auto", 0, self.seeds, updates, run, lambda text: print(text, flush=True))

    def cost(self, name: str) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of an update, bytes that its forward pass keeps and that the optimiser holds: of base and option."""
        from matrixlib.bench.updates import Update, chosen_runtime
        from matrixlib.hardware.speed import turns

        plan, arms = chosen_runtime(), ("base", name)
        works = {arm: Update(plan, self.preset, self.changes(arm), self.config(arm).train.batch_size) for arm in arms}
        seconds = turns(works, SECONDS)
        one, other = (
            {"time": seconds[arm], "activations": kept_bytes(works[arm]), "optimiser's state": self.state_bytes(arm)}
            for arm in arms
        )
        return one, other

    def state_bytes(self, name: str) -> float:
        """Of the optimiser, as the newest checkpoint of a run holds it."""
        from matrixlib.engine.checkpoint import Checkpoints

        checkpoint = Checkpoints(self.root / f"{self.stem}-{name}0" / "checkpoints", 2).pick()
        return float(sum(tensor.nbytes for tensor in checkpoint.tensors["optimiser"].values()))

    def ratio(self, name: str, what: str = "time") -> float:
        return float(self.costs[name]["own"][what] / self.costs[name]["base"][what])

    def equal_minutes(self, name: str) -> tuple[int, str]:
        """(updates that fit into the base's time, how the names of their runs begin)."""
        ratio = self.ratio(name)
        fit = max(1, round(self.updates / ratio))
        same = abs(ratio - 1) <= SLACK
        return (self.updates, self.stem) if same else (fit, f"{self.stem}-minutes-{fit}")

    def row(self, name: str) -> tuple[float, str]:
        """(gain in top-1, a row of the table), at equal minutes where that was measured."""
        run = self.equal_minutes(name)[1]
        gain, updates, sentence = self.gains(name, self.stem)
        fair = ["the same"] * len(FIGURES)
        if run != self.stem:
            gain, fair, other = self.gains(name, run)
            sentence = sentence if sentence == other else f"{sentence} at equal updates, {other} at equal minutes"
        ratios = {what: self.ratio(name, what) for what in self.costs[name]["own"]}
        cost = ", ".join(f"{r:.2f} times the {what}" for what, r in ratios.items() if abs(r - 1) > SLACK) or "none"
        return gain, f"| {' | '.join([written(CHANGES[name]), *updates, *fair, cost, sentence])} |"

    def gains(self, name: str, run: str) -> tuple[float, list[str], str]:
        """(mean difference in top-1, differences with their intervals, a text for each of FIGURES, what these say)."""
        from matrixlib.runs import compare

        stems = {"base": self.stem, name: run}
        folders = {arm: [self.root / f"{stems[arm]}-{arm}{seed}" for seed in range(self.seeds)] for arm in stems}
        results = compare.results(folders)
        if results[compare.LOSS].isna().any():
            return float("-inf"), ["-"] * len(FIGURES), "a run did not reach its end"
        table = compare.differences(results, "base")[f"{name} - base"]
        texts, sure = [], {}
        for column, (figure, factor, form, unit) in FIGURES.items():
            difference, low, high = (float(value) * abs(factor) for value in table.loc[figure])
            ends = f" ({low:{form}} to {high:{form}})" if self.seeds > 1 else ""
            texts.append(f"{difference:{form}}{unit}{ends}")
            if low * high > 0:
                sure[column] = "helps" if difference * factor > 0 else "hurts"
        words = set(sure.values())
        sentence = (
            "one seed gives no interval" if self.seeds == 1 else words.pop() if len(words) == 1 else "shows nothing"
        )
        if words:
            sentence = ", ".join(f"{word} {column}" for column, word in sure.items())
        return 100 * float(table.loc["top1", "difference"]), texts, sentence


def kept_bytes(work: Any) -> int:
    """What the forward pass of an update keeps for its backward pass, weights among it."""
    import torch

    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(kept.values())


def written(changes: dict[str, Any]) -> str:
    """`optim.optimiser: muon`, `model.policy: {kind: attention, rank: 32}`: a section of one option by its key."""
    import yaml

    parts = []
    for key, value in changes.items():
        if isinstance(value, dict) and len(value) == 1:
            parts.append(f"`{key}.{written(value)[1:]}")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
            parts.append(f"`{key}: {text.splitlines()[0]}`")
    return ", ".join(parts)


def table(rows: list[tuple[float, str]]) -> str:
    columns = [f"{figure}, equal {what}" for what in ("updates", "minutes") for figure in FIGURES]
    head = [f"| option | {' | '.join(columns)} | cost | in a sentence |", "|---" * (len(columns) + 3) + "|"]
    return "\n".join([*head, *(text for _, text in sorted(rows, reverse=True))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(CHANGES))
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--base", choices=("before", "now"), default="before", help="the preset as it was, or as it is")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="of what has been measured; nothing is trained")
    given = parser.parse_args()
    bench, rows = Bench(given.preset, given.base, given.updates, given.seeds), []
    for name in given.options:
        if bench.config(name) != bench.config("base") and not given.table:
            bench.measure(name)
        if name in bench.costs:
            rows.append(bench.row(name))
            print(f"{table(rows)}\n" * (not given.table), end="", flush=True)
    if given.table:
        missing = "; ".join(written(CHANGES[name]) for name in given.options if name not in bench.costs)
        print(f"{table(rows)}\n\nNot measured: {missing or 'none'}.")


if __name__ == "__main__":
    main()
