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
import hashlib
import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

FIGURES = {"top-1": ("top1", 100, "+.2f", " %"), "KL": ("policy kl", -1, "+.3f", "")}
"""Column -> name of the held-out figure, by what a gain is multiplied so that more is better, format, unit."""
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


class Row(NamedTuple):
    gain: float
    """In top-1, at equal minutes where that was measured."""
    text: str


def main() -> None:
    from matrixlib.engine.optim import optimiser_kind

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=list(CHANGES))
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--base", choices=("before", "now"), default="before", help="the preset as it was, or as it is")
    parser.add_argument("--overrides", type=json.loads, default={}, help="of base and options, as JSON")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the turns that time an option's update")
    parser.add_argument("--table", action="store_true", help="of what has been measured; nothing is trained")
    options = parser.parse_args()
    configs: dict[str, Any] = {}
    for name in ("base", *options.options):  # not what the base has, or another option changes likewise
        if (config := config_of(name, options)) not in configs.values():
            configs[name] = config
    new = [name for name in configs if name != "base"]
    if not new:
        raise SystemExit(f"{', '.join(options.options)}: that is what the base has; see --base")
    for name in new:  # a library that is missing is told before anything is trained
        config = configs[name].optim
        if not options.table and optimiser_kind(config) != config.optimiser:
            raise SystemExit(f"{name}: its library is not installed: pip install 'matrixlib[optimisers]'")
    rows: list[Row] = []
    for name in new:
        if not options.table:
            measure(name, options)
            print(table(rows := [*rows, row_of(name, options)]), flush=True)
        elif measured(name, options):
            rows.append(row_of(name, options))
    if options.table:
        missing = [written(CHANGES[name]) for name in new if not measured(name, options)]
        print(f"{table(rows)}\n\nNot measured: {'; '.join(missing) or 'none'}.")


def changes_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """An option's changes of the preset, over what the preset was where that is the base; "base" has no own."""
    from matrixlib.config import merge

    before = BEFORE.get(options.preset, {}) if options.base == "before" else {}
    return merge(merge(before, options.overrides), CHANGES.get(name, {}))


def config_of(name: str, options: argparse.Namespace) -> Any:
    from matrixlib.tasks import load_config

    return load_config(options.preset, changes_of(name, options))


def stem(options: argparse.Namespace) -> str:
    """How the names of all runs begin."""
    parts = ["verdicts", options.preset, str(options.updates), *(["now"] if options.base == "now" else [])]
    if options.overrides:
        parts.append(hashlib.sha256(json.dumps(options.overrides, sort_keys=True).encode()).hexdigest()[:8])
    return "-".join(parts)


def measure(name: str, options: argparse.Namespace) -> None:
    """Train base and option for equal updates, time them, and train the option for equal minutes."""
    train(("base", name), options.updates, stem(options), options)
    time(name, options)
    updates, minutes = in_equal_minutes(name, options)
    if minutes != stem(options):
        train((name,), updates, minutes, options)


def train(arms: tuple[str, ...], updates: int, run: str, options: argparse.Namespace) -> None:
    from matrixlib.runs.compare import train_arms

    presets = {arm: (options.preset, changes_of(arm, options)) for arm in arms}
    train_arms(presets, "auto", 0, options.seeds, updates, run, lambda text: print(text, flush=True))


