"""The sample set that ships with the package: how it is compressed, and how it unpacks to the user cache.

`sample/sample.npz.xz` holds columns that compress well (about 23 bytes a position): boards in real colours,
so that successive positions of a game repeat, and policy levels without indices, because the legal moves
follow from the board. `sample/manifest.json` holds the SHA-256 of that file and of every shard in it.
"""

import io
import lzma
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.tasks.chess.importers.notation import classes_of
from matrixlib.tasks.chess.records import RECORD
from matrixlib.tasks.chess.stockfish.labels import Positions, assemble
from matrixlib.tasks.chess.stockfish.sample import collect, provenance, write_splits
from matrixlib.tasks.shipped import unpack, write_shipped

SAMPLE = Path(__file__).parent / "sample"
DATA = "sample.npz.xz"
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
    first = np.flatnonzero(np.diff(records["game"], prepend=~records["game"][:1]))
    columns = {
        "squares": turned(classes_of(pieces), black),
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
    """Compresses the positions of a work folder (sample.generate) into `folder`; returns the manifest.

    For the makers of the package: it needs the work folder, minutes, and room for the unpacked shards.
    """
    positions, _ = collect(Path(work))
    meta = provenance(Path(work))
    data = encode(positions)
    with tempfile.TemporaryDirectory() as scratch:
        infos = write_splits(Path(scratch), assemble(decode(data)), meta)
    facts = {"positions": len(positions.records), "games": len(np.unique(positions.records["game"]))}
    return write_shipped(folder, DATA, data, facts, meta, infos)


def unpack_sample(cache: Path | None = None, folder: Path = SAMPLE) -> Path:
    """The folder with the unpacked shards of the sample set; see `shipped.unpack`."""
    return unpack(folder, "sample", _write, cache)


def _write(folder: Path, data: bytes, meta: dict[str, Any]) -> None:
    write_splits(folder, assemble(decode(data)), meta)
