"""Rows of many shards by one running number, damaged blocks replaced: what the loader's workers read from."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.catalogue import ShardRow
from matrixlib.data.gather import ChangedRow, addresses, gather, sizes
from matrixlib.data.remote import Remote, remote_of
from matrixlib.data.shards import BLOCK, REMEDY, Batch, DamagedBlock, Layout, Shard, ShardError

Damage = tuple[str, int, str]  # (shard name, block or WHOLE, reason)

WHOLE = -1  # in place of a block's number: the shard cannot be opened
ROW_BYTES = 3 * 2**16  # mapped by reading a row, at most: its three places, each with the 16 pages around it
RESIDENT = 2**27  # bytes of mapped shards that may stay in memory; a larger data set is let go again and again
SPARE_FILES = 256  # of what else a process opens: libraries, pipes of workers, logs


class LoaderError(RuntimeError):
    """A batch that could not be made, and why."""


@dataclass(frozen=True)
class Sidecars:
    """A file beside each shard that has rows in use, with a row of its own for each of the shard's: `paths` by the
    shard's name. Whoever makes them makes one anew where there is a note that it is damaged.
    """

    layout: Layout
    paths: Mapping[str, Path]

    def sound(self, name: str, block: int) -> bool:
        """Whether a block of the file beside a shard, or the file (`WHOLE`), can be read."""
        try:
            file = Shard(self.paths[name], self.layout)
            if block != WHOLE:
                file.verify_block(block)
        except ShardError:
            return False
        return True

    @staticmethod
    def note(path: Path) -> Path:
        """What lies beside such a file where it was damaged when rows of it were read."""
        return path.with_name(f"{path.name}.damaged")


class Unopened(Exception):
    """A shard that could not be opened when its first row was asked for: its number among the shards."""

    def __init__(self, shard: int, reason: str) -> None:
        super().__init__(reason)
        self.shard = shard


def kept_rows(counts: Sequence[int], sources: Sequence[str], limit: int) -> list[int]:
    """How many rows of each shard (counts, sources) a limit keeps, from its beginning on; 0 keeps all.

    Every source keeps the same share, or a limited set would be one of the source that comes first; of a source
    the first rows in the order of its shards.
    """
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


def grouped_by_source(
    weights: Mapping[str, float], shards: Sequence[ShardRow | Path | str]
) -> list[ShardRow | Path | str]:
    """The shards of the weighted sources, those of one source together. LoaderError where one has none."""
    own = {name: [s for s in shards if isinstance(s, ShardRow) and s.source == name] for name in weights}
    if lacking := [name for name, members in own.items() if not members]:
        raise LoaderError(f"no healthy shard of source '{lacking[0]}', which has a weight")
    return [shard for members in own.values() for shard in members]


def allow_files(count: int) -> None:
    """Let this process and its workers keep so many files open, which is more than many systems allow unasked.

    LoaderError where the system does not allow it.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = count + SPARE_FILES
    if soft == unlimited or soft >= needed:
        return
    if hard != unlimited and hard <= count:
        raise LoaderError(
            f"{count:,} shards, but the system lets a process open {hard:,} files: raise the hard limit of open files "
            "(`ulimit -Hn`), make larger shards or, of remote data, whose blocks are files, set data.window_blocks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == unlimited else min(needed, hard), hard))


class Reader:
    """Rows of several shards by one running number, damaged blocks replaced. Workers open their own maps.

    A row of a bad block becomes the row at the same place of the next sound block (cyclic), so what a batch
    holds depends on the files alone and not on who found the damage first. A shard is opened when its first row is
    asked for: opening a data set of thousands costs nothing. One that cannot be opened then is all bad blocks.
    """

    def __init__(
        self,
        names: Sequence[str],
        paths: Sequence[Path],
        sources: Sequence[str],
        counts: Sequence[int],
        layout: Layout,
        limit: int,
        apart: bool = False,
        sidecars: Sidecars | None = None,
        elsewhere: Sequence[ShardRow] = (),
        keep: int = 0,
    ) -> None:
        """apart: the shards of a source follow each other, and rows of a source are replaced by rows of it.

        sidecars: what else there is of each row comes as `sidecar` (B,); where it is damaged, the row counts as lost.
        elsewhere: the shards, where they are those of a data set elsewhere. Their blocks are brought here and are a
        file each, of which `keep` stay open (0: all).
        """
        self._elsewhere, self.remote = tuple(elsewhere), remote_of(elsewhere)
        self._keep = keep if elsewhere else 0
        self._beside: Reader | None = None
        if sidecars is not None:
            beside = [sidecars.paths.get(name, Path()) for name in names]
            self._beside = Reader(names, beside, sources, counts, sidecars.layout, limit)
        self.names, self.paths, self.layout = tuple(names), tuple(paths), layout
        self._shards: dict[int, Shard] = {}
        self._rows = tuple(counts)  # of each shard, by the catalogue
        counts = kept_rows(counts, sources, limit)
        self.start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # first row of each shard
        self.count = int(self.start[-1])
        firsts = [np.arange(a, b, BLOCK) for a, b in zip(self.start, self.start[1:], strict=False)]
        # first row of each block, and N
        self.first = np.concatenate([*firsts, [self.count]]).astype(np.int64)
        whole = [("", 0, self.count)]
        self._parts = self._by_source(sources) if apart else whole  # (source, first row, end)
        self._sound = np.arange(len(self.first) - 1)  # the block that stands in for each block
        self._bad = np.zeros(len(self._sound), bool)
        self._new_damage: list[Damage] = []
        self._forget()

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_shards": {}, "_new_damage": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a worker has the limit of the process that it was forked from
        self.allow_files()
        self._forget()

    def allow_files(self) -> None:
        """See `allow_files`, for as many as this keeps open."""
        blocks = len(self.first) - 1
        own = len(self.paths) if self.remote is None else min(self._keep or blocks, blocks)
        allow_files(own * (1 + (self._beside is not None)))

    def _forget(self) -> None:
        """Nothing is open, checked or mapped yet in this process."""
        members = len(list(self.layout.members()))
        # A file is a shard or, of a data set elsewhere, a block. Of its arrays: where they lie in memory, and how many
        # items they have
        files = len(self.paths) if self.remote is None else len(self.first) - 1
        self._address = np.zeros((members, files), np.int64)
        self._size = np.zeros_like(self._address)
        self._checked = np.zeros(len(self.first) - 1, bool)
        self._mapped, self._resident = np.zeros(files, bool), 0

    def _open(self, i: int) -> Shard:
        if i not in self._shards:
            try:
                shard = Shard(self.paths[i], self.layout)
            except ShardError as error:
                raise Unopened(i, str(error)) from error
            except OSError as error:  # of the machine, not of the file
                remedy = "raise the limit of open files (`ulimit -n`), or close other programs"
                raise LoaderError(f"{self.paths[i]} cannot be opened: {error}; {remedy}") from error
            if len(shard) != self._rows[i]:
                rows = f"{len(shard)} rows, the catalogue says {self._rows[i]}"
                raise Unopened(i, f"{shard.path}: {rows}; {REMEDY}")
            self._map(i, shard)
        return self._shards[i]

    def _map(self, file: int, shard: Shard) -> None:
        self._shards[file], self._address[:, file], self._size[:, file] = shard, addresses(shard), sizes(shard)

    def _bring(self, remote: Remote, block: int) -> None:
        """Open a block of a data set elsewhere."""
        i, number = self.place(block)
        try:
            shard = remote.block(self._elsewhere[i], number, self.layout)
        except DamagedBlock:
            raise
        except ShardError as error:
            raise Unopened(i, str(error)) from error
        if len(shard) != min(BLOCK, self._rows[i] - number * BLOCK):
            raise Unopened(i, f"{self.paths[i]}: {len(shard)} rows in block {number}, not those of the catalogue")
        self._map(block, shard)

    @property
    def block_bytes(self) -> int:
        """Of a block of a data set elsewhere, about: the mean of the shard whose blocks are the largest."""
        return max(row.bytes // -(-row.count // BLOCK) for row in self._elsewhere)

    def place(self, block: int) -> tuple[int, int]:
        """(shard, number in it) of a block."""
        i = int(np.searchsorted(self.start, self.first[block], side="right")) - 1
        return i, int(self.first[block] - self.start[i]) // BLOCK

    def blocks(self, rows: np.ndarray) -> np.ndarray:
        """The blocks in which these rows (B,) lie, each once."""
        return np.unique(np.searchsorted(self.first, rows, side="right") - 1)

    def bring(self, block: int) -> None:
        """Have a block of a data set elsewhere in the cache, and count it as used. Raises what `Remote.block` does."""
        i, number = self.place(block)
        if self.remote is not None and not self.remote.has(self._elsewhere[i], number):
            self.remote.block(self._elsewhere[i], number, self.layout)

    def _by_source(self, sources: Sequence[str]) -> list[tuple[str, int, int]]:
        changes = [i for i, name in enumerate(sources) if i == 0 or name != sources[i - 1]]
        edges = [int(self.start[i]) for i in changes] + [self.count]
        parts = [(sources[i], a, b) for i, (a, b) in zip(changes, itertools.pairwise(edges), strict=True)]
        if lacking := [source for source, a, b in parts if a == b]:
            raise LoaderError(f"data.limit {self.count} leaves no row of source '{lacking[0]}'; raise it")
        return parts

    def firsts(self) -> list[np.ndarray]:
        """First row of each block and, last, N, of the whole or of each source."""
        return [self.first[(self.first >= a) & (self.first <= b)] - a for _, a, b in self._parts]

    def gather(self, rows: np.ndarray) -> Batch:
        """Copies of the rows (B,). Raises LoaderError when no block is sound."""
        while True:
            blocks = np.searchsorted(self.first, rows, side="right") - 1
            sound = self._sound[blocks]
            size = self.first[sound + 1] - self.first[sound]
            actual = self.first[sound] + (rows - self.first[blocks]) % size
            try:
                return self._read(actual, sound)
            except DamagedBlock as error:
                beside = self._beside.paths if self._beside is not None else ()
                i = (self.paths if error.path in self.paths else beside).index(error.path)
                block = int(np.searchsorted(self.first, self.start[i] + error.block * BLOCK))
                self._replace(slice(block, block + 1), (self.names[i], error.block, str(error)))
            except Unopened as error:
                start, stop = np.searchsorted(self.first, self.start[error.shard : error.shard + 2])
                self._replace(slice(start, stop), (self.names[error.shard], WHOLE, str(error)))

    def _read(self, rows: np.ndarray, blocks: np.ndarray) -> Batch:
        shards = np.searchsorted(self.start, rows, side="right") - 1
        if self._keep and len(self._shards) > self._keep:
            self._close(blocks)
        for block in np.unique(blocks[~self._checked[blocks]]):
            if self.remote is not None:
                self._bring(self.remote, int(block))
                shard = self._shards[int(block)]
            else:
                i, number = self.place(int(block))
                shard = self._open(i)
                shard.verify_block(number)
            self._checked[block] = True
            self._resident += shard.bytes // shard.blocks
        files, first = (shards, self.start) if self.remote is None else (blocks, self.first)
        self._mapped[files] = True
        self._resident += len(rows) * ROW_BYTES
        try:
            own = rows - first[files]
            batch = gather(self.layout, self._address[:, files], self._size[:, files], own)
        except ChangedRow as error:
            i, number = self.place(int(blocks[error.row]))
            raise DamagedBlock(self.paths[i], number, error.member) from error
        self._release()
        if self._beside is not None:
            batch["sidecar"] = self._beside._read(rows, blocks)["records"]
        return batch

    def _close(self, needed: np.ndarray) -> None:
        """Close the blocks that were opened longest ago and are not among the `needed` (B,), but for the last ones."""
        wanted = set(needed.tolist())
        spare = [block for block in self._shards if block not in wanted]
        for block in spare[: len(self._shards) - self._keep]:
            del self._shards[block]
            self._checked[block] = self._mapped[block] = False

    def _release(self) -> None:
        """Keep a data set larger than RESIDENT from filling the memory: its rows hardly come again soon."""
        if self._resident > RESIDENT:
            mapped = [self._shards[int(i)] for i in np.flatnonzero(self._mapped)]
            self._resident = sum(shard.bytes for shard in mapped)
            if self._resident > RESIDENT:
                for shard in mapped:
                    shard.release()
                self._mapped[:], self._resident = False, 0

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

    def rows_in(self, name: str, block: int) -> int:
        """Rows of a shard's block, or of all of them (`WHOLE`), that the limit keeps."""
        start, stop = (int(row) for row in self.start[self.names.index(name) :][:2])
        return stop - start if block == WHOLE else max(0, min(BLOCK, stop - start - block * BLOCK))

    def new_damage(self) -> list[Damage]:
        """Damage met since the last call."""
        damage, self._new_damage = self._new_damage, []
        return damage
