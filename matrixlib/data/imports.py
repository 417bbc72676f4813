"""The way of an import: files read in parallel, their entries checked, and stored as catalogued shards.

A file is imported by steps of a few shards; after its shards a step writes its account (account.py). The name of an
import follows from the file's bytes and the reader's options, the borders of the steps from the data, so a step that
has a whole account is done, and doing it again gives the same files. Killed at any moment, the next call goes on. What
the folder holds already is left out where an entry is a whole game.

Worker processes are spawned: a script that imports more than a handful needs the usual `if __name__ == "__main__":`.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.account import (
    FOLDER,
    Account,
    ImportReport,
    ImportStopped,
    check_inside,
    is_ours,
    locked,
    read_account,
    replaced_shards,
    report_of,
    write_account,
)
from matrixlib.data.catalogue import Catalogue, ShardRow
from matrixlib.data.entries import ParseResult, Part, Reader, Refused
from matrixlib.data.shards import Batch, Layout, Shard, ShardInfo, concat, file_hash, select, write_shard
from matrixlib.files import end_with_parent
from matrixlib.progress import live_bar

COMPRESSED = (".gz", ".bz2", ".zst")
Faults = Callable[[Batch], Mapping[str, np.ndarray]]  # sent to workers
ALONE = 2.0  # seconds after which worker processes are started
LOST_GAMES = "gone"  # folder of the ids of games that shards lost all rows of when they were merged


@dataclass(frozen=True)
class Storage:
    """How a task stores what is imported. Its records have a `game`.

    version: of what decides about names and bytes. shard: rows of a shard. step: training rows from which on a step
    ends. is_held_out(records): (n,) bool. faults(batch): fault -> (n,) bool, the rows that cannot be stored, which are
    mistakes of the reader. figures(batch): of a shard, for the catalogue. outliers(catalogue, names): marks new shards
    that are far from the others; in words.
    """

    layout: Layout
    version: int
    shard: int
    step: int
    is_held_out: Callable[[np.ndarray], np.ndarray]
    faults: Faults
    figures: Callable[[Batch], dict[str, Any]]
    outliers: Callable[[Catalogue, Sequence[str]], list[str]] = lambda catalogue, names: []


def import_each(
    jobs: Iterable[tuple[Path, Reader]],
    folder: Path,
    storage: Storage,
    workers: int | None = None,
    progress: bool = True,
    limit: int | None = None,
) -> ImportReport:
    """Import files, or folders of files of one kind, each with its reader, into a folder of shards, made if it is not
    there; what had been imported is not done again.

    workers: processes, by default one a core, started after two seconds. limit: stop, for each file, at the end of the
    step in which so many rows are reached; another call goes on. Raises ValueError, ImportStopped.
    """
    start = time.monotonic()
    whole: list[Account] = []
    fresh: list[Account] = []
    with locked(folder) as catalogue:
        rows = {row.name: row for row in catalogue.shards(state=None)}
        merged = replaced_shards(rows.values(), storage.layout)
        for path, reader in jobs:
            plain = path.is_file() and path.suffix not in COMPRESSED
            size = path.stat().st_size if plain else None  # compressed: nobody knows how much text it is
            with live_bar(total=size, unit="B", unit_scale=True, desc=path.name, disable=not progress) as bar:
                job = _FileImport(path, reader, storage, catalogue, rows, merged, hash_of(path))
                done, before = job.run(workers or os.cpu_count() or 1, bar, limit)
            whole += done
            fresh += done[before:]
        names = [name for account in fresh for name in account.shards]
        outliers = storage.outliers(catalogue, names)
    return report_of(whole, fresh, time.monotonic() - start, outliers, catalogue.messages)


# The files


def files_of(path: Path) -> list[Path]:
    """The file, or the files of a folder by name, but for hidden ones and what a folder of shards holds itself."""
    if path.is_file():
        return [path]
    files = (file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if not is_ours(file, path))


def hash_of(path: Path) -> str:
    """SHA-256 of a file; of a folder, that of the names and hashes of its files."""
    if path.is_file():
        return file_hash(path)
    facts = [[file.relative_to(path).as_posix(), file_hash(file)] for file in files_of(path)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _options(reader: Reader) -> dict[str, Any]:
    """A reader as JSON data; its fields decide about what it reads."""
    data = {item.name: getattr(reader, item.name) for item in fields(reader)}  # type: ignore[arg-type]
    return {"kind": type(reader).__name__, **json.loads(json.dumps(data, default=str))}


# Reading


def _read(reader: Reader, faults: Faults, part: Part) -> ParseResult:
    """A part, its rows checked. One that fails is a mistake of the reader, which must refuse it."""
    result = reader.read(part)
    for fault, rows in faults(result.batch).items():
        raise ValueError(
            f"{type(reader).__name__} gave {int(rows.sum())} rows in part {part.number} that can't be stored, "
            f"the first at row {int(rows.argmax())}: {fault}"
        )
    return result


def read_parts(
    reader: Reader, faults: Faults, parts: Iterable[Part], workers: int
) -> Iterator[tuple[Part, ParseResult]]:
    """Every part with what it gave, in order. Other processes help only where there is work for longer than it takes to
    start them; a bounded number of parts is in flight."""
    parts = iter(parts)
    start = time.monotonic()
    for part in parts:
        yield part, _read(reader, faults, part)
        if workers > 1 and time.monotonic() - start > ALONE:
            break
    if (part_left := next(parts, None)) is None:
        return
    waiting: deque[tuple[Part, Future[ParseResult]]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        try:
            for part in chain([part_left], parts):
                waiting.append((part, pool.submit(_read, reader, faults, part)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            cause = "a worker process died (was it killed for its memory?)"
            raise ImportStopped(f"{cause}; call again to go on, with fewer workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# Storing


@dataclass
class _Step:
    """Parts that are read and not stored yet."""

    storage: Storage
    batches: list[Batch] = field(default_factory=list)
    training: int = 0
    parts: int = 0
    entries: int = 0
    stored: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    refused: list[Refused] = field(default_factory=list)

    def add(self, result: ParseResult, known_games: Callable[[], set[int]]) -> None:
        """Add a part, but for games that are there already."""
        batch, stored = result.batch, result.stored
        if result.rows is not None and stored:
            ids = batch["records"]["game"][np.cumsum(result.rows) - result.rows].tolist()
            new, games = np.ones(stored, bool), known_games()
            for row, game in enumerate(ids):
                new[row] = game not in games
                games.add(game)
            if not new.all():
                batch = select(batch, np.flatnonzero(np.repeat(new, result.rows)), self.storage.layout)
                self.skipped["stored before"] += int((~new).sum())
                stored = int(new.sum())
        self.batches.append(batch)
        self.training += int((~self.storage.is_held_out(batch["records"])).sum())
        self.parts += 1
        self.entries += result.entries
        self.stored += stored
        self.skipped.update(result.skipped)
        self.warned.update(result.warned)
        self.refused += result.refused


@dataclass(frozen=True)
class _FileImport:
    """One file on its way into one folder. rows: of the catalogue. merged: shards that others replaced since."""

    path: Path
    reader: Reader
    storage: Storage
    catalogue: Catalogue
    rows: dict[str, ShardRow]
    merged: set[str]
    sha256: str

    @functools.cached_property
    def name(self) -> str:
        facts = json.dumps([self.storage.version, self.sha256, _options(self.reader)], sort_keys=True)
        return f"{self.reader.source}_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    @property
    def place(self) -> Path:
        return self.catalogue.folder / FOLDER / self.name

    def run(self, workers: int, bar: Any, limit: int | None) -> tuple[list[Account], int]:
        """All accounts of the file, and how many of them were there before."""
        check_inside(self.place, self.catalogue.folder)
        for left in self.place.glob("*.tmp"):
            left.unlink()  # of a killed import
        done = self.finished_steps()
        self.clear(len(done))
        before = len(done)
        positions = sum(sum(account.positions.values()) for account in done)
        if done and (done[-1].last or (limit is not None and positions >= limit)):
            return done, before
        known = functools.cache(functools.partial(self.known_games, before))
        step, first = _Step(self.storage), done[-1].parts[1] if done else 0
        with ThreadPoolExecutor(1) as writer:  # while a step goes to disk, the next one is read
            writing: Future[Account] | None = None
            for part, result in read_parts(self.reader, self.storage.faults, self.parts_left(first, bar), workers):
                step.add(result, known)
                bar.update(len(part.data))
                bar.set_postfix_str(f"{part.first + result.entries:,} entries", refresh=False)
                if step.training < self.storage.step:
                    continue
                if writing:
                    done.append(writing.result())
                writing = writer.submit(self.store, step, len(done), first, last=False)
                positions += sum(len(batch["records"]) for batch in step.batches)
                step, first = _Step(self.storage), first + step.parts
                if limit is not None and positions >= limit:
                    return [*done, writing.result()], before
            if writing:
                done.append(writing.result())
        if not done and not step.parts:
            raise ValueError(f"{self.path}: holds nothing that {type(self.reader).__name__} could read")
        done.append(self.store(step, len(done), first, last=True))
        return done, before

    def finished_steps(self) -> list[Account]:
        """The accounts of the first steps, as far as they and their shards are whole."""
        done: list[Account] = []
        while account := read_account(self.place / f"part_{len(done):06d}.json"):
            if not all(self.is_stored(name, sha256) for name, sha256 in account.shards.items()):
                break
            done.append(account)
            if account.last:
                break
        return done

    def is_stored(self, name: str, sha256: str) -> bool:
        """Whether a shard is as it was written, or others stand for it; reads it."""
        row = self.rows.get(name)
        if row is None or name in self.merged:
            return name in self.merged
        return row.sha256 == sha256 and row.path.is_file() and file_hash(row.path) == sha256

    def clear(self, step: int) -> None:
        """Remove the shards from this step on, of which no account tells: made again, they may be fewer and others,
        where another import has stored the same games meanwhile. What they were merged into stays."""
        own = re.compile(rf"{self.name}_(\d{{6}})_(train|validation)_\d+\.npz")
        matches = {name: own.fullmatch(name) for name in self.rows}
        old = [name for name, match in matches.items() if match and int(match[1]) >= step]
        stale = [name for name in old if name not in self.merged]
        self.catalogue.remove(stale)
        for name in stale:
            del self.rows[name]

    def known_games(self, done: int) -> set[int]:
        """Ids of the games of this source that the folder holds, also where others' positions stand for all of one's
        own, but for those of own steps from `done` on, which are to be done again."""

        def again(name: str) -> bool:
            base = Path(name).name
            return base.startswith(self.name) and int(base[len(self.name) + 1 :][:6]) >= done

        ids: set[int] = set()
        for row in self.rows.values():
            if row.state == "healthy" and row.source == self.reader.source and not again(row.name):
                ids.update(np.unique(Shard(row.path, self.storage.layout).arrays["records"]["game"]).tolist())
        lost = self.catalogue.folder / FOLDER / LOST_GAMES
        for path in lost.rglob(f"{self.reader.source}_*.npy"):
            name = path.relative_to(lost).with_suffix(".npz").as_posix()
            if name in self.merged and not again(name):
                ids.update(np.load(path, allow_pickle=False).tolist())
        return ids

    def parts_left(self, first: int, bar: Any) -> Iterator[Part]:
        """The parts that are still to be read; those of a folder numbered through."""
        number = 0
        for file in files_of(self.path):
            name = file.name if file == self.path else file.relative_to(self.path).as_posix()
            for part in self.reader.parts(file):
                if number >= first:
                    yield replace(part, number=number, name=name)
                else:
                    bar.update(len(part.data))
                number += 1

    def store(self, step: _Step, number: int, first: int, last: bool) -> Account:
        """Shards, catalogue, account: in this order, so that the account says that all of it is there."""
        layout = self.storage.layout
        batch = concat(step.batches, layout)
        changed = datetime.fromtimestamp(int(self.path.stat().st_mtime), UTC)
        parts = (first, first + step.parts)
        options = _options(self.reader)
        meta = {
            "source": self.reader.source,
            "generator": {"intake": self.storage.version, "reader": options, "file": self.sha256, "parts": parts},
            "seed": 0,
            "created": changed.isoformat().replace("+00:00", "Z"),  # the file's: the same bytes every time
        }
        validation = self.storage.is_held_out(batch["records"])
        jobs: dict[str, tuple[str, np.ndarray]] = {}
        for split, mask in (("train", ~validation), ("validation", validation)):
            rows = np.flatnonzero(mask)
            pieces = np.array_split(rows, max(1, round(len(rows) / self.storage.shard))) if len(rows) else []
            for piece, members in enumerate(pieces):
                jobs[f"{self.name}_{number:06d}_{split}_{piece}.npz"] = split, members

        def write(job: tuple[str, tuple[str, np.ndarray]]) -> tuple[ShardInfo, str, str, dict[str, Any]]:
            name, (split, members) = job
            part = select(batch, members, layout)
            info = write_shard(self.catalogue.folder / name, layout, part, {**meta, "split": split})
            return info, split, self.reader.source, self.storage.figures(part)

        new = [job for job in jobs.items() if job[0] not in self.merged]  # else: since it was stored the first time
        with ThreadPoolExecutor(max(1, len(new))) as pool:  # most of it is waiting for the disk
            added = {row.name: row for row in self.catalogue.add_all(pool.map(write, new))}
        self.rows.update(added)
        account = Account(
            source=self.reader.source,
            file=self.path.name,
            sha256=self.sha256,
            reader=options,
            step=number,
            parts=parts,
            last=last,
            entries=step.entries,
            stored=step.stored,
            positions={"train": int((~validation).sum()), "validation": int(validation.sum())},
            skipped=dict(step.skipped),
            warned=dict(step.warned),
            refused=step.refused,
            shards={name: added[name].sha256 if name in added else "" for name in jobs},
        )
        self.place.mkdir(parents=True, exist_ok=True)
        write_account(self.place / f"part_{number:06d}.json", account)
        return account
