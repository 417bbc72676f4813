"""Schedules: learning rate, plateau cuts, dropout stages, the gate of SSL terms."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matrixlib.config import GatingConfig, OptimConfig
from matrixlib.engine.stats import State


def warmup_updates(config: OptimConfig, steps: int) -> int:
    """Updates of the warm-up: at most half of the run, so that short runs reach their peak."""
    return min(config.warmup_steps, steps // 2)


def learning_rate(config: OptimConfig, steps: int, batch_size: int = 0) -> Callable[[int], float]:
    """The configured schedule of a run of `steps` updates of `batch_size` rows; skipped updates count.

    Warm-up, update i from 0: peak * (i + 1) / warmup, never 0. Then `optim.schedule` from the peak to exactly peak *
    final_fraction at the last update, constant beyond. decay_ratio: share of the updates after the warm-up (of each
    cycle, with restarts) that decay; before it the rate is the peak (Hu et al. 2024, https://arxiv.org/abs/2404.06395).
    restarts: warm restarts in equal cycles (Loshchilov and Hutter 2016, https://arxiv.org/abs/1608.03983). rate_batch:
    scale the rate by sqrt(batch size / rate_batch), which keeps the noise of Adam's updates (Malladi et al. 2022,
    https://arxiv.org/abs/2205.10287).
    """
    if steps < 1:
        raise ValueError(f"a run needs at least one update, got {steps}")
    warmup = warmup_updates(config, steps)
    scale = (batch_size / config.rate_batch) ** 0.5 if config.rate_batch and batch_size else 1.0
    peak, floor = config.learning_rate * scale, config.final_fraction
    first = max(warmup - 1, 0)
    span = steps - 1 - first

    def rate(update: int) -> float:
        if update < warmup:
            return peak * ((update + 1) / warmup)
        if config.schedule == "constant":
            return peak
        progress = min((update - first) / span, 1.0) if span > 0 else 0.0
        if progress < 1:
            progress = progress * (config.restarts + 1) % 1
        progress = max(0.0, 1 - (1 - progress) / config.decay_ratio) if config.decay_ratio < 1 else progress
        shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return peak * (floor + (1 - floor) * shape)

    return rate


@dataclass
class Plateau(State):
    """Cuts the rate after `stale` full validations without a new `best`. cuts: so far."""

    config: OptimConfig
    best: float | None = None
    stale: int = 0
    cuts: int = 0

    @property
    def factor(self) -> float:
        """Factor on the scheduled rate."""
        return float(self.config.plateau_factor**self.cuts)

    def record(self, loss: float, min_delta: float) -> str:
        """Record a full validation loss; a message if the rate is cut, else ""."""
        if not self.config.plateau:
            return ""
        if math.isfinite(loss) and (self.best is None or loss < self.best - min_delta):
            self.best, self.stale = loss, 0
            return ""
        self.stale += 1
        if self.stale < self.config.plateau:
            return ""
        self.stale, self.cuts = 0, self.cuts + 1
        text = f"{self.config.plateau} full validations in a row without an improvement: the learning rate is"
        return f"{text} {self.factor:.3g} times its schedule's from here on"


class Dropout:
    """Dropout rates in equal stages of the run, each a factor on `p` of modules and `dropout` of attention."""

    def __init__(self, modules: Iterable[Any], stages: Sequence[float]) -> None:
        self._stages, self.factor = stages or (1.0,), 1.0
        self._rates: list[tuple[Any, str, float]] = []
        for module in modules:
            name = "p" if "Dropout" in type(module).__name__ else "dropout"
            rate = getattr(module, name, None)
            if isinstance(rate, float) and rate:
                self._rates.append((module, name, rate))
        if stages and not self._rates:
            text = "train.dropout_stages changes nothing, as the network has no dropout; set model.dropout above 0"
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def enter(self, progress: float) -> bool:
        """Set the rates for a share of the run done; True if they changed."""
        factor = self._stages[min(int(progress * len(self._stages)), len(self._stages) - 1)]
        if factor == self.factor:
            return False
        self.factor = factor
        for module, name, rate in self._rates:
            setattr(module, name, factor * rate)
        return bool(self._rates)


@dataclass
class Gate(State):
    """When the SSL terms take part in an update, and with what weight. frozen_until: update from which they do again.
    row_seconds: measured, with a time limit only. left_out: rows computed without them."""

    config: GatingConfig
    frozen_until: int = 0
    row_seconds: float = 0.0
    left_out: int = 0

    def factor(self, update: int) -> float:
        """Factor on the terms' weights at `update` (from 0): 0 while frozen, never 0 in the warm-up."""
        if update < self.frozen_until:
            return 0.0
        return min(1.0, (update + 1) / self.config.warmup_steps) if self.config.warmup_steps else 1.0

    def freeze(self, update: int) -> bool:
        """Leave the terms out after an unstable `update`; True if that starts now."""
        if not self.config.freeze_steps:
            return False
        begins = update >= self.frozen_until
        self.frozen_until = update + 1 + self.config.freeze_steps
        return begins

    def rows(self, size: int, micro_batch: int) -> int:
        """How many of an update's `size` rows get the terms: the micro-batches (at least one) within the time limit."""
        if not self.config.seconds or not self.row_seconds:
            return size
        fitting = int(self.config.seconds / self.row_seconds)
        return min(size, max(micro_batch, fitting // micro_batch * micro_batch))

    def leave_out(self, rows: int) -> str:
        """Record rows without the terms; a message."""
        self.left_out += rows
        if not rows:
            return ""
        return f"gating.seconds left {rows:,} rows without the self-supervised terms; {self.left_out:,} so far"
