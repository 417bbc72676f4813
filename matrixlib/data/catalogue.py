"""Catalogue: one SQLite row a shard of a folder, with count, split, checksum, quality and state.

A disposable index: if missing or corrupt it is rebuilt from the shards. The reason of a manual quarantine is also
stored in ``<shard>.quarantined``, so that a rebuild keeps it. Connections live for one call, so none crosses a fork. A
read-only folder, or one without shards, is catalogued in memory.
"""

import hashlib
import json
import os
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, Json, TypeAdapter, ValidationError

from matrixlib.data.shards import SPLITS, ShardError, ShardInfo, file_hash, find_damage, read_info
from matrixlib.files import from_home, read_json, remove_leftovers, write_text

NAME = "catalogue.sqlite"
REMOTE = "remote.json"  # beside a remote data set's catalogue: its URL, see `matrixlib.data.remote`
LARGEST = 2**36  # most bytes of a shard; larger claims would allocate that much
COLUMNS = ("name", "split", "source", "count", "bytes", "sha256", "state", "reason", "quality")
CREATE = (
    f"CREATE TABLE IF NOT EXISTS shards ({', '.join(COLUMNS)}, digest, PRIMARY KEY (name)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS imports (name, step, data, digest, PRIMARY KEY (name, step))",
)
PUT = f"INSERT OR REPLACE INTO shards VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"
PUT_IMPORT = "INSERT OR REPLACE INTO imports VALUES (?, ?, ?, ?)"
MARK = "UPDATE shards SET state = ?, reason = ?, digest = ? WHERE name = ? AND digest = ?"
MISSING = "the file is missing"
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
BUSY_SECONDS = 30.0
MIN_SHARDS = 9  # of a source and split, to look for outliers
OUTLIER_Z = 6.0  # robust standard deviations

State = Literal["healthy", "quarantined"]
Log = tuple[str, int, Mapping[str, Any]]  # of an import: its name, step and JSON data
Figures = Callable[[Mapping[str, Any]], Mapping[str, float]]  # quality -> what is compared; nan where unknown


class CatalogueError(ValueError):
    """The catalogue cannot be used; the message says what to do."""


@dataclass(frozen=True)
class ShardRow:
    """One shard. name: path inside the folder (with /); bytes: its size; remote: the catalogue's folder if the shard
    lies elsewhere (see `matrixlib.data.remote.local_path`). Stored rows are untrusted, so validated: paths are made of
    name and hash."""

    name: Annotated[str, Field(strict=True, pattern=r"\.npz$")]
    path: Path
    split: Literal["train", "validation"]
    source: Annotated[str, Field(strict=True)]
    count: Annotated[int, Field(strict=True, gt=0)]
    bytes: Annotated[int, Field(strict=True, le=LARGEST)]
    sha256: Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
    state: State
    reason: Annotated[str, Field(strict=True)]
    quality: Json[dict[str, Any]]
    remote: Path | None = None


_validated = TypeAdapter(ShardRow).validate_python


def _values(row: ShardRow | Log) -> list[Any]:
    """Columns of a shard row or import log, then their digest."""
    *columns, last = [getattr(row, column) for column in COLUMNS] if isinstance(row, ShardRow) else row
    columns.append(json.dumps(last, sort_keys=True))
    return [*columns, _digest(columns)]


def _digest(columns: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(list(columns), default=repr).encode()).hexdigest()


