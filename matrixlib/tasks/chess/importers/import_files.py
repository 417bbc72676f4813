"""The intake: files of any kind, read in parallel, checked, and stored as catalogued shards.

A file is taken in by steps of a few shards. After its shards a step writes its account,
`imports/<name>/part_000003.json`: what was read, stored, left out and refused, with the refused entries themselves (the
quarantine). The name follows from the file's bytes and the reader's options, the borders of the steps from the data, so
a step that has a whole account is done, and doing it again gives the same files. Killed at any moment, the next call
goes on. A game of a PGN file that the folder holds already is left out; what other files have in common is stored twice
until `merging.deduplicate` merges it.

Worker processes are spawned: a script that imports more than a handful needs the usual `if __name__ == "__main__":`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from matrixlib.data import stats as quality
from matrixlib.data.catalogue import Catalogue, ShardRow, reason_file
from matrixlib.data.shards import (
    LFS_POINTER,
    Batch,
    Shard,
    ShardInfo,
    concat,
    file_hash,
    read_info,
    select,
    write_shard,
)
from matrixlib.files import end_with_parent
from matrixlib.tasks.chess.importers import inspection
from matrixlib.tasks.chess.importers.epd import Epd
from matrixlib.tasks.chess.importers.evaluations import Evaluations
from matrixlib.tasks.chess.importers.labels import Labelled
from matrixlib.tasks.chess.importers.lc0 import Lc0
from matrixlib.tasks.chess.importers.matrix0_data import Matrix0Data
from matrixlib.tasks.chess.importers.parsing import Harvest, Part, Reader, Refused
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.importers.puzzles import Puzzles
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.stockfish.generator import write_atomically
from matrixlib.tasks.chess.stockfish.packing import SHARD, is_validation

INTAKE = 1  # version of what decides about names and bytes
STEP = 4 * SHARD  # training positions, from which on a step ends
ALONE = 2.0  # seconds after which worker processes are started
FOLDER = "imports"
KINDS: Mapping[str, Callable[[], Reader]] = {  # by ending, that of the compression taken off
    ".pgn": Pgn,
    ".csv": Puzzles,
    ".jsonl": Evaluations,
    ".epd": Epd,
    ".tar": Lc0,
    ".tgz": Lc0,
    ".npz": Matrix0Data,
    ".fen": Labelled,
}
COMPRESSED = (".gz", ".bz2", ".zst")
NESTED = (".tar.zst", *(f"{kind}{ending}" for kind in (".tgz", ".npz") for ending in COMPRESSED))  # not read
PLAN, STAGED, GONE = "merge.json", "staged", "gone"  # of a merge, see merging.py
MERGED = "merged into"  # reason of a shard that others stand for
OTHERS = "other shards"  # ... where they were not named, as in folders that were merged long ago
UNFINISHED = "the merge that made it was not finished: deduplicate or import again"
FEW = 8  # shards of a source, below which none is called an outlier
FAR = 6.0  # robust standard deviations
COMPARED = (
    *("policy_mean", "policy_weight_entropy_mean", "policy_weight_entropy_std", "policy_weight_zero"),
    *("men", "ply", "black", "known_result", "known_wdl"),
    *("win", "draw", "loss", "white", "value", "value_gap"),
)


class ImportStopped(RuntimeError):
    """An import that could not go on; what was finished stays, and the same call goes on from there."""


@dataclass(frozen=True)
class Account:
    """What one step did. parts: numbers of its first part and of the one after its last. positions: by split.
    shards: name -> SHA-256."""

    source: str
    file: str
    sha256: str
    reader: Mapping[str, Any]
    step: int
    parts: tuple[int, int]
    last: bool
    entries: int
    stored: int
    positions: Mapping[str, int]
    skipped: Mapping[str, int]
    warned: Mapping[str, int]
    refused: Sequence[Refused]
    shards: Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """What the files of a call hold: entries = stored + sum(refused) + sum(skipped); fresh_*: done by this call.

    outliers: figures of new shards that are far from those of the other shards of their source. remarks: what the
    catalogue repaired when it was opened.
    """

    entries: int = 0
    stored: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    warned: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)
    shards: Sequence[str] = ()
    fresh_entries: int = 0
    fresh_positions: int = 0
    seconds: float = 0.0
    outliers: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def text(self) -> str:
        """A few lines for people."""
        train, validation = (self.positions.get(split, 0) for split in ("train", "validation"))
        lines = [
            f"{self.entries:,} entries: {self.stored:,} stored, {sum(self.refused.values()):,} in quarantine, "
            f"{sum(self.skipped.values()):,} left out",
            f"{train:,} training and {validation:,} validation positions in {len(self.shards)} shards",
        ]
        for title, counts in (
            ("in quarantine", self.refused),
            ("left out", self.skipped),
            ("stored, but", self.warned),
        ):
            lines += [f"  {title}: {count:,} {reason}" for reason, count in sorted(counts.items())]
        lines += [f"  outlier: {outlier}" for outlier in self.outliers]
        lines += [f"  {remark}" for remark in self.remarks]
        if not self.fresh_entries:
            lines.append("nothing new: all of it had been imported before")
        else:
            before = self.entries - self.fresh_entries
            rate = f"{self.fresh_entries / self.seconds:,.0f} entries/s, {self.fresh_positions / self.seconds:,.0f}"
            had = f", {before:,} had been imported before" if before else ""
            lines.append(f"{self.fresh_entries:,} read in {self.seconds:.1f} s ({rate} positions/s){had}")
        return "\n".join(lines)


# The files


def files_of(path: Path) -> list[Path]:
    """The file, or the files of a folder by name, but for hidden ones."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))


