"""Import pipeline: files are read in parallel, entries validated, and stored as catalogued shards.

A file is imported in steps of a few shards; the step's log is written in the transaction that adds its shards. Logged
steps are skipped and steps are deterministic, so an import killed at any time resumes. Worker processes are spawned:
scripts need `if __name__ == "__main__":`.

An *entry* is a game, a row, a replay; a *part* is a fixed run of entries of one file, read by one process.
"""

import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from filelock import FileLock
from pydantic import TypeAdapter

from matrixlib.data.catalogue import NAME, REMOTE, Catalogue
from matrixlib.data.shards import Batch, Layout, Shard, concat, file_hash, is_shard, select, write_shard
from matrixlib.files import end_with_parent, exclusive, foreign_entry, make_folder, writing
from matrixlib.progress import live_bar

LOCK = "import.lock"
COMPRESSED = (".gz", ".bz2", ".zst")
OURS = (".npz.quarantined", ".tmp")  # suffixes of auxiliary files beside shards
ALONE_SECONDS = 2.0  # before worker processes are started
Faults = Callable[[Batch], Mapping[str, np.ndarray]]  # sent to workers


class ImportStopped(RuntimeError):
    """The import could not continue; finished steps are kept, and the same call resumes."""


@dataclass(frozen=True)
class Part:
    """Consecutive entries of a file. number: of the part, first: of its first entry, from 0. name: set by imports."""

    number: int
    first: int
    data: bytes
    name: str = ""


@dataclass(frozen=True)
class Refused:
    """A quarantined entry: number, kind of fault, details, positions it would have given, its text."""

    entry: int
    reason: str
    detail: str
    positions: int
    text: str


@dataclass
class ParseResult:
    """Result of parsing a part: entries = stored + len(refused) + skipped.total().

    skipped: reason -> entries skipped on purpose. warned: remark -> entries stored anyway. rows: positions of each
    stored entry (stored,) if an entry is a whole game, for deduplication of games.
    """

    part: Part
    refused: list[Refused] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    batch: Batch = field(default_factory=dict)
    entries: int = 0
    stored: int = 0
    rows: np.ndarray | None = None

    def refuse(self, number: int, reason: str, detail: str, text: str, positions: int = 1) -> None:
        """Quarantine entry `number` of the part, from 0."""
        self.refused.append(Refused(self.part.first + number, reason, detail, positions, text))

    def result(self, batch: Batch, entries: int, stored: int | None = None, rows: np.ndarray | None = None) -> Self:
        """Finish. stored: by default the number of positions in the batch. ValueError if they do not add up."""
        positions = len(batch["records"])
        self.batch, self.entries, self.rows = batch, entries, rows
        self.part = replace(self.part, data=b"")  # workers need not send it back
        self.stored = positions if stored is None else stored
        self.refused.sort(key=lambda entry: entry.entry)
        self.skipped, self.warned = +self.skipped, +self.warned
        counted = self.stored + len(self.refused) + self.skipped.total()
        if entries != counted or (rows is not None and (len(rows), rows.sum()) != (self.stored, positions)):
            found = f"{entries} entries, {counted} accounted for, with {positions} positions; mend the reader"
            raise ValueError(f"{self.part.name or 'a file'}, part {self.part.number}, is miscounted: {found}")
        return self


class Reader(Protocol):
    """Parser of one format: a frozen dataclass whose fields are its options, picklable for workers."""

    @property
    def source(self) -> str:
        """Source name for the catalogue, one that the task knows."""

    def parts(self, path: Path) -> Iterator[Part]:
        """The file's parts in order, lazily. ValueError if it is not of the format."""

    def read(self, part: Part) -> ParseResult:
        """Positions of a part, a pure function of the options and the part."""


@dataclass(frozen=True)
class Storage:
    """How a task stores imported data. Its records have a `game`.

    version: of everything that determines names and bytes. shard: rows of one shard. step: training rows that end a
    step. is_held_out(records): (n,) bool. faults(batch): fault -> (n,) bool, rows that cannot be stored.
    figures(batch): of a shard, for the catalogue. outliers(catalogue, names): marks new outlier shards; returns texts.
    """

    layout: Layout
    version: int
    shard: int
    step: int
    is_held_out: Callable[[np.ndarray], np.ndarray]
    faults: Faults
    figures: Callable[[Batch], dict[str, Any]]
    outliers: Callable[[Catalogue, Sequence[str]], list[str]] = lambda catalogue, names: []


