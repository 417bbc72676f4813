"""Options of a sweep: which configurations are trained, alike; the search itself is Optuna's, in sweep.ipynb.

reports/<sweep>/sweep.yaml        the options
reports/<sweep>/optuna.log        the study: Optuna's journal
reports/<sweep>-000-s0/ ...       the runs, by trial and seed
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import (
    Config,
    ConfigError,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Processes,
    Section,
    difference,
    merge,
    nearest,
    option,
    read_preset,
    read_yaml_file,
    validated,
)
from matrixlib.hardware import machine
from matrixlib.hardware.runtime import select_device, suggest
from matrixlib.runs.compare import LOSS, RunResult
from matrixlib.runs.fleet import Kind
from matrixlib.runs.record import locked
from matrixlib.tasks import get_task, load_config

if TYPE_CHECKING:
    import optuna

FIXED = ("task", "seed", "train.steps", "train.minutes", "arm", "compute")
"""Keys that a sweep sets for all trials alike, or by options of its own."""
HELD_OUT = ("data.source", "data.suspicious")
"""Keys on which the held-out rows depend in every task."""
LESS_IS_BETTER = ("loss", "kl", "nll")
"""Last words of such figures; of others `highest` must say it."""
SIGNIFICANT_DIGITS = 4  # of a grid's points: what a person would type
REASON_CHARACTERS = 2000
LOCK_SECONDS = 600.0
"""That another process may go on writing a run: one on a node that was given up saves before it ends."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log )?({_NUMBER})\.\.({_NUMBER})(?: in (\d+))?")


class SweepError(ValueError):
    """A sweep that cannot go on; says why and what to do."""


