"""Data that ship with the package: a compressed file and a manifest, unpacked to shards in the cache on first use.

The manifest has the file's SHA-256, and SHA-256, bytes and count of every shard. `tests/shipping.py` makes both.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from matrixlib.data.shards import file_hash
from matrixlib.files import cache_root

Write = Callable[[Path, bytes, dict[str, Any]], object]

MANIFEST = "manifest.json"
REINSTALL = "install the package again, or take the file from a fresh clone"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest: facts, meta, shards with SHA-256, bytes and count. ValueError if absent."""
    path = folder / MANIFEST
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"the sample set's manifest cannot be read ({error}): {REINSTALL}") from error


def damage(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of shards that are missing or differ from the manifest; [] if intact."""
    shards = ((name, folder / name, shard["sha256"]) for name, shard in manifest["shards"].items())
    return [name for name, path, sha256 in shards if not path.is_file() or file_hash(path) != sha256]


def unpack(folder: Path, name: str, write: Write, cache: Path | None = None) -> Path:
    """Folder of the unpacked shards of `folder`, unpacked on first use, verified every time.

    In `cache` (default: cache_root()) under `name`. write(folder, data, meta) makes shards from the bytes. A partial or
    corrupt set is unpacked again; safe for concurrent calls. ValueError for a corrupt file or bad cache.
    """
    manifest = read_manifest(folder)
    root, path = cache or cache_root(), folder / manifest["file"]
    target = root / f"{name}-{manifest['sha256'][:12]}"
    if not damage(target, manifest):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not damage(target, manifest):  # another process was faster
                return target
            data = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
                raise ValueError(f"{path} is missing or damaged: {REINSTALL}")
            for left in root.glob(f"{name}-*.tmp"):  # left by killed processes: we hold the lock
                shutil.rmtree(left)
            temporary = target.with_name(f"{target.name}.tmp")
            write(temporary, data, manifest["meta"])
            if bad := damage(temporary, manifest):
                shutil.rmtree(temporary)
                raise ValueError(f"{path} unpacks to other data than its manifest says ({', '.join(bad)}): {REINSTALL}")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
    except OSError as error:
        raise ValueError(f"{root} cannot be written ({error}): set MATRIXLIB_CACHE to another folder") from error
    return target
