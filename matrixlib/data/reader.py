"""Rows of many shards by one running number, with corrupt blocks replaced: what loader workers read from."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from matrixlib.data.catalogue import ShardRow
from matrixlib.data.remote import Remote
from matrixlib.data.shards import BLOCK, OFFSET, REMEDY, Batch, DamagedBlock, Layout, Shard, ShardError
from matrixlib.hardware.kernels import kernel

Damage = tuple[str, int, str]  # (shard name, block or WHOLE, reason)

WHOLE = -1  # instead of a block number: the shard cannot be opened
ROW_BYTES = 3 * 2**16  # most mapped by reading a row: three places with 16 pages each
RESIDENT_BYTES = 2**27  # of mapped shards kept resident; larger data sets are unmapped repeatedly


class LoaderError(RuntimeError):
    """A batch could not be prepared."""


@dataclass(frozen=True)
class Sidecars:
    """A file for each shard in use, with a row for each of the shard's: `paths` by shard name."""

    layout: Layout
    paths: Mapping[str, Path]

    def sound(self, name: str, block: int) -> bool:
        """Whether a block of a shard's sidecar (`WHOLE`: the file) can be read."""
        try:
            file = Shard(self.paths[name], self.layout)
            if block != WHOLE:
                file.verify_block(block)
        except ShardError:
            return False
        return True

    @staticmethod
    def note(path: Path) -> Path:
        """Marker file next to a corrupt sidecar, so that it is recomputed."""
        return path.with_name(f"{path.name}.damaged")


class UnreadableRows(Exception):
    """Unreadable rows: shard number, block or WHOLE, reason."""

    def __init__(self, shard: int, block: int, reason: object) -> None:
        super().__init__(str(reason))
        self.shard, self.block = shard, block


def kept_rows(counts: Sequence[int], sources: Sequence[str], limit: int) -> list[int]:
    """Rows of each shard kept by a limit: the same share of every source, first rows first; 0 keeps all."""
    total = sum(counts)
    if not limit or limit >= total:
        return list(counts)
    left, passed = dict.fromkeys(sources, 0), 0
    for source in left:
        rows = sum(count for count, own in zip(counts, sources, strict=True) if own == source)
        left[source] = limit * (passed + rows) // total - limit * passed // total
        passed += rows
    rows_kept = []
    for count, source in zip(counts, sources, strict=True):
        rows_kept.append(min(count, left[source]))
        left[source] -= rows_kept[-1]
    return rows_kept


@kernel
def _copy(source: np.ndarray, start: np.ndarray, length: np.ndarray, place: np.ndarray, target: np.ndarray) -> int:
    """Copy bytes source[start[i] : start[i] + length[i]] to target[place[i] :] for each row i. Returns a meaningless
    sum: touching all rows first is three times as fast, as the processor overlaps the cache misses."""
    touched = 0
    for i in range(len(start)):
        if length[i]:
            touched += source[start[i]] + source[start[i] + length[i] - 1]
    for i in range(len(start)):
        for k in range(length[i]):
            target[place[i] + k] = source[start[i] + k]
    return touched