class SweepConfig(Section):
    """A sweep: arms, a space over keys of the configuration, or both, and how it is gone through.

    A trial is one configuration, trained with each of the seeds.
    """

    preset: str = option("demo", "preset of all trials, unless an arm or the space names others")
    overrides: dict[str, Any] = option({}, "nested mapping over the preset of all trials")
    arms: dict[str, dict[str, Any]] = option(
        {}, "configurations by name: keys with their values, and a `preset` of their own"
    )
    space: dict[str, Any] = option(
        {}, "values by key: a list, or a range such as `log 1e-4..1e-2 in 5` (of 5 points in a grid)"
    )
    method: Literal["grid", "random", "tpe", "staged"] = option(
        "grid",
        "how the space is gone through; `tpe` learns from the results, `staged` takes the arms one after "
        "the other and keeps those that help",
    )
    trials: CountOrZero = option(0, "configurations of `random` and `tpe`; a grid has its own number")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = option(0, "first seed of each trial")
    seeds: Count = option(1, "seeds of each trial, all with the same; from 2 on there are intervals")
    steps: CountOrZero = option(0, "updates of every run; 0 = as the presets say")
    minutes: NonNegative = option(0.0, "minutes of every run in place of updates; 0 = by updates")
    compute: tuple[Positive, ...] = option(
        (), "floating-point operations of a run: every size is trained with each of these budgets"
    )
    equal: Literal["", "parameters", "flops"] = option(
        "", "make the arms equal to the first one, by setting `width` in the others"
    )
    width: str = option("model.channels", "key of the whole number that `equal` sets")
    measure: str = option(
        "loss", "what a trial is judged by: `loss` (of the last full validation) or a held-out figure"
    )
    highest: bool = option(
        False, "the greatest measure is the best one, not the least; to be given where `measure` is no loss"
    )
    prune: bool = option(
        False, "end a trial whose validation loss (of the first seed) is above the median, from a third of the updates"
    )
    workers: Processes = option(1, "processes, which share the processor's threads and the GPUs")
    fleet: Kind = option(
        "local",
        "`ray`: the processes are on the nodes of the Ray cluster that this machine belongs to, which all "
        "see the folder of the reports",
    )


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, whole where both ends are written so. points: in a grid, 0 where it does not say."""

    low: float
    high: float
    log: bool = False
    whole: bool = False
    points: int = 0

    def grid(self, key: str) -> list[float]:
        """Its points; ConfigError for a range that does not say how many."""
        if not self.points and not (self.whole and not self.log):
            raise ConfigError(f"space: a grid needs the number of points of '{key}': write '... in 5', or a list")
        spaced = np.geomspace if self.log else np.linspace
        values = spaced(self.low, self.high, self.points or int(self.high - self.low) + 1)
        if self.whole:
            return list(dict.fromkeys(round(value) for value in values.tolist()))
        return [min(max(float(f"{v:.{SIGNIFICANT_DIGITS}g}"), self.low), self.high) for v in values.tolist()]


def parse(key: str, values: Any) -> list[Any] | Range:
    """`[4, 6, 8]`, `0..0.3`, `2..8` or `log 1e-4..1e-2 in 5`; ConfigError for anything else."""
    if isinstance(values, list):
        if not values or any(values[i] == values[j] for i, j in itertools.combinations(range(len(values)), 2)):
            raise ConfigError(f"space: '{key}' needs values that differ, not {values!r}")
        return values
    form = _RANGE.fullmatch(values.strip()) if isinstance(values, str) else None
    if form is None:
        raise ConfigError(
            f"space: '{key}' is {values!r}; give a list such as [4, 6, 8], or a range such as 0..0.3, 2..8 or "
            "'log 1e-4..1e-2 in 5'"
        )
    log, low, high, points = bool(form[1]), float(form[2]), float(form[3]), int(form[4] or 0)
    whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (form[2], form[3]))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"space: '{key}' goes from {form[2]} to {form[3]}: the first must be less than the second")
    if log and (low <= 0 or (whole and low < 1)):
        raise ConfigError(f"space: '{key}' is logarithmic and begins at {form[2]}: begin above 0")
    if form[4] and points < 2:
        raise ConfigError(f"space: '{key}' has {points} points: a range in a grid needs 2 at least")
    return Range(int(low) if whole else low, int(high) if whole else high, log, whole, points)


def search_space(sweep: SweepConfig) -> dict[str, list[Any] | Range]:
    """What varies, by key; the arms first (of a staged sweep each arm, on or off), the budgets of `compute` last."""
    if bad := [key for key in sweep.space if key in FIXED]:
        raise ConfigError(f"space: '{bad[0]}' is the same for all trials: see the options of a sweep")
    if sweep.method == "staged":
        return {arm: [False, True] for arm in sweep.arms}
    own = {key: parse(key, values) for key, values in sweep.space.items()}
    arms: dict[str, list[Any] | Range] = {"arm": list(sweep.arms)} if sweep.arms else {}
    return arms | own | ({"compute": list(sweep.compute)} if sweep.compute else {})


def grid(sweep: SweepConfig) -> list[dict[str, Any]]:
    """Values of every trial of a grid, the last dimension going round first."""
    space = search_space(sweep)
    points = [values.grid(key) if isinstance(values, Range) else values for key, values in space.items()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*points)]


def load_sweep(preset: str, overrides: Mapping[str, Any] | None = None, device: str = "auto") -> SweepConfig:
    """Read a sweep's preset by name, from params/sweep/, or a YAML file by path. overrides: replace whole options.

    Raises ConfigError: unknown keys, values that the configuration does not take, trials that would not be comparable;
    SweepError without Optuna.
    """
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise SweepError("sweeps need Optuna: pip install 'matrixlib[sweep]' (or optuna)") from error
    data, name = read_preset(preset, {}, files.PARAMS / "sweep")
    sweep = validated(SweepConfig, data | dict(overrides or {}), name)
    if device != "auto":
        sweep = sweep.model_copy(update={"overrides": merge(sweep.overrides, {"runtime": {"device": device}})})
    space, method = search_space(sweep), sweep.method
    staged, own_number, others = method == "staged", method in ("grid", "staged"), [*sweep.arms.values()][1:]
    with_others = bool(sweep.space or sweep.compute or sweep.workers > 1)
    word = sweep.measure.replace(" ", "_").rpartition("_")[2]
    greatest = f"is the best {sweep.measure} the greatest or the least? Give `highest: true` or `highest: false`"
    problems = {
        "nothing varies: give `space` or `arms`": not space,
        "a staged sweep has arms, no space, no compute and one worker: its stages follow": staged and with_others,
        f"`{method}` needs the number of `trials`": not (own_number or sweep.trials),
        f"`trials` is for random and tpe; a {method} sweep has its own number": own_number and sweep.trials,
        "give one budget: steps, minutes or compute": sum(map(bool, (sweep.steps, sweep.minutes, sweep.compute))) > 1,
        greatest: word not in LESS_IS_BETTER and "highest" not in sweep.model_fields_set,
        f"equal: {sweep.equal} needs two `arms` at least": sweep.equal and not others,
        f"equal: {sweep.equal} sets '{sweep.width}': take it out of space and arms": sweep.equal
        and (sweep.width in sweep.space or any(sweep.width in arm for arm in others)),
    }
    for text, bad in problems.items():
        if bad:
            raise ConfigError(f"{name}: {text}")
    if method == "grid":
        grid(sweep)
    _check_comparable(sweep, [load_config(*request(sweep, values)) for values in edges(space)], name)
    return sweep


def open_folder(name: str, sweep: SweepConfig) -> Path:
    """The sweep's folder below the reports, made at first. SweepError where it was begun with other options."""
    if problem := files.name_problem(name):
        raise SweepError(f"sweep name {name!r} {problem}")
    folder = files.reports_root() / name
    path = folder / "sweep.yaml"
    if (folder / "run.json").exists():
        raise SweepError(f"'{name}' is the name of a training: give the sweep another")
    files.make_folder(folder)
    with files.writing(folder):
        if not path.exists():
            files.write_text(path, configuration.to_yaml(sweep))
    stored = validated(SweepConfig, read_yaml_file(path, str(path)), str(path))
    free = {"trials", "fleet"}
    if sweep.method in ("grid", "random") and not sweep.prune:  # no trial depends on another
        free |= {"measure", "highest", "workers"}
    if stored.model_copy(update={key: getattr(sweep, key) for key in free}) != sweep:
        raise SweepError(
            f"sweep '{name}' was begun with other options (see {path}): only {', '.join(sorted(free))} may change; "
            "give the sweep another name"
        )
    return folder