@dataclass
class ImportLog:
    """Log of one step. parts: first part number and one past the last. positions: by split. shards: name -> SHA-256."""

    source: str
    file: str
    sha256: str
    reader: Mapping[str, Any]
    step: int
    parts: tuple[int, int]
    last: bool = False
    entries: int = 0
    stored: int = 0
    positions: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    refused: list[Refused] = field(default_factory=list)
    shards: dict[str, str] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        return vars(self) | {"refused": [vars(entry) for entry in self.refused]}


_read_log = TypeAdapter(ImportLog).validate_python


def import_logs(folder: Path | str) -> list[ImportLog]:
    """Logs of a folder's imports, by import and step."""
    return [_read_log(data) for *_, data in Catalogue(folder, warn=False).imports()]


def quarantined(folder: Path | str) -> list[tuple[str, Refused]]:
    """Rejected entries with their file names. Once fixed, their text can be imported like any file."""
    return [(log.file, entry) for log in import_logs(folder) for entry in log.refused]


@dataclass
class ImportReport:
    """Totals over files by their `logs`: entries = stored + sum(refused) + sum(skipped). fresh: logs of this call.
    outliers: new outlier shards. remarks: repairs of the catalogue."""

    logs: Sequence[ImportLog]
    fresh: Sequence[ImportLog]
    seconds: float
    outliers: Sequence[str]
    remarks: Sequence[str]

    def __post_init__(self) -> None:
        self.entries = sum(log.entries for log in self.logs)
        self.stored = sum(log.stored for log in self.logs)
        self.skipped = sum((log.skipped for log in self.logs), Counter[str]())
        self.warned = sum((log.warned for log in self.logs), Counter[str]())
        self.positions = sum((log.positions for log in self.logs), Counter[str]())
        self.refused = Counter(entry.reason for log in self.logs for entry in log.refused)
        self.shards = [name for log in self.logs for name in log.shards]
        self.fresh_entries = sum(log.entries for log in self.fresh)

    def text(self, rows: str = "positions") -> str:
        """A few lines for people. rows: the task's word for rows."""
        train, validation = self.positions["train"], self.positions["validation"]
        lines = [
            f"{self.entries:,} entries: {self.stored:,} stored, {self.refused.total():,} in quarantine, "
            f"{self.skipped.total():,} left out",
            f"{train:,} training and {validation:,} validation {rows} in {len(self.shards)} shards",
        ]
        titles = {"in quarantine": self.refused, "left out": self.skipped, "stored, but": self.warned}
        for title, counts in titles.items():
            lines += [f"  {title}: {count:,} {reason}" for reason, count in sorted(counts.items())]
        lines += [f"  outlier: {outlier}" for outlier in self.outliers] + [f"  {remark}" for remark in self.remarks]
        fresh, seconds = self.fresh_entries, self.seconds
        rate = f"{fresh:,} of them read now, in {seconds:.1f} s ({fresh / seconds:,.0f} entries/s)"
        return "\n".join([*lines, rate if fresh else "nothing new: all of it had been imported before"])


@contextmanager
def locked(folder: Path, sources: Sequence[Path] = ()) -> Iterator[Catalogue]:
    """The folder's catalogue, created if needed, locked against other imports. ValueError for a folder that has other
    files than shards, unless the sources are in it."""
    if (folder / REMOTE).exists():
        raise ValueError("shards that lie elsewhere are only read: import where they are")
    beside = {place for path in map(Path.resolve, sources) for place in (path, path.parent)}
    found = "" if folder.resolve() in beside else foreign_entry(folder, [NAME])
    if found and not any(map(is_shard, folder.rglob("*.npz"))):  # whose catalogue was lost
        raise ValueError(f"{folder} has other files, such as {found!r}: import into another folder")
    make_folder(folder)
    busy = ImportStopped(f"another import into {folder} is running; wait until it has ended")
    with writing(folder), exclusive(FileLock(folder / LOCK), busy):
        yield Catalogue(folder, warn=False)


