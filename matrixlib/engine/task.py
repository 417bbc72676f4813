"""The seam between the engine and what is trained: everything the engine asks of a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.hardware import backend

if TYPE_CHECKING:
    from matrixlib.engine.curriculum import Phase

Batch = dict[str, Tensor]
"""Name -> tensor; every tensor has the same leading dimension B (rows)."""


class Task(Protocol):
    """What the engine trains. One contract test (tests/test_task_contract.py) runs over every task.

    A *term* is one part of the loss ("policy", "value", ...). A term has *items*: the rows (or pixels, tokens) with a
    usable target. Losses and metrics leave the task as SUMS over items: the engine adds those of the micro-batches and
    divides once, by the item counts of the whole update.
    """

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each term's mean in the total loss, one per term, >= 0; a term of weight 0 is not computed."""

    @property
    def gated(self) -> frozenset[str]:
        """Self-supervised terms: the engine may ramp them up and leave them out for a while (`gating`)."""

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Stored rows to training arrays, augmented; runs in the loader's workers.

        `batch`: what the loader gathered, `records` (B,) structured and the task's ragged members. Returns arrays that
        ALL have leading dimension B, none structured and none uint16/32/64 (torch can't collate or shift those). Every
        random choice comes from `rng`. The leading size of each draw (random, integers, normal, standard_normal,
        uniform) is B: of several ranks, each gets the numbers of its own rows.
        """

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The same without augmentation, for validation; `prepare` itself where nothing is augmented."""

    def build_model(self) -> nn.Module:
        """A freshly initialised fp32 model on the CPU; the same for the same configuration and seed."""

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        """Let the layers of the gated terms work on `rows` rows at once, 0: all; what is in force, 0 = cannot."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid items of every term of `weights` in `batch`, on the host; the counts of slices add up."""

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Forward pass of the terms in `active` over one micro-batch on the model's device.

        Returns (losses, metrics). `losses`: each term of `active` -> 0-d fp32 tensor, the SUM over that term's valid
        items, with a gradient; a differentiable zero without any. `metrics`: "term/name" -> 0-d tensor without
        gradient, the SUM over the same items. Softmax and losses are computed in fp32 whatever the autocast dtype.
        Nothing here reads from the device (no .item(), no boolean indexing of device tensors).
        """

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per term whose bounds are known (chance, floor), SUMS over the items of a batch on the host. chance: the loss
        of a freshly initialised network, e.g. ln(number of classes) per row. floor: the least that any network can
        reach, e.g. the entropy of the (smoothed) targets. A teacher's `auxiliary_terms` have none.
        """

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Raw outputs for statistics (name -> tensor of any shape); masked-out entries (-1e9, say) removed or NaN."""


class Ungated:
    """A task none of whose terms may be left out."""

    gated: frozenset[str] = frozenset()

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        return 0


class Source(Protocol):
    """Where the trainer's updates come from: batch i is a pure function of i and the skipped ranges."""

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Host batches of updates start..stop-1; closing the iterator gives its resources back."""

    def unskipped_index(self, i: int) -> int:
        """Number of batch i in the stream with nothing skipped."""

    def skipping(self, ranges: Sequence[tuple[int, int]]) -> Source:
        """The same stream without the batches of these unskipped ranges (start, stop)."""

    def prefetch_stats(self) -> dict[str, float]:
        """Of the last batch: seconds to `prepare` it in a worker, how many lay `ready` behind it; {} = no workers."""


class Data(Protocol):
    """What a run trains on and is judged by. phase: of its curriculum; the whole data without one."""

    def batches(self, phase: Phase | None = None) -> tuple[Task, Source]:
        """The task that prepares and scores the training batches, and where these come from."""

    def held_out(self, kind: str, phase: Phase | None = None) -> Iterable[Batch]:
        """Host batches of the fixed "sample" of the held-out rows or of the "full" set; empty where there are none."""

    def records(self, source: Source, batches: Sequence[int], folder: Path) -> None:
        """Keep the stored rows of these unskipped batch numbers in `folder`, after a blow-up."""


class Teacher(Protocol):
    """A frozen network that a task's losses need; no part of the model, of a checkpoint or of the loader's workers."""

    @property
    def record(self) -> Mapping[str, Any]:
        """Its `name`, the `sha256` of its file and the `runtime` that it computes in, for run.json and checkpoints."""

    @property
    def auxiliary_terms(self) -> frozenset[str]:
        """Terms that no held-out loss has; where it becomes clearly worse they are switched off for good."""

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        """The batch with what the network says of its rows. progress: share of the training, None of held-out rows."""


def rows(batch: Mapping[str, Any]) -> int:
    """Leading dimension B of a batch of tensors or arrays; ValueError when it is empty or they disagree."""
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"every array of a batch needs the same leading dimension, got {sizes}")
    return next(iter(sizes.values()))


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop-1 of every tensor, as views."""
    return {name: value[start:stop] for name, value in batch.items()}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; the copy runs beside the computation where the host tensors are pinned."""
    return {name: value.to(device, non_blocking=backend.copies_overlap(value, device)) for name, value in batch.items()}


def active_terms(task: Task) -> frozenset[str]:
    """Terms with a weight above 0: those that are computed at all."""
    return frozenset(term for term, weight in task.weights.items() if weight > 0)
