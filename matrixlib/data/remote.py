"""Data sets that lie elsewhere (S3, HTTP, a shared folder): what is needed of them, in a cache on this machine.

A data set is named by a URL of fsspec. Its catalogue is read when a run begins; blocks come by ranges of bytes, each
checked by the shard's own checksums, and are kept as small shards, which are checked again wherever they are opened.
A block that is not what was written is damage, as in a local shard. A source that says no, or cannot be reached, is no
damage: rows would be replaced by others that are only late, so it ends the run, which can go on later.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock

from matrixlib.data.blocks import End, Head, Ranges, read_block, read_head
from matrixlib.data.cache import Cache
from matrixlib.data.catalogue import NAME, REMOTE, ShardRow
from matrixlib.data.shards import REMEDY, DamagedBlock, Layout, Shard, ShardError, file_hash, guarded, write_shard
from matrixlib.files import cache_root, read_json, write_bytes, write_json

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try where a connection fails
OPTIONS = {"s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 1}}}}
"""By protocol, unless fsspec's own configuration has others: one try is one try, as they are counted here."""
TAIL = 2**20  # bytes of a shard's end: its directory, meta data and checksums, of tens of millions of rows
PIECE = 2**24  # bytes that are read at once of a whole shard
LARGEST = 2**28  # bytes of a catalogue
TAGS = ("ETag", "etag", "LastModified", "mtime")  # of what a file system says of a file: other ones, other bytes
ROOM = 2**13  # bytes of a block's file beside its arrays, at most


class RemoteError(ValueError):
    """A data set elsewhere that cannot be read; says which, why and what to do."""


