"""Win-draw-loss of a centipawn score, and shares of any kind as the integers that a record stores.

The model is Stockfish's own (`UCI_ShowWDL`, version 15.1, fitted by its authors to their test games): a logistic
curve for winning, its mirror image for losing, the rest are draws. There, location and scale depend on the move
number; here they are fixed at full move 32, where games.py labels, so that a position's value does not depend on its
move number. From version 15.1 on, 100 centipawns mean an even chance of winning at that stage of the game. Fitted to
17,691 lines of the engine itself (depth 6, 400 positions): location 99.6, as it cuts centipawns towards 0, scale 18.3;
win and loss agree with it to 0.003 (root mean square).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from matrixlib.tasks.chess.records import WDL_SUM
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT

EVEN = 100.0  # centipawns with which half of the games are won
SCALE = 18.32  # centipawns: 66.13 of 361 engine units, the published polynomial at ply 62
LIMIT = 2000  # centipawns; beyond, nothing changes but the exponential, which overflows


def wdl_of_shares(shares: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Win, draw, loss (n, 3), each row summing to 1, as (n, 3) u2 that sum to 65535; the likeliest gets the rest."""
    whole = np.floor(shares * WDL_SUM + 1e-9).astype(np.int64)
    whole[np.arange(len(whole)), whole.argmax(axis=1)] += WDL_SUM - whole.sum(axis=1)
    return whole.astype("<u2")


def wdl_of_score(scores: ArrayLike) -> NDArray[np.uint16]:
    """Win-draw-loss (n, 3) u2 as a record stores it, of scores (n,) from the mover's side (`stockfish.score_of`).

    For x centipawns win = 1 / (1 + exp((EVEN - x) / SCALE)), loss = 1 / (1 + exp((EVEN + x) / SCALE)), draw = the
    rest. A mate, that is a score beyond `stockfish.CENTIPAWN_LIMIT`, is won or lost for certain.
    """
    score = np.atleast_1d(np.asarray(scores, np.float64))
    x = np.clip(score, -LIMIT, LIMIT)
    win, loss = 1 / (1 + np.exp((EVEN - x) / SCALE)), 1 / (1 + np.exp((EVEN + x) / SCALE))
    mate = np.abs(score) > CENTIPAWN_LIMIT
    win, loss = np.where(mate, score > 0, win), np.where(mate, score < 0, loss)
    return wdl_of_shares(np.stack([win, 1 - win - loss, loss], axis=1))
