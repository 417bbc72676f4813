"""The self-supervised targets once more, slowly, by python-chess; and what may be taken for them by mistake.

The first is the oracle of `bitboard.ssl_maps`. The others tell what a head has learned in the place of its target:
Matrix0's pawns attacked backwards, and nobody saw it in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import chess
import numpy as np
from numpy.typing import NDArray

Maps = dict[str, NDArray[np.uint8]]

EXACT = "exact"
BACKWARDS = "pawns attack backwards"
COPY = "a copy of what stands on the square"
EMPTY = 12
_WORTH = (1, 3, 3, 5, 9, 1000)  # P N B R Q K
_SWAPPED = np.array([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, EMPTY], np.uint8)


def maps(board: chess.Board, backwards: bool = False) -> Maps:
    """Targets (8, 8) uint8 of one position by head, on the board of the side to move (DESIGN: chess facts).

    backwards: with pawns that attack the two squares behind them.
    """
    board = board if board.turn == chess.WHITE else board.mirror()
    attacks = {square: _attacked(board, square, backwards) for square in chess.scan_forward(board.occupied)}
    count = np.zeros((2, 64), np.int64)  # attackers of theirs, ours
    for square, mask in attacks.items():
        count[int(board.color_at(square) or 0), list(chess.scan_forward(mask))] += 1
    out = {head: np.zeros(64, np.uint8) for head in ("piece", "threat", "pin", "fork", "control")}
    out["piece"][:] = EMPTY
    out["threat"][:] = count[0] > 0
    out["control"][:] = 1 + np.sign(count[1] - count[0])
    for square, mask in attacks.items():
        piece = board.piece_at(square)
        assert piece is not None
        out["piece"][square] = piece.piece_type - 1 + 6 * (piece.color == chess.BLACK)
        out["pin"][square] = piece.piece_type != chess.KING and board.is_pinned(piece.color, square)
        victims = chess.scan_forward(mask & board.occupied_co[not piece.color])
        out["fork"][square] = sum(_worthwhile(board, piece, victim, count) for victim in victims) >= 2
    return {head: value.reshape(8, 8) for head, value in out.items()}


def readings(boards: Sequence[chess.Board], head: str, hidden: NDArray[np.bool_]) -> Maps:
    """Name -> (N, 8, 8) uint8: the exact target of a head over N boards, and what may be taken for it.

    hidden: (N, 8, 8) bool, squares that the network does not see: they look empty. Readings that differ from the exact
    target nowhere are left out.
    """
    every = [maps(board) for board in boards]
    exact = np.stack([one[head] for one in every])
    piece = np.where(hidden, EMPTY, np.stack([one["piece"] for one in every]))
    found = {EXACT: exact, "upside down": exact[:, ::-1], "left for right": exact[:, :, ::-1]}
    if head in ("threat", "fork", "control"):
        found[BACKWARDS] = np.stack([maps(board, backwards=True)[head] for board in boards])
    if head == "threat":
        ours = [maps(_other_side(board))[head][::-1] for board in boards]
        found["attacked by the side to move"] = np.stack(ours)
    elif head in ("control", "piece"):
        found["the colours exchanged"] = 2 - exact if head == "control" else _SWAPPED[exact]
    if head == "piece":
        found[COPY] = piece
    elif head == "control":
        found[COPY] = np.where(piece == EMPTY, 1, np.where(piece < 6, 2, 0))
    else:
        found[COPY] = piece != EMPTY
    return {
        name: value.astype(np.uint8)
        for name, value in found.items()
        if name == EXACT or (value != exact).any()
    }


def _attacked(board: chess.Board, square: chess.Square, backwards: bool) -> int:
    piece = board.piece_at(square)
    assert piece is not None
    if backwards and piece.piece_type == chess.PAWN:
        return chess.BB_PAWN_ATTACKS[not piece.color][square]
    return board.attacks_mask(square)


def _worthwhile(
    board: chess.Board, piece: chess.Piece, square: chess.Square, count: NDArray[np.int64]
) -> bool:
    victim = board.piece_at(square)
    assert victim is not None
    undefended = not count[int(victim.color), square]
    return bool(undefended or _WORTH[victim.piece_type - 1] > _WORTH[piece.piece_type - 1])


def _other_side(board: chess.Board) -> chess.Board:
    """The same pieces with the other side to move; the position need not be legal."""
    other = board.copy(stack=False)
    other.turn, other.ep_square = not board.turn, None
    return other