class Remote:
    """A data set at `url`. `folder`: what this machine has of it; `cache`: the bound of that and of all other sets.

    Its catalogue lies in a folder of that for each bound, so that everybody who fetches holds to the bound that they
    were told, whoever else has begun since.
    """

    def __init__(self, url: str, cache: Cache) -> None:
        import fsspec

        self.url, self.cache = url.rstrip("/"), cache
        self.folder = cache.root / hashlib.sha256(self.url.encode()).hexdigest()[:16]
        protocol = url.partition("://")[0]
        known = fsspec.config.conf.get(protocol, {})
        options = {key: value for key, value in OPTIONS.get(protocol, {}).items() if key not in known}
        try:
            self.fs: AbstractFileSystem = fsspec.core.url_to_fs(self.url, **options)[0]
        except ImportError as error:
            raise RemoteError(
                f"{url}: {error}. S3 and HTTP need one more package: pip install 'matrixlib[remote]'"
            ) from error
        except ValueError as error:
            raise RemoteError(f"{url}: {error}; give s3://bucket/folder, https://..., file:///folder") from error
        self._try_once()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._try_once()  # in a worker process fsspec has made the file system anew

    def _try_once(self) -> None:
        if hasattr(self.fs, "retries"):
            self.fs.retries = 1

    @classmethod
    def open(cls, folder: Path) -> Remote:
        """The data set whose catalogue was brought to `folder`."""
        known = read_json(folder / REMOTE)
        return cls(known["url"], Cache(folder.parent.parent, int(known["cache"])))

    # What the source is asked

    def _ask(self, name: str, act: Callable[[], Result]) -> Result:
        """act(), again and again where the connection fails. RemoteError says what to do about anything else."""
        where = f"{self.url}/{name}"
        for tries in itertools.count():
            try:
                return act()
            except FileNotFoundError as error:
                raise RemoteError(f"{where} is not there: is data.source right, and all of the set there?") from error
            except PermissionError as error:
                raise RemoteError(f"{where} may not be read ({error}): are these the right credentials?") from error
            except _connection_errors() as error:
                if tries == len(WAITS):
                    raise RemoteError(
                        f"{where} could not be read in {tries + 1} tries ({type(error).__name__}: {error}): is the "
                        "network up, and the address right? The same command goes on where this one stopped"
                    ) from error
                time.sleep(WAITS[tries])
            except _access_errors() as error:
                raise RemoteError(
                    f"{where}: {error}: log in, or set AWS_PROFILE, or AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
                    "AWS_ENDPOINT_URL"
                ) from error
        raise AssertionError("the last try raises")

    def _facts(self, name: str) -> tuple[int, str]:
        """(size in bytes, tag) of a file as it is now."""
        facts = self._ask(name, lambda: self.fs.info(f"{self.url}/{name}"))
        tag = next((facts[key] for key in TAGS if facts.get(key)), "")
        if facts["size"] is None:
            raise RemoteError(f"{self.url}/{name}: the server does not say how large it is: use one that does")
        return int(facts["size"]), str(tag)

    def _ranges(self, name: str, ranges: Ranges) -> list[bytes]:
        """The bytes of these ranges of a file, each as long as it should be."""
        full = [(start, stop) for start, stop in ranges if stop > start]  # servers refuse an empty one
        path = f"{self.url}/{name}"

        def read() -> list[bytes]:
            starts, stops = [start for start, _ in full], [stop for _, stop in full]
            parts = self.fs.cat_ranges([path] * len(full), starts, stops, on_error="return")
            for part, (start, stop) in zip(parts, full, strict=True):
                if isinstance(part, Exception):
                    raise part
                if len(part) > stop - start:
                    raise RemoteError(f"{path}: the server sends more than was asked for: use one that knows ranges")
                if len(part) != stop - start:
                    raise ConnectionError(f"{len(part):,} of {stop - start:,} bytes came")
            return list(parts)

        parts = iter(self._ask(name, read))
        return [next(parts) if stop > start else b"" for start, stop in ranges]

    # The catalogue

    def update(self) -> Path:
        """Bring the catalogue as it is now; its folder."""
        size, _ = self._facts(NAME)
        if size > LARGEST:
            raise RemoteError(f"{self.url}/{NAME} has {size:,} bytes, which no catalogue has: is that a data set?")
        (data,) = self._ranges(NAME, [(0, size)])
        path = self.folder / str(self.cache.bytes) / NAME
        known = path.with_name(REMOTE)
        if not (path.is_file() and path.read_bytes() == data and self.cache.use(known)):
            with self.cache.filling(path):
                write_bytes(path, data)
                write_json(known, {"url": self.url, "cache": self.cache.bytes})
        return path.parent

    # Blocks

    def has(self, row: ShardRow, number: int) -> bool:
        """Whether a block lies in the cache; it then counts as used now."""
        return self.cache.use(self._place(row, number))

    def block(self, row: ShardRow, number: int, layout: Layout) -> Shard:
        """A block of a shard, checked, as a shard of its own. Raises DamagedBlock, ShardError for a shard without a
        sound head, RemoteError and CacheError.
        """
        path = self._place(row, number)
        if shard := self._kept(path, layout):
            return shard
        with self.cache.filling(path):
            while not (shard := self._kept(path, layout)):  # another process may have been faster
                head, batch = self._sound(row, number, layout)
                self.cache.reserve(sum(array.nbytes for array in batch.values()) + ROOM)
                meta = {key: head.meta[key] for key in ("source", "generator", "seed", "split", "created")}
                write_shard(path, layout, batch, meta)
        return shard

    def _place(self, row: ShardRow, number: int) -> Path:
        return self.folder / "blocks" / row.sha256[:32] / f"{number:06d}.npz"

    def _kept(self, path: Path, layout: Layout) -> Shard | None:
        """A block that is in the cache and whole."""
        if not self.cache.use(path):
            return None
        try:
            shard = Shard(path, layout)
            shard.verify_block(0)
        except ShardError:  # it went meanwhile, or the disk is not what it was
            return None
        return shard

    def _sound(self, row: ShardRow, number: int, layout: Layout) -> tuple[Head, dict[str, Any]]:
        """A block from the source, read once more where it fails its check: that may have happened on the way."""
        head = self._head(row, layout)
        read = functools.partial(self._ranges, row.name)
        try:
            return head, read_block(row.name, head, layout, number, read)
        except DamagedBlock:
            fresh = self._head(row, layout, head.tag)
        if fresh.tag != head.tag:
            raise RemoteError(
                f"{self.url}/{row.name} is not the file that this run has begun with: bring that back, or make the "
                "catalogue anew, and begin another run"
            )
        try:
            return fresh, read_block(row.name, fresh, layout, number, read)
        except DamagedBlock as error:
            raise DamagedBlock(row.path, number, error.member) from error

    def _head(self, row: ShardRow, layout: Layout, known: str = "") -> Head:
        """That of a shard, as it was when the first block was read; anew where that is `known` and gave damage."""
        path = self._place(row, 0).with_name("head.json")
        with FileLock(path.with_suffix(".lock")):  # of those that hold the lock of a block
            if path.is_file() and not known:
                return Head(**read_json(path))
            head = self._fetch_head(row, layout)
            if known in ("", head.tag):
                write_json(path, head.data())
            return head

    def _fetch_head(self, row: ShardRow, layout: Layout) -> Head:
        """The head of a shard as it is now."""
        size, tag = self._facts(row.name)
        if size != row.bytes:
            raise RemoteError(
                f"{self.url}/{row.name} has {size:,} bytes, and {row.bytes:,} by the catalogue: bring back the file "
                "that belongs to the catalogue, or make that anew"
            )
        for last in (False, True):  # what is wrong may have become so on the way
            (data,) = self._ranges(row.name, [(max(0, size - TAIL), size)])
            try:
                head = guarded(row.path, functools.partial(read_head, row.name, End(data, size), layout, tag))
                break
            except ShardError:
                if last:
                    raise
        if head.meta["count"] != row.count:
            raise ShardError(f"{row.path}: {head.meta['count']} rows, the catalogue says {row.count}; {REMEDY}")
        return head

    # Whole shards

    def whole(self, row: ShardRow) -> Path:
        """The file of a shard, all of it. ShardError where its bytes are, twice, not those that were catalogued."""
        path = self.folder / row.name
        if self._is_whole(path, row):
            return path
        with self.cache.filling(path):
            if self._is_whole(path, row):
                return path
            temporary = path.with_name(f"{path.name}.tmp")
            self.cache.reserve(row.bytes, temporary)
            try:
                for _ in range(2):  # what is wrong may have become so on the way
                    with temporary.open("r+b") as file:
                        for start in range(0, row.bytes, PIECE):
                            file.writelines(self._ranges(row.name, [(start, min(start + PIECE, row.bytes))]))
                    if file_hash(temporary) == row.sha256:
                        temporary.replace(path)
                        return path
                raise ShardError(f"{self.url}/{row.name}: its bytes differ from those that were written (SHA-256)")
            finally:
                temporary.unlink(missing_ok=True)

    def _is_whole(self, path: Path, row: ShardRow) -> bool:
        return self.cache.use(path) and file_hash(path) == row.sha256


