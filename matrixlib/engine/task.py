"""The interface between the engine and what is trained."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.curriculum import Phase
from matrixlib.hardware import backend

Batch = dict[str, Tensor]  # name -> tensor; every tensor has the same leading dimension B (rows)
Sums = dict[str, Tensor]  # name -> 0-d sum over items


class Task(Protocol):
    """What the engine trains. One contract test (tests/test_task_contract.py) covers every task.

    A *term* is one part of the loss ("policy", "value", ...). Its *items* are the rows (or pixels, tokens) with a valid
    target. Tasks return losses and metrics as SUMS over items: the engine adds up micro-batches and divides once, by
    the item counts of the whole update.
    """

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight (>= 0) of each term's mean in the total loss; terms of weight 0 are not computed."""

    @property
    def gated(self) -> frozenset[str]:
        """SSL terms, which the engine may ramp up and leave out temporarily (`gating`)."""

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Stored rows to training arrays, augmented; runs in loader workers.

        batch: `records` (B,) structured, and the task's ragged members; of a task with an attribute `history` H > 0
        also `before` (B, H), and with a `last_of` `last` (B,), see `data.reader.Reader`. Returns arrays with
        leading dimension B, none structured, none uint16/32/64 (torch cannot collate or shift them). All randomness
        comes from `rng`, and each draw (random, integers, normal, standard_normal, uniform) has leading size B, so that
        ranks get the numbers of their own rows.
        """

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`prepare` without augmentation, for validation."""

    def build_model(self) -> nn.Module:
        """A new fp32 model on the CPU, a function of configuration and seed."""

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        """Process `rows` rows of gated terms at once (0 = all); returns the value in force, 0 if unsupported."""

    def counts(self, batch: Batch) -> dict[str, int]:
        """Valid items of every term in `weights` of a host batch; counts of slices add up."""

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> tuple[Sums, Sums]:
        """Forward pass of the `active` terms on one micro-batch on the model's device.

        Returns (losses, metrics). losses: active term -> 0-d fp32 tensor with gradient, the SUM over its valid items, a
        differentiable zero if there are none. metrics: "term/name" -> 0-d tensor without gradient, the SUM over the
        same items. Softmax and losses are fp32 under any autocast dtype. No host reads (no .item(), no boolean indexing
        of device tensors).
        """

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """(chance, floor) of terms where known, SUMS over the items of a host batch. chance: the loss of a fresh
        network, e.g. ln(number of classes) a row. floor: the lowest possible loss, e.g. the entropy of (smoothed)
        targets. Not for a teacher's `auxiliary_terms`."""

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Raw outputs for statistics (name -> tensor); masked entries (-1e9, say) removed or NaN."""


class Ungated:
    """A task without gated terms."""

    gated: frozenset[str] = frozenset()

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        return 0


class Source(Protocol):
    """A stream of training batches: batch i is a pure function of i and the skipped ranges."""

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Host batches of updates start..stop-1; close the iterator to free workers."""

    def unskipped_index(self, i: int) -> int:
        """Number of batch i in the stream without skips."""

    def skipping(self, ranges: Sequence[tuple[int, int]]) -> Self:
        """The same stream without these unskipped ranges (start, stop)."""

    def prefetch_stats(self) -> dict[str, float]:
        """Of the last batch: worker seconds to `prepare` it, batches `ready` in the queue; {} without workers."""


class Data(Protocol):
    """Training and held-out data of a run. phase: of its curriculum; None = all data."""

    def batches(self, phase: Phase | None = None) -> tuple[Task, Source]:
        """The task that prepares and scores training batches, and their source."""

    def held_out(self, kind: str, phase: Phase | None = None) -> Iterable[Batch]:
        """Host batches of held-out rows, the fixed "sample" or the "full" set; empty if there are none."""

    def records(self, source: Source, batches: Sequence[int], folder: Path) -> None:
        """Store the raw rows of these unskipped batches in `folder`, as evidence."""


class Teacher(Protocol):
    """A frozen network that a task's losses need; not part of the model, its checkpoints or loader workers."""

    @property
    def record(self) -> Mapping[str, Any]:
        """Its `name`, `sha256` of its file and `runtime`, for run.json and checkpoints."""

    @property
    def auxiliary_terms(self) -> frozenset[str]:
        """Terms without a held-out loss; switched off for good if the held-out loss becomes clearly worse."""

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        """The batch with the teacher's outputs. progress: share of the training done, None for held-out rows."""


def rows(batch: Mapping[str, Any]) -> int:
    """Leading dimension B of a batch; ValueError if empty or inconsistent."""
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"every array of a batch needs the same leading dimension, got {sizes}")
    return next(iter(sizes.values()))


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Rows start..stop-1 of every tensor, as views."""
    return {name: value[start:stop] for name, value in batch.items()}


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; asynchronous if the host tensors are pinned."""
    return {name: value.to(device, non_blocking=backend.copies_overlap(value, device)) for name, value in batch.items()}


def active_terms(task: Task) -> frozenset[str]:
    """Terms of weight above 0, which are computed."""
    return frozenset(term for term, weight in task.weights.items() if weight > 0)