def reader_for(path: Path) -> Reader:
    """The reader of a file, by its name; of a folder, that of its first file. ValueError names the known kinds."""
    if path.is_dir():
        path = files_of(path)[0]
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    kind = KINDS.get(plain.suffix.lower())
    if kind is None and path.suffix == ".gz":
        kind = Lc0  # one game: training.123456.gz
    if kind is None:
        known = ", ".join(KINDS)
        raise ValueError(
            f"{path}: unknown kind of file; known: {known} (also with {', '.join(COMPRESSED)}), and Leela's .gz"
        )
    return kind()


def check_files(path: Path) -> None:
    """ValueError for what can't be imported whatever the kind, and what to do about it."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    files = files_of(path)
    if not files:
        raise ValueError(f"{path}: a folder without files")
    for name in files:
        if name.name.lower().endswith(NESTED):
            plain = name.with_suffix("").name
            raise ValueError(
                f"{name}: can't be read with {name.suffix} around it; decompress it to {plain} first"
            )
        with open(name, "rb") as file:
            head = file.read(len(LFS_POINTER))
        if not head:
            raise ValueError(f"{name}: is empty; get the file again")
        if head == LFS_POINTER:
            raise ValueError(f"{name}: only a Git LFS pointer, not the data; run `git lfs pull`")


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


# Accounts


def write_account(path: Path, account: Account) -> None:
    """Written whole or not at all, with a digest of itself."""
    text = json.dumps(asdict(account), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_atomically(path, json.dumps({"digest": digest, "account": json.loads(text)}, indent=1).encode())


def read_account(path: Path) -> Account | None:
    """The account in a file; None if it is missing or not what was written."""
    try:
        data = json.loads(path.read_bytes())
        text = json.dumps(data["account"], sort_keys=True)
        if hashlib.sha256(text.encode()).hexdigest() != data["digest"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = data["account"]
    refused = tuple(Refused(**entry) for entry in found["refused"])
    return Account(**{**found, "parts": tuple(found["parts"]), "refused": refused})


def accounts(folder: Path | str) -> list[Account]:
    """All whole accounts of a folder of shards, by import and step."""
    found = (read_account(path) for path in sorted(Path(folder).glob(f"{FOLDER}/*/part_*.json")))
    return [account for account in found if account is not None]


def quarantined(folder: Path | str) -> list[tuple[str, Refused]]:
    """What was refused, with the name of the file it came from. Its text, mended, can be imported like any other."""
    return [(account.file, entry) for account in accounts(folder) for entry in account.refused]


def _finished(place: Path, rows: Mapping[str, ShardRow]) -> list[Account]:
    """The accounts of the first steps, as far as they and their shards are whole."""
    done: list[Account] = []
    while account := read_account(place / f"part_{len(done):06d}.json"):
        for name, sha256 in account.shards.items():
            if is_stood_for(name, place.parents[1], rows):
                continue
            if name not in rows or rows[name].sha256 != sha256 or not _is_whole(rows[name]):
                return done
        done.append(account)
        if account.last:
            break
    return done


def _is_whole(row: ShardRow) -> bool:
    """Whether a shard's file is whole by its size."""
    return row.path.is_file() and row.path.stat().st_size == row.bytes