def times_of(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """(file, option -> seconds of an update of option and base)."""
    from matrixlib import files

    path = files.reports_root() / f"{stem(options)}-times.json"
    return path, files.read_json(path)


def time(name: str, options: argparse.Namespace) -> None:
    """Time updates of the option and of the base in turns, once; kept with the runs."""
    from matrixlib import files
    from matrixlib.bench.workloads import Update
    from matrixlib.hardware.benchmark import make_plan
    from matrixlib.hardware.speed import turns

    path, times = times_of(options)
    if name not in times:
        plan = make_plan()
        works = {
            arm: Update(plan, options.preset, changes_of(arm, options), config_of(arm, options).train.batch_size)
            for arm in ("base", name)
        }
        times[name] = turns(works, options.seconds)
        files.write_json(path, times)


def in_equal_minutes(name: str, options: argparse.Namespace) -> tuple[int, str]:
    """(updates that fit into the base's time, how the names of their runs begin)."""
    ratio = time_ratio(name, options)
    if abs(ratio - 1) <= SLACK:
        return options.updates, stem(options)
    fit = max(1, round(options.updates / ratio))
    return fit, f"{stem(options)}-minutes-{fit}"


def time_ratio(name: str, options: argparse.Namespace) -> float:
    """Seconds of the option's update in those of the base."""
    times = times_of(options)[1][name]
    return float(times[name] / times["base"])


def folders(name: str, run: str, options: argparse.Namespace) -> list[Path]:
    from matrixlib import files

    return [files.reports_root() / f"{run}-{name}{seed}" for seed in range(options.seeds)]


def ended(name: str, run: str, options: argparse.Namespace) -> bool:
    return all((folder / "summary.json").exists() for folder in folders(name, run, options))


def measured(name: str, options: argparse.Namespace) -> bool:
    """Whether the option has been timed and trained for equal updates."""
    run = stem(options)
    return name in times_of(options)[1] and ended("base", run, options) and ended(name, run, options)


def row_of(name: str, options: argparse.Namespace) -> Row:
    run, (_, minutes) = stem(options), in_equal_minutes(name, options)
    base = folders("base", run, options)
    gain, updates, sentence = gains(folders(name, run, options), base)
    if minutes == run:
        fair = ["the same"] * len(FIGURES)
    elif ended(name, minutes, options):
        gain, fair, other = gains(folders(name, minutes, options), base)
        sentence = sentence if sentence == other else f"{sentence} at equal updates, {other} at equal minutes"
    else:
        fair, sentence = ["not measured"] * len(FIGURES), f"{sentence} at equal updates"
    cells = [written(CHANGES[name]), *updates, *fair, cost(name, options), sentence]
    return Row(gain, f"| {' | '.join(cells)} |")


def gains(option: list[Path], base: list[Path]) -> tuple[float, list[str], str]:
    """(mean difference in top-1, differences with their intervals, a text for each of FIGURES, and what these say)."""
    from matrixlib.runs.compare import interval, read_result

    own, other = ([read_result(folder) for folder in side] for side in (option, base))
    if bad := [result.name for result in (*own, *other) if not result.complete]:
        return float("-inf"), ["-"] * len(FIGURES), f"{', '.join(bad)} did not reach the end"
    means, texts, sure = [], [], {}
    for column, (name, factor, form, unit) in FIGURES.items():
        a, b = ([abs(factor) * result.held_out[name] for result in side] for side in (other, own))
        low, high = interval(a, b)
        ends = f" ({low:{form}} to {high:{form}})" if len(a) > 1 else ""
        means.append(statistics.fmean(b) - statistics.fmean(a))
        texts.append(f"{means[-1]:{form}}{unit}{ends}")
        if low * high > 0:
            sure[column] = "helps" if means[-1] * factor > 0 else "hurts"
    if len(own) == 1:
        return means[0], texts, "one seed gives no interval"
    words = set(sure.values())
    if len(words) > 1:
        return means[0], texts, ", ".join(f"{word} {column}" for column, word in sure.items())
    return means[0], texts, words.pop() if words else "shows nothing"


def cost(name: str, options: argparse.Namespace) -> str:
    """What differs by more than noise of an update's time, of what it keeps in memory, and of the optimiser's state."""
    state, of_base = (state_bytes(folders(arm, stem(options), options)[0]) for arm in (name, "base"))
    kept = activation_bytes(name, options) / activation_bytes("base", options)
    ratios = {"time": time_ratio(name, options), "activations": kept, "optimiser's state": state / of_base}
    return ", ".join(f"{r:.2f} times the {what}" for what, r in ratios.items() if abs(r - 1) > SLACK) or "none"


def activation_bytes(name: str, options: argparse.Namespace) -> int:
    """What the forward pass of an update keeps for its backward pass, weights among it; measured once, kept with the
    times."""
    import torch

    from matrixlib import files
    from matrixlib.bench.workloads import Update
    from matrixlib.hardware.benchmark import make_plan

    path = files.reports_root() / f"{stem(options)}-activations.json"
    known = files.read_json(path)
    if name not in known:
        work = Update(make_plan(), options.preset, changes_of(name, options), config_of(name, options).train.batch_size)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            work()
        known[name] = sum(kept.values())
        files.write_json(path, known)
    return int(known[name])


def state_bytes(folder: Path) -> int:
    """Of the optimiser, as the newest checkpoint holds it."""
    from matrixlib.engine.checkpoint import Checkpoints

    checkpoint = Checkpoints(folder / "checkpoints", 2).newest()
    assert checkpoint is not None, "a finished run has one"
    return sum(tensor.nbytes for tensor in checkpoint.tensors["optimiser"].values())


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


def table(rows: list[Row]) -> str:
    columns = [f"{figure}, equal {what}" for what in ("updates", "minutes") for figure in FIGURES]
    head = [f"| option | {' | '.join(columns)} | cost | in a sentence |", "|---" * (len(columns) + 3) + "|"]
    return "\n".join([*head, *(row.text for row in sorted(rows, key=lambda row: -row.gain))])


if __name__ == "__main__":
    main()
