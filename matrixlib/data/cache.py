"""A folder of files that can be had again, of bounded size, shared by all processes of a machine.

What was used longest ago goes first. A file that goes while another process has it mapped stays readable there (its
room is free when it is let go), so nobody has to ask before one is removed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

LOCKS = 64  # files, for any number of files of the cache
KEPT = 0.9  # of the bound, after what is oldest was removed
STALE_SECONDS = 3600.0  # after which an unfinished file is one of a killed process
ENDS = (".npz", ".tmp")


class CacheError(ValueError):
    """A cache that cannot be used; says which folder, why and what to do."""


@dataclass(frozen=True)
class Cache:
    """`root`: its folder, `bytes`: how much may lie there."""

    root: Path
    bytes: int

    @contextmanager
    def filling(self, path: Path) -> Iterator[None]:
        """Within it, no other process or thread fills `path`, whose folder is there. CacheError where the system
        refuses to write.
        """
        number = int.from_bytes(hashlib.sha256(str(path).encode()).digest()[:4]) % LOCKS
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.root / f"{number:02d}.lock"):
                yield
        except OSError as error:
            raise CacheError(
                f"the cache of remote data in {self.root} cannot be written ({error}): make room or make it writable, "
                "lower data.cache, or let MATRIXLIB_CACHE name another folder"
            ) from error

    def use(self, path: Path) -> bool:
        """Whether a file is there; it then counts as used now."""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:  # of a folder that cannot be written
            return path.is_file()
        return True

    def reserve(self, size: int, path: Path | None = None) -> None:
        """Count `size` bytes that are about to be written, and remove older files for them. path: a `.tmp` file, made
        here with that size, of what takes long to come: others who count meanwhile count it whole. CacheError for more
        than the bound.
        """
        if size > self.bytes:
            raise CacheError(
                f"{size:,} bytes of remote data have to lie in the cache at once, and data.cache is "
                f"{self.bytes / 2**30:g} GiB: raise it"
            )
        total = self.root / "total"  # what was counted; never too little, as it is counted before it is written
        with FileLock(self.root / "total.lock"):
            with open(total, "a+b") as file:
                file.seek(0)
                text = file.read()
            used = int(text) + size if text.isdigit() else self.bytes + 1
            if used > self.bytes:
                used = self._shrink(max(0, int(KEPT * self.bytes) - size)) + size
            with open(total, "r+b", buffering=0) as file:
                file.write(b"%020d" % used)  # in one piece, whenever this process is killed
            if path is not None:
                with open(path, "wb") as file:
                    file.truncate(size)

    def _shrink(self, target: int) -> int:
        """Remove the files that were used longest ago until `target` bytes are left; returns how many are."""
        old, files = time.time() - STALE_SECONDS, []
        for path in self.root.rglob("*"):
            if path.suffix in ENDS:
                with suppress(FileNotFoundError):  # whoever wrote it has renamed or removed it
                    facts = path.stat()
                    files.append((facts.st_mtime, facts.st_size, path))
        used = sum(size for _, size, _ in files)
        for when, size, path in sorted(files):
            if used <= target:
                break
            if path.suffix == ".tmp" and when > old:
                continue
            with suppress(PermissionError):  # Windows keeps a file that somebody has mapped
                path.unlink(missing_ok=True)
                used -= size
        return used
