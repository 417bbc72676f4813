"""The learning rate of each update, a pure function."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from matrixlib.config import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a pure function of the update index.

    Update i (from 0) of `warmup`: peak * (i + 1) / warmup, so the first is peak / warmup and never 0. Then
    `kind` runs from peak to exactly peak * final_fraction at the last update (`constant` stays at peak).
    Skipped updates count: rate and data stay aligned. A warm-up longer than half the run is cut to half of it
    (smoke runs).

    decay_share: the last part of what follows the warm-up (of each cycle, with restarts), in which `kind` runs; before
    it the rate stays at the peak (Hu et al. 2024, https://arxiv.org/abs/2404.06395).
    restarts: times that the curve begins anew at the peak, in cycles of equal length (Loshchilov and Hutter 2016,
    https://arxiv.org/abs/1608.03983); the last one ends as the curve does.
    bends: (update, end) of each change of plan: from that update on what is left of the curve is gone through faster or
    slower, so that it ends at update `end` - 1. The rate makes no jump, and its last value stays what it was to be.
    """

    peak: float
    kind: str
    final_fraction: float
    warmup: int
    steps: int
    bends: tuple[tuple[int, int], ...] = ()
    restarts: int = 0
    decay_share: float = 1.0

    @classmethod
    def of(cls, config: OptimConfig, steps: int, batch_size: int = 0) -> Schedule:
        """The schedule of a run of `steps` updates of `batch_size` rows.

        Where the rate is for batches of another size it grows with the root of the size: the noise of Adam's updates
        then stays the same (Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
        """
        if steps < 1:
            raise ValueError(f"a run needs at least one update, got {steps}")
        warmup = min(config.warmup_steps, steps // 2)
        scale = (batch_size / config.rate_batch) ** 0.5 if config.rate_batch and batch_size else 1.0
        return cls(
            config.learning_rate * scale,
            config.schedule,
            config.final_fraction,
            warmup,
            steps,
            restarts=config.restarts,
            decay_share=config.decay_share,
        )

    @property
    def end(self) -> int:
        """Updates of the run: `steps`, unless it was bent."""
        return self.bends[-1][1] if self.bends else self.steps

    def bend(self, update: int, end: int) -> Schedule:
        """This schedule up to update `update`, and from there on to its end within `end` updates in all.

        Bends from `update` on are dropped: a rollback to before them has undone them.
        """
        assert update < end, "at least one update is left to end with"
        return replace(self, bends=(*(bend for bend in self.bends if bend[0] < update), (update, end)))

    def place(self, update: int) -> float:
        """Where an update stands in the run as it was planned: the update itself, unless the schedule was bent."""
        place: float = update
        start, last, reached = 0, self.steps - 1, 0.0
        for bend, end in self.bends:
            if update < bend:
                break
            reached = _between(reached, self.steps - 1, bend - start, last - start)
            start, last = bend, end - 1
            place = _between(reached, self.steps - 1, update - start, last - start)
        return place

    def __call__(self, update: int) -> float:
        """Learning rate of update `update` (0 = first); beyond the end it stays at the last value."""
        place = self.place(update)
        if place < self.warmup:
            return self.peak * ((place + 1) / self.warmup)
        if self.kind == "constant":
            return self.peak
        first = max(self.warmup - 1, 0)
        span = self.steps - 1 - first
        progress = min((place - first) / span, 1.0) if span > 0 else 0.0
        if progress < 1:
            progress = progress * (self.restarts + 1) % 1
        progress = max(0.0, 1 - (1 - progress) / self.decay_share) if self.decay_share < 1 else progress
        shape = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * shape)


def _between(low: float, high: float, part: int, whole: int) -> float:
    """`part` of `whole` of the way from low to high, which is where it ends."""
    return high if part >= whole else low + (high - low) * part / whole