def is_remote(source: str) -> bool:
    """Whether a data set is named by a URL."""
    return "://" in source


def bring_catalogue(url: str, cache: float, look: bool = False) -> Path:
    """Folder with the catalogue of the data set at a URL as it is now. cache: GiB that its blocks, and those of all
    other such sets, may take on this machine; look: unless a training has set another. RemoteError, CacheError.
    """
    remote = Remote(url, Cache(cache_root() / "remote", int(cache * 2**30)))
    known = sorted(remote.folder.glob(f"*/{REMOTE}"), key=lambda path: path.stat().st_mtime)
    return (Remote.open(known[-1].parent) if look and known else remote).update()


def remote_of(rows: Sequence[ShardRow]) -> Remote | None:
    """The data set elsewhere of which these are shards; None where they are here."""
    folder = next((row.remote for row in rows if row.remote), None)
    return None if folder is None else Remote.open(folder)


def whole(row: ShardRow) -> Path:
    """Path of a shard's file, brought here if it lies elsewhere. Raises ShardError, RemoteError, CacheError."""
    return row.path if row.remote is None else Remote.open(row.remote).whole(row)


def _connection_errors() -> tuple[type[Exception], ...]:
    """What is raised where a connection fails, by the libraries that are loaded."""
    errors: list[type[Exception]] = [OSError, TimeoutError]
    if "aiohttp" in sys.modules:
        errors.append(sys.modules["aiohttp"].ClientError)
    if "botocore" in sys.modules:
        from botocore.exceptions import ConnectionError as RefusedError
        from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError

        errors += [HTTPClientError, IncompleteReadError, FlexibleChecksumError, RefusedError]
    return tuple(errors)


def _access_errors() -> tuple[type[Exception], ...]:
    """What is raised where it isn't known how to get at the source: mostly without credentials."""
    if "botocore" not in sys.modules:
        return ()
    from botocore.exceptions import BotoCoreError

    return (BotoCoreError,)