def _heirs(name: str, folder: Path, rows: Mapping[str, ShardRow]) -> list[str]:
    """The shards that a shard was merged into; a rebuilt catalogue may know nothing of it, but its note does."""
    reason, note = "", reason_file(folder / name)
    if name in rows:
        if rows[name].state == "healthy":
            return []
        reason = rows[name].reason
    if not reason.startswith(MERGED) and note.is_file():
        reason = note.read_text(encoding="utf-8", errors="replace")
    return reason.removeprefix(MERGED).strip().split(", ") if reason.startswith(MERGED) else []


def is_stood_for(name: str, folder: Path, rows: Mapping[str, ShardRow]) -> bool:
    """Whether a shard was merged into others, and these are there, or merged further into some that are."""

    def there(heir: str) -> bool:
        whole = heir in rows and _is_whole(rows[heir])
        return whole or heir == OTHERS or is_stood_for(heir, folder, rows)

    heirs = _heirs(name, folder, rows)
    return bool(heirs) and all(map(there, heirs))


# Reading


def _read(reader: Reader, part: Part) -> Harvest:
    """A part, its positions checked. A position that fails is a mistake of the reader, which must refuse it."""
    harvest = reader.read(part)
    for fault, rows in inspection.faults(harvest.batch).items():
        row = int(rows.argmax())
        raise ValueError(
            f"{type(reader).__name__} gave {int(rows.sum())} positions in part {part.number} that can't be stored, "
            f"the first at row {row}: {fault}"
        )
    return harvest


def harvests(reader: Reader, parts: Iterable[Part], workers: int) -> Iterator[tuple[Part, Harvest]]:
    """Every part with what it gave, in order. Other processes help only where there is work for longer than it takes to
    start them; a bounded number of parts is in flight."""
    parts = iter(parts)
    start = time.monotonic()
    for part in parts:
        yield part, _read(reader, part)
        if workers > 1 and time.monotonic() - start > ALONE:
            break
    if (part_left := next(parts, None)) is None:
        return
    waiting: deque[tuple[Part, Future[Harvest]]] = deque()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, end_with_parent) as pool:
        try:
            for part in chain([part_left], parts):
                waiting.append((part, pool.submit(_read, reader, part)))
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

    batches: list[Batch] = field(default_factory=list)
    training: int = 0
    parts: int = 0
    entries: int = 0
    stored: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    refused: list[Refused] = field(default_factory=list)

    def add(self, harvest: Harvest, known: Callable[[], set[int]]) -> None:
        """Take a part in, but for games that are there already."""
        batch, stored = harvest.batch, harvest.stored
        if harvest.rows is not None and stored:
            ids = batch["records"]["game"][np.cumsum(harvest.rows) - harvest.rows].tolist()
            new, stored_games = np.ones(stored, bool), known()
            for row, game in enumerate(ids):
                new[row] = game not in stored_games
                stored_games.add(game)
            if not new.all():
                batch = select(batch, np.flatnonzero(np.repeat(new, harvest.rows)), LAYOUT)
                self.skipped["stored before"] += int((~new).sum())
                stored = int(new.sum())
        self.batches.append(batch)
        self.training += int((~is_validation(batch["records"]["game"])).sum())
        self.parts += 1
        self.entries += harvest.entries
        self.stored += stored
        self.skipped.update(harvest.skipped)
        self.warned.update(harvest.warned)
        self.refused += harvest.refused


