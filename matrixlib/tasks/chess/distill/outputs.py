"""What is kept of a teacher's outputs: a row of 104 bytes a position.

The 32 likeliest moves by their places in the position's list of legal moves, with log-probabilities in float16, the
share of all others, and win-draw-loss.
"""

import numpy as np

from matrixlib.data.shards import Batch, Layout

MOVES = 32  # kept of a position
NO_MOVE = 255  # a place that no position's list has: at most 218 moves
MIN_REST = 1e-7  # share of the moves that are left out, at least: float16 may have none left of it
RECORD = np.dtype([("move", "u1", MOVES), ("log_p", "<f2", MOVES), ("rest", "<f2"), ("wdl", "<f2", 3)])
LAYOUT = Layout("chess teacher", 1, RECORD, {})


def packed(log_p: np.ndarray, wdl: np.ndarray, index: np.ndarray) -> np.ndarray:
    """RECORD rows (B,) of log-probabilities (B, L) at the moves `index` (B, L), -1 in pads, and wdl (B, 3)."""
    rows = np.zeros(len(index), RECORD)
    scores = np.where(index >= 0, log_p, -np.inf)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :MOVES]
    best = np.take_along_axis(scores, top, axis=1)
    rows["move"] = np.where(np.isfinite(best), top, NO_MOVE)
    rows["log_p"] = np.where(np.isfinite(best), best, 0).clip(-6e4, 0)
    rows["rest"] = (1 - np.exp(best).sum(1)).clip(0, 1)
    rows["wdl"] = wdl
    return rows


def unpacked(batch: Batch) -> Batch:
    """A gathered batch whose `sidecar` (B,) RECORD has become `policy_teacher` (K,) f32, log-probabilities of the moves
    of `policy_index`; the batch itself where there is none. Moves that were left out share their rest alike.
    """
    if "sidecar" not in batch:
        return batch
    rows, offset = batch["sidecar"], batch["policy_offset"]
    others = np.maximum(np.diff(offset) - MOVES, 1)
    rest = np.log(np.maximum(rows["rest"].astype(np.float32), MIN_REST) / others)
    log_p = np.repeat(rest.astype(np.float32), np.diff(offset))
    row, place = np.nonzero(rows["move"] != NO_MOVE)
    log_p[offset[row] + rows["move"][row, place]] = rows["log_p"][row, place]
    return {**batch, "policy_teacher": log_p}
