"""Atomic files, standard folders, and worker processes that end with their parent."""

import errno
import fnmatch
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import platformdirs
import psutil
from filelock import AcquireReturnProxy, FileLock, Timeout

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = None if (PACKAGE / "params").is_dir() else PACKAGE.parent  # None if installed, with presets and notebooks
PARAMS = (CHECKOUT or PACKAGE) / "params"
SHIPPED = PACKAGE / "tasks/chess/shipped"
"""Run folder of the network that comes with the package; its name stands for it wherever a run is named."""
NOTEBOOKS = (CHECKOUT or PACKAGE) / "notebooks"
NAME_BYTES = 200  # of a run's name: file systems allow 255, and file names are derived from it
REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
REFUSALS |= {errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG}

ANYWHERE = (".*", "*.ipynb", "*.lock", "lock", "*.log", "*.tmp", "notes.txt")
"""Entries that a folder may have before it becomes that of a run, say: papermill's, locks, and the user's."""


class FolderError(ValueError):
    """A folder is not writable; says which, why and what to do."""


def from_home(path: str | Path) -> Path:
    """A path with `~` expanded, left as it is for unknown users."""
    return Path(os.path.expanduser(path))  # Path.expanduser would raise RuntimeError


def reports_root() -> Path:
    """Folder of all runs: $MATRIXLIB_REPORTS, else reports/ in the checkout or the working folder. May not exist yet.
    FolderError for an impossible path."""
    root = from_home(os.environ.get("MATRIXLIB_REPORTS") or (CHECKOUT or Path.cwd()) / "reports")
    with writing(root), suppress(FileNotFoundError):
        root.stat()
    return root


def folder_of(run: str | Path) -> Path:
    """Folder of a run's name below the reports root; that of SHIPPED for its name, if no own run has it."""
    folder = reports_root() / run
    return SHIPPED if run == SHIPPED.name and not folder.exists() else folder


def cache_root() -> Path:
    """$MATRIXLIB_CACHE, else the platform's cache folder for this package. Not created."""
    if folder := os.environ.get("MATRIXLIB_CACHE"):
        return from_home(folder)
    return platformdirs.user_cache_path("matrixlib", appauthor=False)


def name_problem(name: str) -> str:
    """Why nothing below the reports root can have this name, or ""."""
    if Path(name).name != name or name.startswith("."):
        return "must be a plain folder name, without slashes or a leading dot"
    if not name.isprintable():
        return "has characters that cannot be shown; take letters, digits, - and _"
    if (length := len(name.encode())) > NAME_BYTES:
        return f"has {length} bytes; take at most {NAME_BYTES}"
    return "is that of a file there; take another" if (reports_root() / name).is_file() else ""


def foreign_entry(folder: Path, marks: Sequence[str], known: Sequence[str] = ()) -> str:
    """Name of an entry that shows that a folder is not ours to fill, or "". marks: names of which one makes it ours;
    known: patterns of entries that it may have without, beside `ANYWHERE` and empty folders."""
    if not os.path.isdir(folder) or any((folder / name).exists() for name in marks):
        return ""
    with writing(folder):
        for path in sorted(folder.iterdir()):
            expected = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in (*ANYWHERE, *known))
            if not expected and not (path.is_dir() and not any(path.iterdir())):
                return path.name
    return ""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Context in which refused writes become a FolderError that names folder, cause and remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        where = f" ({error.filename})" if error.filename and Path(error.filename) != folder else ""
        problem = inode_problem(folder, error) or error.strerror
        refused = FolderError(
            f"{folder} cannot be written: {problem}{where}. Make room or make it writable, or let "
            "MATRIXLIB_REPORTS name another folder for all runs"
        )
        for note in getattr(error, "__notes__", ()):  # what was saved anyway
            refused.add_note(note)
        raise refused from error


def inode_problem(folder: Path, error: Exception) -> str:
    """Text for a write below a folder that failed as no inode is free, which the system calls a full disk, or ""."""
    if getattr(error, "errno", None) != errno.ENOSPC or not hasattr(os, "statvfs"):
        return ""
    disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.is_dir()))
    if not (disk.f_bavail and disk.f_files) or disk.f_favail:
        return ""
    free = f"{disk.f_bavail * disk.f_frsize / 1e6:,.1f} MB are free"
    return f"the file system has no room for more files ({free}, but all {disk.f_files:,} inodes are used)"


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; FolderError names the one that fails."""
    with writing(folder.parent):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # in /proc, say
            raise PermissionError(errno.EACCES, "no folder can be made in it") from error


def exclusive(lock: FileLock, refusal: Exception) -> AcquireReturnProxy:
    """Take a lock, for `with` or until `release`; raises `refusal` if another process holds it."""
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        raise refusal from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, {} if absent; ValueError names a file with something else."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise ValueError(f"{path} is not a file: move it")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}): restore or move it") from error
    return data


def plain(value: Any, where: str = "row") -> Any:
    """`value` as JSON data: non-finite numbers become strings, one-element arrays numbers. TypeError names the place of
    anything that JSON cannot hold."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    try:
        return plain(value.item(), where)  # NumPy, torch
    except (AttributeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"{where}: {kind} is not a number, a string, a list or a mapping of strings") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` (see `plain`) as indented JSON, atomically."""
    text = json.dumps(plain(data, Path(path).name), allow_nan=False, ensure_ascii=False, indent=1)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically and durably: temporary file (of this process), fsync, rename, fsync of the folder."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a full disk, say
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Remove temporaries of `path` (`name.<process id>.tmp`) of killed processes."""
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        number = left.name.split(".")[-2]
        if not (number.isdecimal() and psutil.pid_exists(int(number))):
            left.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; not needed on Windows."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def utc_now() -> str:
    """UTC time as ISO 8601 with milliseconds: 2026-01-31T12:00:00.000Z."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def end_with_parent() -> None:
    """Call in a worker process: exit when the parent does, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process has a parent to end with"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