def figures(batch: Batch) -> dict[str, Any]:
    """The quality figures of a shard."""
    keys = inspection.position_keys(batch["records"])
    return quality.figures(batch, LAYOUT, keys=keys, weight="policy_weight") | inspection.figures(batch)


@dataclass(frozen=True)
class _Import:
    """One file on its way into one folder."""

    path: Path
    reader: Reader
    catalogue: Catalogue
    rows: dict[str, ShardRow]  # of the catalogue
    sha256: str

    @property
    def folder(self) -> Path:
        return self.catalogue.folder

    @functools.cached_property
    def name(self) -> str:
        facts = json.dumps([INTAKE, self.sha256, _options(self.reader)], sort_keys=True)
        return f"{self.reader.source}_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    @property
    def place(self) -> Path:
        return self.folder / FOLDER / self.name

    def known(self, done: Sequence[Account]) -> set[int]:
        """Ids of the games of this source that the folder holds, also where others' positions stand for all of one's
        own, but for those of steps that are to be done again."""

        def again(name: str) -> bool:
            return name.startswith(self.name) and int(name[len(self.name) + 1 :][:6]) >= len(done)

        ids: set[int] = set()
        for row in self.rows.values():
            if row.state == "healthy" and row.source == self.reader.source and not again(row.name):
                ids.update(np.unique(Shard(row.path, LAYOUT).arrays["records"]["game"]).tolist())
        merged = self.folder / FOLDER / GONE
        for path in merged.rglob(f"{self.reader.source}_*.npy"):
            name = path.relative_to(merged).with_suffix(".npz").as_posix()
            if is_stood_for(name, self.folder, self.rows) and not again(name):
                ids.update(np.load(path, allow_pickle=False).tolist())
        return ids

    def store(self, step: _Step, number: int, first: int, last: bool) -> Account:
        """Shards, catalogue, account: in this order, so that the account says that all of it is there."""
        batch = concat(step.batches, LAYOUT)
        changed = datetime.fromtimestamp(int(self.path.stat().st_mtime), UTC)
        parts = (first, first + step.parts)
        meta = {
            "source": self.reader.source,
            "generator": {
                "intake": INTAKE,
                "reader": _options(self.reader),
                "file": self.sha256,
                "parts": parts,
            },
            "seed": 0,
            "created": changed.isoformat().replace("+00:00", "Z"),  # the file's: the same bytes every time
        }
        validation = is_validation(batch["records"]["game"])
        jobs: list[tuple[Path, str, np.ndarray]] = []
        merged: dict[str, str] = {}  # since it was stored for the first time
        for split, mask in (("train", ~validation), ("validation", validation)):
            rows = np.flatnonzero(mask)
            pieces = np.array_split(rows, max(1, round(len(rows) / SHARD))) if len(rows) else []
            for piece, chosen in enumerate(pieces):
                name = f"{self.name}_{number:06d}_{split}_{piece}.npz"
                if is_stood_for(name, self.folder, self.rows):
                    merged[name] = self.rows[name].sha256 if name in self.rows else ""
                else:
                    jobs.append((self.folder / name, split, chosen))

        def write(job: tuple[Path, str, np.ndarray]) -> tuple[ShardInfo, str, str, dict[str, Any]]:
            path, split, chosen = job
            part = select(batch, chosen, LAYOUT)
            info = write_shard(path, LAYOUT, part, {**meta, "split": split})
            return info, split, self.reader.source, figures(part)

        with ThreadPoolExecutor(max(1, len(jobs))) as pool:  # most of it is waiting for the disk
            rows_new = self.catalogue.add_all(pool.map(write, jobs))
        self.rows.update({row.name: row for row in rows_new})
        positions = {"train": int((~validation).sum()), "validation": int(validation.sum())}
        shards = merged | {row.name: row.sha256 for row in rows_new}
        account = Account(
            self.reader.source,
            self.path.name,
            self.sha256,
            _options(self.reader),
            number,
            parts,
            last,
            step.entries,
            step.stored,
            positions,
            dict(step.skipped),
            dict(step.warned),
            step.refused,
            shards,
        )
        self.place.mkdir(parents=True, exist_ok=True)
        write_account(self.place / f"part_{number:06d}.json", account)
        return account

    def clear(self, step: int) -> None:
        """Remove the shards from this step on, of which no account tells: made again, they may be fewer and others,
        where another import has taken in the same games meanwhile. What they were merged into stays."""
        own = re.compile(rf"{self.name}_(\d{{6}})_(train|validation)_\d+\.npz")
        found = {name: own.fullmatch(name) for name in self.rows}
        old = [name for name, match in found.items() if match and int(match[1]) >= step]
        stale = [name for name in old if not _heirs(name, self.folder, self.rows)]
        self.catalogue.remove(stale)
        for name in stale:
            del self.rows[name]

    def run(self, workers: int, bar: Any, limit: int | None) -> tuple[list[Account], int]:
        """All accounts of the file, and how many of them were there before."""
        for left in self.place.glob("*.tmp"):
            left.unlink()  # of a killed import
        done = _finished(self.place, self.rows)
        self.clear(len(done))
        before = len(done)
        positions = sum(sum(account.positions.values()) for account in done)
        if done and (done[-1].last or (limit is not None and positions >= limit)):
            return done, before
        known = functools.cache(functools.partial(self.known, tuple(done)))
        step, first = _Step(), done[-1].parts[1] if done else 0
        with ThreadPoolExecutor(1) as writer:  # while a step goes to disk, the next one is read
            writing: Future[Account] | None = None
            for part, harvest in harvests(self.reader, self._left(first, bar), workers):
                step.add(harvest, known)
                bar.update(len(part.data))
                bar.set_postfix_str(f"{part.first + harvest.entries:,} entries", refresh=False)
                if step.training < STEP:
                    continue
                if writing:
                    done.append(writing.result())
                writing = writer.submit(self.store, step, len(done), first, last=False)
                positions += sum(len(batch["records"]) for batch in step.batches)
                step, first = _Step(), first + step.parts
                if limit is not None and positions >= limit:
                    return [*done, writing.result()], before
            if writing:
                done.append(writing.result())
        if not done and not step.parts:
            raise ValueError(f"{self.path}: holds nothing that {type(self.reader).__name__} could read")
        done.append(self.store(step, len(done), first, last=True))
        return done, before

    def _left(self, first: int, bar: Any) -> Iterator[Part]:
        """The parts that are still to be read; those of a folder numbered through."""
        number = 0
        for file in files_of(self.path):
            for part in self.reader.parts(file):
                if number >= first:
                    yield replace(part, number=number)
                else:
                    bar.update(len(part.data))
                number += 1


