"""Statistics of a run in progress: each update's, raw outputs, gradient norms, throughput."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from matrixlib.engine.health import OVERFLOW_WINDOW, Health, Verdict
from matrixlib.engine.task import Batch, Task, to_device
from matrixlib.engine.validation import evaluating

if TYPE_CHECKING:
    from matrixlib.engine.step import StepStats
    from matrixlib.hardware.runtime import Runtime

WINDOW = 500
"""Updates that gradient statistics look back on."""
CLIP_SHARE = 0.1
"""Share of clipped updates after the warm-up above which the learning rate is probably too high."""
INITIAL_TOLERANCE = 0.15
"""Relative difference between the first losses and chance level that is worth a warning."""


@dataclass(frozen=True)
class Stats:
    """What happened in one update; all numbers are on the host.

    step: updates done, this one included. micro_step: forward passes done. loss, losses, metrics: means over
    the items of this update, in training mode, before it. seconds: waiting for data and updating; times: seconds
    of each phase (`profile.PHASES`), saving and what runs on a GPU maybe one update late.
    throughput: rows per second over the last updates. share_of_peak: of the device's matrix rate, where that is known.
    grad_norm: before clipping. clip_share: share of clipped
    gradients among the last after the warm-up. skipped, overflows: updates that moved no weight so far, for a
    blow-up or for the loss scale. rollbacks: rollbacks so far, before this update. gate: factor on the weights
    of the self-supervised terms. phase: of the curriculum. validation: fields of `Validation`, where one was
    made. memory: use since the last validation. statistics: "outputs", "gradient_norm", "blocks" and
    "dead_units", at their interval. initial: at the first update, by term "loss", "chance" and "floor".
    messages: warnings.
    """

    step: int
    micro_step: int
    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    learning_rate: float
    grad_norm: float
    clip_share: float
    verdict: str
    skipped: int
    overflows: int
    rollbacks: int
    seconds: float
    throughput: float
    times: dict[str, float] = field(default_factory=dict)
    share_of_peak: float | None = None
    gate: float | None = None
    phase: int | None = None
    validation: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    statistics: dict[str, Any] | None = None
    initial: dict[str, dict[str, float]] | None = None
    messages: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """The row of metrics.jsonl: what this update has nothing of is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != ()}


def compare_with_chance(
    task: Task, batch: Batch, done: StepStats
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Losses of the first update beside chance level and floor, by term; and warnings for those far off."""
    bounds = task.bounds(batch)
    table: dict[str, dict[str, float]] = {}
    messages: list[str] = []
    for term, loss in done.losses.items():
        chance, floor = (value / done.counts[term] for value in bounds[term])
        table[term] = {"loss": loss, "chance": chance, "floor": floor}
        if not abs(loss - chance) <= INITIAL_TOLERANCE * abs(chance):
            messages.append(
                f"first {term} loss is {loss:.4f}, but chance level is {chance:.4f}: a fresh network should "
                "start near it; look at its last layer's initialisation, the targets or the loss"
            )
    return table, messages


def unusual(done: StepStats, health: Health, known: Container[str] = ()) -> list[str]:
    """Warnings about an update with items or terms without targets, or one that was skipped.

    known: terms without targets of which nothing is said again. A task counts items without a target in the metric
    "<term>/skipped".
    """
    empty = [term for term in done.empty if term not in known]
    messages = [f"no valid target of {', '.join(empty)} in this update"] if empty else []
    for name, share in done.metrics.items():
        term, _, what = name.rpartition("/")
        if what == "skipped" and share > 0:
            messages.append(
                f"{share * done.counts[term]:.0f} items without a usable target of {term} were skipped"
            )
    if done.verdict is Verdict.SKIP:
        cause = "the loss scale was too large" if done.overflow else health.last
        messages.append(f"update skipped, no weight moved: {cause}")
    if done.overflow and health.scale_falls:
        messages.append(
            f"the loss scale fell {len(health.overflowed)} times in {OVERFLOW_WINDOW} updates: normal at the start, "
            "later a sign that gradients are about to blow up"
        )
    return messages


def clip_warning(health: Health, said: float = 0.0) -> list[str]:
    """A warning when too many of at least 100 gradients after the warm-up were clipped.

    said: share of the last warning; there is another one at twice as much.
    """
    if len(health.clips) < 100 or health.clip_share <= max(CLIP_SHARE, 2 * said):
        return []
    return [
        f"{health.clip_share:.0%} of the gradients after the warm-up were clipped; above {CLIP_SHARE:.0%} "
        "the learning rate is probably too high"
    ]


def output_statistics(
    task: Task, model: nn.Module, batch: Batch, runtime: Runtime
) -> dict[str, dict[str, float]]:
    """mean, std (population), max (magnitude) and share of infinities by output; one host read.

    batch: host tensors of one micro-batch. NaN marks entries that the task has masked out: they count
    nowhere. An output with no entry left is left out. Eval mode, so BatchNorm and random streams stay as they
    are.
    """
    names: list[str] = []
    values: list[Tensor] = []
    with evaluating(model):
        with runtime.autocast():
            outputs = task.outputs(model, to_device(batch, runtime.torch_device))
        for name, output in outputs.items():
            value = output.float().flatten()
            if not value.numel():
                continue
            known = ~value.isnan()
            finite = value.isfinite()
            count = finite.sum()
            kept = torch.where(finite, value, 0.0)
            mean = kept.sum() / count
            deviation = torch.where(finite, value - mean, 0.0).square().sum() / count
            infinite = (known & ~finite).sum() / known.sum()
            names.append(name)
            values.append(torch.stack((mean, deviation.sqrt(), kept.abs().max(), infinite)))
        rows = torch.stack(values).tolist() if values else []
    keys = ("mean", "std", "max", "infinite")
    found = {name: dict(zip(keys, row, strict=True)) for name, row in zip(names, rows, strict=True)}
    return {name: row for name, row in found.items() if not math.isnan(row["infinite"])}


class GradientNorms:
    """Ring buffer of the last finite gradient norms (before clipping)."""

    def __init__(self, values: Iterable[float] = (), window: int = WINDOW) -> None:
        self._values: deque[float] = deque(values, maxlen=window)

    def add(self, norm: float) -> None:
        """Non-finite norms are left out: `Health` counts those, and one would poison the quantiles."""
        if math.isfinite(norm):
            self._values.append(norm)

    def quantiles(self) -> dict[str, float]:
        """median and p95 (nearest rank); empty without values."""
        ordered = sorted(self._values)
        if not ordered:
            return {}
        return {
            "median": statistics.median(ordered),
            "p95": ordered[math.ceil(0.95 * len(ordered)) - 1],
        }

    def to_list(self) -> list[float]:
        """For the checkpoint."""
        return list(self._values)


class Throughput:
    """Rows per second over the last updates: waiting for data counts, validation and checkpoints do not."""

    def __init__(self, window: int = 20) -> None:
        self._updates: deque[tuple[int, float]] = deque(maxlen=window)

    def add(self, rows: int, seconds: float) -> float:
        """Take in one update; the rate over the window."""
        self._updates.append((rows, seconds))
        total = sum(seconds for _, seconds in self._updates)
        return sum(rows for rows, _ in self._updates) / total if total > 0 else 0.0
