"""Loader: batch i is a pure function of (seed, phase, i, skipped ranges), for any number of workers.

Its state is one integer, so resuming is free. Batches are cut from an endless stream of epochs, so all are full.
"""

import copy
import multiprocessing
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Self

import cloudpickle
import numpy as np
import torch

from matrixlib.data import order as ordering
from matrixlib.data.catalogue import ShardRow
from matrixlib.data.order import Mixture, Order, RankSlice, generator, make_key, merge_ranges, permute, places_of
from matrixlib.data.reader import Damage, LoaderError, Reader, Sidecars
from matrixlib.data.remote import fetch_ahead
from matrixlib.data.shards import BLOCK, Batch, Layout
from matrixlib.files import end_with_parent
from matrixlib.hardware import backend

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Batch, np.random.Generator], Arrays]

ENDLESS = 2**62
MAX_RESTARTS = 3  # worker restarts in the life of one iterator
MIN_WORKER_BATCHES = 1000  # of a pass: starting a worker takes 1.5 s, a chess batch of 512 rows 2 ms
ROWS_AT_ONCE = 65_536  # in `of_records`
TRIAL_BATCHES, TRIAL_SECONDS = 2, 60.0  # of `try_workers`; seconds for one batch
TENSOR_KINDS = {"b1", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"}


class WorkerTraceback(Exception):
    """Traceback of a worker's error as text: the cause of the LoaderError in this process."""


def checked(arrays: Arrays, rows: int) -> Arrays:
    """The result of `prepare`, contiguous and writable. LoaderError if torch cannot take it."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.str[1:] not in TENSOR_KINDS:
            kind = getattr(array, "dtype", type(array).__name__)
            raise LoaderError(f"prepare: '{name}' is {kind}; return arrays of bool, uint8, signed or float")
        if array.ndim == 0 or len(array) != rows:
            raise LoaderError(f"prepare: '{name}' has shape {array.shape}; its first size must be {rows}")
    return {name: np.require(array, requirements=["C", "W"]) for name, array in arrays.items()}


@dataclass(frozen=True)
class BatchSequence:
    """A re-iterable sequence of batches, prepared again on each iteration."""

    length: int
    make: Callable[[], Iterator[Tensors]]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensors]:
        return self.make()


@dataclass
class WorkerBatch:
    """A worker's result: tensors and damage found, or an error. seconds: to prepare it."""

    tensors: Tensors
    damage: list[Damage]
    error: str = ""
    trace: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class BatchMaker:
    """Batches by number, as sent to workers. rows(i): (B,) rows of batch i over all ranks; stream(i): its generator."""

    reader: Reader
    prepare: Prepare
    ranks: RankSlice
    rows: Callable[[int], np.ndarray]
    stream: Callable[[int], np.random.Generator]

    def arrays(self, i: int) -> Arrays:
        """This rank's rows of batch i, prepared with its part of the stream."""
        rows = self.rows(i)
        own = self.ranks.rows(rows)
        batch = self.prepare(self.reader.gather(own), self.ranks.stream(self.stream(i), len(rows)))
        return checked(batch, len(own))

    def item(self, i: int) -> WorkerBatch:
        """Batch i as tensors; errors are returned, not raised."""
        began = time.perf_counter()
        try:
            tensors = {name: torch.from_numpy(array) for name, array in self.arrays(i).items()}
        except Exception as error:  # noqa: BLE001 - re-raised in the training process
            text = f"batch {i} could not be made: {type(error).__name__}: {error}"
            return WorkerBatch({}, self.reader.new_damage(), text, traceback.format_exc())
        return WorkerBatch(tensors, self.reader.new_damage(), seconds=time.perf_counter() - began)


_source: BatchMaker | None = None  # in a worker process


def _start_worker(source: bytes) -> None:
    global _source
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C
    torch.set_num_threads(1)  # workers are the parallelism
    end_with_parent()
    _source = pickle.loads(source)  # noqa: S301 - from the parent process


def _work(i: int) -> WorkerBatch:
    assert _source is not None
    return _source.item(i)


def unskipped(skip: Sequence[tuple[int, int]], i: int) -> int:
    """Number of the i-th unskipped batch in the stream without skips."""
    for start, stop in skip:
        i += stop - start if i >= start else 0
    return i


def worker_context() -> BaseContext:
    """How worker processes start: not by fork, which copies locks in any state, but from a server, where there can be
    one, that imports torch once for all of them."""
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])
    return context


