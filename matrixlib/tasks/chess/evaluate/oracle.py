"""Reference implementation of `bitboard.ssl_maps` with python-chess, slow."""

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess.config import SSL_CHANNELS
from matrixlib.tasks.chess.records import PIECE_VALUES

Maps = dict[str, NDArray[np.uint8]]

EMPTY = 12
_VALUES = (*PIECE_VALUES[:5], 1000)  # P N B R Q K


def maps(board: chess.Board, backwards: bool = False) -> Maps:
    """Targets (8, 8) uint8 of one position by head, on the board of the side to move, plus `ours`: the squares that it
    attacks. backwards: pawns attack the two squares behind them."""
    board = board if board.turn == chess.WHITE else board.mirror()
    pieces = board.piece_map()
    attacks = {square: board.attacks_mask(square) for square in pieces}
    if backwards:
        pawns = {square: piece for square, piece in pieces.items() if piece.piece_type == chess.PAWN}
        attacks |= {square: chess.BB_PAWN_ATTACKS[not piece.color][square] for square, piece in pawns.items()}
    count = np.zeros((2, 64), np.int64)  # attackers of theirs, ours
    for square, mask in attacks.items():
        count[int(pieces[square].color), list(chess.scan_forward(mask))] += 1
    out = {name: np.zeros(64, np.uint8) for name in (*SSL_CHANNELS, "ours")}
    out["piece"][:] = EMPTY
    out["threat"][:], out["ours"][:] = count > 0
    out["control"][:] = 1 + np.sign(count[1] - count[0])
    for square, piece in pieces.items():
        out["piece"][square] = piece.piece_type - 1 + 6 * (piece.color == chess.BLACK)
        out["pin"][square] = piece.piece_type != chess.KING and board.is_pinned(piece.color, square)
        victims = chess.scan_forward(attacks[square] & board.occupied_co[not piece.color])
        worth = _VALUES[piece.piece_type - 1]
        out["fork"][square] = (
            sum(
                _VALUES[pieces[victim].piece_type - 1] > worth or not count[int(not piece.color), victim]
                for victim in victims
            )
            >= 2
        )
    return {head: value.reshape(8, 8) for head, value in out.items()}
