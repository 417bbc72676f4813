"""The loader: batch i is a pure function of (seed, phase, i, skipped ranges), whatever the number of workers.

The rows of an epoch are a counter-based permutation (a Feistel network with cycle walking), so there is no
list of N, the state is one cursor, and going on in the middle costs nothing. Batches are cut from the endless
stream of epochs, so each is full. Rows of a damaged block are replaced by others, from the next sound one.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from matrixlib.data.catalogue import ShardRow
from matrixlib.data.order import (
    PREPARE,
    SAMPLE,
    SEQUENTIAL,
    Mixture,
    Order,
    generator,
    make_key,
    merge_ranges,
    permute,
    places_of,
)
from matrixlib.data.reader import Damage, LoaderError, Reader, allow_files, grouped_by_source
from matrixlib.data.shards import Batch, Layout, Shard

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Batch, np.random.Generator], Arrays]
OnDamage = Callable[[str, int, str], None]  # `Damage`
OnLoss = Callable[[str], None]  # (what happened)

ENDLESS = 2**62
GONE = (
    ConnectionError,
    EOFError,
    FileNotFoundError,
)  # a dead worker cannot hand over the batches it made ahead
GONE_WORDS = ("exited unexpectedly", "killed by signal")  # DataLoader's, of a worker or its pinning thread
RESTARTS = 3  # times that lost workers are started again, over the life of one iterator
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
TENSOR_KINDS = {"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"}


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text: the cause of the LoaderError in this process."""


