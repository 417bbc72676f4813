"""When the self-supervised terms take part in an update, and by how much. Numbers in, numbers out; no tensors.

They rise to their weight over a warm-up, are left out altogether for a while after an unstable update (a weight of 0
would still decay weights and move moments), and may have a time limit, watched by a monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from matrixlib.config import GatingConfig
from matrixlib.engine.state import State


@dataclass
class Gate(State):
    """State of the gate; all but `config` goes into the checkpoint.

    frozen_until: update index from which the terms take part again.
    row_seconds: measured time of one row with these terms, 0 before it is known; used with a time limit only.
    """

    config: GatingConfig
    frozen_until: int = 0
    row_seconds: float = 0.0

    @classmethod
    def from_dict(cls, config: Any, data: Mapping[str, Any]) -> Self:
        """As of every state; runs of before 2026-11-23 counted how often it froze."""
        return super().from_dict(config, {name: value for name, value in data.items() if name != "freezes"})

    def factor(self, update: int) -> float:
        """Factor on the weights of the terms at `update` (from 0): 0 while frozen, never 0 in the warm-up."""
        if update < self.frozen_until:
            return 0.0
        return min(1.0, (update + 1) / self.config.warmup_steps) if self.config.warmup_steps else 1.0

    def freeze(self, update: int) -> bool:
        """Leave the terms out after an unstable `update`; True if that begins now."""
        if not self.config.freeze_steps:
            return False
        begins = update >= self.frozen_until
        self.frozen_until = update + 1 + self.config.freeze_steps
        return begins

    def rows(self, size: int, micro_batch: int) -> int:
        """How many of an update's `size` rows get the terms: all, or what fits in the time limit.

        Whole micro-batches and at least one. The terms' means are taken over those rows, so their weight stays.
        """
        if not self.config.seconds or not self.row_seconds:
            return size
        fitting = int(self.config.seconds / self.row_seconds)
        return min(size, max(micro_batch, fitting // micro_batch * micro_batch))

    def took(self, seconds: float, rows: int) -> None:
        """Take in the time of the micro-batches with the terms, `rows` rows in all."""
        self.row_seconds = seconds / rows


@dataclass
class LeftOut:
    """Counts the rows that a time limit left without the self-supervised terms, and tells of them: at the first, then
    for each `interval` updates."""

    interval: int
    updates: int = 0
    rows: int = 0
    size: int = 0
    in_all: int = 0

    def add(self, rows: int, size: int) -> list[str]:
        """Take in an update of `size` rows; what to say after it."""
        first = bool(rows) and not self.in_all
        self.updates, self.rows, self.size = self.updates + 1, self.rows + rows, self.size + size
        self.in_all += rows
        if not (self.rows and (first or self.updates % self.interval == 0)):
            return []
        text = f"gating.seconds left {self.rows:,} of {self.size:,} rows without the self-supervised terms"
        self.rows = self.size = 0
        return [f"{text}; {self.in_all:,} so far"]