def open_trial(study: optuna.Study, number: int) -> optuna.Trial:
    """Trial `number`: a new one, or the one that an earlier start was stopped in, with the values that it has."""
    from optuna.trial import Trial, TrialState

    trials = study.get_trials(deepcopy=False)
    if number == len(trials) or trials[number].state == TrialState.WAITING:
        return study.ask()
    return Trial(study, trials[number]._trial_id)


def attempt(train: bytes, number: int) -> tuple[str, str]:
    """train(number), pickled by cloudpickle: the function of a cell reaches other processes so. Its (state, reason).

    Whatever the configuration trips over is the trial's: ("failed", why). Ctrl-C, SIGTERM, a full disk, and folders
    that cannot be written end the sweep.
    """
    import cloudpickle

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"update \d+: ")  # they are in the run's metrics
            return cloudpickle.loads(train)(number)
    except files.FolderError:
        raise
    except Exception as error:  # noqa: BLE001 - of one configuration of many: its row says so
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())[:REASON_CHARACTERS]
    finally:
        gc.collect()  # run and trainer hold each other: the next one needs the memory of the device


def wait_for(name: str) -> None:
    """Return when no other process writes a run; FolderError where one does not end."""
    ends, folder = time.monotonic() + LOCK_SECONDS, files.reports_root() / name
    while (folder / "lock").exists() and locked(folder):
        if time.monotonic() > ends:
            raise files.FolderError(
                f"run '{name}' has been written by another process for {LOCK_SECONDS / 60:g} minutes, maybe on a node "
                "that went away: end that process, and start the sweep again"
            )