def checked(arrays: Arrays, rows: int) -> Arrays:
    """What `prepare` returned, contiguous and writable. Raises LoaderError unless torch can take it."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.str[1:] not in TENSOR_KINDS:
            kind = getattr(array, "dtype", type(array).__name__)
            raise LoaderError(f"prepare: '{name}' is {kind}; return arrays of bool, uint8, signed or float")
        if array.ndim == 0 or len(array) != rows:
            raise LoaderError(f"prepare: '{name}' has shape {array.shape}; its first size must be {rows}")
    return {name: np.require(array, requirements=["C", "W"]) for name, array in arrays.items()}


# Batches


@dataclass
class Item:
    """What a worker sends: tensors and the damage it met, or why there are none."""

    tensors: Tensors
    damage: list[Damage]
    error: str = ""
    trace: str = ""

    def pin_memory(self) -> Item:
        """The tensors in page-locked memory; DataLoader calls this by name."""
        return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})


class Batches(Dataset[Item]):
    """The batches as a dataset for DataLoader(batch_size=None)."""

    def __init__(
        self,
        reader: Reader,
        order: Order | Mixture,
        size: int,
        prepare: Prepare,
        skip: Sequence[tuple[int, int]],
    ) -> None:
        self.reader, self.order, self.size, self.prepare = reader, order, size, prepare
        self.skip = merge_ranges(skip)

    def raw(self, i: int) -> int:
        """The number of the i-th batch that is not skipped, in the stream with nothing skipped."""
        for start, stop in self.skip:
            i += stop - start if i >= start else 0
        return i

    def arrays(self, i: int) -> Arrays:
        raw = self.raw(i)
        epoch = raw * self.size // self.reader.count
        stream = generator(PREPARE, self.order.seed, self.order.phase, epoch, raw)
        return checked(self.prepare(self.reader.gather(self.rows(raw)), stream), self.size)

    def rows(self, raw: int) -> np.ndarray:
        """(B,) row numbers of the batch with this raw number."""
        return self.order.rows(np.arange(raw * self.size, (raw + 1) * self.size))

    def __getitem__(self, i: int) -> Item:
        try:
            tensors = to_tensors(self.arrays(i))
        except Exception as error:  # noqa: BLE001 - raised again in the training process
            text = f"batch {i} could not be made: {type(error).__name__}: {error}"
            return Item({}, self.reader.new_damage(), text, traceback.format_exc())
        return Item(tensors, self.reader.new_damage())


def to_tensors(arrays: Arrays) -> Tensors:
    """The same memory as tensors."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def as_is(item: Any) -> Any:
    """Collation: an item is a whole batch already."""
    return item


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Processes started inside compute on one thread each: workers are the parallelism."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Loader:
    """Batches of the shards' rows, in an order fixed by (seed, phase), made by `prepare`.

    `shards` are catalogue rows or paths, in catalogue order; `limit` keeps N rows of them (0: all; see `kept_rows`);
    `window_blocks` is the shuffle window (0: everything). `weights` gives each source's share of every batch; without
    it a source counts as much as it has rows. `skip` holds ranges (start, stop) of batch numbers
    that are left out. `prepare(batch, rng)` must be picklable when there are workers. `on_damage(name, block,
    reason)` is called in this process once for every damaged block, `on_loss(text)` when workers were lost and
    are started again. Raises ShardError, LoaderError.
    """

    def __init__(
        self,
        shards: Sequence[ShardRow | Path | str],
        layout: Layout,
        batch_size: int,
        seed: int,
        prepare: Prepare,
        *,
        limit: int = 0,
        window_blocks: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        phase: int = 0,
        weights: Mapping[str, float] | None = None,
        skip: Sequence[tuple[int, int]] = (),
        pin: bool = False,
        on_damage: OnDamage | None = None,
        on_loss: OnLoss = lambda text: None,
    ) -> None:
        if not shards:
            raise LoaderError("no healthy shard to read; the catalogue says which are quarantined, and why")
        if batch_size < 1 or min(limit, window_blocks, workers) < 0 or prefetch < 1:
            raise ValueError("batch_size and prefetch are at least 1; limit, window_blocks, workers at least 0")
        if weights:
            shards = grouped_by_source(weights, shards)
        names = [item.name if isinstance(item, ShardRow) else Path(item).name for item in shards]
        paths = [item.path if isinstance(item, ShardRow) else Path(item) for item in shards]
        sources = [item.source if isinstance(item, ShardRow) else "" for item in shards]
        counts = [item.count if isinstance(item, ShardRow) else len(Shard(item, layout)) for item in shards]
        allow_files(len(paths))
        self._reader = Reader(names, paths, sources, counts, layout, limit, apart=bool(weights))
        orders = [Order(first, seed, phase, window_blocks) for first in self._reader.firsts()]
        order = Mixture(tuple(orders), tuple(places_of(weights).values())) if weights else orders[0]
        self._batches = Batches(self._reader, order, batch_size, prepare, skip)
        self._seed, self._workers, self._prefetch, self._pin = seed, workers, prefetch, pin
        self._on_damage, self._reported = on_damage, set[tuple[str, int]]()
        self._on_loss = on_loss
        self.batch_size = batch_size
        self.count = self._reader.count
        self.per_epoch = -(-self.count // batch_size)

    def raw(self, i: int) -> int:
        """Number of batch i in the stream with nothing skipped: what a range in `skip` counts."""
        return self._batches.raw(i)

    def skipping(self, skip: Sequence[tuple[int, int]]) -> Loader:
        """This loader with other ranges of raw batch numbers left out; both share the files that are open."""
        other = copy.copy(self)
        other._batches = Batches(self._reader, self._batches.order, self.batch_size, self._batches.prepare, skip)
        return other

    def records(self, raw: int) -> Batch:
        """Stored rows of the batch with this raw number, as they lie in the shards: evidence after a blow-up."""
        return self._reader.gather(self._batches.rows(raw))

    def batch(self, i: int) -> Arrays:
        """Batch i, made here; every array (B, ...)."""
        arrays = self._batches.arrays(i)
        self._report(self._reader.new_damage())
        return arrays

    def batches(self, start: int, stop: int | None = None) -> Iterator[Tensors]:
        """Batches start, start + 1, ... (endless when `stop` is None) as tensors, made by the workers.

        One iterator is meant to live as long as the training; closing it ends the workers. Where a worker is gone
        (killed, crashed), all are started again from the batch that never came: no batch is lost or changed, as
        each is a function of its number. LoaderError when that has happened `RESTARTS` times and once more.
        """
        numbers = range(start, ENDLESS if stop is None else stop)
        if not self._workers:
            for i in numbers:
                item = self._batches[i]
                yield self._open(item.pin_memory() if self._pin else item)
            return
        iterator, restarts = self._start(numbers), 0
        for i in numbers:
            while True:
                try:
                    item = next(iterator)
                    break
                except (RuntimeError, *GONE) as error:
                    text = (str(error) or type(error).__name__).splitlines()[0]
                    cause = f"({text}); was it killed, or out of memory? use fewer workers"
                    gone = isinstance(error, GONE) or any(words in text for words in GONE_WORDS)
                    if restarts == RESTARTS or not gone:
                        raise LoaderError(f"batch {i} never came {cause}") from error
                restarts += 1
                del iterator  # ends the others
                iterator = self._start(numbers[i - start :])
                self._on_loss(f"the loader's workers were started again at batch {i}, as one was gone {cause}")
            yield self._open(item)

    def _start(self, numbers: range) -> Iterator[Item]:
        """Worker processes; never by fork, which copies locks and threads of this process in any state."""
        try:
            pickle.dumps(self._batches)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            remedy = "use a module's function or a method, or no workers"
            raise LoaderError(f"prepare cannot be sent to workers ({error}); {remedy}") from error
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload([__name__])  # torch is imported once, not by every worker
        loader = DataLoader(
            self._batches,
            batch_size=None,
            sampler=numbers,
            num_workers=self._workers,
            prefetch_factor=self._prefetch,
            collate_fn=as_is,
            pin_memory=self._pin,
            multiprocessing_context=context,
            generator=torch.Generator(),  # else starting would draw from, and so change, the global stream
        )
        with one_thread():
            return iter(loader)

    def sequential(self, batch_size: int, sample: int = 0) -> Iterator[Tensors]:
        """Every row once, in order (validation); the last batch may be short. `sample` > 0: so many rows,
        always the same for a seed. The random stream depends on the seed and the batch's number alone."""
        rows = np.arange(self.count)
        if 0 < sample < self.count:
            rows = np.sort(permute(np.arange(sample), self.count, make_key(SAMPLE, self._seed)))
        for i, start in enumerate(range(0, len(rows), batch_size)):
            members = rows[start : start + batch_size]
            batch = self._reader.gather(members)
            arrays = checked(self._batches.prepare(batch, generator(SEQUENTIAL, self._seed, i)), len(members))
            self._report(self._reader.new_damage())
            yield to_tensors(arrays)

    def _open(self, item: Item) -> Tensors:
        self._report(item.damage)
        if item.error:
            raise LoaderError(item.error) from WorkerTraceback(item.trace)
        return item.tensors

    def _report(self, damage: Sequence[Damage]) -> None:
        """Pass on what is new: every worker meets the same damage for itself."""
        for name, block, reason in damage:
            if (name, block) not in self._reported:
                self._reported.add((name, block))
                if self._on_damage:
                    self._on_damage(name, block, reason)
