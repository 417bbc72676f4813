"""Curriculum: which part of the data an update draws from, in any number of dimensions, each with stages.

A *phase* is one combination of stages; the next phase begins when any dimension enters its next stage.
"""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from matrixlib.config import Count, CountOrZero, Real, Section, option
from matrixlib.config import Fraction as Share

VALIDATED = "a metric as validation names it (`term/name`), a term's loss (`term`), or the total (`loss`)"


class CurriculumConfig(Section):
    """The engine's part of a curriculum; a task adds a `StagesConfig` for each dimension."""

    kind: Literal["fractions", "adaptive"] = option("fractions", "stages end by share of the updates or by `metric`")
    metric: str = option("", "metric of `adaptive`: " + VALIDATED)
    up: Real = option(0.4, "`adaptive`: next phase when the metric is at least this (a loss: at most), ...")
    patience: Count = option(2, "... in this many validations in a row")
    down: Real = option(0.2, "`adaptive`: previous phase when it is below this (a loss: above), as often in a row")
    dwell: Count = option(2, "`adaptive`: validations in a phase before it may change")
    longest: CountOrZero = option(0, "`adaptive`: most validations in a phase; 0 = no limit")

    @model_validator(mode="after")
    def _hysteresis(self) -> Self:
        if self.falling and self.down <= self.up:
            raise ValueError(f"down {self.down:g} must be above up {self.up:g}: '{self.metric}' is a loss, which falls")
        if not self.falling and self.down >= self.up:
            raise ValueError(f"down {self.down:g} must be below up {self.up:g}, or phases would flap")
        return self

    @property
    def falling(self) -> bool:
        """Whether lower is better: the metric is a loss."""
        return bool(self.metric) and "/" not in self.metric


class StagesConfig(Section):
    """One dimension of a curriculum; the task's subclass defines `stages`."""

    enabled: bool = option(True, "false = the last stage from the start")
    stages: tuple[Any, ...]
    fractions: tuple[Share, ...] = option((1.0,), "share of the updates of each stage; they add up to 1")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.stages or len(self.stages) != len(self.fractions):
            raise ValueError(f"{len(self.stages)} stages and {len(self.fractions)} fractions; give one for each")
        if abs(sum(self.fractions) - 1) > 1e-9:
            raise ValueError(f"fractions {list(self.fractions)} add up to {sum(self.fractions):g}, not to 1")
        return self

    def starts(self) -> list[tuple[Fraction, Any]]:
        """(share of the updates at which it begins, stage) for each; shares are exact decimals: .5 + .3 is .8."""
        if not self.enabled:
            return [(Fraction(0), self.stages[-1])]
        shares = (Fraction(str(share)) for share in self.fractions[:-1])
        return list(zip(itertools.accumulate(shares, initial=Fraction(0)), self.stages, strict=True))


class SourceStages(StagesConfig):
    enabled: bool = option(False, "false = the last stage from the start")
    stages: tuple[dict[str, Annotated[Real, Field(gt=0)]], ...] = option(
        ({},),
        "weights of the sources of the data in a stage, any positive numbers; {} = all by their number of positions",
    )


class SourceCurriculumConfig(CurriculumConfig):
    """For tasks with several data sources."""

    metric: str = option("policy/top1", "metric of `adaptive`: " + VALIDATED)
    sources: SourceStages = SourceStages()


@dataclass(frozen=True)
class Phase:
    """One combination of stages. start: share of the updates at which it begins."""

    number: int
    start: Fraction
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(value)}" for name, value in self.values.items())


def phases(dimensions: Mapping[str, StagesConfig]) -> tuple[Phase, ...]:
    """All phases in order; a function of the stages, not of the number of updates."""
    starts = {name: dimension.starts() for name, dimension in dimensions.items()}
    edges = {Fraction(0)}.union(edge for stages in starts.values() for edge, _ in stages if edge < 1)
    found = []
    for number, edge in enumerate(sorted(edges)):
        values = {name: [stage for start, stage in stages if start <= edge][-1] for name, stages in starts.items()}
        found.append(Phase(number, edge, values))
    return tuple(found)


STATE = ("phase", "history", "_next", "_validations", "_good", "_bad", "_falls")  # in a checkpoint


class Curriculum:
    """State machine over updates and validations. phase: the current one; history: (update, phase) of every change."""

    def __init__(self, config: CurriculumConfig, dimensions: Mapping[str, StagesConfig]) -> None:
        self.config, self.phases, self.phase = config, phases(dimensions), 0
        self.history: list[tuple[int, int]] = [(0, 0)]
        self._next = 0  # phase decided by `record`, entered by `advance`
        self._validations = self._good = self._bad = 0  # validations in this phase; in a row at `up`, below `down`
        self._falls = [0] * len(self.phases)  # how often each phase proved too hard

    def advance(self, update: int, steps: int) -> bool:
        """Call before update `update` (from 0) of `steps`; True if a new phase begins with it."""
        if self.config.kind == "fractions":
            self._next = sum(update >= phase.start * steps for phase in self.phases[1:])
        if self._next == self.phase:
            return False
        self.phase = self._next
        self.history.append((update, self.phase))
        self._validations = self._good = self._bad = 0
        return True

    def record(self, values: Mapping[str, float]) -> None:
        """Record losses and metrics of a validation on the current phase; only `adaptive` uses them.

        Re-entering a phase that was too hard takes twice as many good validations. ValueError for an unknown metric.
        """
        if self.config.kind != "adaptive":
            return
        name, config = self.config.metric, self.config
        if name not in values:
            raise ValueError(f"curriculum.metric '{name}' is not measured; there are {', '.join(sorted(values))}")
        sign = -1 if config.falling else 1
        value, up, down = sign * values[name], sign * config.up, sign * config.down
        self._validations += 1
        self._good = self._good + 1 if value >= up else 0
        self._bad = self._bad + 1 if value < down else 0
        if self._validations < config.dwell or self._next != self.phase:
            return
        after = self.phase + 1
        if self._bad >= config.patience and self.phase:
            self._falls[self.phase] += 1
            self._next = self.phase - 1
        elif after < len(self.phases) and (
            self._good >= config.patience * 2 ** self._falls[after] or 0 < config.longest <= self._validations
        ):
            self._next = after

    def spans(self, updates: int) -> list[tuple[int, int, Phase]]:
        """(first update, end, phase) of every stretch up to `updates`, for plots."""
        stops = [start for start, _ in self.history[1:]] + [max(updates, self.history[-1][0])]
        return [(start, stop, self.phases[number]) for (start, number), stop in zip(self.history, stops, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        state = {name: copy.deepcopy(getattr(self, name)) for name in STATE}
        return {"phases": list(map(str, self.phases)), **state}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. ValueError if the phases differ."""
        if data["phases"] != [str(phase) for phase in self.phases]:
            raise ValueError(f"the curriculum had the phases {'; '.join(data['phases'])}")
        for name in STATE:
            setattr(self, name, copy.deepcopy(data[name]))
        self.history = [(update, phase) for update, phase in data["history"]]


def _text(value: Any) -> str:
    """A stage as text: "3-8", "standard+negative", "puzzles 30 %, games 70 %"."""
    if isinstance(value, Mapping):
        total = sum(value.values())
        return ", ".join(f"{name} {share / total:.0%}" for name, share in value.items()) or "all"
    if not isinstance(value, tuple | list):
        return str(value)
    return ("-" if all(isinstance(item, int | float) for item in value) else "+").join(map(str, value))
