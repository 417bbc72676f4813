"""From generated chunks to training records: policy and win-draw-loss targets, duplicates out, split by game.

Everything here is integer arithmetic on what the engine said, so packing again gives the same bytes
everywhere. The policy target is kept as levels: level k means exp(-k / 10) times the best move's weight, that
is a softmax at 50 centipawns in steps of 5; levels are also what the shipped sample set stores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from matrixlib.data.shards import SPLITS, Batch, ShardInfo, select, write_shard
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.keys import SOURCES, is_validation, keys_of
from matrixlib.tasks.chess.records import LAYOUT, RECORD, UNKNOWN
from matrixlib.tasks.chess.scores import wdl_of_shares, whole_shares
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT, MATE
from matrixlib.tasks.chess.stockfish.generator import chunks

PACKING = 1  # version of the rules in this file
SHARD = 32768  # records in a shard
TEMPERATURE = 50  # centipawns
STEP = 5  # centipawns of a level
NO_WEIGHT = 81  # levels from here on (more than 400 centipawns behind) have no weight
MARGIN = 10  # centipawns by which a move outside the deep lines is at least behind the last of them
CENTIPAWNS = 2000  # scores are cut here: beyond, the rank of winning moves is noise
MATE_VALUE, MATE_STEP, MATE_MOVES = 3000, 50, 15  # a mate in k counts 3000 - 50 min(k, 15) centipawns
WEIGHTS = np.array(
    [int((Decimal(-k * STEP) / TEMPERATURE).exp() * 10**6) for k in range(NO_WEIGHT)] + [0], dtype=np.int64
)


BOARD = ("pieces", "castling", "en_passant")  # what decides about legal moves


class Positions(NamedTuple):
    """Positions before their targets are filled in."""

    records: np.ndarray  # (n,) RECORD, wdl still 0
    per_mille: np.ndarray  # (n, 3) u2, win-draw-loss of the side to move
    level: np.ndarray  # (K,) u1, of all legal moves in ascending order of policy index

    def head(self, n: int) -> Positions:
        """The first n positions."""
        _, offset = bitboard.legal_policy_indices(*(self.records[:n][name] for name in BOARD))
        return Positions(self.records[:n], self.per_mille[:n], self.level[: offset[-1]])


@dataclass
class Seen:
    """Keys of the positions that were taken, from all games of both splits."""

    keys: set[bytes] = field(default_factory=set)
    duplicates: int = 0


def values(scores: np.ndarray) -> np.ndarray:
    """Stored scores (see stockfish.MATE) as centipawns: a shorter mate is better, any mate best."""
    scores = scores.astype(np.int64)
    moves = np.minimum(MATE - np.abs(scores), MATE_MOVES)
    mates = np.sign(scores) * (MATE_VALUE - MATE_STEP * moves)
    return np.where(np.abs(scores) > CENTIPAWN_LIMIT, mates, np.clip(scores, -CENTIPAWNS, CENTIPAWNS))


def levels(chunk: Batch) -> np.ndarray:
    """(K,) u1 policy levels of all legal moves, in the order of the chunk's `legal`.

    The deep search decides about its own lines. It also says that every other move is worse than the last of
    them, so the shallow score of the others is cut there (less MARGIN): without that, a blunder that only
    the shallow search likes would keep its weight.
    """
    offset = chunk["legal_offset"].astype(np.int64)
    value = values(chunk["score"])
    rows = np.repeat(np.arange(len(offset) - 1), np.diff(offset))
    deep, deep_value = chunk["deep"].astype(np.int64), values(chunk["deep_score"])
    valid = deep != 255
    last = np.where(valid, deep_value, np.iinfo(np.int64).max).min(axis=1)
    value = np.minimum(value, (last - MARGIN)[rows])
    for line in range(deep.shape[1]):
        mask = valid[:, line]
        value[offset[:-1][mask] + deep[mask, line]] = deep_value[mask, line]
    best = np.maximum.reduceat(value, offset[:-1]) if len(rows) else value
    return np.minimum((best[rows] - value + STEP // 2) // STEP, NO_WEIGHT).astype(np.uint8)


def weights_of(level: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Levels (K,) of rows `offset` (n+1,) to weights (K,) u2; see `whole_shares`."""
    return whole_shares(WEIGHTS[level], offset)


