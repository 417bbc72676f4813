"""The self-supervised targets once more, slowly, by python-chess: the oracle of `bitboard.ssl_maps`."""

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess.config import SSL_CHANNELS
from matrixlib.tasks.chess.records import PIECE_VALUES

Maps = dict[str, NDArray[np.uint8]]

EMPTY = 12
_WORTH = (*PIECE_VALUES[:5], 1000)  # P N B R Q K, which is above all


def maps(board: chess.Board, backwards: bool = False) -> Maps:
    """Targets (8, 8) uint8 of one position by head, on the board of the side to move; and `ours`,
    what that side attacks.

    backwards: with pawns that attack the two squares behind them.
    """
    board = board if board.turn == chess.WHITE else board.mirror()
    attacks = {square: _attacked(board, square, backwards) for square in chess.scan_forward(board.occupied)}
    count = np.zeros((2, 64), np.int64)  # attackers of theirs, ours
    for square, mask in attacks.items():
        count[int(board.color_at(square) or 0), list(chess.scan_forward(mask))] += 1
    out = {name: np.zeros(64, np.uint8) for name in (*SSL_CHANNELS, "ours")}
    out["piece"][:] = EMPTY
    out["threat"][:], out["ours"][:] = count > 0
    out["control"][:] = 1 + np.sign(count[1] - count[0])
    for square, mask in attacks.items():
        piece = board.piece_at(square)
        assert piece is not None
        out["piece"][square] = piece.piece_type - 1 + 6 * (piece.color == chess.BLACK)
        out["pin"][square] = piece.piece_type != chess.KING and board.is_pinned(piece.color, square)
        victims = chess.scan_forward(mask & board.occupied_co[not piece.color])
        out["fork"][square] = sum(_worthwhile(board, piece, victim, count) for victim in victims) >= 2
    return {head: value.reshape(8, 8) for head, value in out.items()}


def _attacked(board: chess.Board, square: chess.Square, backwards: bool) -> int:
    piece = board.piece_at(square)
    assert piece is not None
    if backwards and piece.piece_type == chess.PAWN:
        return chess.BB_PAWN_ATTACKS[not piece.color][square]
    return board.attacks_mask(square)


def _worthwhile(board: chess.Board, piece: chess.Piece, square: chess.Square, count: NDArray[np.int64]) -> bool:
    victim = board.piece_at(square)
    assert victim is not None
    undefended = not count[int(victim.color), square]
    return bool(undefended or _WORTH[victim.piece_type - 1] > _WORTH[piece.piece_type - 1])