def import_each(
    jobs: Iterable[tuple[Path, Reader]],
    folder: Path,
    storage: Storage,
    workers: int | None = None,
    progress: bool = True,
    limit: int | None = None,
) -> ImportReport:
    """Import files, or folders of one kind, each with its reader, into a folder of shards; finished work is skipped.

    workers: processes, default one a core, started after two seconds. limit: for each file, stop after the step that
    reaches this many rows; another call continues. Raises ValueError, ImportStopped.
    """
    start, jobs = time.monotonic(), list(jobs)
    logs, fresh = list[ImportLog](), list[ImportLog]()
    with locked(folder, [path for path, _ in jobs]) as catalogue:
        for path, reader in jobs:
            plain = path.is_file() and path.suffix not in COMPRESSED
            size = path.stat().st_size if plain else None  # unknown for compressed files
            with live_bar(total=size, unit="B", unit_scale=True, desc=path.name, disable=not progress) as bar:
                job = _FileImport(path, reader, storage, catalogue, hash_of(path))
                done, before = job.run(workers or os.cpu_count() or 1, bar, limit)
            logs += done
            fresh += done[before:]
        outliers = storage.outliers(catalogue, [name for log in fresh for name in log.shards])
    return ImportReport(logs, fresh, time.monotonic() - start, outliers, catalogue.messages)


def files_of(path: Path) -> list[Path]:
    """The file, or a folder's files by name, without hidden ones and a shard folder's own."""
    if path.is_file():
        return [path]

    def ours(file: Path) -> bool:
        kept = file.name.startswith(NAME) or file.name.endswith(OURS) or file.name == LOCK
        return kept or (file.suffix == ".npz" and is_shard(file))

    return sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith(".") and not ours(f))