def quiet_catalogue(folder: Path) -> Catalogue:
    """A folder's catalogue; what it repairs, as after a kill, is in its `messages` alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Catalogue(folder)


def carry_out(catalogue: Catalogue) -> None:
    """Do what the plan of a merge says, if there is one, or the rest of it; at no moment are a shard and what it was
    merged into both in use. ValueError where a new shard is gone."""
    folder = catalogue.folder
    path = folder / FOLDER / PLAN
    if not path.is_file():
        return
    replaced: Mapping[str, Sequence[str]] = json.loads(path.read_bytes())["replaced"]
    new = []
    for name in sorted({heir for heirs in replaced.values() for heir in heirs}):
        staged = folder / FOLDER / STAGED / f"{name}.new"
        if staged.is_file():  # whoever opens the folder now must not use it yet
            reason_file(folder / name).write_text(UNFINISHED, encoding="utf-8")
            os.replace(staged, folder / name)
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is gone, but {path} needs it: delete that file, import again")
        info = read_info(folder / name)
        arrays = Shard(folder / name, LAYOUT).arrays
        new.append((info, info.meta["split"], info.meta["source"], figures(arrays)))
    catalogue.replace(new, {name: f"{MERGED} {', '.join(heirs)}" for name, heirs in replaced.items()})
    for name in replaced:
        if (folder / name).is_file():  # a rebuilt catalogue must not find it again
            os.replace(folder / name, folder / f"{name}.merged")
    path.unlink()


def take_in(
    paths: Path | str | Iterable[Path | str],
    folder: Path | str,
    reader: Reader | None = None,
    workers: int | None = None,
    progress: bool = True,
    limit: int | None = None,
) -> Report:
    """Import files into a folder of shards, made if it is not there; what had been imported is not done again. A
    folder of files of one kind (Leela's games) counts as one file, whose entries are numbered file by file.

    reader: by default that of the file's ending. workers: processes, by default one a core, started after two seconds.
    limit: stop, for each file, at the end of the step in which so many positions are reached; another call goes on.
    Raises ValueError for a file that can't be imported, ImportStopped where a worker died.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    chosen = []
    for path in files:
        check_files(path)
        chosen.append((path, reader or reader_for(path)))
    folder = Path(folder)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        with FileLock(folder / FOLDER / "lock", timeout=0):
            catalogue = quiet_catalogue(folder)
            carry_out(catalogue)
            rows = {row.name: row for row in catalogue.shards(state=None)}
            whole: list[Account] = []
            fresh: list[Account] = []
            for path, its_reader in chosen:
                plain = path.is_file() and path.suffix not in COMPRESSED
                size = path.stat().st_size if plain else None  # compressed: nobody knows how much text it is
                from matrixlib.progress import live_bar

                with live_bar(
                    total=size, unit="B", unit_scale=True, desc=path.name, disable=not progress
                ) as bar:
                    work = _Import(path, its_reader, catalogue, rows, hash_of(path))
                    found, before = work.run(workers or os.cpu_count() or 1, bar, limit)
                whole += found
                fresh += found[before:]
            outliers = mark_outliers(catalogue, rows, [name for account in fresh for name in account.shards])
    except Timeout as error:
        raise ImportStopped(f"another import into {folder} is running; wait until it has ended") from error
    return _report(whole, fresh, time.monotonic() - start, outliers, catalogue.messages)


def _report(
    whole: Sequence[Account],
    fresh: Sequence[Account],
    seconds: float,
    outliers: Sequence[str],
    remarks: Sequence[str],
) -> Report:
    refused: Counter[str] = Counter(entry.reason for account in whole for entry in account.refused)
    skipped, warned, positions = Counter[str](), Counter[str](), Counter[str]()
    for account in whole:
        skipped.update(account.skipped)
        warned.update(account.warned)
        positions.update(account.positions)
    return Report(
        sum(account.entries for account in whole),
        sum(account.stored for account in whole),
        dict(refused),
        dict(skipped),
        dict(warned),
        dict(positions),
        [name for account in whole for name in account.shards],
        sum(account.entries for account in fresh),
        sum(sum(account.positions.values()) for account in fresh),
        seconds,
        outliers,
        tuple(remarks),
    )


# Outliers


def mark_outliers(catalogue: Catalogue, rows: Mapping[str, ShardRow], names: Sequence[str]) -> list[str]:
    """Compare the figures of these shards with those of the other healthy ones of their source and split, and put what
    is far off into the catalogue beside them ("outliers": figure -> robust z). Returns it in words.

    z = (figure - median) / scale, scale = 1.4826 times the median absolute deviation, at least 2 % of the median and
    0.01 (entropies in nats, shares, points).
    """
    said = []
    healthy = {row.name: row for row in rows.values() if row.state == "healthy"}
    for row in (healthy[name] for name in names if name in healthy):  # others were merged
        kin = [other.quality for other in healthy.values() if other is not row and _kin(other) == _kin(row)]
        far = {}
        for figure in COMPARED:
            sample = np.array([other[figure] for other in kin if figure in other], np.float64)
            if figure not in row.quality or len(sample) < FEW:
                continue
            if abs(z := quality.robust_z(row.quality[figure], sample)) > FAR:
                far[figure] = round(z, 1)
        if far:
            catalogue.set_quality(row.name, {**row.quality, "outliers": far})
            said.append(f"{row.name}: " + ", ".join(f"{figure} (z {z:+.1f})" for figure, z in far.items()))
    return said


def _kin(row: ShardRow) -> tuple[str, str]:
    return row.source, row.split
