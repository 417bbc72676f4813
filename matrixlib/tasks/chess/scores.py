"""Win-draw-loss of a centipawn score, and shares of any kind as the integers that a record stores.

The model is Stockfish's own (`UCI_ShowWDL`, version 15.1, fitted by its authors to their test games): a logistic
curve for winning, its mirror image for losing, the rest are draws. There, location and scale depend on the move
number; here they are fixed at full move 32, where games.py labels, so that a position's value does not depend on its
move number. From version 15.1 on, 100 centipawns mean an even chance of winning at that stage of the game. Fitted to
17,691 lines of the engine itself (depth 6, 400 positions): location 99.6, as it cuts centipawns towards 0, scale 18.3;
win and loss agree with it to 0.003 (root mean square).
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matrixlib.tasks.chess.records import WDL_SUM
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT

EVEN = 100.0  # centipawns with which half of the games are won
SCALE = 18.32  # centipawns: 66.13 of 361 engine units, the published polynomial at ply 62
LIMIT = 2000  # centipawns; beyond, nothing changes but the exponential, which overflows


def whole_shares(amounts: NDArray[Any], offset: NDArray[Any]) -> NDArray[np.uint16]:
    """Amounts (K,) >= 0 of rows `offset` (n+1,), none of them empty, to shares (K,) u2.

    The shares of a row sum to 65535, the first of its greatest amounts gets the remainder; a row of zeros, an unknown
    policy, stays 0. Integers, which may sum to 1e14 in a row, are divided exactly.
    """
    if not len(amounts):
        return np.zeros(0, "<u2")
    amounts = amounts if amounts.dtype.kind == "f" else amounts.astype(np.int64)
    starts, length = offset[:-1], np.diff(offset)
    total = np.add.reduceat(amounts, starts)
    row_total = np.repeat(np.where(total > 0, total, 1), length)
    if amounts.dtype.kind == "f":
        shares = np.floor(amounts / row_total * WDL_SUM + 1e-9).astype(np.int64)
    else:
        shares = amounts * WDL_SUM // row_total
    row = np.repeat(np.arange(len(length)), length)
    greatest = np.flatnonzero(amounts == np.repeat(np.maximum.reduceat(amounts, starts), length))
    first = greatest[np.unique(row[greatest], return_index=True)[1]]
    shares[first] += np.where(total > 0, WDL_SUM - np.add.reduceat(shares, starts), 0)
    return shares.astype("<u2")


def wdl_of_shares(shares: NDArray[Any]) -> NDArray[np.uint16]:
    """Win, draw, loss (n, 3) in any unit as (n, 3) u2 that sum to 65535; see `whole_shares`."""
    return whole_shares(shares.reshape(-1), 3 * np.arange(len(shares) + 1)).reshape(-1, 3)


def wdl_of_score(scores: ArrayLike) -> NDArray[np.uint16]:
    """Win-draw-loss (n, 3) u2 as a record stores it, of scores (n,) from the mover's side (`client.score_of`).

    For x centipawns win = 1 / (1 + exp((EVEN - x) / SCALE)), loss = 1 / (1 + exp((EVEN + x) / SCALE)), draw = the
    rest. A mate, that is a score beyond `client.CENTIPAWN_LIMIT`, is won or lost for certain.
    """
    score = np.atleast_1d(np.asarray(scores, np.float64))
    x = np.clip(score, -LIMIT, LIMIT)
    win, loss = 1 / (1 + np.exp((EVEN - x) / SCALE)), 1 / (1 + np.exp((EVEN + x) / SCALE))
    mate = np.abs(score) > CENTIPAWN_LIMIT
    win, loss = np.where(mate, score > 0, win), np.where(mate, score < 0, loss)
    return wdl_of_shares(np.stack([win, 1 - win - loss, loss], axis=1))
