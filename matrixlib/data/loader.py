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
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from matrixlib.data.ahead import check_cache, with_blocks_ahead
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
from matrixlib.data.reader import Damage, LoaderError, Reader, Sidecars, grouped_by_source
from matrixlib.data.shards import Batch, Layout, Shard
from matrixlib.data.share import Share

Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]
Prepare = Callable[[Batch, np.random.Generator], Arrays]
OnDamage = Callable[[str, int, str], None]  # `Damage`
OnLoss = Callable[[str], None]  # (what happened)

ENDLESS = 2**62
GONE = (ConnectionError, EOFError, FileNotFoundError)  # a dead worker cannot hand over the batches it made ahead
GONE_WORDS = ("exited unexpectedly", "killed by signal")  # DataLoader's, of a worker or its pinning thread
LATE_WORDS = "timed out after"  # DataLoader's, where a batch did not come while it waited
WAIT_SECONDS = 5.0  # of one wait, after which it looks whether its workers are alive
RESTARTS = 3  # times that lost workers are started again, over the life of one iterator
WORTH_WORKERS = 1000  # batches of a pass over rows: starting a worker took 1.5 s, making 512 rows of chess here 2 ms
ROWS_AT_ONCE = 65_536  # whose records are looked at
TRIAL_BATCHES, TRIAL_SECONDS = 2, 60.0  # of `try_workers`; seconds for one batch
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


@dataclass(frozen=True)
class Pass:
    """Batches of a fixed number of rows, to be gone through as often as one likes, each time made anew."""

    length: int
    make: Callable[[], Iterator[Tensors]]

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Tensors]:
        return self.make()


# Batches


@dataclass
class Item:
    """What a worker sends: tensors and the damage it met, or why there are none.

    seconds: that it took to make. pageable: why the tensors could not be page-locked.
    """

    tensors: Tensors
    damage: list[Damage]
    error: str = ""
    trace: str = ""
    seconds: float = 0.0
    pageable: str = ""

    def pin_memory(self) -> Item:
        """The tensors in page-locked memory, as they are where the system refuses; DataLoader calls this by name."""
        try:
            return replace(self, tensors={name: tensor.pin_memory() for name, tensor in self.tensors.items()})
        except RuntimeError as error:
            return replace(self, pageable=str(error).splitlines()[0])


class Numbered(Dataset[Item]):
    """Batches by their number, as a dataset for DataLoader(batch_size=None)."""

    def __init__(self, reader: Reader, prepare: Prepare, share: Share) -> None:
        self.reader, self.prepare, self.share = reader, prepare, share

    def arrays(self, i: int) -> Arrays:
        """Batch i."""
        raise NotImplementedError

    def members(self, i: int) -> np.ndarray:
        """(B,) row numbers of batch i, those of all ranks."""
        raise NotImplementedError

    def own(self, i: int) -> np.ndarray:
        """Those that are read here."""
        return self.share.of(self.members(i))

    def made(self, rows: np.ndarray, stream: np.random.Generator) -> Arrays:
        """The share of these rows (B,), prepared with that of the stream."""
        own = self.share.of(rows)
        return checked(self.prepare(self.reader.gather(own), self.share.stream(stream, len(rows))), len(own))

    def __getitem__(self, i: int) -> Item:
        began = time.perf_counter()
        try:
            tensors = to_tensors(self.arrays(i))
        except Exception as error:  # noqa: BLE001 - raised again in the training process
            text = f"batch {i} could not be made: {type(error).__name__}: {error}"
            return Item({}, self.reader.new_damage(), text, traceback.format_exc())
        return Item(tensors, self.reader.new_damage(), seconds=time.perf_counter() - began)


class Rows(Numbered):
    """These rows once, in their order; the last batch may be short."""

    def __init__(self, reader: Reader, rows: np.ndarray, size: int, prepare: Prepare, seed: int, share: Share) -> None:
        super().__init__(reader, prepare, share)
        self.rows, self.size, self.seed = rows, size, seed

    def __len__(self) -> int:
        """A last batch with too few rows for every rank is none of this one's where it has no row of it."""
        whole, rest = divmod(len(self.rows), self.size)
        return whole + (rest > self.share.rank)

    def arrays(self, i: int) -> Arrays:
        return self.made(self.members(i), generator(SEQUENTIAL, self.seed, i))

    def members(self, i: int) -> np.ndarray:
        return self.rows[i * self.size : (i + 1) * self.size]


class Batches(Numbered):
    """The endless stream of shuffled epochs."""

    def __init__(
        self,
        reader: Reader,
        order: Order | Mixture,
        size: int,
        prepare: Prepare,
        share: Share,
        skip: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(reader, prepare, share)
        self.order, self.size = order, size
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
        return self.made(self.rows(raw), stream)

    def members(self, i: int) -> np.ndarray:
        return self.rows(self.raw(i))

    def rows(self, raw: int) -> np.ndarray:
        """(B,) row numbers of the batch with this raw number."""
        return self.order.rows(np.arange(raw * self.size, (raw + 1) * self.size))


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
    are started again, or memory could not be page-locked. `timeout`: seconds without a batch after which the workers
    count as hung; 0 = never. `sidecars`: what comes beside each row. `share`: the rows of each batch that are made.
    Raises ShardError, LoaderError.
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
        timeout: float = 0.0,
        on_damage: OnDamage | None = None,
        on_loss: OnLoss = lambda text: None,
        sidecars: Sidecars | None = None,
        share: Share = Share(),  # noqa: B008 - frozen
    ) -> None:
        if not shards:
            raise LoaderError("no healthy shard to read; the catalogue says which are quarantined, and why")
        if batch_size < 1 or min(limit, window_blocks, workers) < 0 or prefetch < 1:
            raise ValueError("batch_size and prefetch are at least 1; limit, window_blocks, workers at least 0")
        if batch_size < share.size:
            raise ValueError(f"a batch of {batch_size} rows for {share.size} ranks: use a larger one, or fewer ranks")
        if weights:
            shards = grouped_by_source(weights, shards)
        names = [item.name if isinstance(item, ShardRow) else Path(item).name for item in shards]
        paths = [item.path if isinstance(item, ShardRow) else Path(item) for item in shards]
        sources = [item.source if isinstance(item, ShardRow) else "" for item in shards]
        counts = [item.count if isinstance(item, ShardRow) else len(Shard(item, layout)) for item in shards]
        elsewhere = [item for item in shards if isinstance(item, ShardRow) and item.remote]
        self._window = window_blocks * len(weights or (0,))  # blocks from which rows come at a time
        keep = 2 * self._window
        self._reader = Reader(names, paths, sources, counts, layout, limit, bool(weights), sidecars, elsewhere, keep)
        self._reader.allow_files()
        orders = [Order(first, seed, phase, window_blocks) for first in self._reader.firsts()]
        order = Mixture(tuple(orders), tuple(places_of(weights).values())) if weights else orders[0]
        self._batches = Batches(self._reader, order, batch_size, prepare, share, skip)
        self._seed, self._workers, self._prefetch, self._pin = seed, workers, prefetch, pin
        self._on_damage, self._reported = on_damage, set[tuple[str, int]]()
        self._on_loss, self._timeout, self._restarts = on_loss, timeout, RESTARTS
        self._supply: dict[str, float] = {}
        self._only: np.ndarray | None = None
        self.batch_size = batch_size
        self.count = self._reader.count
        self.per_epoch = -(-self.count // batch_size)

    def raw(self, i: int) -> int:
        """Number of batch i in the stream with nothing skipped: what a range in `skip` counts."""
        return self._batches.raw(i)

    def skipping(self, skip: Sequence[tuple[int, int]]) -> Loader:
        """This loader with other ranges of raw batch numbers left out; both share the files that are open."""
        other = copy.copy(self)
        own = self._batches
        other._batches = Batches(self._reader, own.order, self.batch_size, own.prepare, own.share, skip)
        return other

    def of_records(self, look: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(N, ...) what `look` makes of the records of all rows, in their order, some of them at a time."""
        parts = np.array_split(np.arange(self.count), -(-self.count // ROWS_AT_ONCE))
        return np.concatenate([look(self._reader.gather(part)["records"]) for part in parts])

    def only(self, keep: np.ndarray) -> Loader:
        """This loader with those rows alone in `sequential` of which `keep` (N,) says True."""
        other = copy.copy(self)
        other._only, other.count = np.flatnonzero(keep), int(keep.sum())
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
        (killed, crashed) or hangs, all are started again from the batch that never came: no batch is lost or changed,
        as each is a function of its number. LoaderError when that has happened `RESTARTS` times and once more.
        """
        return self._made(self._batches, range(start, ENDLESS if stop is None else stop), self._workers)

    def rows_in(self, name: str, block: int) -> int:
        """Rows of a shard's block (`WHOLE`: of all of them) that are used: what damage to it loses."""
        return self._reader.rows_in(name, block)

    def supply(self) -> dict[str, float]:
        """How workers keep up, by the batch that came last: seconds that one took to `prepare` it, and how many lay
        `ready` behind it, where that can be seen. Empty without workers.
        """
        return self._supply

    def try_workers(self) -> str:
        """Have the first batches made by the workers, as a trial; what went wrong, or "" where they came as they are
        made here. A system may refuse processes, or their shared memory; what hangs is given up after a minute.
        """
        if not self._workers:
            return ""
        trial = copy.copy(self)
        trial._restarts, trial._timeout = 0, TRIAL_SECONDS
        try:
            for i, batch in enumerate(trial.batches(0, TRIAL_BATCHES)):
                if any(batch[name].numpy().tobytes() != array.tobytes() for name, array in self.batch(i).items()):
                    return f"batch {i} of a worker differs from the one that is made here"
        except (LoaderError, OSError) as error:
            return str(error)
        return ""

    def check_cache(self) -> None:
        """See `matrixlib.data.ahead.check_cache`, for the training batches."""
        check_cache(self._reader, self._window)

    def _made(self, dataset: Numbered, numbers: range, workers: int) -> Iterator[Tensors]:
        """The batches of these numbers; what they read of a data set elsewhere is brought here before."""
        batches = self._given(dataset, numbers, workers)
        if self._reader.remote is None:
            return batches
        return with_blocks_ahead(batches, numbers, self._reader, dataset.own, self._window)

    def _given(self, dataset: Numbered, numbers: range, workers: int) -> Generator[Tensors, None, None]:
        """The batches of these numbers, by the workers or, without any, here."""
        if not workers:
            for i in numbers:
                item = dataset[i]
                yield self._open(item.pin_memory() if self._pin else item)
            return
        iterator, restarts = self._start(dataset, numbers, workers), 0
        for i in numbers:
            began = time.monotonic()
            while True:
                try:
                    item = next(iterator)
                    break
                except (RuntimeError, *GONE) as error:
                    text = (str(error) or type(error).__name__).splitlines()[0]
                    late = LATE_WORDS in text
                    if late and time.monotonic() - began < self._timeout:
                        continue
                    if late:
                        what = f"gave nothing for {self._timeout:g} s; is the disk slow, or data.timeout too short?"
                    else:
                        what = f"was gone ({text}); was it killed, or out of memory?"
                    gone = late or isinstance(error, GONE) or any(words in text for words in GONE_WORDS)
                    if late:
                        _kill(iterator)
                    if restarts == self._restarts or not gone:
                        raise LoaderError(f"batch {i} never came, as a worker {what} use fewer workers") from error
                restarts += 1
                del iterator  # ends the others
                iterator, began = self._start(dataset, numbers[i - numbers.start :], workers), time.monotonic()
                self._on_loss(f"the loader's workers were started again at batch {i}, as one {what} use fewer workers")
            self._supply = {"prepare": round(item.seconds, 6), **_ready(iterator)}
            yield self._open(item)

    def _start(self, dataset: Numbered, numbers: range, workers: int) -> Iterator[Item]:
        """Worker processes; never by fork, which copies locks and threads of this process in any state."""
        try:
            pickle.dumps(dataset)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            remedy = "use a module's function or a method, or no workers"
            raise LoaderError(f"prepare cannot be sent to workers ({error}); {remedy}") from error
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload([__name__])  # torch is imported once, not by every worker
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            timeout=min(self._timeout, WAIT_SECONDS),
            prefetch_factor=self._prefetch,
            collate_fn=as_is,
            pin_memory=self._pin,
            multiprocessing_context=context,
            generator=torch.Generator(),  # else starting would draw from, and so change, the global stream
        )
        with one_thread():
            return iter(loader)

    def sequential(self, batch_size: int, sample: int = 0) -> Pass:
        """Every row once, in order (validation); the last batch may be short. `sample` > 0: so many rows,
        always the same for a seed. The random stream depends on the seed and the batch's number alone."""
        rows = np.arange(self.count) if self._only is None else self._only
        if 0 < sample < len(rows):
            rows = rows[np.sort(permute(np.arange(sample), len(rows), make_key(SAMPLE, self._seed)))]
        dataset = Rows(self._reader, rows, batch_size, self._batches.prepare, self._seed, self._batches.share)
        workers = self._workers if len(dataset) >= WORTH_WORKERS else 0
        return Pass(len(dataset), lambda: self._made(dataset, range(len(dataset)), workers))

    def _open(self, item: Item) -> Tensors:
        self._report(item.damage)
        if item.pageable and self._pin:
            self._pin = False  # this process asks no more; its workers' thread may, in vain
            self._on_loss(f"batches are not page-locked, so that updates wait for their copies: {item.pageable}")
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


def _kill(iterator: Any) -> None:
    """End a DataLoader's workers at once: one that hangs would be waited for, and a stopped one outlives a request."""
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()


def _ready(iterator: Any) -> dict[str, float]:
    """Batches that lie ready, by the DataLoader's private books; nothing where these are others than we know."""
    try:
        early = sum(len(task) == 2 for task in iterator._task_info.values())  # came before their turn
        return {"ready": early + iterator._data_queue.qsize()}
    except (AttributeError, NotImplementedError):  # macOS counts no queue of processes
        return {}
