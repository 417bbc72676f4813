"""Leela Chess Zero's 1,858 moves, on the board of the side to move (ranks turned for Black).

In order of from- and to-square come all moves of a queen and a knight, then the promotions of the seventh rank to
queen, rook and bishop, move by move. A knight's promotion is the plain move, and castling is king takes rook.
"""

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess import bitboard

POLICY_SIZE = 1858
CONV_PLANES = 80  # of a convolutional policy; the last seven are not used
QUEEN = 4  # promotions: 0 none, then N B R Q
RAYS = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))  # (file, rank)
JUMPS = ((1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2))


def _policy_table() -> NDArray[np.int16]:
    """(5, 64, 64): number of a move by promotion, from and to; -1 where there is none."""
    table = np.full((5, 64, 64), -1, np.int16)
    origin, target = np.nonzero(bitboard.POLICY_INDEX[: 1 << 12].reshape(64, 64).T >= 0)
    table[:2, origin, target] = np.arange(len(origin))
    number = len(origin)
    for s, t in ((s, t) for s in range(48, 56) for t in range(56, 64) if abs(s % 8 - t % 8) <= 1):
        for promotion in (QUEEN, 3, 2):
            table[promotion, s, t] = number
            number += 1
    return table


MOVES = _policy_table()


def move_name(number: int) -> str:
    """A move of the 1,858 as its mover sees the board: "a7b8q"."""
    promotion, s, t = (int(axis[-1]) for axis in np.nonzero(np.equal(MOVES, number)))
    suffix = "" if promotion < 2 else "nbrq"[promotion - 1]
    return chess.SQUARE_NAMES[s] + chess.SQUARE_NAMES[t] + suffix


def slot_table() -> NDArray[np.int64]:
    """(3, 4672): the move of a policy index of ours by what makes it: another piece, a pawn (whose promotion to a queen
    has no index of its own), a king (whose castling is its own move).
    """
    code = np.where(bitboard.POLICY_MOVE == bitboard.NO_MOVE, 0, bitboard.POLICY_MOVE).astype(np.int64)
    s, t, promotion = code & 63, code >> 6 & 63, code >> 12
    plain = MOVES[promotion, s, t]
    pawn = np.where((promotion == 0) & (MOVES[QUEEN, s, t] >= 0), MOVES[QUEEN, s, t], plain)
    rook = np.where(t == chess.G1, chess.H1, chess.A1)
    castling = (promotion == 0) & (s == chess.E1) & ((t == chess.G1) | (t == chess.C1))
    king = np.where(castling, MOVES[0, s, rook], plain)
    return np.maximum(np.stack([plain, pawn, king]), 0).astype(np.int64)


def plane_table() -> NDArray[np.int64]:
    """(1858,): where a move stands in a convolutional policy (80, 64), flattened: 56 planes of queen moves (8
    directions, 7 lengths), 8 of knights, 3 (rook, bishop, queen) for each direction of a pawn's promotion, at the
    square it leaves.
    """
    table = np.zeros(POLICY_SIZE, np.int64)
    for promotion, s, t in zip(*(axis.tolist() for axis in np.nonzero(MOVES >= 0)), strict=True):
        move = (t % 8 - s % 8, t // 8 - s // 8)
        steps = max(map(abs, move))
        if promotion > 1:
            plane = 64 + 3 * (move[0] + 1) + {3: 0, 2: 1, QUEEN: 2}[promotion]
        elif move in JUMPS:
            plane = 56 + JUMPS.index(move)
        else:
            plane = 7 * RAYS.index((move[0] // steps, move[1] // steps)) + steps - 1
        table[MOVES[promotion, s, t]] = plane * 64 + s
    return table
