"""What is checked and measured on chess positions, and a folder of shards as tables: shards, imports, a sample."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, concat

from matrixlib.data import stats
from matrixlib.data.catalogue import Catalogue, ShardRow
from matrixlib.data.imports import import_logs
from matrixlib.data.remote import local_path
from matrixlib.data.shards import BLOCK, Batch, Shard, ShardError, ragged_rows
from matrixlib.data.shards import concat as concat_batches
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.importers.notation import classes_of, standing_rights
from matrixlib.tasks.chess.keys import hashes_of
from matrixlib.tasks.chess.records import (
    LAYOUT,
    PIECE_VALUES,
    UNKNOWN,
    WDL_SUM,
    legal_indices,
    move_from_index,
    playable,
    to_board,
)

MAX_BLOCKS = 64  # of a source that its sample is from: a set of any size is looked at in seconds
MEASURED = 8 * BLOCK  # records of a shard without figures
MATERIAL = np.array([*PIECE_VALUES, *(-value for value in PIECE_VALUES), 0])  # by class of a square
PHASE = np.array([0, 1, 1, 2, 4, 0] * 2 + [0])  # 24 at the start, 0 where kings and pawns are left
MIN_SHARDS = 9  # of a source and split, below which none is called an outlier
FAR = 6.0  # robust standard deviations
COMPARED = (
    *("policy_mean", "policy_weight_entropy_mean", "policy_weight_entropy_std", "policy_weight_zero"),
    *("men", "ply", "black", "known_result", "known_wdl"),
    *("win", "draw", "loss", "white", "value", "value_gap"),
)


# Positions


def faults(batch: Batch) -> dict[str, NDArray[np.bool_]]:
    """What makes positions unfit to be stored: fault -> (n,) bool, for the faults that occur."""
    records = batch["records"]
    total = records["wdl"].sum(axis=1, dtype=np.int64)
    file = bitboard.legal_en_passant(records["pieces"], records["en_passant"])
    standing = standing_rights(records["castling"], records["pieces"])
    masks = {
        "not a position of chess": ~playable(bitboard.bitboards(records["pieces"])),
        "a castling right without king and rook at home": standing != records["castling"],
        "an en-passant file where no capture is legal": file != records["en_passant"],
        "no such result": (records["result"] < -1) | (records["result"] > UNKNOWN),
        "win, draw and loss do not add up": (total != 0) & (total != WDL_SUM),
        "the listed moves are not the legal ones": unlike_legal(batch),
    }
    return {fault: rows for fault, rows in masks.items() if rows.any()}


def unlike_legal(batch: Batch) -> NDArray[np.bool_]:
    """(n,) bool: the listed policy indices are not exactly those of the legal moves, in ascending order."""
    index, offset = legal_indices(batch["records"])
    wrong: NDArray[np.bool_] = np.diff(offset) != np.diff(batch["policy_offset"])
    rows = np.flatnonzero(~wrong)
    legal, bounds = ragged_rows(offset, rows)
    listed, _ = ragged_rows(batch["policy_offset"], rows)
    differs = index[legal] != batch["policy_index"][listed]
    wrong[np.repeat(rows, np.diff(bounds))[differs]] = True
    return wrong


def columns(batch: Batch) -> dict[str, NDArray[Any]]:
    """Figures (n,) of each position, nan where unknown.

    men: pieces on the board. value: expected points by win-draw-loss, -1 to 1. result: points of the side to move;
    white: White's.
    """
    records = batch["records"]
    wdl = records["wdl"].astype(np.float64) / WDL_SUM
    result = np.where(records["result"] == UNKNOWN, np.nan, records["result"])
    pieces = records["pieces"]
    return {
        "ply": records["ply"].astype(np.int64),
        "men": (pieces & 15 != bitboard.EMPTY).sum(1) + (pieces >> 4 != bitboard.EMPTY).sum(1),
        "value": np.where(wdl.sum(1) > 0, wdl[:, 0] - wdl[:, 2], np.nan),
        "result": result,
        "white": np.where(records["side"] == 1, 0 - result, result),
    }


def figures(batch: Batch) -> stats.Figures:
    """The quality figures of a shard: those of `data.stats`, and what is particular to chess.

    men: pieces on the board. ply: half moves since the start. black: share with Black to move. known_result and
    known_wdl: shares; win, draw, loss: of the known results, for the side to move; white: White's mean points (-1 to
    1). value: mean expected points by win-draw-loss; value_gap: mean distance from the result, where both are known
    (0 to 2). The weight on legal moves needs no figure: `faults` lets no other move pass.
    """
    records, points = batch["records"], columns(batch)
    value, result = points["value"], points["result"]
    known, valued = ~np.isnan(result), ~np.isnan(value)
    out = {
        "men": points["men"].mean(),
        "ply": records["ply"].mean(),
        "black": records["side"].mean(),
        "known_result": known.mean(),
        "known_wdl": valued.mean(),
    }
    if known.any():
        thirds = (("win", 1), ("draw", 0), ("loss", -1))
        out |= {name: (result[known] == third).mean() for name, third in thirds}
        out["white"] = points["white"][known].mean()
    if valued.any():
        out["value"] = value[valued].mean()
    if (known & valued).any():
        out["value_gap"] = np.abs(value - result)[known & valued].mean()
    general = stats.figures(batch, LAYOUT, keys=hashes_of(records), weight="policy_weight")
    return general | {name: float(number) for name, number in out.items()}


# Shards


def shard_table(rows: Iterable[ShardRow]) -> DataFrame:
    """Source, split, state, reason, records, MB and quality figures of shards, by name.

    The figures are those of the import; of the first 64 shards that were not imported, they are measured here on a
    few records.
    """
    facts, unmeasured = [], MAX_BLOCKS
    for row in rows:
        quality = row.quality
        if not quality and row.state == "healthy" and unmeasured:
            unmeasured -= 1
            with contextlib.suppress(ShardError):  # `Catalogue.verify` names it
                quality = figures(_opened(row).gather(np.arange(min(row.count, MEASURED))))
        facts.append(
            {"shard": row.name, "source": row.source, "split": row.split, "state": row.state, "reason": row.reason}
            | {"records": row.count, "MB": row.bytes / 1e6}
            | {figure: quality.get(figure, np.nan) for figure in COMPARED}
        )
    names = ("shard", "source", "split", "state", "reason", "records", "MB", *COMPARED)
    return DataFrame(facts, columns=list(names)).set_index("shard")


def distances(shards: DataFrame) -> DataFrame:
    """How far each figure of a healthy shard (see `shard_table`) is from the median of those of its source and split,
    where those are 9 at least, in robust standard deviations.

    One is 1.4826 times the median absolute deviation, at least 2 % of the median and 0.01 (entropies in nats, shares,
    points).
    """

    def robust(group: DataFrame) -> DataFrame:
        middle = group.median()
        scale = 1.4826 * (group - middle).abs().median()
        return (group - middle) / scale.clip(lower=(0.02 * middle.abs()).clip(lower=0.01))

    healthy = shards[(shards["state"] == "healthy") & shards[list(COMPARED)].notna().any(axis=1)]
    groups = [group[list(COMPARED)] for _, group in healthy.groupby(["source", "split"]) if len(group) >= MIN_SHARDS]
    return concat([robust(group) for group in groups]) if groups else healthy[list(COMPARED)][:0]


def mark_outliers(catalogue: Catalogue, names: Sequence[str]) -> list[str]:
    """Put what is far off in the figures of these shards into the catalogue beside them ("outliers": figure -> robust
    z). Returns it in words."""
    rows = {row.name: row for row in catalogue.shards()}
    found, lines = distances(shard_table(rows.values())), []
    for name in filter(set(names).__contains__, found.index):
        far = {figure: round(z, 1) for figure, z in found.loc[name].items() if abs(z) > FAR}
        if far:
            catalogue.set_quality(name, {**rows[name].quality, "outliers": far})
            lines.append(f"{name}: " + ", ".join(f"{figure} (z {z:+.1f})" for figure, z in far.items()))
    return lines


# A folder


def games(rows: Iterable[ShardRow]) -> DataFrame:
    """Source, split and id of each game of healthy shards, once a shard."""
    parts = [DataFrame(columns=["source", "split", "game"])]
    for row in rows:
        if row.state == "healthy":
            with contextlib.suppress(ShardError):  # `Catalogue.verify` names it
                ids = np.unique(_opened(row).arrays["records"]["game"])
                parts.append(DataFrame({"source": row.source, "split": row.split, "game": ids}))
    return concat(parts[1:] or parts, ignore_index=True)


def imports(folder: Path | str) -> DataFrame:
    """The steps of the imports into a folder: what became of the entries of each file; empty for a set that was made
    here or copied. fault: why a step's log does not add up, or is not of the shards that are there; "" where all is
    well."""
    rows = {row.name: row for row in Catalogue(folder, warn=False).shards(state=None)}
    facts = []
    for log in import_logs(folder):
        counts = {"stored": log.stored, "in quarantine": len(log.refused)}
        counts["left out"] = sum(log.skipped.values())
        positions = sum(log.positions.values())
        lost = [name for name, sha in log.shards.items() if name not in rows or rows[name].sha256 != sha]
        fault = ""
        if sum(counts.values()) != log.entries:
            fault = f"{log.entries} entries, {sum(counts.values())} accounted for"
        elif lost:
            fault = f"{', '.join(lost)} not as written"
        elif sum(rows[name].count for name in log.shards) != positions:
            fault = "its shards hold other numbers of positions than it says"
        options = [option for option, value in log.reader.items() if value is True]
        facts.append(
            {"file": log.file, "kind": " ".join([log.source, *options]), "step": log.step}
            | {"entries": log.entries, **counts, "positions": positions, "fault": fault}
        )
    names = ("file", "kind", "step", "entries", "stored", "in quarantine", "left out", "positions", "fault")
    return DataFrame(facts, columns=list(names))


def sample(folder: Path | str, count: int = 4000, seed: int = 0, plies: tuple[int, int] = (0, 65535)) -> DataFrame:
    """At most `count` random records of each source, from at most 64 blocks of it, as a table.

    Columns beside those of `columns`: source, split, shard, row (in the shard), fen; best, weight: the likeliest move
    in UCI and its share, "" and nan without a policy, or where the record is at fault; phase: 24 at the start, 0 with
    kings and pawns alone; balance: material of the side to move less the other's, in pawns; moves: legal ones; entropy:
    of the policy, nats, nan without one; key: equal for equal positions and their mirror images; fault: see `faults`.

    plies: the first and last ply of records to choose from. Blocks that cannot be read are left out; `Catalogue.verify`
    names their shards. ValueError for a folder without a healthy shard, and for a sample of nothing.
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
    parts = []
    for source in sorted({row.source for row in healthy}):
        own = [row for row in healthy if row.source == source]
        blocks = list(_eligible(own, plies, rng))
        ends = np.cumsum([0, *(len(numbers) for _, numbers in blocks)])
        chosen = np.sort(rng.permutation(ends[-1])[:count])
        for (row, numbers), begin, end in zip(blocks, ends, ends[1:], strict=False):
            picked = numbers[chosen[(chosen >= begin) & (chosen < end)] - begin]
            if len(picked):
                parts.append(_table(_opened(row).gather(picked), row, picked))
    return (
        concat(parts, ignore_index=True)
        if parts
        else _table(concat_batches([], LAYOUT), healthy[0], np.zeros(0, np.int64))
    )


