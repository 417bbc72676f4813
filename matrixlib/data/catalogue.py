"""The catalogue: one SQLite row for every shard of a folder, with counts, split, checksum, quality and state.

The shards are the truth and the catalogue an index of them: a missing or damaged one is rebuilt, shards
without a row are taken in, rows whose file is gone are quarantined; each is said in ``messages``. Why a shard was
quarantined by hand also lies beside it, in ``<shard>.quarantined``, so that no rebuild takes it back in. A
connection lives for one call, so none crosses a fork. A read-only folder is catalogued in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matrixlib.data.shards import SPLITS, ShardError, ShardInfo, file_hash, find_damage, read_info

NAME = "catalogue.sqlite"
SCHEMA = 1
COLUMNS = ("name", "split", "source", "count", "bytes", "sha256", "state", "reason", "quality")
CREATE = """CREATE TABLE IF NOT EXISTS shards (
name TEXT PRIMARY KEY, split TEXT NOT NULL, source TEXT NOT NULL,
count INTEGER NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, state TEXT NOT NULL,
reason TEXT NOT NULL, quality TEXT NOT NULL, digest TEXT NOT NULL
) WITHOUT ROWID"""
PUT = f"INSERT OR REPLACE INTO shards VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
EXCHANGE = "UPDATE shards SET state = ?, reason = ?, digest = ? WHERE name = ? AND digest = ?"
MISSING = "the file is missing"
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
BUSY_SECONDS = 30.0

State = Literal["healthy", "quarantined"]


class CatalogueError(ValueError):
    """A catalogue that cannot be used; says what to do."""


@dataclass(frozen=True)
class ShardRow:
    """One shard: `name` is its path inside the folder (with /), `path` the file, `bytes` its size."""

    name: str
    path: Path
    split: str
    source: str
    count: int
    bytes: int
    sha256: str
    state: State
    reason: str
    quality: Mapping[str, Any]


def _values(row: ShardRow) -> list[Any]:
    """The columns of a row, followed by its digest."""
    data = asdict(row) | {"quality": json.dumps(row.quality, sort_keys=True)}
    columns = [data[column] for column in COLUMNS]
    return [*columns, _digest(columns)]


def _digest(columns: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(columns), default=repr).encode()).hexdigest()


class Catalogue:
    """The shards of one folder. `messages` lists what had to be repaired when it was opened or read."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CatalogueError(f"{self.folder}: no such folder; give a folder of shards, or make it first")
        self.path = self.folder / NAME
        self.messages: list[str] = []
        present = self.path.is_file()
        self.writable = os.access(self.folder, os.W_OK) and (not present or os.access(self.path, os.W_OK))
        self._image = b""  # the database itself, where the folder cannot be written
        problem = self._problem() if present else "there is no catalogue"
        if problem:
            self._rebuild(problem, present)
        elif not self.writable:
            self._load_image()
        self._reconcile()

    # Reading and writing rows

    def shards(self, split: str | None = None, state: State | None = "healthy") -> list[ShardRow]:
        """Rows by name, of one split or all (None), in one state or any (None). A row that was tampered with
        is rebuilt from its shard first."""
        if split is not None and split not in SPLITS:
            raise CatalogueError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
        rows = [self._trusted(values) for values in self._raw()]
        found = [row for row in rows if row is not None]
        return [r for r in found if split in (None, r.split) and state in (None, r.state)]

    def add(
        self, info: ShardInfo, split: str, source: str, quality: Mapping[str, Any] | None = None
    ) -> ShardRow:
        """Put a written shard into the catalogue, in place of an older row of that name; returns the row.

        Raises CatalogueError when the file is outside the folder or `split` is not that in its meta data.
        """
        return self.add_all([(info, split, source, quality or {})])[0]

    def add_all(self, shards: Iterable[tuple[ShardInfo, str, str, Mapping[str, Any]]]) -> list[ShardRow]:
        """`add` for several shards (info, split, source, quality): all of them at once or, on an error, none."""
        return self.replace(shards, {})

    def replace(
        self, new: Iterable[tuple[ShardInfo, str, str, Mapping[str, Any]]], old: Mapping[str, str]
    ) -> list[ShardRow]:
        """`add_all` the new shards and quarantine the old ones (name -> reason) that there are, in one transaction."""
        rows = []
        for info, split, source, quality in new:
            try:
                name = info.path.resolve().relative_to(self.folder.resolve()).as_posix()
            except ValueError:
                raise CatalogueError(
                    f"{info.path} is outside {self.folder}; write the shard inside it"
                ) from None
            if split not in SPLITS or split != info.meta["split"]:
                said = info.meta["split"]
                raise CatalogueError(f"{name}: split '{split}', but the shard itself says '{said}'")
            rows.append(self._row(name, info, source, quality))
        there = {row.name: row for row in self.shards(state=None)} if old else {}
        gone = [_kept_out(there[name], reason) for name, reason in old.items() if name in there]
        if self.writable:
            for row in gone:
                reason_file(row.path).write_text(row.reason, encoding="utf-8")
        for row in rows:  # written anew, so what was wrong with an older file of that name is past
            reason_file(row.path).unlink(missing_ok=True)
        self._put([*rows, *gone])
        return rows

    def quarantine(self, name: str, reason: str) -> None:
        """Keep a shard out of use, and say why. Raises CatalogueError for an unknown name."""
        self._named(name)
        self.replace([], {name: reason})

    def release(self, name: str) -> None:
        """Take a quarantined shard back; its file must be whole and have the SHA-256 of its row."""
        row = self._named(name)
        if problem := self._check(row):
            raise CatalogueError(f"{name}: {problem}; restore the file from a copy first")
        self._put([replace(row, state="healthy", reason="")])
        if self.writable:
            reason_file(row.path).unlink(missing_ok=True)

    def remove(self, names: Sequence[str]) -> None:
        """Delete shards: files, notes and rows."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            reason_file(self.folder / name).unlink(missing_ok=True)
        with self._connection() as db:
            db.executemany("DELETE FROM shards WHERE name = ?", [(name,) for name in names])

    def set_quality(self, name: str, quality: Mapping[str, Any]) -> None:
        """Store the quality figures of a shard (JSON data)."""
        self._put([replace(self._named(name), quality=quality)])

    def hash(self) -> str:
        """Hex digest of the healthy shards: names, splits, sources, counts and contents."""
        facts = [[r.name, r.split, r.source, r.count, r.sha256] for r in self.shards()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def verify(self) -> dict[str, str]:
        """Healthy shards that are not the bytes that were catalogued: name -> reason. Reads every file."""
        checked = ((row.name, self._check(row)) for row in self.shards())
        return {name: problem for name, problem in checked if problem}

    def backup(self, path: Path | str) -> None:
        """Copy the database to `path`, whole or not at all, also while others write to it."""
        path = Path(path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with closing(sqlite3.connect(temporary)) as copy, self._connection() as db:
            db.backup(copy)
        os.replace(temporary, path)

    @classmethod
    def restore(cls, folder: Path | str, backup: Path | str) -> Catalogue:
        """The catalogue of `folder` as it was backed up, then reconciled with the shards that are there now.

        Raises CatalogueError for a backup that is missing, damaged or of another program, and changes nothing then.
        """
        backup, path = Path(backup), Path(folder) / NAME
        if not backup.is_file():
            raise CatalogueError(f"{backup}: no such file; give a copy made by Catalogue.backup")
        temporary = path.with_name(f"{NAME}.{os.getpid()}.tmp")
        shutil.copyfile(backup, temporary)
        try:
            with closing(sqlite3.connect(temporary)) as db:
                problem = "made by a newer version" if _is_newer(db) else _problem_of(db)
        except sqlite3.DatabaseError as error:
            problem = str(error)
        if problem:
            temporary.unlink()
            raise CatalogueError(
                f"{backup} cannot be restored ({problem}); nothing was changed, give another copy"
            )
        for suffix in ("-wal", "-shm"):  # they belong to the database that goes
            path.with_name(NAME + suffix).unlink(missing_ok=True)
        os.replace(temporary, path)
        return cls(folder)

    # Repairs

    def _say(self, message: str) -> None:
        self.messages.append(message)
        warnings.warn(message, stacklevel=4)

    def _problem(self) -> str:
        """Why the database cannot be used, or an empty string."""
        try:
            with self._connection() as db:
                if _is_newer(db):
                    raise CatalogueError(f"{self.path}: made by a newer version; update matrixlib")
                return _problem_of(db)
        except UnicodeDecodeError as error:  # sqlite3 quotes a schema that is no text in its message
            return f"the catalogue is damaged ({error})"
        except sqlite3.DatabaseError as error:
            if _damaged(error):
                return f"the catalogue is damaged ({error})"
            cause = f"cannot be opened ({error}); is another program using it?"
            raise CatalogueError(f"{self.path}: {cause}") from error

    def _rebuild(self, problem: str, present: bool) -> None:
        rows = [row for name in self._files() if (row := self._from_file(name)) is not None]
        text = f"{self.path}: {problem}; rebuilt from {len(rows)} shards"
        if present:
            self._say(text)
        elif rows:  # shards that were unpacked or copied without their catalogue: nothing is wrong
            self.messages.append(text)
        if not self.writable:
            with closing(sqlite3.connect(":memory:")) as db:
                _fill(db, rows)
                self._image = db.serialize()
            return
        temporary = self.path.with_name(f"{NAME}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary)) as db:
            _fill(db, rows)
        if present:
            os.replace(self.path, self.path.with_name(f"{NAME}.damaged"))
        for suffix in ("-wal", "-shm"):  # they belong to the old database
            self.path.with_name(NAME + suffix).unlink(missing_ok=True)
        os.replace(temporary, self.path)

    def _load_image(self) -> None:
        """Copy a database that cannot be written into memory, so that repairs need no special case."""
        with closing(sqlite3.connect(_read_only(self.path), uri=True)) as db:
            stored = db.execute("SELECT * FROM shards").fetchall()
        with closing(sqlite3.connect(":memory:")) as db:
            _fill(db, [])
            db.executemany(PUT, stored)
            db.commit()
            self._image = db.serialize()

    def _reconcile(self) -> None:
        """Take in shards without a row; quarantine rows without a file, until it returns, those whose file was cut
        short or replaced by one of another size (the loader could not even open it), and those that were kept out.

        Other processes may write meanwhile: what they say of a shard stands.
        """
        rows = {row.name: row for row in self.shards(state=None)}
        files = set(self._files())
        taken: list[ShardRow] = []
        changed: list[tuple[ShardRow, ShardRow, str]] = []
        for name in sorted(files - rows.keys()):
            if row := self._from_file(name):
                self._say(f"{self.folder / name}: was not in the catalogue; taken in as {row.state}")
                taken.append(row)
        for name, row in rows.items():
            if row.state == "healthy" and (reason := _unfit(row)):
                changed.append((row, _kept_out(row, reason), f"{reason}; quarantined"))
            elif name in files and row.reason == MISSING and not self._check(row):
                healthy = replace(row, state="healthy", reason="")
                changed.append((row, healthy, "is back and whole; used again"))
        if taken:
            with self._connection() as db:
                db.executemany(PUT.replace("REPLACE", "IGNORE"), [_values(row) for row in taken])
        for before, row, said in changed:
            if self._exchange(before, row):
                self._say(f"{row.path}: {said}")

    def _trusted(self, values: tuple[Any, ...]) -> ShardRow | None:
        """A stored row as a value; if its digest is wrong, made anew from its shard (None: it has none)."""
        *columns, digest = values
        if digest == _digest(columns):
            data = dict(zip(COLUMNS, columns, strict=True)) | {"quality": json.loads(columns[-1])}
            return ShardRow(path=self.folder / data["name"], **data)
        name = str(columns[0])
        row = self._from_file(name) if name in self._files() else None
        if row is None:
            self._say(f"{self.path}: row '{name}' was changed or damaged, and has no shard; removed")
            with self._connection() as db:
                db.execute("DELETE FROM shards WHERE name = ?", (columns[0],))
            return None
        # What was kept out stays out; where the state itself is what was damaged, the shard's note says it (_from_file)
        if columns[COLUMNS.index("state")] == "quarantined":
            reason = row.reason or "was quarantined before its row was damaged"
            row = _kept_out(row, reason)
        self._say(f"{self.path}: row '{name}' was changed or damaged; rebuilt from its shard")
        self._put([row])
        return row

    def _from_file(self, name: str) -> ShardRow | None:
        """A row made from the file itself; quarantined if damaged, None if it is no shard (said so)."""
        try:
            info, damaged = read_info(self.folder / name), find_damage(self.folder / name)
        except ShardError as error:
            self._say(f"{error} (left out of the catalogue)")
            return None
        row = self._row(name, info, str(info.meta["source"]), {})
        note = reason_file(row.path)
        reason = f"'{damaged}' is damaged (zip checksum)" if damaged else ""
        if note.is_file():
            reason = reason or note.read_text(encoding="utf-8", errors="replace")
        return _kept_out(row, reason) if reason else row

    # Small parts

    def _row(self, name: str, info: ShardInfo, source: str, quality: Mapping[str, Any]) -> ShardRow:
        facts = (info.meta["split"], source, info.count, info.bytes, info.sha256)
        return ShardRow(name, self.folder / name, *facts, "healthy", "", quality)

    def _files(self) -> list[str]:
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*.npz"))
        return sorted(found)

    def _check(self, row: ShardRow) -> str:
        """Why the file is not the one that was catalogued, or an empty string."""
        if not row.path.is_file():
            return MISSING
        same = row.path.stat().st_size == row.bytes and file_hash(row.path) == row.sha256
        return "" if same else "its bytes differ from those that were written (SHA-256)"

    def _named(self, name: str) -> ShardRow:
        rows = {row.name: row for row in self.shards(state=None)}
        if name not in rows:
            raise CatalogueError(f"{self.path} has no shard '{name}'; .shards(state=None) lists all")
        return rows[name]

    def _raw(self) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            return db.execute(f"SELECT {', '.join(COLUMNS)}, digest FROM shards ORDER BY name").fetchall()

    def _put(self, rows: Sequence[ShardRow]) -> None:
        with self._connection() as db:
            db.executemany(PUT, [_values(row) for row in rows])

    def _exchange(self, before: ShardRow, row: ShardRow) -> bool:
        """Put a row in place of `before`, where that is still what is stored; whether it was."""
        digests = [_values(each)[-1] for each in (row, before)]
        with self._connection() as db:
            changed = db.execute(EXCHANGE, [row.state, row.reason, digests[0], row.name, digests[1]])
            return changed.rowcount == 1

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection for one short transaction, committed unless there is an exception."""
        if self.writable:
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level="IMMEDIATE")
        elif self._image:
            db = sqlite3.connect(":memory:")
            db.deserialize(self._image)
        else:
            db = sqlite3.connect(_read_only(self.path), uri=True)
        db.text_factory = lambda text: text.decode("utf-8", "replace")  # left to the digest
        with closing(db), db:
            yield db
            if self._image:
                db.commit()
                self._image = db.serialize()