class Catalogue:
    """The shards of one folder, as opened plus own changes. messages: what was repaired; warn: also as warnings."""

    def __init__(self, folder: Path | str, warn: bool = True) -> None:
        self.folder, self._warn = Path(folder), warn
        if not os.path.isdir(self.folder):
            raise CatalogueError(f"{self.folder}: no such folder; give a folder of shards, or make it first")
        self.path = self.folder / NAME
        if self.path.is_dir():
            raise CatalogueError(f"{self.path} is a folder, not a catalogue: move it, and a new one is made")
        self.messages: list[str] = []
        self.remote = (self.folder / REMOTE).is_file()
        present = self.path.is_file() and self.path.stat().st_size > 0  # empty: its writer was killed
        may_write = os.access(self.folder, os.W_OK) and (not present or os.access(self.path, os.W_OK))
        self.writable = may_write and not self.remote
        self._rows: dict[str, ShardRow] = {}
        if problem := self._load() if present else "there is no catalogue":
            self._rebuild(problem, present)
        if not self.remote:
            self._reconcile()

    def shards(self, split: str | None = None, state: State | None = "healthy") -> list[ShardRow]:
        """Rows by name, of one split (None: all) and one state (None: any)."""
        if split is not None and split not in SPLITS:
            raise CatalogueError(f"unknown split '{split}'; known: {', '.join(SPLITS)}")
        rows = (row for _, row in sorted(self._rows.items()))
        return [row for row in rows if split in (None, row.split) and state in (None, row.state)]

    def add(self, *shards: ShardInfo, log: Log | None = None) -> list[ShardRow]:
        """Add written shards and the log of their import in one transaction; rows of the same name are replaced.
        CatalogueError for a file outside the folder."""
        rows = []
        for info in shards:
            try:
                name = info.path.resolve().relative_to(self.folder.resolve()).as_posix()
            except ValueError:
                raise CatalogueError(f"{info.path} is outside {self.folder}; write the shard inside it") from None
            rows.append(self._row(name, info))
        for row in rows:  # new files: quarantine notes of older ones no longer apply
            reason_file(row.path).unlink(missing_ok=True)
        self._put(rows, [log] if log else [])
        return rows

    def imports(self, name: str = "") -> list[tuple[str, int, dict[str, Any]]]:
        """Import logs (name, step, data), of one import or all, in order. Corrupt ones are skipped."""
        if not self.path.is_file():
            return []
        with self._connection() as db:
            found = db.execute("SELECT * FROM imports WHERE ? IN ('', name) ORDER BY name, step", [name]).fetchall()
        return [
            (own, step, json.loads(data)) for own, step, data, digest in found if digest == _digest([own, step, data])
        ]

    def quarantine(self, name: str, reason: str) -> None:
        row = replace(self._named(name), state="quarantined", reason=reason)
        if self.writable:
            write_text(reason_file(row.path), reason)  # replaces links instead of following them
        self._put([row])

    def release(self, name: str) -> None:
        """Use a quarantined shard again, if its file matches the SHA-256 of its row."""
        row = self._named(name)
        if problem := self._check(row):
            raise CatalogueError(f"{name}: {problem}; restore the file from a copy first")
        self._put([replace(row, state="healthy", reason="")])
        if self.writable:
            reason_file(row.path).unlink(missing_ok=True)

    def remove(self, names: Sequence[str]) -> None:
        """Delete shards: files, notes and rows; nothing if any name leads outside the folder."""
        if outside := [name for name in names if not _is_inside(name, self.folder)]:
            raise CatalogueError(f"{outside[0]!r} is no name of a shard inside {self.folder}; nothing was deleted")
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
            reason_file(self.folder / name).unlink(missing_ok=True)
            self._rows.pop(name, None)
        if self.writable and self.path.is_file():
            with self._connection() as db:
                db.executemany("DELETE FROM shards WHERE name = ?", [(name,) for name in names])

    def set_quality(self, name: str, quality: Mapping[str, Any]) -> None:
        self._put([replace(self._named(name), quality=dict(quality))])

    def hash(self) -> str:
        """Hex digest over the healthy shards: names, splits, sources, counts, contents."""
        facts = [[r.name, r.split, r.source, r.count, r.sha256] for r in self.shards()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def verify(self, bring: Callable[[ShardRow], Path] | None = None) -> dict[str, str]:
        """Healthy shards whose bytes changed: name -> reason. bring: fetches a remote shard's file
        (`matrixlib.data.remote.local_path`)."""
        problems = {}
        for row in self.shards():
            try:
                problems[row.name] = self._check(row if bring is None else replace(row, path=bring(row)))
            except ShardError as error:
                problems[row.name] = str(error)
        return {name: problem for name, problem in problems.items() if problem}

    def backup(self, path: Path | str) -> None:
        """Copy the catalogue to `path`; when restored it is reconciled with the shards."""
        path = from_home(path)
        try:
            _write(path, self._rows.values(), self.imports())
        except (OSError, sqlite3.Error) as error:
            raise CatalogueError(f"backup {path} cannot be written: {error}") from error

    def _say(self, message: str) -> None:
        self.messages.append(message)
        if self._warn:
            warnings.warn(message, stacklevel=4)

    def _load(self) -> str:
        """Read every row; why the database is unusable, or ""."""
        try:
            with self._connection() as db:
                if problem := _problem_of(db):
                    return problem
                stored = db.execute(f"SELECT {', '.join(COLUMNS)}, digest FROM shards").fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # sqlite3 quotes the schema in its message
            if isinstance(error, UnicodeDecodeError) or (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGE:
                return f"the catalogue is damaged ({error})"
            raise CatalogueError(f"{self.path}: cannot be opened ({error}); is another program using it?") from error
        rows = [_row_of(columns, self.folder) for *columns, digest in stored if digest == _digest(columns)]
        if None in rows or len(rows) < len(stored):
            return "a row was changed or damaged"
        elsewhere = self.folder if self.remote else None
        self._rows = {row.name: replace(row, remote=elsewhere) for row in rows if row}
        return ""

    def _rebuild(self, problem: str, present: bool) -> None:
        """Recreate the database from all shard files and the readable import logs."""
        if self.remote:
            url = read_json(self.folder / REMOTE)["url"]
            raise CatalogueError(f"{url}/{NAME}: {problem}; open it where the shards are, and copy it there again")
        self._rows, logs = {row.name: row for row in self._read_files(self._files())}, list[Log]()
        with suppress(sqlite3.Error, UnicodeDecodeError):
            logs += self.imports() if present else []
        text = f"{self.path}: {problem}; rebuilt from {len(self._rows)} shards"
        if present:
            self._say(text)
        elif self._rows:  # copied without a catalogue: no warning
            self.messages.append(text)
        if self.writable and (present or self._rows):
            remove_leftovers(self.path)
            if present:
                os.replace(self.path, self.path.with_name(f"{NAME}.damaged"))
            self.path.with_name(f"{NAME}-journal").unlink(missing_ok=True)  # of the old database
            _write(self.path, self._rows.values(), logs)

    def _reconcile(self) -> None:
        """Add shards without a row; quarantine shards with a note, with another size, or without a file (until it
        returns). Concurrent changes by other processes win."""
        rows, files, marks = dict(self._rows), self._files(), []
        new = self._read_files(name for name in files if name not in rows)
        for row in new:
            self._say(f"{row.path}: was not in the catalogue; added as {row.state}")
        for name, row in rows.items():
            if row.state == "healthy" and (reason := _unfit(row)):
                after, text = replace(row, state="quarantined", reason=reason), f"{reason}; quarantined"
            elif name in files and row.reason == MISSING and not self._check(row):
                after, text = replace(row, state="healthy", reason=""), "is back and whole; used again"
            else:
                continue
            self._say(f"{row.path}: {text}")
            self._rows[name] = after
            marks.append((after.state, after.reason, _values(after)[-1], name, _values(row)[-1]))
        self._rows |= {row.name: row for row in new}
        if self.writable and (new or marks):
            with self._connection() as db:
                _fill(db, new, [], PUT.replace("REPLACE", "IGNORE"))
                db.executemany(MARK, marks)
            self._load()

    def _read_files(self, names: Iterable[str]) -> list[ShardRow]:
        rows = []
        for name in names:
            try:
                info, damaged = read_info(self.folder / name), find_damage(self.folder / name)
            except ShardError as error:
                self._say(f"{error} (left out of the catalogue)")
                continue
            row = self._row(name, info)
            reason = f"'{damaged}' is damaged (zip checksum)" if damaged else _note(row.path)
            rows.append(replace(row, state="quarantined", reason=reason) if reason else row)
        return rows

    def _row(self, name: str, info: ShardInfo) -> ShardRow:
        facts = (info.meta["split"], info.meta["source"], info.count, info.bytes, info.sha256)
        return ShardRow(name, self.folder / name, *facts, "healthy", "", info.meta.get("quality", {}))

    def _files(self) -> list[str]:
        paths = (path for path in self.folder.rglob("*.npz") if path.is_file())
        names = (path.relative_to(self.folder).as_posix() for path in paths)
        return sorted(name for name in names if ".tmp/" not in name and name.isprintable())

    def _check(self, row: ShardRow) -> str:
        """Why the file differs from the catalogued one, or ""."""
        if not row.path.is_file():
            return MISSING
        same = row.path.stat().st_size == row.bytes and file_hash(row.path) == row.sha256
        return "" if same else "its bytes differ from those that were written (SHA-256)"

    def _named(self, name: str) -> ShardRow:
        if name not in self._rows:
            raise CatalogueError(f"{self.path} has no shard '{name}'; .shards(state=None) lists all")
        return self._rows[name]

    def _put(self, rows: Sequence[ShardRow], logs: Iterable[Log] = ()) -> None:
        if self.writable:
            with self._connection() as db:
                _fill(db, rows, logs)
        self._rows |= {row.name: row for row in rows}

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction, committed unless an exception is raised."""
        if self.writable:
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level="IMMEDIATE")
        else:
            db = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        db.text_factory = lambda text: text.decode("utf-8", "replace")  # the digest catches invalid text
        with closing(db), db:
            yield db


class JoinedCatalogue(Catalogue):
    """Several catalogues as one, to be read; a row's source is its data set's name. CatalogueError for a remote one."""

    def __init__(self, parts: Mapping[str, Catalogue]) -> None:
        if remote := [name for name, part in parts.items() if part.remote]:
            raise CatalogueError(f"{remote[0]}: of several data sets each must be local; copy it, or use it alone")
        self.folder, self.remote, self.writable = Path(" and ".join(parts)), False, False
        self.path = self.folder / NAME
        self.messages = [text for part in parts.values() for text in part.messages]
        named = {name: part.shards(state=None) for name, part in parts.items()}
        rows = [replace(row, name=f"{name}/{row.name}", source=name) for name, part in named.items() for row in part]
        self._rows = {row.name: row for row in rows}


def _row_of(columns: Sequence[Any], folder: Path) -> ShardRow | None:
    try:
        row = _validated({"path": folder, **dict(zip(COLUMNS, columns, strict=True))})
    except ValidationError:
        return None
    if not _is_inside(row.name, folder) or row.count > row.bytes:
        return None
    return replace(row, path=folder / row.name)


def _is_inside(name: str, folder: Path) -> bool:
    """Whether a name stays inside a folder, also through links; the file itself may be a link."""
    path = Path(name)
    if not name or "\0" in name or path.anchor or ".." in path.parts:
        return False
    return len(path.parts) == 1 or (folder / path).parent.resolve().is_relative_to(folder.resolve())


def _unfit(row: ShardRow) -> str:
    try:
        size = row.path.stat().st_size
    except FileNotFoundError:
        return MISSING
    return _note(row.path) if size == row.bytes else f"has {size:,} bytes instead of {row.bytes:,}"


def reason_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.quarantined")


def _note(path: Path) -> str:
    note = reason_file(path)
    return note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""


def _problem_of(db: sqlite3.Connection) -> str:
    if foreign := db.execute("SELECT name FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchone():
        return f"the catalogue has code of somebody else's ({foreign[0]!r})"  # views can loop forever
    if (result := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        return f"the catalogue is damaged ({result})"
    tables = {"shards": [*COLUMNS, "digest"], "imports": ["name", "step", "data", "digest"]}
    for table, names in tables.items():
        if [column[1] for column in db.execute(f"PRAGMA table_xinfo({table})")] != names:
            return "the catalogue has other columns"
    return ""


def _fill(db: sqlite3.Connection, rows: Iterable[ShardRow], logs: Iterable[Log], insert: str = PUT) -> None:
    """Insert rows and logs in one transaction, creating the tables if needed."""
    db.execute("BEGIN IMMEDIATE")
    for statement in CREATE:
        db.execute(statement)
    db.executemany(insert, map(_values, rows))
    db.executemany(PUT_IMPORT, map(_values, logs))


def _write(path: Path, rows: Iterable[ShardRow], logs: Iterable[Log]) -> None:
    temporary = path.parent / f"{path.name}.{os.getpid()}.tmp"
    try:
        with closing(sqlite3.connect(temporary)) as db, db:
            _fill(db, rows, logs)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def outlier_scores(rows: Iterable[ShardRow], figures: Figures) -> Any:
    """DataFrame of robust z-scores of each shard's figures, (x - median) / scale, by shard name; only in groups of
    source and split with MIN_SHARDS shards. scale: 1.4826 * MAD, at least 2 % of the median and 0.01."""
    from pandas import DataFrame  # only imports need it

    measured = [row for row in rows if row.state == "healthy" and row.quality]
    table = DataFrame([figures(row.quality) for row in measured], [row.name for row in measured], dtype=float)
    groups = [[row.source for row in measured], [row.split for row in measured]]
    middle = table.groupby(groups).transform("median")
    scale = 1.4826 * (table - middle).abs().groupby(groups).transform("median")
    far = (table - middle) / scale.clip(lower=(0.02 * middle.abs()).clip(lower=0.01))
    return far[(table.assign(n=1.0).groupby(groups)["n"].transform("sum") >= MIN_SHARDS).to_numpy(bool)]


def mark_outliers(catalogue: Catalogue, names: Sequence[str], figures: Figures) -> list[str]:
    """Store the outlying figures of these shards in the catalogue ("outliers": figure -> z); returns them as text."""
    rows = {row.name: row for row in catalogue.shards()}
    found, lines = outlier_scores(rows.values(), figures), []
    for name in filter(set(names).__contains__, found.index):
        far = {figure: round(z, 1) for figure, z in found.loc[name].items() if abs(z) > OUTLIER_Z}
        if far:
            catalogue.set_quality(name, {**rows[name].quality, "outliers": far})
            lines.append(f"{name}: " + ", ".join(f"{figure} (z {z:+.1f})" for figure, z in far.items()))
    return lines
