"""Verdict on an update, from numbers alone: may the weights move, must the run go back? No tensors here.

OK moves the weights. SKIP moves none: the loss or a gradient is not finite. ROLLBACK goes back to the last good
checkpoint: loss or gradient norm stayed far above its running band, or came back from there to a worse loss, or
updates stayed non-finite. HALT ends the run: it was rolled back too often, or there is nothing good to go back to.

The band is robust (median and median absolute deviation of the last accepted updates), so that a few outliers inside
it do not widen it. It has an upper edge only: a falling loss is no fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from statistics import median
from typing import Any

from matrixlib.config import HealthConfig

NORMAL = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
LOSS_FLOOR, NORM_FLOOR = 0.05, 0.25
"""Least standard deviation of the band as a share of the median: a quiet stretch must not make a normal update an
outlier. Gradient norms scatter more than losses do."""
SETTLED_FLOOR = 0.01
"""The same for the median loss after a short spike, which scatters less."""
SETTLED_BAND = 1.25
"""Deviations by which that median must lie above the later half of the losses before the spike. A loss that drifts
evenly by itself gets no further: its deviation is 0.37 windows of drift, the medians are 0.375 windows apart."""
CLIP_WINDOW = 500
"""Updates after the warm-up that the share of clipped gradients looks back on."""
OVERFLOW_WINDOW, OVERFLOWS = 100, 3
"""A loss scale that fell so often in so many updates is reported."""


class Verdict(StrEnum):
    """What becomes of an update."""

    OK = "ok"
    SKIP = "skip"
    ROLLBACK = "rollback"
    HALT = "halt"


class TrainingHalted(ArithmeticError):
    """Training was stopped because it could not be kept stable; the message is the diagnosis."""


@dataclass(frozen=True)
class Measured:
    """What a verdict is made of. All are numbers on the host.

    update: index, from 0. loss: weighted mean without the self-supervised terms (their weights change). grad_norm:
    global norm before clipping. finite: False if any part (a term, a gradient) is not finite. overflow: not finite,
    but the loss is and a loss scale explains the rest. clipped: the norm was above the threshold. warming_up: the
    learning rate has not reached its peak. detail: what is not finite, in words.
    """

    update: int
    loss: float
    grad_norm: float
    finite: bool = True
    overflow: bool = False
    clipped: bool = False
    warming_up: bool = False
    detail: str = ""

    def __str__(self) -> str:
        text = f"update {self.update + 1}: loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass
class Health:
    """Counts of a run and its verdicts. Its whole state but `config` goes into the checkpoint (`to_dict`).

    updates: updates judged. skipped: those with a non-finite loss or gradient. overflows: fp16 gradients beyond the
    range at the current loss scale; the scaler halves the scale, which is normal, so they count apart and never
    towards a rollback. overflowed: their latest update indices. nonfinite, outliers: such updates in a row up to now.
    onset: update index where the present row of them began. losses, norms: the running bands. before, after: the
    losses before a row that ended by itself, and since then, until it is known whether they came back to their level.
    clips: whether the latest gradients after the warm-up were clipped. rollbacks: rollbacks so far. cut, cut_at:
    learning-rate factor set by the last one, and the update that it went back to. last: what was wrong last.
    """

    config: HealthConfig
    updates: int = 0
    skipped: int = 0
    overflows: int = 0
    overflowed: list[int] = field(default_factory=list)
    nonfinite: int = 0
    outliers: int = 0
    onset: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    clips: list[bool] = field(default_factory=list)
    rollbacks: int = 0
    cut: float = 1.0
    cut_at: int = -1
    last: str = ""

    def judge(self, seen: Measured) -> Verdict:
        """Verdict on one update, counted. After SKIP, ROLLBACK and HALT no weight may move."""
        self.updates += 1
        finite = seen.finite and math.isfinite(seen.loss) and math.isfinite(seen.grad_norm)
        if not finite and seen.overflow:
            self.overflows += 1
            self.overflowed = [u for u in self.overflowed if u > seen.update - OVERFLOW_WINDOW] + [
                seen.update
            ]
            return Verdict.SKIP
        why = "not finite" if not finite else self._outlier(seen)
        if not why:
            self.nonfinite = self.outliers = 0
            self._accept(seen)
            return Verdict.ROLLBACK if self._settled_worse(seen) else Verdict.OK
        if self.steady:
            self.onset = seen.update
        self.last = f"{seen}" if not finite else f"{seen}; {why}"
        if finite:
            self.nonfinite, self.outliers = 0, self.outliers + 1
            self.before = self.before or self.losses
        else:
            self.skipped, self.nonfinite = self.skipped + 1, self.nonfinite + 1
        if self.nonfinite >= self.config.skips or self.outliers >= self.config.patience:
            return Verdict.ROLLBACK if self.rollbacks < self.config.rollbacks else Verdict.HALT
        return Verdict.OK if finite else Verdict.SKIP

    def _outlier(self, seen: Measured) -> str:
        """Which value lies above its band, in words; "" where none does or the band is not known yet.

        Gradient norms are judged after the warm-up only: during it they grow by design.
        """
        found = []
        for name, value, band, floor in (
            ("loss", seen.loss, self.losses, LOSS_FLOOR),
            ("gradient norm", seen.grad_norm, self.norms, NORM_FLOOR),
        ):
            if len(band) >= self.config.window // 4 and value > (edge := self._edge(band, floor)):
                found.append(f"{name} above {edge:.4g}, the band's edge (median {median(band):.4g})")
        return "; ".join(found)

    def _settled_worse(self, seen: Measured) -> bool:
        """Whether the losses after a short spike have settled above those before it: the weights were damaged.

        Known once as many losses have come in as make a band. Such a run is not lost, so it is never halted for it.
        """
        if not self.before:
            return False
        self.after = [*self.after, seen.loss]
        if len(self.after) < self.config.window // 4:
            return False
        level, now = median(self.before[len(self.before) // 2 :]), median(self.after)
        worse = now > level + max(SETTLED_BAND * _deviation(self.before), SETTLED_FLOOR * abs(level))
        if worse:
            self.last = (
                f"{seen}; the median loss has settled at {now:.4g} after a spike, from {level:.4g} before it"
            )
        self.before, self.after = [], []
        return worse and self.rollbacks < self.config.rollbacks

    def _edge(self, band: Sequence[float], floor: float) -> float:
        middle = median(band)
        return middle + self.config.band * max(_deviation(band), floor * abs(middle))

    def _accept(self, seen: Measured) -> None:
        self.losses = [*self.losses, seen.loss][-self.config.window :]
        if not seen.warming_up:
            self.norms = [*self.norms, seen.grad_norm][-self.config.window :]
            self.clips = [*self.clips, seen.clipped][-CLIP_WINDOW:]

    @property
    def steady(self) -> bool:
        """Whether no update since the loss was last at its level was an outlier or not finite.

        Such a state is worth keeping.
        """
        return not self.outliers and not self.nonfinite and not self.before

    @property
    def clip_share(self) -> float:
        """Share of the latest updates after the warm-up whose gradient was clipped; 0 before there are any."""
        return sum(self.clips) / len(self.clips) if self.clips else 0.0

    @property
    def scale_falls(self) -> bool:
        """Whether the loss scale has fallen at least `OVERFLOWS` times in `OVERFLOW_WINDOW` updates."""
        return len(self.overflowed) >= OVERFLOWS

    def target(self, checkpoints: Sequence[int]) -> int | None:
        """Which of the checkpoints (update counts) a rollback goes to; None where none is good.

        The newest from before the trouble began; the one before that, if there is one, where the last rollback went
        to the same already and no new one was made since: it may carry the fault in it.
        """
        good = sorted(step for step in checkpoints if step <= self.onset)
        if len(good) > 1 and good[-1] == self.cut_at:
            good.pop()
        return good[-1] if good else None

    def rolled_back(self, step: int, saved: Health) -> Health:
        """The state to go on with from the checkpoint of `step`, whose health is `saved`: its bands, our counts.

        The learning rate is cut by the configured factor, on top of what is left of an earlier cut.
        """
        return Health(
            self.config,
            updates=self.updates,
            skipped=self.skipped,
            overflows=self.overflows,
            losses=saved.losses,
            norms=saved.norms,
            clips=saved.clips,
            rollbacks=self.rollbacks + 1,
            cut=self.rate_scale(self.onset) * self.config.rate_factor,
            cut_at=step,
            last=self.last,
        )

    def rate_scale(self, update: int) -> float:
        """Factor on the learning rate of `update`: the cut of the last rollback, going back to 1 linearly."""
        if self.cut_at < 0 or not self.config.rate_recovery:
            return self.cut
        return self.cut + (1 - self.cut) * min(1.0, max(0, update - self.cut_at) / self.config.rate_recovery)

    def forget_band(self) -> None:
        """Start the bands anew: what is trained has changed (a phase of a curriculum), so the old ones do not hold."""
        self.losses, self.norms, self.before, self.after = [], [], [], []

    def diagnosis(self, nothing_to_return_to: bool = False) -> str:
        """Why training was halted and what to try."""
        row = (
            f"{self.nonfinite} updates in a row were not finite"
            if self.nonfinite
            else f"{self.outliers} updates in a row were far outside the running band"
        )
        reason = (
            "there is no checkpoint from before it to go back to"
            if nothing_to_return_to
            else f"the run had been rolled back {self.rollbacks} times (health.rollbacks)"
        )
        return (
            f"{row} ({self.last}), and {reason}. {self.skipped} of {self.updates} updates were skipped in all. Lower "
            "optim.learning_rate, lengthen optim.warmup_steps, use runtime.precision fp32, or look at the records "
            "that were kept as evidence for bad targets."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the checkpoint; Health.from_dict(h.config, h.to_dict()) == h."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}

    @classmethod
    def from_dict(cls, config: HealthConfig, data: Mapping[str, Any]) -> Health:
        """Raises ValueError naming the keys that are missing or unknown."""
        known = {f.name for f in fields(cls)} - {"config"}
        if odd := sorted(known ^ set(data)):
            raise ValueError(f"health state of the checkpoint is of another version: {', '.join(odd)}")
        return cls(config, **data)


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation of normally distributed values, by the median absolute deviation: outliers do not count."""
    middle = median(values)
    return NORMAL * median([abs(value - middle) for value in values])