class Workers:
    """Processes that prefetch `prefetch` batches each."""

    def __init__(self, source: bytes, numbers: range, workers: int, prefetch: int) -> None:
        self._pool = ProcessPoolExecutor(workers, worker_context(), _start_worker, (source,))
        self._numbers, self.futures = iter(numbers), deque[Future[WorkerBatch]]()
        self._submit(workers * prefetch)

    def _submit(self, count: int) -> None:
        self.futures += [self._pool.submit(_work, i) for i in islice(self._numbers, count)]

    def take(self, timeout: float) -> WorkerBatch:
        """The next batch. Raises BrokenProcessPool, TimeoutError (0: never)."""
        item = self.futures[0].result(timeout or None)
        self.futures.popleft()
        self._submit(1)
        return item

    def close(self) -> None:
        """Kill the processes: a hung one would block."""
        processes = list(self._pool._processes.values())
        self._pool.shutdown(wait=False)
        for process in processes:
            process.kill()


class Loader:
    """Batches of shard rows in an order fixed by (seed, phase), prepared by `prepare`.

    shards: of a catalogue, in its order. limit: rows kept (0: all; see `kept_rows`). window_blocks: shuffle window (0:
    everything). weights: share of each source in every batch; default: its share of the rows. skip: ranges (start,
    stop) of skipped batch numbers. on_damage(name, block, reason): called once a corrupt block; on_loss(text): when
    workers are restarted or pinning fails. timeout: seconds without a batch until workers count as hung (0: never).
    sidecars: additional per-row files. before, last_of: further rows of the shard that `prepare` gets, see `Reader`.
    ranks: whose rows are prepared.
    """

    def __init__(
        self,
        shards: Sequence[ShardRow],
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
        timeout: float = 0.0,
        on_damage: Callable[[str, int, str], None] = lambda *damage: None,
        on_loss: Callable[[str], None] = lambda text: None,
        sidecars: Sidecars | None = None,
        before: int = 0,
        last_of: str = "",
        ranks: RankSlice = RankSlice(),  # noqa: B008 - frozen
    ) -> None:
        if not shards:
            raise LoaderError("no healthy shard to read; the catalogue says which are quarantined, and why")
        if batch_size < ranks.size:
            raise ValueError(f"a batch of {batch_size} rows for {ranks.size} ranks: use a larger one, or fewer ranks")
        if weights:
            shards = [row for name in weights for row in shards if row.source == name]
            if lacking := set(weights) - {row.source for row in shards}:
                raise LoaderError(f"no healthy shard of source '{min(lacking)}', which has a weight")
        self._window = window_blocks * len(weights or (0,))  # blocks, at most as many shards, in use at a time
        self.reader = Reader(shards, layout, limit, bool(weights), sidecars, 2 * self._window, before, last_of)
        orders = [Order(first, seed, phase, window_blocks) for first in self.reader.firsts()]
        self._order = Mixture(tuple(orders), tuple(places_of(weights).values())) if weights else orders[0]
        self._prepare, self._ranks, self._seed, self._phase = prepare, ranks, seed, phase
        self._skip = merge_ranges(skip)
        self._workers, self._prefetch, self._pin = workers, prefetch, pin
        self._on_damage, self._reported = on_damage, set[tuple[str, int]]()
        self._on_loss, self._timeout, self._max_restarts = on_loss, timeout, MAX_RESTARTS
        self._stats: dict[str, float] = {}
        self._only: np.ndarray | None = None
        self.batch_size = batch_size
        self.count = self.reader.count
        self.per_epoch = -(-self.count // batch_size)

    def unskipped_index(self, i: int) -> int:
        return unskipped(self._skip, i)

    def skipping(self, skip: Sequence[tuple[int, int]]) -> Self:
        """This loader with other skipped ranges; open files are shared."""
        other = copy.copy(self)
        other._skip = merge_ranges(skip)
        return other

    def _batches(self) -> BatchMaker:
        """The endless stream of shuffled epochs without skipped batches."""
        order, skip, size, count = self._order, self._skip, self.batch_size, self.reader.count
        key = ordering.PREPARE, self._seed, self._phase

        def rows(i: int) -> np.ndarray:
            number = unskipped(skip, i)
            return order.rows(np.arange(number * size, (number + 1) * size))

        def stream(i: int) -> np.random.Generator:
            number = unskipped(skip, i)
            return generator(*key, number * size // count, number)

        return BatchMaker(self.reader, self._prepare, self._ranks, rows, stream)

    def of_records(self, look: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(N, ...) results of `look` on the records of all rows, in order, in chunks."""
        parts = np.array_split(np.arange(self.count), -(-self.count // ROWS_AT_ONCE))
        return np.concatenate([look(self.reader.gather(part, records=True)["records"]) for part in parts])

    def of_sources(self) -> dict[str, np.ndarray]:
        """Source -> mask (N,) of its rows."""
        sources, counts = [row.source for row in self.reader.shards], np.diff(self.reader.start)
        return {name: np.repeat([own == name for own in sources], counts) for name in sorted(set(sources))}

    def only(self, keep: np.ndarray) -> Self:
        """This loader restricted further to rows where `keep` (N,), of all rows, is True, for `sequential`."""
        other, rows = copy.copy(self), np.flatnonzero(keep)
        other._only = rows if self._only is None else np.intersect1d(rows, self._only)
        other.count = len(other._only)
        return other

    def prepared_by(self, prepare: Prepare) -> Self:
        """This loader with another `prepare`, such as one that augments nothing."""
        other = copy.copy(self)
        other._prepare = prepare
        return other

    def records(self, number: int) -> Batch:
        """Stored rows of an unskipped batch number, unprepared: evidence after a blow-up."""
        return self.reader.gather(self.skipping(())._batches().rows(number))

    def batch(self, i: int) -> Arrays:
        """Batch i prepared in this process; arrays (B, ...)."""
        arrays = self._batches().arrays(i)
        self._report(self.reader.new_damage())
        return arrays

    def batches(self, start: int, stop: int | None = None) -> Iterator[Tensors]:
        """Batches start, start + 1, ... (endless if `stop` is None) as tensors from the workers, which stop when the
        iterator is closed. If a worker dies or hangs, all are restarted from the missing batch."""
        return self._iterate(self._batches(), range(start, ENDLESS if stop is None else stop), self._workers)

    def sequential(self, batch_size: int, sample: int = 0) -> BatchSequence:
        """Every row once, in order; the last batch may be short. sample > 0: a fixed random subset by seed."""
        kept = np.arange(self.count) if self._only is None else self._only
        ranks, stream = self._ranks, partial(generator, ordering.SEQUENTIAL, self._seed)
        if 0 < sample < len(kept):
            kept = kept[np.sort(permute(np.arange(sample), len(kept), make_key(ordering.SAMPLE, self._seed)))]

        def rows(i: int) -> np.ndarray:
            return kept[i * batch_size : (i + 1) * batch_size]

        source = BatchMaker(self.reader, self._prepare, ranks, rows, stream)
        whole, rest = divmod(len(kept), batch_size)
        length = whole + (rest > ranks.rank)  # without a last batch that has no row of this rank
        workers = self._workers if length >= MIN_WORKER_BATCHES else 0
        return BatchSequence(length, lambda: self._iterate(source, range(length), workers))

    def prefetch_stats(self) -> dict[str, float]:
        return self._stats

    def try_workers(self) -> str:
        """Let workers prepare the first batches: what went wrong, or "" if they equal those made here."""
        if not self._workers:
            return ""
        trial = copy.copy(self)
        trial._max_restarts, trial._timeout = 0, TRIAL_SECONDS
        try:
            for i, batch in enumerate(trial.batches(0, TRIAL_BATCHES)):
                if any(batch[name].numpy().tobytes() != array.tobytes() for name, array in self.batch(i).items()):
                    return f"batch {i} of a worker differs from the one that is made here"
        except (LoaderError, OSError) as error:
            return str(error)
        return ""

    def check_cache(self) -> None:
        """RemoteError if the shards in one shuffle window do not fit in the cache."""
        if self.reader.remote is not None:
            self.reader.remote.check_room([row.bytes for row in self.reader.shards], self._window)

    def _iterate(self, source: BatchMaker, numbers: range, workers: int) -> Iterator[Tensors]:
        """Batches by number; remote shards are prefetched."""
        here = (self._unpack(source.item(i)) for i in numbers)
        batches = self._from_workers(source, numbers, workers) if workers else here
        reader, remote = self.reader, self.reader.remote
        if remote is None:
            return batches
        if not self._window:
            return fetch_ahead(batches, remote, reader.shards, iter([set(range(len(reader.shards)))]), 1)
        own = (source.ranks.rows(source.rows(i)) for i in numbers)
        wanted = (set(np.unique(reader.shards_of(rows)).tolist()) for rows in own)
        ahead = self._window * BLOCK // max(1, len(source.rows(numbers.start)))
        return fetch_ahead(batches, remote, reader.shards, wanted, ahead)

    def _from_workers(self, source: BatchMaker, numbers: range, workers: int) -> Generator[Tensors, None, None]:
        try:
            data = cloudpickle.dumps(source)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise LoaderError(f"prepare cannot be sent to workers ({error}); use no workers") from error
        restarts = 0
        while numbers:
            with closing(Workers(data, numbers, workers, self._prefetch)) as pool:
                for i in numbers:
                    try:
                        item = pool.take(self._timeout)
                    except TimeoutError:
                        what = f"gave nothing for {self._timeout:g} s; is the disk slow, or data.timeout too short?"
                        break
                    except BrokenProcessPool:
                        what = "was gone; was it killed, or out of memory?"
                        break
                    except Exception as error:
                        raise LoaderError(f"batch {i} could not be sent by a worker: {error}") from error
                    self._stats = {
                        "prepare": round(item.seconds, 6),
                        "ready": sum(future.done() for future in pool.futures),
                    }
                    yield self._unpack(item)
                else:
                    return
            if restarts == self._max_restarts:
                raise LoaderError(f"batch {i} never came, as a worker {what} use fewer workers")
            restarts, numbers = restarts + 1, range(i, numbers.stop)
            self._on_loss(f"the loader's workers were started again at batch {i}, as one {what} use fewer workers")

    def _unpack(self, item: WorkerBatch) -> Tensors:
        self._report(item.damage)
        if item.error:
            raise LoaderError(item.error) from WorkerTraceback(item.trace)
        if not self._pin:
            return item.tensors
        tensors, problem = backend.pin(item.tensors)
        if problem:
            self._pin = False
            self._on_loss(f"batches are not page-locked, so that updates wait for their copies: {problem}")
        return tensors

    def _report(self, damage: Sequence[Damage]) -> None:
        """Report new damage only: every worker finds the same."""
        for name, block, reason in damage:
            if (name, block) not in self._reported:
                self._reported.add((name, block))
                self._on_damage(name, block, reason)
