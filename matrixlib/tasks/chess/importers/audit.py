"""Data quality: checks and statistics of positions, outlier shards, random samples of a data set."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, concat

from matrixlib.data import catalogue
from matrixlib.data.catalogue import Catalogue, ShardRow
from matrixlib.data.imports import import_logs
from matrixlib.data.remote import local_path
from matrixlib.data.shards import BLOCK, Batch, Shard, ShardError, ragged_rows
from matrixlib.data.shards import concat as concat_batches
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import valid_castling
from matrixlib.tasks.chess.records import (
    LAYOUT,
    UNKNOWN,
    WDL_SUM,
    legal_indices,
    move_from_index,
    position_hashes,
    to_board,
    valid_positions,
)

MAX_BLOCKS = 64  # read per source for a sample, so that it takes seconds for any data set
COMPARED_FIGURES = [
    *("policy_mean", "policy_weight_entropy_mean", "policy_weight_entropy_std", "policy_weight_zero"),
    *("men", "ply", "black", "known_result", "known_wdl"),
    *("win", "draw", "loss", "white", "value", "value_gap"),
]


def faults(batch: Batch) -> dict[str, NDArray[np.bool_]]:
    """Faults that keep positions from being stored: fault -> mask (N,), only those that occur."""
    records = batch["records"]
    total = records["wdl"].sum(axis=1, dtype=np.int64)
    file = bitboard.legal_en_passant(records["pieces"], records["en_passant"])
    standing = valid_castling(records["castling"], records["pieces"])
    masks = {
        "not a position of chess": ~valid_positions(bitboard.bitboards(records["pieces"])),
        "a castling right without king and rook at home": standing != records["castling"],
        "an en-passant file where no capture is legal": file != records["en_passant"],
        "no such result": (records["result"] < -1) | (records["result"] > UNKNOWN),
        "win, draw and loss do not add up": (total != 0) & (total != WDL_SUM),
        "the listed moves are not the legal ones": wrong_move_lists(batch),
    }
    return {fault: rows for fault, rows in masks.items() if rows.any()}


def wrong_move_lists(batch: Batch) -> NDArray[np.bool_]:
    """Mask (N,) of rows whose policy indices are not exactly the legal moves in ascending order."""
    index, offset = legal_indices(batch["records"])
    wrong: NDArray[np.bool_] = np.diff(offset) != np.diff(batch["policy_offset"])
    rows = np.flatnonzero(~wrong)
    legal, bounds = ragged_rows(offset, rows)
    listed, _ = ragged_rows(batch["policy_offset"], rows)
    differs = index[legal] != batch["policy_index"][listed]
    wrong[np.repeat(rows, np.diff(bounds))[differs]] = True
    return wrong


def position_statistics(batch: Batch) -> dict[str, NDArray[Any]]:
    """Statistics (N,) of each position, nan if unknown.

    men: pieces on the board. moves: legal moves. value: win - loss, in [-1, 1]. result: of the side to move; white: of
    White. entropy: of the policy, nats.
    """
    records, offset = batch["records"], batch["policy_offset"]
    wdl = records["wdl"].astype(np.float64) / WDL_SUM
    result = np.where(records["result"] == UNKNOWN, np.nan, records["result"])
    pieces = records["pieces"]
    some = np.flatnonzero(batch["policy_weight"])
    row, weight = np.searchsorted(offset, some, side="right") - 1, batch["policy_weight"][some].astype(np.float64)
    total, own = (np.bincount(row, amount, len(records)) for amount in (weight, weight * np.log(weight)))
    safe = np.where(total > 0, total, 1)
    return {
        "ply": records["ply"].astype(np.int64),
        "men": (pieces & 15 != bitboard.EMPTY).sum(1) + (pieces >> 4 != bitboard.EMPTY).sum(1),
        "moves": np.diff(offset),
        "value": np.where(wdl.sum(1) > 0, wdl[:, 0] - wdl[:, 2], np.nan),
        "result": result,
        "white": np.where(records["side"] == 1, 0 - result, result),
        "entropy": np.where(total > 0, np.maximum(np.log(safe) - own / safe, 0), np.nan),
    }


def shard_quality(batch: Batch) -> dict[str, float]:
    """Quality figures of a shard, unknown ones omitted; most are means of `position_statistics`.

    duplicates: repeated positions. policy_mean: legal moves. policy_weight_*: mean and standard deviation of the
    entropy (nats), share of records without policy. win, draw, loss: rates for the side to move. value_gap: mean
    |value - result|, in [0, 2].
    """
    points = DataFrame(position_statistics(batch))
    known, entropy = points["result"].dropna(), points["entropy"]
    numbers = {
        **points[["men", "ply", "white", "value"]].mean(),
        "records": len(points),
        "duplicates": len(points) - len(np.unique(position_hashes(batch["records"]))),
        "policy_mean": points["moves"].mean(),
        "policy_weight_entropy_mean": entropy.mean(),
        "policy_weight_entropy_std": entropy.std(ddof=0),
        "policy_weight_zero": entropy.isna().mean(),
        "black": batch["records"]["side"].mean(),
        "known_result": len(known) / len(points),
        "known_wdl": points["value"].notna().mean(),
        **{name: (known == third).mean() for name, third in (("win", 1), ("draw", 0), ("loss", -1))},
        "value_gap": (points["value"] - points["result"]).abs().mean(),
    }
    return {name: float(number) for name, number in numbers.items() if not np.isnan(number)}


def _compared(quality: Mapping[str, Any]) -> dict[str, float]:
    return {name: quality.get(name, np.nan) for name in COMPARED_FIGURES}


OUTLIER_Z = catalogue.OUTLIER_Z
outlier_scores = partial(catalogue.outlier_scores, figures=_compared)
mark_outliers = partial(catalogue.mark_outliers, figures=_compared)


def sample(folder: Path | str, count: int = 4000, seed: int = 0, plies: tuple[int, int] = (0, 65535)) -> DataFrame:
    """Table of up to `count` random records per source, from at most MAX_BLOCKS blocks.

    Columns: source, split, shard, row (in the shard), fen; best, weight: the likeliest move in UCI and its weight, ""
    and nan for faulty records and those without policy; key: equal for equal and mirrored positions; fault: see
    `faults`; and those of `position_statistics`.

    plies: first and last ply to sample from. Unreadable blocks are skipped; `Catalogue.verify` names their shards.
    ValueError for a folder without a healthy shard and an empty sample.
    """
    if count < 1 or seed < 0:
        raise ValueError(f"sample is {count} and seed {seed}; give a number of records from 1, and a seed from 0")
    rows = Catalogue(folder, warn=False).shards(state=None)
    healthy = [row for row in rows if row.state == "healthy"]
    if not healthy:
        reasons = [f"{row.name}: {row.reason}" for row in rows]
        reasons += {entry.reason for log in import_logs(folder) for entry in log.refused}
        raise ValueError(f"{folder} holds no healthy shard; {'; '.join(reasons[:3]) or 'import something first'}")
    rng = np.random.default_rng(seed)
    parts = [_table(concat_batches([], LAYOUT), healthy[0], np.zeros(0, np.int64))]
    for source in sorted({row.source for row in healthy}):
        blocks = list(_eligible([row for row in healthy if row.source == source], plies, rng))
        ends = np.cumsum([0, *(len(numbers) for _, numbers in blocks)])
        chosen = np.sort(rng.permutation(ends[-1])[:count])
        for (row, numbers), begin, end in zip(blocks, ends, ends[1:], strict=False):
            picked = numbers[chosen[(chosen >= begin) & (chosen < end)] - begin]
            if len(picked):
                parts.append(_table(Shard(local_path(row), LAYOUT).gather(picked), row, picked))
    return concat(parts[1:] or parts, ignore_index=True)


def _eligible(
    rows: Sequence[ShardRow], plies: tuple[int, int], rng: np.random.Generator
) -> Iterator[tuple[ShardRow, NDArray[np.int64]]]:
    """Random readable blocks in order, with the row numbers of the records in the range of plies."""
    blocks = [(row, start) for row in rows for start in range(0, row.count, BLOCK)]
    for number in np.sort(rng.permutation(len(blocks))[:MAX_BLOCKS]):
        row, start = blocks[number]
        try:
            shard = Shard(local_path(row), LAYOUT)
            shard.verify_block(start // BLOCK)
        except ShardError:
            continue
        ply = shard.arrays["records"]["ply"][start : start + BLOCK]
        yield row, start + np.flatnonzero((ply >= plies[0]) & (ply <= plies[1]))


def _table(batch: Batch, row: ShardRow, numbers: NDArray[np.int64]) -> DataFrame:
    offset, weight, index = (batch[f"policy_{name}"] for name in ("offset", "weight", "index"))
    boards = [to_board(record) for record in batch["records"]]
    found = position_statistics(batch)
    fault = np.full(len(boards), "", object)
    for name, mask in faults(batch).items():
        fault[mask] = name
    best, share = np.full(len(boards), "", object), np.full(len(boards), np.nan)
    for item in np.flatnonzero(~np.isnan(found["entropy"]) & (fault == "")):
        own = weight[offset[item] : offset[item + 1]]
        best[item] = move_from_index(int(index[offset[item] + own.argmax()]), boards[item]).uci()
        share[item] = own.max() / own.sum()
    facts = {
        **{"source": row.source, "split": row.split, "shard": row.name, "row": numbers},
        "fen": [board.fen() for board in boards],
        "best": best,
        "weight": share,
        **found,
        "key": position_hashes(batch["records"], mirrored=True),
        "fault": fault,
    }
    return DataFrame(facts)
