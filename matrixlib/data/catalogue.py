"""The catalogue: one SQLite row for every shard of a folder, with counts, split, checksum, quality and state.

The shards are the truth and the catalogue an index of them: a missing or damaged one is rebuilt, shards without a row
are added, rows whose file is gone are quarantined, shards that others say they replace are put aside; ``messages`` has
each. Why a shard was quarantined by hand also lies beside it, in ``<shard>.quarantined``, so that no rebuild
uses it again. A connection lives for one call, so none crosses a fork. A read-only folder is catalogued in memory, and
so is one without shards until the first is added: to look at a folder of something else leaves it as it was. That of a
data set elsewhere is believed as it is, or refused: the shards are not here to be asked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matrixlib.data.shards import SPLITS, ShardError, ShardInfo, file_hash, find_damage, read_info
from matrixlib.files import from_home, read_json, remove_leftovers, write_text

NAME = "catalogue.sqlite"
REMOTE = "remote.json"  # beside the catalogue of a data set that lies elsewhere: where, see `matrixlib.data.remote`
LARGEST = 2**36  # bytes of a shard elsewhere: more is nonsense, and would have arrays made of that size
SCHEMA = 1
COLUMNS = ("name", "split", "source", "count", "bytes", "sha256", "state", "reason", "quality")
CREATE = """CREATE TABLE IF NOT EXISTS shards (
name TEXT PRIMARY KEY, split TEXT NOT NULL, source TEXT NOT NULL,
count INTEGER NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL, state TEXT NOT NULL,
reason TEXT NOT NULL, quality TEXT NOT NULL, digest TEXT NOT NULL
) WITHOUT ROWID"""
PUT = f"INSERT OR REPLACE INTO shards VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
DELETE = "DELETE FROM shards WHERE name = ?"
EXCHANGE = "UPDATE shards SET state = ?, reason = ?, digest = ? WHERE name = ? AND digest = ?"
MISSING = "the file is missing"
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
BUSY_SECONDS = 30.0

State = Literal["healthy", "quarantined"]


class CatalogueError(ValueError):
    """A catalogue that cannot be used; says what to do."""


@dataclass(frozen=True)
class ShardRow:
    """One shard: `name` is its path inside the folder (with /), `path` the file, `bytes` its size. `remote`: the folder
    of its catalogue, where the shard itself lies elsewhere (`matrixlib.data.remote.whole` brings it).
    """

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
    remote: Path | None = None


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
        if not os.path.isdir(self.folder):
            raise CatalogueError(f"{self.folder}: no such folder; give a folder of shards, or make it first")
        self.path = self.folder / NAME
        if self.path.is_dir():
            raise CatalogueError(f"{self.path} is a folder, not a catalogue: move it away, and one is made anew")
        self.messages: list[str] = []
        present = self.path.is_file()
        self.remote = (self.folder / REMOTE).is_file()
        self.writable = (
            not self.remote and os.access(self.folder, os.W_OK) and (not present or os.access(self.path, os.W_OK))
        )
        self._image = b""  # the database itself, where the folder cannot be written, or has no shards yet
        self._replaced: set[str] = set()
        problem = self._problem() if present else "there is no catalogue"
        if problem:
            self._rebuild(problem)
        elif not self.writable:
            with closing(sqlite3.connect(_read_only(self.path), uri=True)) as db:
                self._image = _image(db.execute("SELECT * FROM shards").fetchall())
        if not self.remote:
            self._reconcile()

    # Reading and writing rows

    def shards(self, split: str | None = None, state: State | None = "healthy") -> list[ShardRow]:
        """Rows by name, of one split or all (None), in one state or any (None). Where a row was tampered with, the
        catalogue is rebuilt first."""
        if split is not None and split not in SPLITS:
            raise CatalogueError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
        return [row for row in self._rows() if split in (None, row.split) and state in (None, row.state)]

    def add(self, info: ShardInfo, split: str, source: str, quality: Mapping[str, Any] | None = None) -> ShardRow:
        """Put a written shard into the catalogue, in place of an older row of that name; returns the row.

        Raises CatalogueError when the file is outside the folder or `split` is not that in its meta data.
        """
        return self.add_all([(info, split, source, quality or {})])[0]

    def add_all(self, shards: Iterable[tuple[ShardInfo, str, str, Mapping[str, Any]]]) -> list[ShardRow]:
        """`add` for several shards (info, split, source, quality): all of them at once or, on an error, none."""
        rows = []
        for info, split, source, quality in shards:
            try:
                name = info.path.resolve().relative_to(self.folder.resolve()).as_posix()
            except ValueError:
                raise CatalogueError(f"{info.path} is outside {self.folder}; write the shard inside it") from None
            if split not in SPLITS or split != info.meta["split"]:
                raise CatalogueError(f"{name}: split '{split}', but the shard itself says '{info.meta['split']}'")
            rows.append(self._row(name, info, source, quality))
        for row in rows:  # written anew, so what was wrong with an older file of that name is past
            reason_file(row.path).unlink(missing_ok=True)
        self._put(rows)
        return rows

    def quarantine(self, name: str, reason: str) -> None:
        """Keep a shard out of use, and say why. Raises CatalogueError for an unknown name."""
        row = _quarantined(self._named(name), reason)
        if self.writable:
            write_text(reason_file(row.path), reason)  # replaces a link, and writes through none
        self._put([row])

    def release(self, name: str) -> None:
        """Use a quarantined shard again; its file must be whole and have the SHA-256 of its row."""
        row = self._named(name)
        if problem := self._check(row):
            raise CatalogueError(f"{name}: {problem}; restore the file from a copy first")
        self._put([replace(row, state="healthy", reason="")])
        if self.writable:
            reason_file(row.path).unlink(missing_ok=True)

    def remove(self, names: Sequence[str]) -> None:
        """Delete shards: files, notes and rows. CatalogueError, and nothing is deleted, where a name leads out of the
        folder."""
        if outside := [name for name in names if not _is_inside(name, self.folder)]:
            raise CatalogueError(f"{outside[0]!r} is no name of a shard inside {self.folder}; nothing was deleted")
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            reason_file(self.folder / name).unlink(missing_ok=True)
        with self._connection() as db:
            db.executemany(DELETE, [(name,) for name in names])

    def set_quality(self, name: str, quality: Mapping[str, Any]) -> None:
        """Store the quality figures of a shard (JSON data)."""
        self._put([replace(self._named(name), quality=quality)])

    def hash(self) -> str:
        """Hex digest of the healthy shards: names, splits, sources, counts and contents."""
        facts = [[r.name, r.split, r.source, r.count, r.sha256] for r in self.shards()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def verify(self, bring: Callable[[ShardRow], Path] | None = None) -> dict[str, str]:
        """Healthy shards that are not the bytes that were catalogued: name -> reason. Reads every file. bring: has one
        of a set elsewhere brought here (`matrixlib.data.remote.whole`)."""
        problems = {}
        for row in self.shards():
            try:
                problems[row.name] = self._check(row if bring is None else replace(row, path=bring(row)))
            except ShardError as error:
                problems[row.name] = str(error)
        return {name: problem for name, problem in problems.items() if problem}

    def backup(self, path: Path | str) -> None:
        """Copy the database to `path`, whole or not at all, also while others write to it. CatalogueError where that
        can't be written."""
        path = from_home(path)
        temporary = path.parent / f"{path.name}.{os.getpid()}.tmp"
        try:
            with closing(sqlite3.connect(temporary)) as copy, self._connection() as db:
                db.backup(copy)
            os.replace(temporary, path)
        except (OSError, sqlite3.Error) as error:
            temporary.unlink(missing_ok=True)
            raise CatalogueError(f"backup {path} cannot be written: {error}") from error

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
            raise CatalogueError(f"{backup} cannot be restored ({problem}); nothing was changed, give another copy")
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
            if (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGE:
                return f"the catalogue is damaged ({error})"
            raise CatalogueError(f"{self.path}: cannot be opened ({error}); is another program using it?") from error

    def _rebuild(self, problem: str, whole: Iterable[ShardRow] = ()) -> None:
        """Make the database anew from the rows that are `whole`, and from the files of all other shards."""
        if self.remote:
            url = read_json(self.folder / REMOTE)["url"]
            raise CatalogueError(
                f"{url}/{NAME}: {problem}; open the catalogue where the shards are, and copy it there again"
            )
        known = {row.name: row for row in whole}
        rows = self._read_files(name for name in self._files() if name not in known)
        rows += [row for name, row in known.items() if name not in self._replaced]
        text, present = f"{self.path}: {problem}; rebuilt from {len(rows)} shards", self.path.is_file()
        if present:
            self._say(text)
        elif rows:  # shards that were unpacked or copied without their catalogue: nothing is wrong
            self.messages.append(text)
        values = [_values(row) for row in rows]
        if not self.writable or not (present or values):
            self._image = _image(values)
            return
        self._write(values, present)

    def create(self) -> None:
        """Write the catalogue of a folder that has no shards yet; nothing where it is written already. What several
        processes will add to is created before they begin."""
        if self.writable and self._image:
            self._image = b""
            if not self.path.is_file():
                self._write([], False)

    def _write(self, values: Iterable[Sequence[Any]], present: bool) -> None:
        """Put a new database in the place of the old one, which is kept, if it is there."""
        remove_leftovers(self.path)
        temporary = self.path.with_name(f"{NAME}.{os.getpid()}.tmp")
        temporary.unlink(missing_ok=True)
        with closing(sqlite3.connect(temporary)) as db:
            _fill(db, values)
        if present:
            os.replace(self.path, self.path.with_name(f"{NAME}.damaged"))
        for suffix in ("-wal", "-shm"):  # they belong to the old database
            self.path.with_name(NAME + suffix).unlink(missing_ok=True)
        os.replace(temporary, self.path)

    def _reconcile(self) -> None:
        """Add shards without a row; quarantine rows without a file, until it returns, those whose file was cut short
        or replaced by one of another size (the loader could not even open it), and those with a note.

        Other processes may write meanwhile: what they say of a shard stands.
        """
        rows = {row.name: row for row in self._rows()}
        files = set(self._files())
        new = self._read_files(sorted(files - rows.keys() - self._replaced))
        changed: list[tuple[ShardRow, ShardRow, str]] = []
        for row in new:
            self._say(f"{row.path}: was not in the catalogue; added as {row.state}")
        for name, row in rows.items():
            if name in self._replaced:
                continue
            if row.state == "healthy" and (reason := _unfit(row)):
                changed.append((row, _quarantined(row, reason), f"{reason}; quarantined"))
            elif name in files and row.reason == MISSING and not self._check(row):
                changed.append((row, replace(row, state="healthy", reason=""), "is back and whole; used again"))
        if new:
            with self._connection() as db:
                db.executemany(PUT.replace("REPLACE", "IGNORE"), map(_values, new))
                db.executemany(DELETE, [(name,) for name in self._replaced])
        for before, row, text in changed:
            old, new_digest = _values(before)[-1], _values(row)[-1]
            with self._connection() as db:
                exchanged = db.execute(EXCHANGE, [row.state, row.reason, new_digest, row.name, old]).rowcount
            if exchanged:
                self._say(f"{row.path}: {text}")

    def _read_files(self, names: Iterable[str]) -> list[ShardRow]:
        """Rows made from files, those not that others of them say they replace (`replaces` in their meta data): the
        files of these are put aside, as the shards that stand for them are whole."""
        rows = []
        for name in names:
            try:
                info, damaged = read_info(self.folder / name), find_damage(self.folder / name)
            except ShardError as error:
                self._say(f"{error} (left out of the catalogue)")
                continue
            row = self._row(name, info, str(info.meta["source"]), info.meta.get("quality", {}))
            reason = f"'{damaged}' is damaged (zip checksum)" if damaged else _note(row.path)
            rows.append(_quarantined(row, reason) if reason else row)
            if not reason:
                self._replaced.update(replaced_by(info.meta, name))
        inside = (name for name in self._replaced if self.writable and _is_inside(name, self.folder))
        for path in (self.folder / name for name in inside):
            with suppress(FileNotFoundError):  # somebody else has done it
                os.replace(path, path.with_name(f"{path.name}.merged"))
        return [row for row in rows if row.name not in self._replaced]

    # Small parts

    def _row(self, name: str, info: ShardInfo, source: str, quality: Mapping[str, Any]) -> ShardRow:
        facts = (info.meta["split"], source, info.count, info.bytes, info.sha256)
        return ShardRow(name, self.folder / name, *facts, "healthy", "", quality)

    def _files(self) -> list[str]:
        """Names of all shards but those in folders that are being written (.tmp), and those that are no text."""
        paths = (path for path in self.folder.rglob("*.npz") if path.is_file())
        names = (path.relative_to(self.folder).as_posix() for path in paths)
        return sorted(name for name in names if ".tmp/" not in name and name.isprintable())

    def _check(self, row: ShardRow) -> str:
        """Why the file is not the one that was catalogued, or an empty string."""
        if not row.path.is_file():
            return MISSING
        same = row.path.stat().st_size == row.bytes and file_hash(row.path) == row.sha256
        return "" if same else "its bytes differ from those that were written (SHA-256)"

    def _named(self, name: str) -> ShardRow:
        rows = {row.name: row for row in self._rows()}
        if name not in rows:
            raise CatalogueError(f"{self.path} has no shard '{name}'; .shards(state=None) lists all")
        return rows[name]

    def _rows(self) -> list[ShardRow]:
        """Every row, by name; where one is not what was written, the catalogue is rebuilt."""
        with self._connection() as db:
            stored = db.execute(f"SELECT {', '.join(COLUMNS)}, digest FROM shards ORDER BY name").fetchall()
        rows = []
        for *columns, digest in stored:
            if digest == _digest(columns) and (row := _row_of(columns, self.folder)):
                sound = row.name.endswith(".npz") and re.fullmatch("[0-9a-f]{64}", row.sha256)  # paths are made of both
                if not (sound and 0 < row.count <= row.bytes) or (self.remote and row.bytes > LARGEST):
                    continue
                rows.append(replace(row, remote=self.folder) if self.remote else row)
        if len(rows) == len(stored):
            return rows
        self._rebuild("a row was changed or damaged", rows)
        return self._rows()

    def _put(self, rows: Iterable[ShardRow]) -> None:
        self.create()
        with self._connection() as db:
            db.executemany(PUT, map(_values, rows))

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection for one short transaction, committed unless there is an exception."""
        if self._image and self.writable and self.path.is_file():  # another process has added the first shard
            self._image = b""
        if self._image:
            db = sqlite3.connect(":memory:")
            db.deserialize(self._image)
        elif self.writable:
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level="IMMEDIATE")
        else:
            db = sqlite3.connect(_read_only(self.path), uri=True)
        db.text_factory = lambda text: text.decode("utf-8", "replace")  # left to the digest
        with closing(db), db:
            yield db
            if self._image:
                db.commit()
                self._image = db.serialize()


def _quarantined(row: ShardRow, reason: str) -> ShardRow:
    return replace(row, state="quarantined", reason=reason)


def _row_of(columns: Sequence[Any], folder: Path) -> ShardRow | None:
    """A row as it was stored; None where it is none of a shard inside the folder."""
    facts = dict(zip(COLUMNS, columns, strict=True))
    texts = (facts[name] for name in ("name", "split", "source", "sha256", "state", "reason", "quality"))
    if not all(isinstance(text, str) for text in texts) or not _is_inside(facts["name"], folder):
        return None
    if not (isinstance(facts["count"], int) and isinstance(facts["bytes"], int)):
        return None
    try:
        quality = json.loads(facts["quality"])
    except (ValueError, RecursionError):
        return None
    if not isinstance(quality, dict):
        return None
    return ShardRow(path=folder / facts["name"], **facts | {"quality": quality})


def _is_inside(name: str, folder: Path | None = None) -> bool:
    """Whether a name stays in a folder, and with `folder` also no link on the way leads out of it. The file itself may
    be a link: it is read through, and deleted or replaced without what it leads to."""
    path = Path(name)
    if not name or "\0" in name or path.anchor or ".." in path.parts:
        return False
    return folder is None or len(path.parts) == 1 or (folder / path).parent.resolve().is_relative_to(folder.resolve())


def replaced_by(meta: Mapping[str, Any], own: str) -> list[str]:
    """Names of the shards that a shard of this meta data and name says it replaces; no other kind of file, nothing that
    leads out of the folder, not itself."""
    names = meta.get("replaces", ())
    if not isinstance(names, (list, tuple)):
        return []
    shards = (name for name in names if isinstance(name, str) and name.endswith(".npz") and name != own)
    return [name for name in shards if _is_inside(name)]


def _unfit(row: ShardRow) -> str:
    """Why a healthy row's file is not to be used, without reading it; an empty string where it is."""
    try:
        size = row.path.stat().st_size
    except FileNotFoundError:
        return MISSING
    return _note(row.path) if size == row.bytes else f"has {size:,} bytes instead of {row.bytes:,}"


def reason_file(path: Path) -> Path:
    """Where the reason of a shard's quarantine lies."""
    return path.with_name(f"{path.name}.quarantined")


def _note(path: Path) -> str:
    """Why a shard was quarantined by hand, or an empty string."""
    note = reason_file(path)
    return note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""


# The database


def _is_newer(db: sqlite3.Connection) -> bool:
    return int(db.execute("PRAGMA user_version").fetchone()[0]) > SCHEMA


def _problem_of(db: sqlite3.Connection) -> str:
    """Why a database is no catalogue of ours, or an empty string."""
    if foreign := db.execute("SELECT name FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone():
        return f"the catalogue has code of somebody else's ({foreign[0]!r})"  # a view may never end
    if (result := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        return f"the catalogue is damaged ({result})"
    names = [column[1] for column in db.execute("PRAGMA table_xinfo(shards)")]
    return "" if names == [*COLUMNS, "digest"] else "the catalogue has other columns"


def _fill(db: sqlite3.Connection, values: Iterable[Sequence[Any]]) -> None:
    """Make an empty database a catalogue of rows; WAL lets readers go on while a shard is added."""
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(CREATE)
    db.execute(f"PRAGMA user_version={SCHEMA}")
    db.executemany(PUT, values)
    db.commit()


def _image(values: Iterable[Sequence[Any]]) -> bytes:
    """A catalogue in memory, so that a folder that cannot be written needs no special case."""
    with closing(sqlite3.connect(":memory:")) as db:
        _fill(db, values)
        return db.serialize()


def _read_only(path: Path) -> str:
    """URI of a database on a medium that cannot be written: no lock files, no WAL."""
    return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