@kernel
def _copy_last(
    records: np.ndarray, start: int, stop: int, rows: np.ndarray, places: np.ndarray, target: np.ndarray
) -> None:
    """Copy to target[i] (B, W), for each i of `places`, the last of the records (N, W) from rows[i] on that have its
    bytes start:stop, unless their block ends with them."""
    for i in places:
        for row in range(rows[i] + 1, min(len(records), (rows[i] // BLOCK + 1) * BLOCK)):
            other = False
            for k in range(start, stop):
                other |= records[row, k] != records[rows[i], k]
            if other:
                target[i] = records[row - 1]
                break


def gather(
    shards: Mapping[int, Shard], which: np.ndarray, rows: np.ndarray, layout: Layout, earlier: np.ndarray, most: int
) -> Batch:
    """Copies of row rows[i] of open shard which[i], (B,) each; with `most` > 0 also `before` (B, most): records of the
    earlier[i] rows before it, newest first, then zeros. UnreadableRows if a file changed since its check."""
    parts = [(shards[number], np.flatnonzero(which == number)) for number in np.unique(which).tolist()]
    out: Batch = {}

    def copy(name: str, dtype: np.dtype, start: np.ndarray, length: np.ndarray, place: np.ndarray, size: int) -> None:
        out[name], width = np.zeros(size, dtype), dtype.itemsize
        target, start, length, place = out[name].view(np.uint8), start * width, length * width, place * width
        for shard, part in parts:
            _copy(shard.arrays[name].view(np.uint8), start[part], length[part], place[part], target)

    count = len(rows)
    place = np.arange(count) * (most + 1) + most - earlier  # in lines of most + 1 records, oldest first
    copy("records", layout.record, rows - earlier, earlier + 1, place, count * (most + 1))
    if most:
        lines = out["records"].reshape(count, most + 1)
        out["records"], out["before"] = lines[:, most].copy(), lines[:, most - 1 :: -1]
    for group, members in layout.ragged.items():
        start, length = np.empty((2, count), np.int64)
        for shard, part in parts:
            offset = shard.arrays[f"{group}_offset"]
            begin, end = offset[rows[part]], offset[rows[part] + 1]
            if wrong := np.flatnonzero((begin < 0) | (begin > end) | (end > shard.meta["sizes"][group])).tolist():
                block = int(rows[part][wrong[0]]) // BLOCK
                raise UnreadableRows(int(which[part[0]]), block, DamagedBlock(shard.path, block, f"{group}_offset"))
            start[part], length[part] = begin, end - begin
        out[f"{group}_offset"] = place = np.zeros(count + 1, OFFSET)
        np.cumsum(length, out=place[1:])
        for member, dtype in members.items():
            copy(f"{group}_{member}", np.dtype(dtype), start, length, place[:-1], int(place[-1]))
    return out


class Reader:
    """Rows of several shards by one running number. Each worker maps shards lazily.

    by_source: shards of a source are consecutive, and rows are replaced within their source. sidecars: provide
    `sidecar` (B,). keep_open: remote shards kept open (0: all). before: at most BLOCK; provide `before` (B, before),
    records of the rows before each in its shard, newest first, zeros where there is none. last_of: a field of the
    records; provide `last` (B,), the last record of those from each on that have its value, zeros if its block ends
    first. A row of a corrupt block is replaced by the same row of the next intact block (cyclic), so batches depend on
    the files alone.
    """

    def __init__(
        self,
        shards: Sequence[ShardRow],
        layout: Layout,
        limit: int = 0,
        by_source: bool = False,
        sidecars: Sidecars | None = None,
        keep_open: int = 0,
        before: int = 0,
        last_of: str = "",
    ) -> None:
        self.shards, self.layout = tuple(shards), layout
        # pickled with its file system, as a worker's configuration may differ
        self.remote = None if shards[0].remote is None else Remote.open(shards[0].remote)
        self._keep = 0 if self.remote is None else keep_open
        self._before, self._last_of = before, last_of
        self._sidecars: Reader | None = None
        if sidecars is not None:
            beside = [replace(row, path=sidecars.paths.get(row.name, Path()), remote=None) for row in shards]
            self._sidecars = Reader(beside, sidecars.layout, limit)
        kept = kept_rows([row.count for row in shards], [row.source for row in shards], limit)
        self.start = np.cumsum([0, *kept], dtype=np.int64)  # first row of each shard, and N
        self.count = int(self.start[-1])
        firsts = [np.arange(a, b, BLOCK) for a, b in itertools.pairwise(self.start)]
        self.first = np.concatenate([*firsts, [self.count]]).astype(np.int64)  # first row of each block, and N
        self._parts = [("", 0, self.count)]  # (source, first row, end)
        if by_source:
            self._parts, end = [], 0
            for source, rows in itertools.groupby(zip(shards, kept, strict=True), lambda pair: pair[0].source):
                begin, end = end, end + sum(count for _, count in rows)
                if begin == end:
                    raise LoaderError(f"data.limit {self.count} leaves no row of source '{source}'; raise it")
                self._parts.append((source, begin, end))
        self._sound = np.arange(len(self.first) - 1)  # replacement of each block
        self._bad = np.zeros(len(self._sound), bool)
        self._begin()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        """Reset open files and checks in this process; raises the limit of open files to the maximum."""
        with contextlib.suppress(ImportError, ValueError, OSError):  # no limit on Windows; macOS may refuse
            import resource

            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._open: dict[int, Shard] = {}  # by number, least recently used first
        self._checked = np.zeros(len(self.first) - 1, bool)
        self._touched, self._resident = set[int](), 0
        self._new_damage: list[Damage] = []

    def firsts(self) -> list[np.ndarray]:
        """First row of each block, then N; overall, or for each source."""
        return [self.first[(self.first >= a) & (self.first <= b)] - a for _, a, b in self._parts]

    def shards_of(self, rows: np.ndarray) -> np.ndarray:
        """Shard number of each row (B,)."""
        return np.searchsorted(self.start, rows, side="right") - 1

    def rows_in(self, name: str, block: int) -> int:
        """Rows of a shard's block (`WHOLE`: of the shard) within the limit."""
        number = [row.name for row in self.shards].index(name)
        rows = int(self.start[number + 1] - self.start[number])
        return rows if block == WHOLE else max(0, min(BLOCK, rows - block * BLOCK))

    def gather(self, rows: np.ndarray, records: bool = False) -> Batch:
        """Copies of rows (B,); of their `records` alone if so wanted. LoaderError if no block is intact."""
        while True:
            blocks = np.searchsorted(self.first, rows, side="right") - 1
            sound = self._sound[blocks]
            size = self.first[sound + 1] - self.first[sound]
            actual = self.first[sound] + (rows - self.first[blocks]) % size
            try:
                return self._read(actual, sound, records)
            except UnreadableRows as error:
                start, stop = np.searchsorted(self.first, self.start[error.shard : error.shard + 2])
                if error.block != WHOLE:
                    start, stop = start + error.block, start + error.block + 1
                self._replace(slice(start, stop), (self.shards[error.shard].name, error.block, str(error)))

    def _read(self, rows: np.ndarray, blocks: np.ndarray, records: bool = False) -> Batch:
        layout, before = (replace(self.layout, ragged={}), 0) if records else (self.layout, self._before)
        shards = self.shards_of(rows)
        self._close(shards)
        within = rows - self.first[blocks]
        earlier = np.minimum(np.where(self._bad[blocks - 1], within, rows - self.start[shards]), before)
        used = np.append(blocks, blocks[earlier > within] - 1)
        for block in np.unique(used[~self._checked[used]]).tolist():
            i = int(self.shards_of(self.first[block]))
            shard = self._opened(i)
            try:
                shard.verify_block(int(self.first[block] - self.start[i]) // BLOCK)
            except DamagedBlock as error:
                raise UnreadableRows(i, error.block, error) from error
            self._checked[block] = True
            self._resident += shard.bytes // shard.blocks
        self._touched.update(np.unique(shards).tolist())
        self._resident += len(rows) * ROW_BYTES
        batch = gather(self._open, shards, rows - self.start[shards], layout, earlier, before)
        if self._last_of and not records:
            batch["last"] = self._last(shards, rows - self.start[shards])
        self._release()
        if self._sidecars is not None:
            batch["sidecar"] = self._sidecars._read(rows, blocks)["records"]
        return batch

    def _last(self, shards: np.ndarray, rows: np.ndarray) -> np.ndarray:
        record = self.layout.record
        kind, start, *_ = record.fields[self._last_of]  # type: ignore[index]
        out = np.zeros((len(rows), record.itemsize), np.uint8)
        for number in np.unique(shards).tolist():
            stored = self._open[number].arrays["records"].view(np.uint8).reshape(-1, record.itemsize)
            _copy_last(stored, start, start + kind.itemsize, rows, np.flatnonzero(shards == number), out)
        return out.view(record)[:, 0]

    def _opened(self, i: int) -> Shard:
        while i not in self._open:
            row, path = self.shards[i], Path()
            try:
                path = row.path if self.remote is None else self.remote.fetch(row)
                shard = Shard(path, self.layout)
            except ShardError as error:
                if self.remote is not None and path.suffix and not path.exists():
                    continue  # evicted by another process
                raise UnreadableRows(i, WHOLE, error) from error
            except OSError as error:  # the machine's fault, not the file's
                remedy = "raise the limit of open files (`ulimit -n`), or close other programs"
                raise LoaderError(f"{row.path} cannot be opened: {error}; {remedy}") from error
            if len(shard) != row.count:
                problem = f"{shard.path}: {len(shard)} rows, the catalogue says {row.count}; {REMEDY}"
                raise UnreadableRows(i, WHOLE, problem)
            self._open[i] = shard
        return self._open[i]

    def _close(self, shards: np.ndarray) -> None:
        """Close the least recently used shards."""
        if not self._keep or len(self._open) <= self._keep:
            return
        for i in np.unique(shards).tolist():
            if i in self._open:
                self._open[i] = self._open.pop(i)
        for i in [i for i in self._open if i not in shards][: len(self._open) - self._keep]:
            del self._open[i]
            self._touched.discard(i)
            self._checked[slice(*np.searchsorted(self.first, self.start[i : i + 2]))] = False

    def _release(self) -> None:
        """Unmap pages of data sets above RESIDENT_BYTES, whose rows are not needed again soon."""
        if self._resident > RESIDENT_BYTES:
            self._resident = sum(self._open[i].bytes for i in self._touched)
            if self._resident > RESIDENT_BYTES:
                for i in self._touched:
                    self._open[i].release()
                self._touched, self._resident = set(), 0

    def _replace(self, blocks: slice, damage: Damage) -> None:
        self._bad[blocks] = True
        self._new_damage.append(damage)
        for source, begin, end in self._parts:
            a, b = np.searchsorted(self.first, (begin, end))
            good = np.flatnonzero(~self._bad[a:b])
            if not len(good):
                of = f" of source '{source}'" if source else ""
                raise LoaderError(f"all {b - a} blocks{of} are damaged, the last one: {damage[2]}")
            self._sound[a:b] = a + good[np.searchsorted(good, np.arange(b - a)) % len(good)]

    def new_damage(self) -> list[Damage]:
        """Damage found since the last call."""
        damage, self._new_damage = self._new_damage, []
        return damage