def _kept_out(row: ShardRow, reason: str) -> ShardRow:
    return replace(row, state="quarantined", reason=reason)


def _unfit(row: ShardRow) -> str:
    """Why a healthy row's file is not to be used, without reading it; an empty string where it is."""
    try:
        size = row.path.stat().st_size
    except FileNotFoundError:
        return MISSING
    if size != row.bytes:
        return f"has {size:,} bytes instead of {row.bytes:,}"
    note = reason_file(row.path)
    return note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""


def _is_newer(db: sqlite3.Connection) -> bool:
    return int(db.execute("PRAGMA user_version").fetchone()[0]) > SCHEMA


def _problem_of(db: sqlite3.Connection) -> str:
    """Why a database is no catalogue of ours, or an empty string."""
    if (result := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        return f"the catalogue is damaged ({result})"
    found = [column[1] for column in db.execute("PRAGMA table_info(shards)")]
    return "" if found == [*COLUMNS, "digest"] else "the catalogue has other columns"


def reason_file(path: Path) -> Path:
    """Where the reason of a shard's quarantine lies."""
    return path.with_name(f"{path.name}.quarantined")


def _fill(db: sqlite3.Connection, rows: Sequence[ShardRow]) -> None:
    """Make an empty database a catalogue of `rows`; WAL lets readers go on while a shard is added."""
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(CREATE)
    db.execute(f"PRAGMA user_version={SCHEMA}")
    db.executemany(PUT, [_values(row) for row in rows])
    db.commit()


def _read_only(path: Path) -> str:
    """URI of a database on a medium that cannot be written: no lock files, no WAL."""
    return f"{path.resolve().as_uri()}?mode=ro&immutable=1"


def _damaged(error: sqlite3.DatabaseError) -> bool:
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGE
