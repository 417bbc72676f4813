"""Copies of a run in another place, a folder or an fsspec URL, and the way back.

    python -m matrixlib.runs.backup PLACE/RUN [--name NAME]

restores a run whose folder was lost. `PLACE/RUN/<SHA-256>` is the content of a file, read back and compared once
written; `manifest.json`, written after them, says which files of the run they are. So a copy that breaks off leaves the
one before it, and what has arrived is not sent again.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from matrixlib import files
from matrixlib.data.remote import Remote, RemoteError, is_remote
from matrixlib.engine.folder import name_conflict

Result = TypeVar("Result")

MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**26  # at most
LEFT_OUT = frozenset({"lock", "heartbeat.json"})  # of this machine
LOOK_SECONDS = 5.0  # between looks for a new checkpoint
TRIES = 3  # listings of a folder whose checkpoints are replaced meanwhile


class BackupError(ValueError):
    """A backup cannot be written or restored; says why and what to do."""


class Backup:
    """The copy of a run's folder in `place`/<run>, by a thread: `begin`, `look` after each update, then `end`."""

    def __init__(self, place: str, folder: Path) -> None:
        self.folder, self._there = folder, _Place(f"{place.rstrip('/')}/{folder.name}")
        self._sent = dict[tuple[str, int, int], tuple[str, int]]()  # name, size, time -> SHA-256 and size of the copy
        self._thread = ThreadPoolExecutor(1, "backup")
        self._copying: Future[None] | None = None
        self._at, self._seen = 0.0, set[str]()

    def begin(self) -> None:
        """Copy what there is. BackupError if the place is not writable, or has another run of that name."""
        there, started = self._there.manifest(), self._started()
        if there and there.get("started") != started:
            raise BackupError(
                f"checkpoint.backup: {self._there.url} has another run of this name, begun {there.get('started')}: "
                f"restore it (python -m matrixlib.runs.backup {self._there.url}), or name this run differently"
            )
        self._copy()

    def look(self) -> str:
        """Start a copy in the background if there is a new checkpoint; why the last copy failed, or ""."""
        now = time.monotonic()
        if now < self._at or (self._copying is not None and not self._copying.done()):
            return ""
        self._at, problem = now + LOOK_SECONDS, self._problem()
        names = {path.name for path in (self.folder / "checkpoints").glob("*") if path.suffix != ".tmp"}
        if names != self._seen:
            self._seen, self._copying = names, self._thread.submit(self._copy)
        return problem

    def end(self) -> str:
        """Wait, and copy what the run has left; why that failed, or ""."""
        self._problem()  # of a copy that the next one replaces
        self._copying = self._thread.submit(self._copy)
        problem = self._problem()
        self._thread.shutdown()
        return problem

    def _problem(self) -> str:
        copying, self._copying = self._copying, None
        if copying is None:
            return ""
        try:
            copying.result()
        except (BackupError, RemoteError, OSError) as error:
            self._seen = set()  # again at the next look
            return f"the backup is not up to date: {error}"
        return ""

    def _started(self) -> Any:
        return files.read_json(self.folder / "run.json").get("started")

    def _copy(self) -> None:
        for _ in range(TRIES):
            with suppress(FileNotFoundError):  # a checkpoint was replaced by a newer one
                return self._copy_once()
        raise BackupError(f"the files of {self.folder} change too fast to be copied")

    def _copy_once(self) -> None:
        there, kept = self._there.sizes(), dict[str, tuple[str, int]]()
        for path in self._paths():
            name, facts = path.relative_to(self.folder).as_posix(), path.stat()
            key = name, facts.st_size, facts.st_mtime_ns
            if key not in self._sent or there.get(self._sent[key][0]) != self._sent[key][1]:
                data = path.read_bytes()  # a file that grows is copied as of this moment
                sha256, size = self._sent[key] = hashlib.sha256(data).hexdigest(), len(data)
                if there.get(sha256) != size:
                    self._there.write(sha256, data)
                    there[sha256] = size
            kept[name] = self._sent[key]
        manifest = {"run": self.folder.name, "started": self._started(), "time": files.utc_now(), "files": kept}
        self._there.write(MANIFEST, json.dumps(manifest, indent=1).encode())
        for old in there.keys() - {MANIFEST, *(sha256 for sha256, _ in kept.values())}:
            self._there.remove(old)

    def _paths(self) -> Iterator[Path]:
        for path in sorted(self.folder.rglob("*")):
            inside = path.relative_to(self.folder).parts
            if path.is_file() and inside[0] not in LEFT_OUT and not any(part.endswith(".tmp") for part in inside):
                yield path


class _Place:
    """Files of one backup. Methods raise BackupError or RemoteError."""

    def __init__(self, url: str) -> None:
        self._remote = Remote(url if is_remote(url) else str(files.from_home(url).absolute()), 0)
        self.url = self._remote.url

    def _ask(self, name: str, act: Callable[[str], Result]) -> Result:
        try:
            return self._remote.ask(name, act)
        except (NotImplementedError, OSError) as error:
            raise BackupError(f"{self.url} cannot hold a backup: {error}") from error

    def read(self, name: str, size: int) -> bytes:
        """A file's content, of at most `size` bytes."""
        found = self._ask(name, self._remote.fs.info)["size"]
        if found is None or found > size:
            raise BackupError(f"{self.url}/{name} has {found} bytes instead of at most {size:,}")
        data: bytes = self._ask(name, self._remote.fs.cat_file)
        return data

    def manifest(self) -> dict[str, Any]:
        """The manifest, {} if there is none."""
        if MANIFEST not in self.sizes():
            return {}
        try:
            data = json.loads(self.read(MANIFEST, MANIFEST_BYTES))
        except (ValueError, RecursionError) as error:
            if isinstance(error, BackupError | RemoteError):
                raise
            data = None
        if not isinstance(data, dict):
            raise BackupError(f"{self.url}/{MANIFEST} is damaged: move that folder, or name another place")
        return data

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""

        def look(url: str) -> list[dict[str, Any]]:
            self._remote.fs.invalidate_cache()
            try:
                return list(self._remote.fs.ls(url.rstrip("/"), detail=True))
            except FileNotFoundError:
                return []

        return {PurePosixPath(entry["name"]).name: int(entry["size"] or 0) for entry in self._ask("", look)}

    def write(self, name: str, data: bytes) -> None:
        """Write a file and compare what is read back."""

        def put(url: str) -> None:
            self._remote.fs.makedirs(self.url, exist_ok=True)
            self._remote.fs.pipe_file(url, data)

        self._ask(name, put)
        if self._ask(name, self._remote.fs.cat_file) != data:
            raise BackupError(f"{self.url}/{name} is not what was written: is the place sound?")

    def remove(self, name: str) -> None:
        self._ask(name, self._remote.fs.rm_file)


def restore(url: str, name: str = "") -> Path:
    """Restore the run of a backup below the reports root, under its own name or `name`; returns its folder.

    Nothing is written unless all files are there and have their SHA-256; what a broken-off call has brought is used by
    the next one. Raises BackupError, RemoteError.
    """
    place = _Place(url)
    try:
        manifest = place.manifest()
        run = name or str(manifest["run"])
        facts = {str(inside): (str(sha256), int(size)) for inside, (sha256, size) in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BackupError(f"{url}: no backup of a run (no {MANIFEST} that can be read); give PLACE/RUN") from error
    if odd := [inside for inside in facts if _outside(inside)]:
        raise BackupError(f"{url}: {MANIFEST} names a file outside of the run ({odd[0]!r}); nothing was restored")
    folder = files.reports_root() / run
    if problem := name_conflict(run, "run.json") or ("exists" if folder.exists() else ""):
        raise BackupError(f"run name {run!r} {problem}: move it, or give --name")
    brought = folder.with_name(f".{run}.restoring")
    for inside, (sha256, size) in facts.items():
        path = brought / inside
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            continue
        data = place.read(sha256, size)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BackupError(f"{url}: {inside} is damaged there (SHA-256); nothing was restored")
        files.make_folder(path.parent)
        with files.writing(folder.parent):
            files.write_bytes(path, data)
    for path in [path for path in brought.rglob("*") if path.is_file()]:
        if path.relative_to(brought).as_posix() not in facts:  # of a try with an older manifest
            path.unlink()
    brought.replace(folder)
    return folder


def _outside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 2 with one line if the run cannot be restored."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.runs.backup", description="Restore a run.")
    parser.add_argument("url", help="PLACE/RUN: folder or URL of the backup of one run")
    parser.add_argument("--name", default="", help="name of the restored run; default: its own")
    flags = parser.parse_args(arguments)
    try:
        folder = restore(flags.url, flags.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"restored {folder}; the command that it was trained by resumes it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
