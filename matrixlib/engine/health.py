"""What to do with an update, from numbers alone (no tensors): OK, SKIP, ROLLBACK or HALT.

OK: apply. SKIP: the loss or a gradient is not finite, apply nothing. ROLLBACK to the last good checkpoint: loss or
gradient norm stayed far above its band (median and median absolute deviation of recent accepted updates), or settled at
a worse loss after a spike, or updates stayed non-finite. HALT: end the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from matrixlib.config import HealthConfig
from matrixlib.engine.stats import Action, Event, Message, State, Stats

NORMAL = 1.4826  # standard deviation / median absolute deviation of a normal distribution
LOSS_FLOOR, NORM_FLOOR, SETTLED_FLOOR = 0.05, 0.25, 0.01
"""Least standard deviation of the band of losses, of gradient norms and of the loss after a spike, by the median."""
SETTLED_BAND = 1.25
"""Deviations by which that median must exceed the later half of the losses before the spike; drift alone is less."""
CLIP_WINDOW = 500  # updates after the warm-up over which the share of clipped gradients is computed
OVERFLOW_WINDOW = 100  # updates; a loss scale that fell so often in so many is reported


class TrainingHalted(ArithmeticError):
    """Training could not be kept stable; the message is the diagnosis."""


@dataclass
class Health(State):
    """Counters of a run, and the decision about each update. Everything but `config` is checkpointed.

    updates: judged. skipped: non-finite loss or gradient. overflows, overflowed: by the loss scale (never towards a
    rollback), and the recent indices. nonfinite, outliers: current streaks. onset: index where the streak began.
    losses, norms: running bands. before, after: losses before a streak that ended by itself, and since, until settled.
    clips: whether recent gradients were clipped. cut, cut_at: learning-rate factor of the last rollback, and its
    update. last: what was wrong.
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

    def judge(self, stats: Stats) -> Action:
        """Decide about one update and count it. After SKIP, ROLLBACK and HALT no weight may move."""
        self.updates += 1
        finite = stats.finite and math.isfinite(stats.main_loss) and math.isfinite(stats.grad_norm)
        if not finite and stats.overflow:
            self.overflows += 1
            self.overflowed = [*(u for u in self.overflowed if u > stats.update - OVERFLOW_WINDOW), stats.update]
            return Action.SKIP
        why = "not finite" if not finite else self._outlier(stats)
        if not why:
            self.nonfinite = self.outliers = 0
            self.losses = [*self.losses, stats.main_loss][-self.config.window :]
            if not stats.warming_up:
                self.norms = [*self.norms, stats.grad_norm][-self.config.window :]
                self.clips = [*self.clips, stats.clipped][-CLIP_WINDOW:]
            return Action.ROLLBACK if self._settled_worse(stats) else Action.OK
        if self.steady:
            self.onset = stats.update
        self.last = _words(stats) if not finite else f"{_words(stats)}; {why}"
        if finite:
            self.nonfinite, self.outliers = 0, self.outliers + 1
            self.before = self.before or self.losses
        else:
            self.skipped, self.nonfinite = self.skipped + 1, self.nonfinite + 1
        if self.nonfinite >= self.config.skips or self.outliers >= self.config.patience:
            return Action.ROLLBACK if self.rollbacks < self.config.rollbacks else Action.HALT
        return Action.OK if finite else Action.SKIP

    def _outlier(self, stats: Stats) -> str:
        """Which value is above its band, as text; "" if none is, or the band is not known yet."""
        losses, norms = (stats.main_loss, self.losses, LOSS_FLOOR), (stats.grad_norm, self.norms, NORM_FLOOR)
        reasons = []
        for name, (value, band, floor) in {"loss": losses, "gradient norm": norms}.items():
            if len(band) >= self.config.window // 4:
                middle = median(band)
                edge = middle + self.config.band * max(_deviation(band), floor * abs(middle))
                if value > edge:
                    reasons.append(f"{name} above {edge:.4g}, the band's edge (median {middle:.4g})")
        return "; ".join(reasons)

    def _settled_worse(self, stats: Stats) -> bool:
        """Whether losses settled at a higher level after a short spike; never halts a run."""
        if not self.before:
            return False
        self.after = [*self.after, stats.main_loss]
        if len(self.after) < self.config.window // 4:
            return False
        level, now = median(self.before[len(self.before) // 2 :]), median(self.after)
        worse = now > level + max(SETTLED_BAND * _deviation(self.before), SETTLED_FLOOR * abs(level))
        if worse:
            drift = f"the median loss has settled at {now:.4g} after a spike, from {level:.4g} before it"
            self.last = f"{_words(stats)}; {drift}"
        self.before, self.after = [], []
        return worse and self.rollbacks < self.config.rollbacks

    @property
    def steady(self) -> bool:
        """Whether no outlier or non-finite update occurred since the loss was last at its level: worth a checkpoint."""
        return not self.outliers and not self.nonfinite and not self.before

    @property
    def clip_share(self) -> float:
        """Share of recent updates after the warm-up whose gradient was clipped; 0 before there are any."""
        return sum(self.clips) / len(self.clips) if self.clips else 0.0

    def target(self, checkpoints: Sequence[int]) -> int | None:
        """Checkpoint to roll back to: the newest before the streak, an older one the second time; or None."""
        good = sorted(step for step in checkpoints if step <= self.onset)
        if len(good) > 1 and good[-1] == self.cut_at:
            good.pop()
        return good[-1] if good else None

    def rolled_back(self, step: int, saved: "Health") -> "Health":
        """State after rolling back to `step`: the bands of `saved`, our counters, a cut learning rate."""
        kept = {name: getattr(self, name) for name in ("updates", "skipped", "overflows", "last")}
        bands = {name: getattr(saved, name) for name in ("losses", "norms", "clips")}
        cut = self.rate_scale(self.onset) * self.config.rate_factor
        return Health(self.config, **kept, **bands, rollbacks=self.rollbacks + 1, cut=cut, cut_at=step)

    def rate_scale(self, update: int) -> float:
        """Learning-rate factor at `update`: the last rollback's cut, recovering to 1 linearly."""
        if self.cut_at < 0 or not self.config.rate_recovery:
            return self.cut
        return self.cut + (1 - self.cut) * min(1.0, max(0, update - self.cut_at) / self.config.rate_recovery)

    def forget_band(self) -> None:
        """Restart the bands, because the objective changed."""
        self.losses, self.norms, self.before, self.after = [], [], [], []

    def diagnosis(self) -> str:
        """Why training was halted, and what to try."""
        kind = f"{self.nonfinite} updates in a row were not finite"
        if not self.nonfinite:
            kind = f"{self.outliers} updates in a row were far outside the running band"
        reason = f"the run had been rolled back {self.rollbacks} times (health.rollbacks)"
        if self.rollbacks < self.config.rollbacks:
            reason = "there is no checkpoint from before it to go back to"
        return (
            f"{kind} ({self.last}), and {reason}. {self.skipped} of {self.updates} updates were skipped in all. Lower "
            "optim.learning_rate, lengthen optim.warmup_steps, use runtime.precision fp32, or look at the records "
            "that were kept as evidence for bad targets."
        )

    def warnings(self, stats: Stats) -> list[Message]:
        """Messages about terms or items ("<term>/skipped") without targets, or a skipped update."""
        text = f"no valid target of {', '.join(stats.empty)} in this update"
        messages = [Message(Event.NO_TARGET, text)] if stats.empty else []
        for name, share in stats.metrics.items():
            term, _, what = name.rpartition("/")
            if what == "skipped" and share > 0:
                text = f"{share * stats.counts[term]:.0f} items without a usable target of {term} were skipped"
                messages.append(Message(Event.UNUSABLE_TARGETS, text, term))
        if stats.action is Action.SKIP:
            cause = "the loss scale was too large" if stats.overflow else self.last
            messages.append(Message(Event.SKIP, f"update skipped, no weight moved: {cause}"))
        if len(self.overflowed) >= self.config.overflow_warning and stats.overflow:
            text = f"the loss scale fell {len(self.overflowed)} times in {OVERFLOW_WINDOW} updates: normal at the start"
            messages.append(Message(Event.LOSS_SCALE, f"{text}, later a sign that gradients are about to blow up"))
        return messages

    def clip_warning(self, p95: float, threshold: float) -> str:
        """A warning if too many of at least 100 gradients after the warm-up were clipped, else ""."""
        if self.clip_share <= self.config.clip_warning or len(self.clips) < 100:
            return ""
        return (
            f"gradients after the warm-up: {self.clip_share:.0%} were clipped; above {self.config.clip_warning:.0%} "
            f"(health.clip_warning) the learning rate is probably too high, or optim.clip_norm {threshold:g} too low: "
            f"95% of the latest norms are below {p95:.3g}"
        )


def _words(stats: Stats) -> str:
    text = f"update {stats.step}: loss {stats.main_loss:.6g}, gradient norm {stats.grad_norm:.6g}"
    return f"{text}; {stats.detail}" if stats.detail else text


def _deviation(values: Sequence[float]) -> float:
    """Robust standard deviation, from the median absolute deviation."""
    middle = median(values)
    return NORMAL * median([abs(value - middle) for value in values])
