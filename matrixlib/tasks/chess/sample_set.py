"""The sample set that ships with the package: how it is compressed, and how it unpacks to the user cache.

`sample/sample.npz.xz` holds columns that compress well (about 23 bytes a position): boards in real colours,
so that successive positions of a game repeat, and policy levels without indices, because the legal moves
follow from the board. `sample/manifest.json` holds the SHA-256 of that file and of every shard in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from matrixlib.data.shards import file_hash
from matrixlib.files import cache_root, write_bytes
from matrixlib.tasks.chess.records import RECORD
from matrixlib.tasks.chess.stockfish import packing
from matrixlib.tasks.chess.stockfish.labels import Positions, assemble

SAMPLE = Path(__file__).parent / "sample"
DATA, MANIFEST = "sample.npz.xz", "manifest.json"
FORMAT = 1
REINSTALL = "install the package again, or take the file from a fresh clone"
_SWAP = np.array([*range(6, 12), *range(6), 12], dtype=np.uint8)  # piece class of the other colour


def turned(squares: np.ndarray, black: np.ndarray) -> np.ndarray:
    """Boards (n, 64) of piece classes between oriented and real colours; its own inverse."""
    boards = squares.reshape(-1, 8, 8).copy()
    boards[black] = _SWAP[boards[black][:, ::-1]]
    return boards.reshape(-1, 64)


def encode(positions: Positions) -> bytes:
    """Positions to the bytes that ship; deterministic."""
    records = positions.records
    pieces, black = records["pieces"], records["side"] == 1
    squares = np.stack([pieces & 15, pieces >> 4], axis=2).reshape(-1, 64)
    first = np.flatnonzero(np.diff(records["game"], prepend=~records["game"][:1]))
    columns = {
        "squares": turned(squares, black),
        **{name: records[name] for name in ("castling", "en_passant", "halfmove", "repetition", "side", "result")},
        "ply_step": np.diff(records["ply"].astype("<i2"), prepend=np.array([0], "<i2")),
        "source": records["source"],
        "game": records["game"][first],
        "game_first": first.astype("<u4"),
        "win": positions.per_mille[:, 0],
        "loss": positions.per_mille[:, 2],
        "level": positions.level,
    }
    plain = io.BytesIO()
    np.savez(plain, **columns)  # type: ignore[arg-type]
    return lzma.compress(plain.getvalue(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def decode(data: bytes) -> Positions:
    """The inverse of `encode`. The bytes are trusted: their checksum is the caller's to check."""
    with np.load(io.BytesIO(lzma.decompress(data)), allow_pickle=False) as columns:
        column = {name: columns[name] for name in columns.files}
    n = len(column["side"])
    records = np.zeros(n, RECORD)
    for name in ("castling", "en_passant", "halfmove", "repetition", "side", "result", "source"):
        records[name] = column[name]
    squares = turned(column["squares"], column["side"] == 1)
    records["pieces"] = squares[:, 0::2] | squares[:, 1::2] << 4
    records["ply"] = np.cumsum(column["ply_step"], dtype=np.int64)
    records["game"] = np.repeat(column["game"], np.diff(column["game_first"].astype(np.int64), append=n))
    win, loss = column["win"], column["loss"]
    return Positions(records, np.stack([win, 1000 - win - loss, loss], axis=1), column["level"])


def ship(work: Path | str, folder: Path = SAMPLE) -> dict[str, Any]:
    """Compresses the positions of a work folder (generator.generate) into `folder`; returns the manifest.

    For the makers of the package: it needs the work folder, minutes, and room for the unpacked shards.
    """
    positions, _ = packing.collect(Path(work))
    meta = packing.provenance(Path(work))
    data = encode(positions)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        infos = packing.write_splits(Path(scratch), assemble(decode(data)), meta)
    manifest = {
        "format": FORMAT,
        "file": DATA,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "positions": len(positions.records),
        "games": len(np.unique(positions.records["game"])),
        "meta": meta,
        "shards": {info.path.name: {"sha256": info.sha256, "bytes": info.bytes, "count": info.count} for info in infos},
    }
    write_bytes(folder / DATA, data)
    write_bytes(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def read_manifest(folder: Path = SAMPLE) -> dict[str, Any]:
    """What ships: positions, games, meta, shards with SHA-256, bytes and count. ValueError if absent."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"the sample set's manifest cannot be read ({error}): {REINSTALL}") from error
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')}, this version reads {FORMAT}: {REINSTALL}")
    return manifest


def damage(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the shards that are missing or differ from the manifest; [] for a whole set."""
    bad = []
    for name, shard in manifest["shards"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != shard["bytes"] or file_hash(path) != shard["sha256"]:
            bad.append(name)
    return bad


def unpack_sample(cache: Path | None = None, folder: Path = SAMPLE) -> Path:
    """The folder with the unpacked shards of the sample set, unpacked on first use, verified every time.

    It lies in `cache` (default: cache_root()). A missing, half-unpacked or damaged set is made again; two
    processes may call at once. Raises ValueError when the shipped file is damaged or the cache is read-only.
    """
    manifest = read_manifest(folder)
    root = cache if cache is not None else cache_root()
    target = root / f"sample-{manifest['sha256'][:12]}"
    if not damage(target, manifest):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / "sample.lock"):
            if damage(target, manifest):  # else another process was faster
                _unpack(folder, manifest, root, target)
    except OSError as error:
        raise ValueError(f"{root} cannot be written ({error}): set MATRIXLIB_CACHE to another folder") from error
    return target


def _unpack(folder: Path, manifest: dict[str, Any], root: Path, target: Path) -> None:
    """Makes `target` anew: written beside it, checked, renamed. The lock is held."""
    path = folder / manifest["file"]
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise ValueError(f"{path} is missing or damaged: {REINSTALL}")
    for left in root.glob("sample-*.tmp"):  # of killed processes: the lock is ours
        shutil.rmtree(left)
    temporary = target.with_name(f"{target.name}.tmp")
    packing.write_splits(temporary, assemble(decode(data)), manifest["meta"])
    if bad := damage(temporary, manifest):
        shutil.rmtree(temporary)
        raise ValueError(f"{path} unpacks to other data than its manifest says ({', '.join(bad)}): {REINSTALL}")
    if target.exists():
        shutil.rmtree(target)
    os.replace(temporary, target)
