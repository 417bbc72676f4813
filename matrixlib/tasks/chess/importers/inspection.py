"""What is checked and measured on chess positions before they are stored."""

from __future__ import annotations

import numpy as np

from matrixlib.data.shards import Batch
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.records import UNKNOWN, WDL_SUM, legal_indices, playable

# Of each castling right: the bitboards of king and rook, and where they have to stand
RIGHTS = ((5, 4, 3, 7), (5, 4, 3, 0), (11, 60, 9, 63), (11, 60, 9, 56))
MIX = np.uint64(0x9E3779B97F4A7C15)


def faults(batch: Batch) -> dict[str, np.ndarray]:
    """What makes positions unfit to be stored: fault -> (n,) bool, for the faults that occur."""
    records = batch["records"]
    boards = bitboard.bitboards(records["pieces"])
    castling = np.zeros(len(records), bool)
    for bit, (king, king_square, rook, rook_square) in enumerate(RIGHTS):
        at_home = (boards[:, king] >> np.uint64(king_square)) & (boards[:, rook] >> np.uint64(rook_square))
        castling |= (records["castling"] >> bit & 1 == 1) & (at_home & np.uint64(1) == 0)
    total = records["wdl"].sum(axis=1, dtype=np.int64)
    file = bitboard.legal_en_passant(records["pieces"], records["en_passant"])
    found = {
        "not a position of chess": ~playable(boards),
        "a castling right without king and rook at home": castling | (records["castling"] > 15),
        "an en-passant file where no capture is legal": file != records["en_passant"],
        "no such result": (records["result"] < -1) | (records["result"] > UNKNOWN),
        "win, draw and loss do not add up": (total != 0) & (total != WDL_SUM),
        "the listed moves are not the legal ones": unlike_legal(batch),
    }
    return {fault: rows for fault, rows in found.items() if rows.any()}


def unlike_legal(batch: Batch) -> np.ndarray:
    """(n,) bool: the listed policy indices are not exactly those of the legal moves, in ascending order."""
    index, offset = legal_indices(batch["records"])
    count, given = np.diff(offset), np.diff(batch["policy_offset"])
    wrong: np.ndarray = count != given
    if not wrong.any():
        rows = np.repeat(np.arange(len(count)), count)
        wrong[rows[index != batch["policy_index"]]] = True
        return wrong
    for row in np.flatnonzero(~wrong):  # the rare case may be slow
        start, here = batch["policy_offset"][row], offset[row]
        wrong[row] = (
            batch["policy_index"][start : start + given[row]] != index[here : here + count[row]]
        ).any()
    return wrong


def position_keys(records: np.ndarray) -> np.ndarray:
    """(n,) u8: equal for equal boards (pieces, castling, en passant, all as the side to move sees them); 64 bits, so
    good for counting and not for telling positions apart for certain (`packing.keys_of` is)."""
    words = np.ascontiguousarray(records["pieces"]).view("<u8")
    state = records["castling"].astype(np.uint64) << np.uint64(8) | (records["en_passant"] + 1).astype(
        np.uint64
    )
    key = np.zeros(len(records), np.uint64)
    for word in (*words.T, state):
        key = (key ^ word) * MIX
        key ^= key >> np.uint64(29)
    return key


def figures(batch: Batch) -> dict[str, float]:
    """Figures of a batch of positions beside those that mean something for every task (`data.quality`).

    men: pieces on the board. ply: half moves since the start. black: share with Black to move. known_result and
    known_wdl: shares; win, draw, loss: of the known results, for the side to move; white: White's mean points (-1 to
    1). value: mean expected points by win-draw-loss; value_gap: mean distance from the result, where both are known
    (0 to 2). The weight on legal moves needs no figure: `faults` lets no other move pass.
    """
    records = batch["records"]
    pieces, result = records["pieces"], records["result"]
    men = (pieces & 15 != bitboard.EMPTY).sum(axis=1) + (pieces >> 4 != bitboard.EMPTY).sum(axis=1)
    known, wdl = result != UNKNOWN, records["wdl"].astype(np.float64) / WDL_SUM
    valued = wdl.sum(axis=1) > 0
    value, both = wdl[:, 0] - wdl[:, 2], valued & known
    out = {
        "men": men.mean(),
        "ply": records["ply"].mean(),
        "black": records["side"].mean(),
        "known_result": known.mean(),
        "known_wdl": valued.mean(),
    }
    if known.any():
        out |= {
            name: (result[known] == points).mean() for name, points in (("win", 1), ("draw", 0), ("loss", -1))
        }
        out["white"] = np.where(records["side"], -result, result)[known].mean()
    if valued.any():
        out["value"] = value[valued].mean()
    if both.any():
        out["value_gap"] = np.abs(value - result)[both].mean()
    return {name: float(number) for name, number in out.items()}
