"""Options of a sweep, and its space: which keys of the configuration take which values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from matrixlib import config as configuration
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
    validated,
)
from matrixlib.files import PARAMS
from matrixlib.runs import sizes
from matrixlib.runs.fleet import Kind
from matrixlib.tasks import get_task, load_config

ARM, PRESET, COMPUTE = "arm", "preset", "compute"
"""Dimensions that are no keys of the configuration."""
FIXED = ("task", "seed", "train.steps", "train.minutes", "train.on_time")
"""Keys that a sweep sets for all trials alike."""
HELD_OUT = ("data.source", "data.suspicious")
"""Keys on which the held-out rows depend in every task."""
LESS_IS_BETTER = ("loss", "kl", "nll")
"""Last words of such figures; of others `highest` must say it."""
DIGITS = 4  # of a number drawn from a range: what a person would type
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log )?({_NUMBER})\.\.({_NUMBER})(?: in (\d+))?")


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
    prune: bool = option(False, "end a trial whose validation loss is above the median, from a third of the updates on")
    workers: Processes = option(1, "processes, which share the processor's threads and the GPUs")
    fleet: Kind = option(
        "local",
        "`ray`: the processes are on the nodes of the Ray cluster that this machine belongs to, which all "
        "see the folder of the reports",
    )


@dataclass(frozen=True)
class Dimension:
    """A key with its values: choices, or a range from low to high, of whole numbers where both ends are written so.

    points: of a range in a grid; 0 where there is no grid.
    """

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    points: int = 0

    @staticmethod
    def parse(key: str, values: Any) -> Dimension:
        """Of `[4, 6, 8]`, `0..0.3`, `2..8` or `log 1e-4..1e-2 in 5`; ConfigError for anything else."""
        if isinstance(values, list):
            if not values or any(values[i] == values[j] for i, j in itertools.combinations(range(len(values)), 2)):
                raise ConfigError(f"space: '{key}' needs values that differ, not {values!r}")
            return Dimension(key, tuple(values))
        form = _RANGE.fullmatch(values.strip()) if isinstance(values, str) else None
        if form is None:
            raise ConfigError(
                f"space: '{key}' is {values!r}; give a list such as [4, 6, 8], or a range such as 0..0.3, 2..8 or "
                "'log 1e-4..1e-2 in 5'"
            )
        log, low, high, points = bool(form[1]), float(form[2]), float(form[3]), int(form[4] or 0)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"space: '{key}' goes from {form[2]} to {form[3]}: the first must be less than the second"
            )
        if log and low <= 0:
            raise ConfigError(f"space: '{key}' is logarithmic and begins at {form[2]}: begin above 0")
        if form[4] and points < 2:
            raise ConfigError(f"space: '{key}' has {points} points: a range in a grid needs 2 at least")
        whole = all(re.fullmatch(r"[-+]?\d+", end) for end in (form[2], form[3]))
        return Dimension(key, (), low, high, log, whole, points)

    def at(self, place: float) -> Any:
        """The value at a place from 0 (the first, or the least) to 1."""
        if self.choices:
            return self.choices[min(int(place * len(self.choices)), len(self.choices) - 1)]
        if self.log and 0 < place < 1:
            value = self.low * (self.high / self.low) ** place
        else:
            value = self.low + place * (self.high - self.low)
        return self.tidy(value)

    def tidy(self, value: float) -> Any:
        """A number of the range as it is trained with: whole, or of few digits, within the range."""
        if self.whole:
            return int(min(max(round(value), self.low), self.high))
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def grid(self) -> tuple[Any, ...]:
        """Its values in a grid; ConfigError for a range that does not say how many."""
        if self.choices:
            return self.choices
        if not self.points and self.whole and not self.log:
            return tuple(range(int(self.low), int(self.high) + 1))
        if not self.points:
            raise ConfigError(f"space: a grid needs the number of points of '{self.key}': write '... in 5', or a list")
        return tuple(dict.fromkeys(self.at(place) for place in np.linspace(0, 1, self.points)))


def load_sweep(preset: str, overrides: Mapping[str, Any] | None = None) -> SweepConfig:
    """Read a sweep's preset by name, from params/sweep/, or a YAML file by path. overrides: replace whole options.

    Raises ConfigError: unknown keys, values that the configuration does not take, trials that would not be comparable.
    """
    data, name = read_preset(preset, {}, PARAMS / "sweep")
    return check(validated(SweepConfig, data | dict(overrides or {}), name), name)


def check(sweep: SweepConfig, name: str) -> SweepConfig:
    """The sweep, with arms made equal where it asks for that; ConfigError where its trials could not be compared."""
    space = dimensions(sweep)
    if sweep.method == "staged":
        if not sweep.arms or sweep.space or sweep.compute or sweep.workers > 1:
            raise ConfigError(
                f"{name}: a staged sweep has arms, no space, no compute and one worker: its stages follow"
            )
    elif not space:
        raise ConfigError(f"{name}: nothing varies: give `space` or `arms`")
    if sweep.method in ("random", "tpe") and not sweep.trials:
        raise ConfigError(f"{name}: `{sweep.method}` needs the number of `trials`")
    if sweep.method in ("grid", "staged") and sweep.trials:
        raise ConfigError(f"{name}: `trials` is for random and tpe; a {sweep.method} sweep has its own number")
    if sum(map(bool, (sweep.steps, sweep.minutes, sweep.compute))) > 1:
        raise ConfigError(f"{name}: give one budget: steps, minutes or compute")
    if any("+" in arm for arm in sweep.arms):
        raise ConfigError(f"{name}: no arm's name may hold a '+'")
    if sweep.method == "grid":
        list(grid(sweep))
    word = sweep.measure.replace(" ", "_").rpartition("_")[2]
    if word not in LESS_IS_BETTER and "highest" not in sweep.model_fields_set:
        raise ConfigError(
            f"{name}: is the best {sweep.measure} the greatest or the least? Give `highest: true` or `highest: false`"
        )
    if sweep.equal:
        sweep = equalise(sweep)
    _check_comparable(sweep, [load_config(*request(sweep, values)) for values in _edges(space)], name)
    return sweep


def equalise(sweep: SweepConfig) -> SweepConfig:
    """The sweep with the width of every arm but the first set so that its size is that of the first.

    ConfigError where no width comes near enough, an arm or the space names the width itself, or the arms are not equal
    all over the space.
    """
    if len(sweep.arms) < 2:
        raise ConfigError(f"equal: {sweep.equal} needs two `arms` at least")
    if sweep.width in sweep.space:
        raise ConfigError(f"space: equal: {sweep.equal} sets '{sweep.width}'; take it out, or leave out `equal`")
    size = sizes.parameters if sweep.equal == "parameters" else sizes.flops
    first, *others = sweep.arms

    def sized(arm: str, width: int) -> float:
        return size(load_config(*request(sweep, {ARM: arm, sweep.width: width})))

    wanted = size(load_config(*request(sweep, {ARM: first})))
    arms = {first: sweep.arms[first]}
    for arm in others:
        if sweep.width in sweep.arms[arm]:
            raise ConfigError(f"arm '{arm}' has a {sweep.width} of its own, which equal: {sweep.equal} would set")
        width = sizes.nearest_width(partial(sized, arm), wanted)
        if abs(sized(arm, width) / wanted - 1) > sizes.TOLERANCE:
            raise ConfigError(
                f"arm '{arm}' comes no nearer to {wanted:,.0f} {sweep.equal} than {sized(arm, width):,.0f} "
                f"({sweep.width} {width}); set {sweep.width} in the arms yourself"
            )
        arms[arm] = {**sweep.arms[arm], sweep.width: width}
    equal = sweep.model_copy(update={"arms": arms})
    for values in _edges([dimension for dimension in dimensions(equal) if dimension.key != ARM]):
        counts = {arm: size(load_config(*request(equal, {**values, ARM: arm}))) for arm in arms}
        for arm, count in counts.items():
            if abs(count / counts[first] - 1) > sizes.TOLERANCE:
                raise ConfigError(
                    f"with {values} arm '{arm}' has {count:,.0f} {sweep.equal} and '{first}' {counts[first]:,.0f}: "
                    "what changes the size goes into the arms, not into the space"
                )
    return equal


def dimensions(sweep: SweepConfig) -> list[Dimension]:
    """What varies, in the order of its keys; the arms first. ConfigError for a key that no sweep may vary."""
    if bad := [key for key in sweep.space if key in FIXED or key in (ARM, COMPUTE)]:
        raise ConfigError(f"space: '{bad[0]}' is the same for all trials: see the options of a sweep")
    own = [Dimension.parse(key, values) for key, values in sweep.space.items()]
    arms = [Dimension(ARM, tuple(sweep.arms))] if sweep.arms else []
    return [*arms, *own, *([Dimension(COMPUTE, sweep.compute)] if sweep.compute else [])]


def grid(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    """Values of every trial of a grid, the last dimension going round first."""
    space = dimensions(sweep)
    for values in itertools.product(*(dimension.grid() for dimension in space)):
        yield dict(zip((dimension.key for dimension in space), values, strict=True))


def request(sweep: SweepConfig, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(preset, overrides) of the trial with these values, its budget with them."""
    preset, changes = sweep.preset, sweep.overrides
    for arm in filter(None, str(values.get(ARM, "")).split("+")):
        own = dict(sweep.arms[arm])
        preset = own.pop(PRESET, preset)
        changes = merge(changes, nest(own))
    preset = values.get(PRESET, preset)
    own = {key: value for key, value in values.items() if key not in (ARM, PRESET, COMPUTE)}
    changes = merge(changes, nest(own))
    if sweep.steps:
        changes = merge(changes, {"train": {"steps": sweep.steps}})
    if sweep.minutes:
        changes = merge(changes, {"train": {"steps": "auto", "minutes": sweep.minutes, "on_time": True}})
    if COMPUTE in values:
        changes = merge(changes, {"train": {"steps": _steps(load_config(preset, changes), values[COMPUTE])}})
    return preset, changes


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a nested mapping."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        out = merge(out, value)
    return out


def _steps(config: Config, compute: float) -> int:
    flops = get_task(config.task).training_flops(config)
    if not flops:
        raise ConfigError(f"nobody has counted the operations of task {config.task}: give steps or minutes")
    return max(1, round(compute / (flops * config.train.batch_size)))


def _edges(space: Sequence[Dimension]) -> Iterator[dict[str, Any]]:
    """Each value that can be listed, and each end of a range, the others at their first."""
    for dimension in space:
        for value in dimension.choices or (dimension.at(0.0), dimension.at(1.0)):
            yield {other.key: other.at(0.0) for other in space} | {dimension.key: value}


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


def known_figure(name: str, figures: Mapping[str, float]) -> float:
    """A held-out figure by its name, with _ or blanks. ConfigError for another, with the nearest."""
    key = name.replace("_", " ")
    if key not in figures:
        raise ConfigError(f"measure: no held-out figure '{name}'{nearest(key, list(figures))} ({', '.join(figures)})")
    return figures[key]


def to_yaml(sweep: SweepConfig) -> str:
    """YAML text of a sweep."""
    return configuration.to_yaml(sweep)