def hash_of(path: Path) -> str:
    """SHA-256 of a file; of a folder, over the names and hashes of its files."""
    if path.is_file():
        return file_hash(path)
    facts = [[file.relative_to(path).as_posix(), file_hash(file)] for file in files_of(path)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _options(reader: Reader) -> dict[str, Any]:
    data = {item.name: getattr(reader, item.name) for item in fields(reader)}  # type: ignore[arg-type]
    return {"kind": type(reader).__name__, **json.loads(json.dumps(data, default=str))}


def _read(reader: Reader, faults: Faults, part: Part) -> ParseResult:
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
    """Every part with its result, in order; after ALONE_SECONDS by worker processes, with bounded queue."""
    parts = iter(parts)
    start = time.monotonic()
    for part in parts:
        yield part, _read(reader, faults, part)
        if workers > 1 and time.monotonic() - start > ALONE_SECONDS:
            break
    else:
        return
    waiting: deque[tuple[Part, Future[ParseResult]]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        try:
            while True:
                for part in itertools.islice(parts, 2 * workers - len(waiting)):
                    waiting.append((part, pool.submit(_read, reader, faults, part)))
                if not waiting:
                    return
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            cause = "a worker process died (was it killed for its memory?)"
            raise ImportStopped(f"{cause}; call again to resume, with fewer workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@dataclass
class _Step:
    """Parts read but not yet stored, and their log so far."""

    storage: Storage
    log: ImportLog
    batches: list[Batch] = field(default_factory=list)
    training: int = 0

    def add(self, result: ParseResult, known_games: Callable[[], set[int]]) -> None:
        """Add a part, without games already present."""
        log, batch, stored = self.log, result.batch, result.stored
        if result.rows is not None and stored:
            ids = batch["records"]["game"][np.cumsum(result.rows) - result.rows].tolist()
            new, games = np.ones(stored, bool), known_games()
            for row, game in enumerate(ids):
                new[row] = game not in games
                games.add(game)
            if not new.all():
                batch = select(batch, np.flatnonzero(np.repeat(new, result.rows)), self.storage.layout)
                log.skipped["stored before"] += int((~new).sum())
                stored = int(new.sum())
        self.batches.append(batch)
        self.training += int((~self.storage.is_held_out(batch["records"])).sum())
        log.parts = log.parts[0], log.parts[1] + 1
        log.entries += result.entries
        log.stored += stored
        log.skipped.update(result.skipped)
        log.warned.update(result.warned)
        log.refused += result.refused


@dataclass(frozen=True)
class _FileImport:
    path: Path
    reader: Reader
    storage: Storage
    catalogue: Catalogue
    sha256: str

    @functools.cached_property
    def name(self) -> str:
        facts = json.dumps([self.storage.version, self.sha256, _options(self.reader)], sort_keys=True)
        return f"{self.reader.source}_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def run(self, workers: int, bar: Any, limit: int | None) -> tuple[list[ImportLog], int]:
        """All logs of the file, and how many existed before."""
        done = self.finished_steps()
        before = len(done)
        self.clear(before)
        positions = sum(log.positions.total() for log in done)
        if done and (done[-1].last or (limit is not None and positions >= limit)):
            return done, before
        known = functools.cache(self.known_games)
        step = self.step(len(done), first := done[-1].parts[1] if done else 0)
        for part, result in read_parts(self.reader, self.storage.faults, self.parts_left(first, bar), workers):
            step.add(result, known)
            bar.update(len(part.data))
            bar.set_postfix_str(f"{part.first + result.entries:,} entries", refresh=False)
            if step.training >= self.storage.step:
                done.append(self.store(step))
                positions += done[-1].positions.total()
                step = self.step(len(done), step.log.parts[1])
                if limit is not None and positions >= limit:
                    return done, before
        if not done and not step.batches:
            raise ValueError(f"{self.path}: holds nothing that {type(self.reader).__name__} could read")
        step.log.last = True
        done.append(self.store(step))
        return done, before

    def step(self, number: int, first: int) -> _Step:
        facts = (self.reader.source, self.path.name, self.sha256, _options(self.reader))
        return _Step(self.storage, ImportLog(*facts, number, (first, first)))

    def finished_steps(self) -> list[ImportLog]:
        """Logs of the leading steps whose shards are intact."""
        done: list[ImportLog] = []
        for _, number, data in self.catalogue.imports(self.name):
            log = _read_log(data)
            rows = [row for row in self.catalogue.shards(state=None) if log.shards.get(row.name) == row.sha256]
            sound = [row for row in rows if row.path.is_file() and file_hash(row.path) == row.sha256]
            if number != len(done) or len(sound) < len(log.shards):
                break
            done.append(log)
        return done

    def clear(self, step: int) -> None:
        """Remove unlogged shards from this step on; redone, they may differ."""
        own = re.compile(rf"{self.name}_(\d{{6}})_(train|validation)_\d+\.npz")
        matches = {row.name: own.fullmatch(row.name) for row in self.catalogue.shards(state=None)}
        self.catalogue.remove([name for name, match in matches.items() if match and int(match[1]) >= step])

    def known_games(self) -> set[int]:
        """Ids of this source's games in the folder."""
        ids: set[int] = set()
        for row in self.catalogue.shards():
            if row.source == self.reader.source:
                ids.update(np.unique(Shard(row.path, self.storage.layout).arrays["records"]["game"]).tolist())
        return ids

    def parts_left(self, first: int, bar: Any) -> Iterator[Part]:
        """Parts still to read; a folder's parts are numbered consecutively."""
        number = 0
        for file in files_of(self.path):
            name = file.name if file == self.path else file.relative_to(self.path).as_posix()
            for part in self.reader.parts(file):
                if number >= first:
                    yield replace(part, number=number, name=name)
                else:
                    bar.update(len(part.data))
                number += 1

    def store(self, step: _Step) -> ImportLog:
        """Write a step's shards, then add them with its log to the catalogue."""
        layout, log = self.storage.layout, step.log
        batch = concat(step.batches, layout)
        changed = datetime.fromtimestamp(int(self.path.stat().st_mtime), UTC)
        facts = {"intake": self.storage.version, "reader": log.reader, "file": self.sha256, "parts": log.parts}
        meta = {
            "source": self.reader.source,
            "generator": facts,
            "seed": 0,
            "created": changed.isoformat().replace("+00:00", "Z"),  # the file's, so bytes are reproducible
        }
        validation, shards = self.storage.is_held_out(batch["records"]), []
        for split, mask in (("train", ~validation), ("validation", validation)):
            rows = np.flatnonzero(mask)
            log.positions[split] = len(rows)
            pieces = np.array_split(rows, max(1, round(len(rows) / self.storage.shard))) if len(rows) else []
            for piece, members in enumerate(pieces):
                part = select(batch, members, layout)
                path = self.catalogue.folder / f"{self.name}_{log.step:06d}_{split}_{piece}.npz"
                info = write_shard(path, layout, part, {**meta, "split": split, "quality": self.storage.figures(part)})
                shards.append(info)
                log.shards[path.name] = info.sha256
        self.catalogue.add(*shards, log=(self.name, log.step, log.data()))
        return log