def _opened(row: ShardRow) -> Shard:
    return Shard(local_path(row), LAYOUT)


def _eligible(
    rows: Sequence[ShardRow], plies: tuple[int, int], rng: np.random.Generator
) -> Iterator[tuple[ShardRow, NDArray[np.int64]]]:
    """Some readable blocks of shards, in order, with the numbers of the records that may be chosen."""
    blocks = [(row, start) for row in rows for start in range(0, row.count, BLOCK)]
    for number in np.sort(rng.permutation(len(blocks))[:MAX_BLOCKS]):
        row, start = blocks[number]
        try:
            shard = _opened(row)
            shard.verify_block(start // BLOCK)
        except ShardError:
            continue
        ply = shard.arrays["records"]["ply"][start : start + BLOCK]
        yield row, start + np.flatnonzero((ply >= plies[0]) & (ply <= plies[1]))


def _table(batch: Batch, row: ShardRow, numbers: NDArray[np.int64]) -> DataFrame:
    """Records of a shard, as `sample` lists them."""
    offset, weight, index = (batch[f"policy_{name}"] for name in ("offset", "weight", "index"))
    boards = [to_board(record) for record in batch["records"]]
    entropy, weighted = stats.row_entropy(weight, offset)
    best = [begin + int(weight[begin:end].argmax()) for begin, end in pairwise(offset)]
    fault = np.full(len(boards), "", object)
    for name, mask in faults(batch).items():
        fault[mask] = name
    valid = weighted & (fault == "")
    moves = [
        move_from_index(int(index[best[row]]), boards[row]).uci() if valid[row] else "" for row in range(len(best))
    ]
    share = weight / np.repeat(np.maximum(1, np.diff(np.append(0, np.cumsum(weight))[offset])), np.diff(offset))
    classes = classes_of(batch["records"]["pieces"])
    facts = {
        **{"source": row.source, "split": row.split, "shard": row.name, "row": numbers},
        "fen": [board.fen() for board in boards],
        "best": moves,
        "weight": np.where(valid, share[best], np.nan),
        **columns(batch),
        "phase": PHASE[classes].sum(1),
        "balance": MATERIAL[classes].sum(1),
        "moves": np.diff(offset),
        "entropy": np.where(weighted, entropy, np.nan),
        "key": hashes_of(batch["records"], mirrored=True),
        "fault": fault,
    }
    return DataFrame(facts)