def request(sweep: SweepConfig, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(preset, overrides) of the trial with these values, its budget with them."""
    preset, changes = sweep.preset, sweep.overrides
    arms = [values["arm"]] if "arm" in values else [arm for arm in sweep.arms if values.get(arm)]
    for arm in arms:
        own = dict(sweep.arms[arm])
        preset = own.pop("preset", preset)
        changes = merge(changes, nest(own))
    preset = values.get("preset", preset)
    changes = merge(changes, nest({key: values[key] for key in sweep.space if key in values and key != "preset"}))
    if sweep.steps:
        changes = merge(changes, {"train": {"steps": sweep.steps}})
    if sweep.minutes:
        changes = merge(changes, {"train": {"steps": "auto", "minutes": sweep.minutes}})
    if "compute" in values:
        config = load_config(preset, changes)
        flops = get_task(config.task).training_flops(config)
        if not flops:
            raise ConfigError(f"nobody has counted the operations of task {config.task}: give steps or minutes")
        steps = max(1, round(values["compute"] / (flops * config.train.batch_size)))
        changes = merge(changes, {"train": {"steps": steps}})
    return preset, changes


def part_of_machine(sweep: SweepConfig, names: Sequence[str], values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Overrides for the runs of a trial: the threads and loader processes that one of several `workers` may take.

    A trial that has begun keeps what its first run was asked to take; a cluster's nodes divide their own.
    """
    for name in names:
        if record := files.read_json(files.reports_root() / name / "run.json"):
            requested = record["requested"]
            return {key: {of: requested[key][of]} for key, of in (("runtime", "threads"), ("data", "workers"))}
    workers = sweep.workers if sweep.fleet == "local" else 1
    if workers == 1:
        return {}
    facts, config = machine.facts(), load_config(*request(sweep, values))
    threads, loaders = config.runtime.threads, config.data.workers
    if threads == "auto":
        threads = max(1, facts.threads // workers)
    if loaders == "auto":
        loaders = suggest(facts, select_device(facts, config.runtime.device)[0])["workers"][0] // workers
    return {"runtime": {"threads": threads}, "data": {"workers": loaders}}


def measured(sweep: SweepConfig, result: RunResult) -> float:
    """What a run of the sweep is judged by. ConfigError for a figure that there is not, with the nearest."""
    key, figures = sweep.measure.replace("_", " "), result.figures()
    if sweep.measure == "loss":
        return figures[LOSS]
    if key not in figures:
        raise ConfigError(f"measure: no figure '{sweep.measure}'{nearest(key, list(figures))} ({', '.join(figures)})")
    return figures[key]


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a nested mapping."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        out = merge(out, value)
    return out


# Checks


def edges(space: Mapping[str, list[Any] | Range]) -> Iterator[dict[str, Any]]:
    """Each value that can be listed, and each end of a range, the others at their first."""
    ends = {key: [v.low, v.high] if isinstance(v, Range) else v for key, v in space.items()}
    for key, values in ends.items():
        for value in values:
            yield {other: own[0] for other, own in ends.items()} | {key: value}


def _check_comparable(sweep: SweepConfig, configs: Sequence[Config], name: str) -> None:
    first = configs[0]
    if other := {config.task for config in configs} - {first.task}:
        raise ConfigError(f"{name}: trials of {first.task} and of {', '.join(other)} cannot be compared")
    keys = {key for config in configs for key in difference(config, first)}
    spec = get_task(first.task)
    if bad := sorted(key for key in keys if key.startswith((*HELD_OUT, *spec.measured_on_options))):
        raise ConfigError(f"{name}: with another {bad[0]} trials would be measured on other rows; keep it the same")
    bad = sorted(key for key in keys if key.startswith(("task", *spec.objective_options)))
    if bad and (sweep.measure == "loss" or sweep.prune):
        raise ConfigError(
            f"{name}: with another {bad[0]} the losses do not mean the same; set `measure` to a held-out figure, "
            "such as policy_kl, or top1 with `highest: true`, and `prune: false`"
        )
    budgets = {(config.train.steps, config.train.steps == "auto" and config.train.minutes) for config in configs}
    if len(budgets) > 1 and not sweep.compute:
        raise ConfigError(f"{name}: the presets have other budgets ({budgets}); give `steps` or `minutes`")
    if sweep.prune:
        other_rows = any(key.startswith("validation.") for key in keys)
        rarer = first.validation.plateau > 0 or first.validation.interval == "auto"
        if other_rows or rarer or first.train.steps == "auto" or len(budgets) > 1:
            raise ConfigError(
                f"{name}: pruning compares at the same updates and rows: give `steps`, a validation.interval in "
                "updates, validation.plateau 0, and all trials the same `validation`"
            )
