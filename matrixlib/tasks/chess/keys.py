"""Keys of positions, ids of games, and the split into training and validation that follows from these.

Ids and split are stable for ever: a run that is resumed, and a file that is imported again, rely on them.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess.records import Records, mirror_files, mirror_pieces, mirrorable

# RECORD's `source`: where a position comes from
SOURCES: Mapping[str, int] = {
    "unknown": 0,
    "stockfish": 1,
    "pgn": 2,
    "puzzles": 3,
    "evaluations": 4,
    "epd": 5,
    "lc0": 6,
    "matrix0": 7,
    "labelled": 8,
    "selfplay": 9,
}
VALIDATION = 50  # per mille of the games
SHARD = 32768  # records in a shard
MIX = np.uint64(0x9E3779B97F4A7C15)


def keys_of(records: Records) -> list[bytes]:
    """A key of 128 bits for each record that equal positions share: orientation has taken the colours out, and where
    no castling right is left, the left-right mirror image counts as equal."""
    pieces, files = records["pieces"], records["en_passant"]
    images, image_files = mirror_pieces(pieces), mirror_files(files)
    keys = []
    rows = zip(pieces, images, files, image_files, records["castling"], strict=True)
    for plain, image, file, image_file, castling in rows:
        key = plain.tobytes() + bytes((castling, file + 1))
        if not castling:
            key = min(key, image.tobytes() + bytes((0, image_file + 1)))
        keys.append(hashlib.blake2b(key, digest_size=16).digest())
    return keys


def hashes_of(records: Records, mirrored: bool = False) -> NDArray[np.uint64]:
    """(n,) u8: equal for equal boards (pieces, castling, en passant, all as the side to move sees them), and with
    `mirrored` for mirror images too. 64 bits in no time: good for counting, not for telling positions apart for
    certain (`keys_of` is)."""
    plain = _mixed(records["pieces"], records["castling"], records["en_passant"])
    if not mirrored:
        return plain
    files = mirror_files(records["en_passant"])
    image = _mixed(mirror_pieces(records["pieces"]), records["castling"], files)
    return np.where(mirrorable(records), np.minimum(plain, image), plain)


def _mixed(pieces: NDArray[np.uint8], castling: NDArray[np.uint8], files: NDArray[np.int8]) -> NDArray[np.uint64]:
    state = castling.astype(np.uint64) << np.uint64(8) | (files + 1).astype(np.uint64)
    key = np.zeros(len(pieces), np.uint64)
    for word in (*np.ascontiguousarray(pieces).view("<u8").T, state):
        key = (key ^ word) * MIX
        key ^= key >> np.uint64(29)
    return key


def ids_of(records: Records) -> NDArray[np.uint64]:
    """(n,) u8 ids that equal positions (see `keys_of`) share, in place of a game's for what belongs to no game."""
    return np.array([int.from_bytes(key[:8], "little") for key in keys_of(records)], "<u8")


def game_id(*facts: str | bytes) -> int:
    """A 64-bit id of a game, from whatever tells it apart (its text, a puzzle's source game)."""
    digest = hashlib.blake2b(digest_size=8)
    for fact in facts:
        data = fact.encode() if isinstance(fact, str) else fact
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


def held_out(records: Records) -> NDArray[np.bool_]:
    """Which records (n,) are for validation: those of about one game in twenty, whose id is itself a hash."""
    chosen: NDArray[np.bool_] = records["game"] // np.uint64(1 << 20) % np.uint64(1000) < VALIDATION
    return chosen
