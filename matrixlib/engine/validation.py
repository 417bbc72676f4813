"""Validation: when it is due, what it measures, and its consequences (best, early stop, target)."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import length_hint

import torch
from torch import Tensor, nn

from matrixlib.config import ValidationConfig
from matrixlib.engine.curriculum import Phase
from matrixlib.engine.distributed import Ranks
from matrixlib.engine.memory import OomBackoff
from matrixlib.engine.stats import State
from matrixlib.engine.task import Batch, Data, Task, to_device
from matrixlib.hardware.runtime import Runtime
from matrixlib.progress import live_bar

CLEARLY = 1.1  # times the lowest held-out loss, above which auxiliary terms are switched off
ALONE = Ranks()
FIRST_AUTO = 20  # updates before the first validation, and fewest between two, with interval `auto`


@dataclass(frozen=True)
class Validation:
    """One validation. kind: "sample" or "full". loss: weighted total of `losses`, means over items by term. metrics:
    means by "term/name". counts: items by term, also of terms without items."""

    kind: str
    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    counts: dict[str, int]
    seconds: float


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in eval and inference mode; restores every module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def validate(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    runtime: Runtime,
    active: frozenset[str],
    kind: str,
    beat: Callable[[], None] = lambda: None,
    passes: OomBackoff | None = None,
    ranks: Ranks = ALONE,
) -> Validation | None:
    """Losses and metrics of `model` over host `batches`, of all ranks together; None without batches.

    Sums stay on the device (float64 if supported) and are read once. beat: called after each batch. passes:
    out-of-memory backoff, kept for later validations.
    """
    started = time.perf_counter()
    device = runtime.torch_device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(sorted(active), 0)
    passes = passes or OomBackoff()

    def measure(part: Batch) -> dict[str, Tensor]:
        with runtime.autocast():
            losses, metrics = task.losses(model, to_device(part, device), active)
        return {name: value.detach().to(dtype) for name, value in (losses | metrics).items()}

    with evaluating(model):
        for batch in batches:
            for term, count in task.counts(batch).items():
                if term in active:
                    counts[term] += count
            for measured in passes.over(batch, measure):
                for name, value in measured.items():
                    sums[name] = sums[name] + value if name in sums else value
            beat()
        own = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}
    if not (names := ranks.same(list(own))):
        return None
    values = ranks.total({name: own.get(name, 0.0) for name in names})
    counts = ranks.total(counts)
    items = {name: counts[name.split("/")[0]] for name in values}
    means = {name: value / items[name] for name, value in values.items() if items[name]}
    by_term = {name: value for name, value in means.items() if name in active}
    metrics = {name: value for name, value in means.items() if name not in active}
    loss = math.fsum(task.weights[term] * value for term, value in by_term.items())
    return Validation(kind, loss, by_term, metrics, counts, ranks.same(time.perf_counter() - started))


class HeldOut:
    """Held-out data of a run. The sample is prepared once and kept on the host. ranks: each has its own rows."""

    def __init__(self, task: Task, data: Data, runtime: Runtime, ranks: Ranks = ALONE) -> None:
        self._task, self._data, self._runtime, self._ranks = task, data, runtime, ranks
        self._sample: list[Batch] | None = None
        self._phase: tuple[Task, list[Batch]] = task, []
        self.passes = OomBackoff()

    def batches(self, kind: str) -> Iterable[Batch]:
        if kind == "full":
            return self._data.held_out(kind)
        if self._sample is None:
            self._sample = list(self._data.held_out(kind))
        return self._sample

    def enter(self, task: Task, phase: Phase) -> None:
        """From now on kind "phase" is the sample of this phase, scored by `task`."""
        self._phase = task, list(self._data.held_out("sample", phase))

    def measure(
        self, kind: str, model: nn.Module, active: frozenset[str], beat: Callable[[], None] = lambda: None
    ) -> Validation | None:
        """One validation, "sample", "full" (with a progress bar) or "phase"; None without held-out data."""
        task, batches = self._phase if kind == "phase" else (self._task, self.batches(kind))
        if kind == "full":
            total = length_hint(batches) or None
            batches = live_bar(iterable=batches, total=total, desc="full validation", unit="batch", leave=False)
        return validate(task, model, batches, self._runtime, active, kind, beat, self.passes, self._ranks)


def check_target_loss(
    target: float, task: Task, batches: Iterable[Batch], active: frozenset[str], ranks: Ranks = ALONE
) -> None:
    """ValueError if validation.target_loss is below the floor over the `batches` of all ranks, or there are none."""
    floors, counts = Counter[str](), Counter[str]()
    for batch in batches:
        counts.update(task.counts(batch))
        floors.update({term: floor for term, (_, floor) in task.bounds(batch).items()})
    items, sums = (ranks.total({term: float(values[term]) for term in active}) for values in (counts, floors))
    if ranks.total({"": len(counts)})[""] == 0:
        raise ValueError("validation.target_loss needs held-out data, and there is none; set it to 0")
    floor = math.fsum(task.weights[term] * sums[term] / items[term] for term in active if items[term])
    if target < floor:
        raise ValueError(
            f"validation.target_loss {target:g} is below {floor:.4f}, the least loss that any network can reach on the "
            "validation sample (entropy of the targets, label smoothing included); raise it, or set it to 0"
        )


@dataclass
class ValidationSchedule(State):
    """When to validate and when to stop. due_at: update of the next validation. done: validations so far. stale,
    full_stale: since the last improvement, of any kind and full. reference: loss by kind to beat by `min_delta`. best,
    best_at: lowest full loss and its update. updating, validating: seconds so far, for interval `auto`; seconds: of the
    last validation by kind."""

    config: ValidationConfig
    due_at: int = 0
    done: int = 0
    stale: int = 0
    full_stale: int = 0
    reference: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_at: int = 0
    last: float | None = None
    updating: float = 0.0
    validating: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        interval = self.config.interval
        self.due_at = self.due_at or (FIRST_AUTO if interval == "auto" else interval)

    def updated(self, seconds: float) -> None:
        if self.config.interval == "auto":  # other modes keep no clock in their state
            self.updating += seconds

    def due(self, updates: int, steps: int) -> str | None:
        """After `updates` of `steps` updates: "sample", "full" or None. The last update's is always full."""
        if updates >= steps:
            return "full"
        return self._next_kind() if updates >= self.due_at else None

    def _next_kind(self) -> str:
        return "full" if (self.done + 1) % self.config.full_every == 0 else "sample"

    def _interval(self, updates: int, kind: str, seconds: float) -> int:
        """Updates to the next validation, such that validations (it included) take `share` of the time."""
        if self.config.interval != "auto":
            return self.config.interval
        self.validating += seconds
        self.seconds[kind] = seconds
        following = self.seconds.get(self._next_kind(), seconds)
        share = self.config.share
        enough = (self.validating + following) * (1 - share) / share  # seconds in updates
        pace = self.updating / updates
        return max(FIRST_AUTO, math.ceil((enough - self.updating) / pace)) if pace else FIRST_AUTO

    def record(self, updates: int, kind: str, loss: float, seconds: float = 0.0) -> bool:
        """Record a validation loss and its time; True if it is the best full one so far."""
        config = self.config
        self.done += 1
        before = self.reference.get(kind)
        improved = math.isfinite(loss) and (before is None or loss < before - config.min_delta)
        if improved:
            self.reference[kind] = loss
        # The first of a kind has no reference, so it does not count towards a plateau.
        self.stale = (0 if improved else self.stale + 1) if before is not None else self.stale
        rarer = config.plateau_factor if config.plateau and self.stale >= config.plateau else 1
        self.due_at = updates + self._interval(updates, kind, seconds) * rarer
        if kind != "full":
            return False
        self.full_stale = 0 if improved else self.full_stale + 1
        best = math.isfinite(loss) and (self.best is None or loss < self.best)
        if best:
            self.best, self.best_at = loss, updates
        self.last = loss
        return best

    def clearly_worse(self, kind: str, loss: float) -> bool:
        """Whether a validation loss is far above the lowest of its kind, or not finite."""
        return kind in self.reference and not loss <= CLEARLY * self.reference[kind]

    @property
    def stop(self) -> str:
        """Why training should end, "" if not; uses the current configuration."""
        config = self.config
        if config.target_loss and self.last is not None and self.last <= config.target_loss:
            return f"target loss {config.target_loss:g} reached: {self.last:.4f}"
        if config.patience and self.full_stale >= config.patience:
            best = math.nan if self.best is None else self.best
            return (
                f"no improvement by {config.min_delta:g} in {self.full_stale} full validations; "
                f"best {best:.4f} after {self.best_at} updates"
            )
        return ""
