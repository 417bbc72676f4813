"""Remote data sets (S3, HTTP, a shared folder) with a bounded local cache of whole shards.

A shard is downloaded when its first row is needed, verified by the catalogue's SHA-256, and evicted least recently used
first. A wrong one counts as corrupt, like a local one.
"""

import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import FileLock

from matrixlib.data.catalogue import NAME, REMOTE, ShardRow
from matrixlib.data.shards import ShardError, file_hash
from matrixlib.files import REFUSALS, cache_root, inode_problem, read_json, write_bytes, write_json

Result = TypeVar("Result")

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each retry
OPTIONS = {"s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}}}}
"""By protocol, unless fsspec's configuration sets others: no retries of its own, as they are counted here."""
CATALOGUE_BYTES = 2**28  # at most
STALE_SECONDS = 86_400.0  # age at which a partial file counts as abandoned
DOWNLOADS = 4  # parallel downloads


class RemoteError(ValueError):
    """A remote data set cannot be read or cached; says why and what to do."""


class Remote:
    """A data set at an fsspec URL. bytes: cache size for all remote sets."""

    def __init__(self, url: str, bytes: int) -> None:
        import fsspec

        self.url, self.bytes = url.rstrip("/"), bytes
        self.root = cache_root() / "remote"
        self.folder = self.root / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        protocol = url.partition("://")[0]
        known = fsspec.config.conf.get(protocol, {})
        options = {key: value for key, value in OPTIONS.get(protocol, {}).items() if key not in known}
        try:
            self.fs: Any = fsspec.core.url_to_fs(self.url, **options)[0]
        except ImportError as error:
            raise RemoteError(f"{url}: {error}. S3 and HTTP need more: pip install 'matrixlib[remote]'") from error
        except ValueError as error:
            raise RemoteError(f"{url}: {error}; give s3://bucket/folder, https://..., file:///folder") from error

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The data set whose catalogue was downloaded to `folder`."""
        known = read_json(folder / REMOTE)
        return cls(known["url"], int(known["cache"]))

    def ask(self, name: str, act: Callable[[str], Result]) -> Result:
        """act(URL) with retries on connection errors. RemoteError for anything else."""
        where = f"{self.url}/{name}"
        if hasattr(self.fs, "retries"):  # here, as workers recreate the file system
            self.fs.retries = 1
        for seconds in (*RETRY_SECONDS, None):
            try:
                return act(where)
            except Exception as problem:
                error: BaseException = problem
                if isinstance(problem, FileNotFoundError):
                    cause = problem.__cause__  # fsspec says so of a refused connection and a server's error, too
                    if not type(cause).__module__.startswith("aiohttp.") or getattr(cause, "status", 0) in (404, 410):
                        text = f"{where} is not there: is the address right, and all of it there?"
                        raise RemoteError(text) from problem
                    error = cause or problem
                if "Credential" in type(error).__name__ or isinstance(error, PermissionError):
                    raise RemoteError(
                        f"{where} may not be read: {error}: log in, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID, "
                        "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL"
                    ) from error
                of_library = type(error).__module__.partition(".")[0] in ("aiohttp", "botocore")
                if not of_library and (not isinstance(error, OSError) or error.errno in REFUSALS):
                    raise  # of the local folder, or a bug
                if seconds is None:
                    raise RemoteError(
                        f"{where} could not be read in {len(RETRY_SECONDS) + 1} tries ({type(error).__name__}: {error})"
                        ": is the network up, and the address right? The same command resumes"
                    ) from error
                time.sleep(seconds)
        raise AssertionError("the last try raises")

    def update(self) -> Path:
        """Download the current catalogue; returns its folder."""
        size = self.ask(NAME, self.fs.info)["size"]
        if size is None or size > CATALOGUE_BYTES:
            raise RemoteError(f"{self.url}/{NAME} has {size} bytes, which no catalogue has: is that a data set?")
        data = self.ask(NAME, self.fs.cat_file)
        path = self.folder / str(self.bytes) / NAME
        known = path.with_name(REMOTE)
        with self._filling(path):
            if not (path.is_file() and path.read_bytes() == data and known.is_file()):
                write_bytes(path, data)
                write_json(known, {"url": self.url, "cache": self.bytes})
            os.utime(known)
        return path.parent

    def check_room(self, sizes: Sequence[int], at_once: int) -> None:
        """RemoteError if the largest `at_once` (0: all) of these shard sizes do not fit in the cache."""
        size = sum(sorted(sizes, reverse=True)[: at_once or None])
        if size > self.bytes:
            raise RemoteError(
                f"{self.url}: rows come from {at_once or len(sizes):,} shards at a time, {size / 2**30:.3g} GiB, and "
                f"data.cache is {self.bytes / 2**30:.3g} GiB: raise it, or set data.window_blocks to fewer"
            )

    def path(self, row: ShardRow) -> Path:
        """Local path of a shard, by content hash, whether present or not."""
        return self.root / "shards" / f"{row.sha256}.npz"

    def fetch(self, row: ShardRow) -> Path:
        """The local file of a shard, downloaded if needed. ShardError if it is wrong twice; RemoteError."""
        path = self.path(row)
        if _is_sound(path, row):
            return path
        with self._filling(path):
            if _is_sound(path, row):  # another process was faster
                return path
            part = path.with_suffix(f".{row.bytes}.tmp")
            self._reserve(row.bytes, part)
            try:
                for _ in range(2):  # may have been corrupted in transit
                    self.ask(row.name, lambda where: self._download(where, part, row.bytes))
                    if file_hash(part) == row.sha256:
                        os.replace(part, path)
                        return path
                if (size := part.stat().st_size) != row.bytes:
                    raise RemoteError(
                        f"{self.url}/{row.name} has {size:,} bytes, and {row.bytes:,} by the catalogue: bring back the "
                        "file that belongs to the catalogue, or make that anew"
                    )
            finally:
                part.unlink(missing_ok=True)
        raise ShardError(f"{self.url}/{row.name}: its bytes differ from those that were written (SHA-256)")

    def _download(self, where: str, path: Path, size: int) -> None:
        self.fs.get_file(where, str(path))
        if (come := path.stat().st_size) < size:
            raise ConnectionError(f"{come:,} of {size:,} bytes came")

    @contextmanager
    def _filling(self, path: Path) -> Iterator[None]:
        """Context in which no other process or thread writes `path`; its folder exists."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f"{hashlib.sha256(path.name.encode()).hexdigest()[:2]}.lock"):
                yield
        except OSError as error:
            problem = inode_problem(self.root, error) or error
            raise RemoteError(
                f"the cache of remote data in {self.root} cannot be written ({problem}): make room or make it "
                "writable, lower data.cache, or let MATRIXLIB_CACHE name another folder"
            ) from error

    def _reserve(self, size: int, part: Path) -> None:
        """Evict least recently used shards until `size` bytes are free for `part`."""
        if size > self.bytes:
            raise RemoteError(
                f"{size:,} bytes of remote data have to lie in the cache at once, and data.cache is "
                f"{self.bytes / 2**30:g} GiB: raise it"
            )
        with FileLock(self.root / "reserve.lock"):
            files = []
            for path in part.parent.iterdir():
                with suppress(FileNotFoundError):  # renamed or removed by its writer
                    facts, whole = path.stat(), path.suffix == ".npz"
                    files.append((facts.st_mtime, facts.st_size if whole else int(path.suffixes[0][1:]), whole, path))
            used = sum(own for _, own, *_ in files)
            for when, own, whole, path in sorted(files):
                if used + size > self.bytes if whole else when < time.time() - STALE_SECONDS:
                    with suppress(PermissionError):  # Windows: still mapped by someone
                        path.unlink(missing_ok=True)
                        used -= own
            part.touch()


def _is_sound(path: Path, row: ShardRow) -> bool:
    """Whether a shard is present and intact; marks it as used."""
    try:
        with suppress(PermissionError):  # read-only folder
            os.utime(path)
        return file_hash(path) == row.sha256
    except FileNotFoundError:
        return False


def is_remote(source: str) -> bool:
    """Whether a data set is given as a URL."""
    return "://" in source


def download_catalogue(url: str, cache: float, look: bool = False) -> Path:
    """Local folder with the current catalogue of the data set at a URL. cache: GiB for all remote sets on this machine;
    look: keep the limit that a training has set. Raises RemoteError."""
    remote = Remote(url, int(cache * 2**30))
    known = sorted(remote.folder.glob(f"*/{REMOTE}"), key=lambda path: path.stat().st_mtime)
    return (Remote.open(known[-1].parent) if look and known else remote).update()


def local_path(row: ShardRow) -> Path:
    """Path of a shard's file, downloaded if remote. Raises ShardError, RemoteError."""
    return row.path if row.remote is None else Remote.open(row.remote).fetch(row)


def fetch_ahead(
    batches: Generator[Result, None, None],
    remote: Remote,
    shards: Sequence[ShardRow],
    wanted: Iterator[set[int]],
    ahead: int,
) -> Iterator[Result]:
    """The batches, while shards of the next `ahead` ones are downloaded. wanted: shard numbers of each batch."""
    before: set[int] = set()

    def bring(number: int) -> None:
        with suppress(ShardError, RemoteError):  # reported when it is read
            if not remote.path(shards[number]).exists():
                remote.fetch(shards[number])

    def look() -> None:
        nonlocal before
        now = next(wanted, before)
        for number in sorted(now - before):
            pool.apply_async(bring, (number,))
        before = now

    pool = ThreadPool(DOWNLOADS)  # daemon threads: not joined at exit, unlike an executor's
    try:
        for _ in range(ahead):
            look()
        with closing(batches):
            for batch in batches:
                look()
                yield batch
    finally:
        pool.terminate()
