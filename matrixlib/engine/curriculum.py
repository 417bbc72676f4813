"""Curriculum: which part of the task's data an update is drawn from, over any number of named dimensions.

Each dimension has stages. A *phase* is one combination of stages; the next phase begins where any dimension goes
on to its next stage. Phases end at shares of the updates, or when a metric of the validations is good enough.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from matrixlib.engine.stages import CurriculumConfig, StagesConfig


@dataclass(frozen=True)
class Dimension:
    """One dimension: its stages, each any value that the task understands, and the share of updates of each."""

    name: str
    stages: tuple[Any, ...]
    fractions: tuple[float, ...]

    @classmethod
    def of(cls, name: str, config: StagesConfig) -> Dimension:
        """From its section; one that is switched off stays in its last, hardest stage."""
        if not config.enabled:
            return cls(name, (config.stages[-1],), (1.0,))
        return cls(name, config.stages, config.fractions)

    def starts(self) -> list[Fraction]:
        """Share of the updates after which each stage begins; decimal, so that .5 + .3 is exactly .8."""
        return [Fraction(0), *itertools.accumulate(Fraction(str(share)) for share in self.fractions[:-1])]


@dataclass(frozen=True)
class Phase:
    """One combination of stages. start: share of the updates after which it begins."""

    number: int
    start: Fraction
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(value)}" for name, value in self.values.items())


def phases(dimensions: Sequence[Dimension]) -> tuple[Phase, ...]:
    """All phases in order; they depend on the stages alone, not on the number of updates."""
    starts = {dimension.name: dimension.starts() for dimension in dimensions}
    edges = sorted({Fraction(0), *itertools.chain.from_iterable(starts.values())})
    return tuple(
        Phase(i, edge, {d.name: d.stages[bisect.bisect_right(starts[d.name], edge) - 1] for d in dimensions})
        for i, edge in enumerate(edges)
        if edge < 1
    )


class Curriculum:
    """A state machine over update counts and validation metrics, which knows no clock and no random number.

    phase: number of the phase in force. history: (update, phase) of every change, the first being (0, 0).
    """

    def __init__(self, config: CurriculumConfig, dimensions: Sequence[Dimension]) -> None:
        self.config, self.dimensions = config, dimensions
        self.phases = phases(dimensions)
        self.phase = 0
        self.history: list[tuple[int, int]] = [(0, 0)]
        self._next = 0  # the phase that `record` decided on; `advance` brings it into force
        self._validations = self._good = self._bad = 0  # validations in this phase; in a row at `up`, below `down`
        self._falls = [0] * len(self.phases)  # how often each phase proved too hard

    @property
    def values(self) -> Mapping[str, Any]:
        """Dimension -> value of the stage in force."""
        return self.phases[self.phase].values

    def advance(self, update: int, steps: int, place: float | None = None) -> bool:
        """Called before update `update` (from 0) of `steps`; True where a new phase begins with it. place: where in
        `steps` it stands, if the run is bent (`Schedule.place`).
        """
        if self.config.kind == "fractions":
            place = update if place is None else place
            self._next = sum(place >= phase.start * steps for phase in self.phases[1:])
        if self._next == self.phase:
            return False
        self.phase = self._next
        self.history.append((update, self.phase))
        self._validations = self._good = self._bad = 0
        return True

    def record(self, values: Mapping[str, float]) -> None:
        """Take in the losses and metrics of a validation on data of the phase in force; only `adaptive` looks at them.

        The phase ends after `patience` validations in a row at `up` or better, and falls back after as many
        worse than `down`; values in between count for neither. Better is more of a metric and less of a loss.
        A phase that proved too hard is entered again only after twice as many good validations, so that two
        phases never alternate. Raises ValueError for an unknown name.
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

    def to_dict(self) -> dict[str, Any]:
        """State without the configuration, for the checkpoint."""
        return {
            "phases": [str(phase) for phase in self.phases],
            "phase": self.phase,
            "next": self._next,
            "history": [list(change) for change in self.history],
            "validations": self._validations,
            "good": self._good,
            "bad": self._bad,
            "falls": list(self._falls),
        }

    @classmethod
    def from_dict(
        cls, config: CurriculumConfig, dimensions: Sequence[Dimension], data: Mapping[str, Any]
    ) -> Curriculum:
        """Inverse of `to_dict`. Raises ValueError when the state is of other phases."""
        curriculum = cls(config, dimensions)
        if data["phases"] != [str(phase) for phase in curriculum.phases]:
            raise ValueError(f"the curriculum had the phases {'; '.join(data['phases'])}")
        curriculum.phase, curriculum._next = data["phase"], data["next"]
        curriculum.history = [(update, phase) for update, phase in data["history"]]
        curriculum._validations = data["validations"]
        curriculum._good, curriculum._bad = data["good"], data["bad"]
        curriculum._falls = list(data["falls"])
        return curriculum


def _text(value: Any) -> str:
    """A stage in words: "3-8", "standard+negative", "puzzles 30 %, games 70 %"."""
    if isinstance(value, Mapping):
        total = sum(value.values())
        return ", ".join(f"{name} {share / total:.0%}" for name, share in value.items()) or "all"
    if not isinstance(value, tuple | list):
        return str(value)
    return ("-" if all(isinstance(item, int | float) for item in value) else "+").join(map(str, value))