def ordered(chunk: Batch, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The levels (K,) in ascending order of policy index in each row, and offsets (n+1,) int64.

    Raises ValueError where the engine's moves are not the legal moves.
    """
    moves, _, offset = bitboard.legal_moves(*(chunk[name] for name in BOARD))
    if not np.array_equal(offset, chunk["legal_offset"]):
        raise ValueError("the engine lists other numbers of moves than are legal: delete the chunk")
    rows = np.repeat(np.arange(len(offset) - 1), np.diff(offset)) << 16
    code = chunk["legal"].astype(np.int64)
    code -= np.where(code >> 12, 1 << 12, 0)  # python-chess counts the knight as 2, bitboard as 1
    ours, found = np.argsort(rows + moves), np.argsort(rows + code)
    if not np.array_equal((rows + moves)[ours], (rows + code)[found]):
        raise ValueError("the engine lists moves that are not legal: delete the chunk")
    placed = np.empty_like(level)
    placed[ours] = level[found]
    return placed, offset


def convert(chunk: Batch, seen: Seen) -> Positions:
    """The new positions of a chunk. Raises ValueError where the engine's moves are not the legal ones."""
    game = chunk["game"].astype(np.int64)
    records = np.zeros(len(game), RECORD)
    for name in ("pieces", "castling", "en_passant", "halfmove", "repetition", "side", "ply"):
        records[name] = chunk[name]
    white = chunk["result"][game]
    records["result"] = np.where((chunk["side"] == 1) & (white != UNKNOWN), -white, white)
    records["source"] = SOURCES["stockfish"]
    records["game"] = chunk["game_id"][game]
    level, offset = ordered(chunk, levels(chunk))
    new = np.zeros(len(records), bool)
    for row, key in enumerate(keys_of(records)):
        new[row] = key not in seen.keys
        seen.keys.add(key)
    seen.duplicates += int((~new).sum())
    return Positions(records[new], chunk["wdl"][new], level[np.repeat(new, np.diff(offset))])


def collect(work: Path, limit: int | None = None, seen: Seen | None = None) -> Positions:
    """The positions of all finished chunks of a work folder in order, without duplicates, at most `limit`.

    `seen` counts the duplicates. Raises ValueError for a damaged chunk and for a folder without any.
    """
    seen = Seen() if seen is None else seen
    parts: list[Positions] = []
    count = 0
    for number, chunk in chunks(work):
        try:
            part = convert(chunk, seen)
        except ValueError as error:
            raise ValueError(f"chunk {number} of {work}: {error}") from error
        parts.append(part)
        count += len(part.records)
        if limit is not None and count >= limit:
            break
    if not count:
        raise ValueError(f"{work} holds no finished chunk: call sources.generate first")
    whole = Positions(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    return whole if limit is None or count <= limit else whole.head(limit)


def assemble(positions: Positions) -> Batch:
    """The batch that is stored: win-draw-loss and policy targets filled in."""
    records = positions.records.copy()
    records["wdl"] = wdl_of_shares(positions.per_mille)
    index, offset = bitboard.legal_policy_indices(*(records[name] for name in BOARD))
    if len(index) != len(positions.level):
        raise ValueError(f"{len(positions.level)} policy levels for {len(index)} legal moves")
    weight = weights_of(positions.level, offset)
    return {
        "records": records,
        "policy_offset": offset.astype("<i8"),
        "policy_index": index.astype("<u2"),
        "policy_weight": weight,
    }


def provenance(work: Path, created: str | None = None) -> dict[str, Any]:
    """The meta data of shards made from a work folder, but the split. `created`: by default when it began."""
    path = work / "generator.json"
    if not path.exists():
        raise ValueError(f"{work} holds no generated games: call sources.generate first")
    generator = json.loads(path.read_text())
    began = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    rules = {"version": PACKING, "temperature": TEMPERATURE, "step": STEP, "margin": MARGIN}
    return {
        "source": "stockfish",
        "generator": {**generator, "packing": rules},
        "seed": generator["parameters"]["seed"],
        "created": created or began.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def write_splits(folder: Path, batch: Batch, meta: dict[str, Any]) -> list[ShardInfo]:
    """Writes both splits as shards of SHARD records, game order kept (the loader shuffles).

    ValueError where the folder holds shards: a catalogue would take those that grew for damaged, and those that there
    are fewer of now would stay in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.npz")):
        raise ValueError(f"{folder} holds shards already: give another folder, or delete that one")
    validation = is_validation(batch["records"]["game"])
    infos = []
    for split, mask in (("train", ~validation), ("validation", validation)):
        rows = np.flatnonzero(mask)
        for number, start in enumerate(range(0, len(rows), SHARD)):
            part = select(batch, rows[start : start + SHARD], LAYOUT)
            path = folder / f"{meta['source']}_{split}_{number:03d}.npz"
            infos.append(write_shard(path, LAYOUT, part, {**meta, "split": split}))
    return infos


def pack(
    work: Path | str, out: Path | str, limit: int | None = None, created: str | None = None
) -> dict[str, Any]:
    """Packs the finished chunks of `work` into shards in `out`; at most `limit` positions.

    A position is in one split only and there once, its mirror image and its colour-swapped image included;
    games are whole in one split, about 5 % of them in validation. Opening the folder as a catalogue takes the
    shards in. Returns the numbers of shards, of train and validation positions, of duplicates left out, and
    bytes a position. Raises ValueError for an empty or damaged work folder, and where `out` holds shards.
    """
    meta = provenance(Path(work), created)
    seen = Seen()
    infos = write_splits(Path(out), assemble(collect(Path(work), limit, seen)), meta)
    count = {split: sum(info.count for info in infos if info.meta["split"] == split) for split in SPLITS}
    size = sum(info.bytes for info in infos) / sum(count.values())
    return {"shards": len(infos), **count, "duplicates": seen.duplicates, "bytes_per_position": size}
