"""Lc0's 1,858 moves on the board of the side to move.

All queen and knight moves by from- and to-square, then the promotions to queen, rook and bishop, move by move. A
promotion to a knight is the plain move, castling is king takes rook.
"""

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess import bitboard

POLICY_SIZE = 1858
CONV_PLANES = 80  # of a convolutional policy; the last seven are unused
QUEEN = 4  # promotions: 0 none, 1 N, 2 B, 3 R, 4 Q
RAYS = ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1))  # (file, rank)
JUMPS = ((1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2))


def _policy_table() -> NDArray[np.int16]:
    """Move index (5, 64, 64) by promotion, from- and to-square, -1 for none."""
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
    """UCI text of a move index on the mover's board, e.g. "a7b8q"."""
    promotion, s, t = (int(axis[-1]) for axis in np.nonzero(np.equal(MOVES, number)))
    suffix = "" if promotion < 2 else "nbrq"[promotion - 1]
    return chess.SQUARE_NAMES[s] + chess.SQUARE_NAMES[t] + suffix


def slot_table() -> NDArray[np.int64]:
    """Lc0 index (3, 4672) of each policy index, by moving piece: 0 others, 1 pawn (queen promotions have no own policy
    index), 2 king (castling).
    """
    code = np.where(bitboard.POLICY_MOVE == bitboard.NO_MOVE, 0, bitboard.POLICY_MOVE).astype(np.int64)
    s, t, promotion = code & 63, code >> 6 & 63, code >> 12
    plain = MOVES[promotion, s, t]
    pawn = np.where((promotion == 0) & (MOVES[QUEEN, s, t] >= 0), MOVES[QUEEN, s, t], plain)
    rook = np.where(t == chess.G1, chess.H1, chess.A1)
    castling = (promotion == 0) & (s == chess.E1) & ((t == chess.G1) | (t == chess.C1))
    king = np.where(castling, MOVES[0, s, rook], plain)
    return np.maximum(np.stack([plain, pawn, king]), 0).astype(np.int64)


def attention_table() -> NDArray[np.int64]:
    """Position (1858,) of each move in the attention policy: 64 x 64 pairs of squares, then 8 x 8 x 3 promotions by
    from-file, to-file and piece (queen, rook, bishop).
    """
    table = np.zeros(POLICY_SIZE, np.int64)
    promotion, s, t = np.nonzero(MOVES >= 0)
    promoted = 64 * 64 + 24 * (s - 48) + 3 * (t - 56) + QUEEN - promotion
    table[MOVES[promotion, s, t]] = np.where(promotion < 2, 64 * s + t, promoted)
    return table


def plane_table() -> NDArray[np.int64]:
    """Position (1858,) of each move in the flattened convolutional policy (80, 64), by from-square: 56 planes of queen
    moves (8 directions, 7 lengths), 8 of knight moves, 3 (rook, bishop, queen) per direction of a promotion.
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
