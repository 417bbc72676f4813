"""The self-supervised targets once more, slowly, by python-chess; and what may be taken for them by mistake.

The first is the oracle of `bitboard.ssl_maps`. The others tell what a head has learned in the place of its target:
Matrix0's pawns attacked backwards, and nobody saw it in the loss.
"""

from collections.abc import Sequence

import chess
import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess.config import SSL_CHANNELS
from matrixlib.tasks.chess.records import PIECE_VALUES
from matrixlib.tasks.chess.ssl_targets import SWAPPED

Maps = dict[str, NDArray[np.uint8]]

EXACT = "exact"
BACKWARDS = "pawns attack backwards"
COPY = "a copy of what stands on the square"
EXCHANGED = "the colours exchanged"
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


def alternatives(boards: Sequence[chess.Board]) -> dict[str, Maps]:
    """Head -> name -> (N, 8, 8) uint8: the exact targets of N boards, and what may be mistaken for them.

    Mistakes that differ from the exact target nowhere are left out.
    """
    exact, wrong = (
        {name: np.stack([one[name] for one in every]) for name in every[0]}
        for every in ([maps(board, backwards) for board in boards] for backwards in (False, True))
    )
    piece = exact["piece"]
    named: dict[str, Maps] = {}
    for head in SSL_CHANNELS:
        true = exact[head]
        named[head] = {EXACT: true, "upside down": true[:, ::-1], "left for right": true[:, :, ::-1]}
        if head in ("threat", "fork", "control"):
            named[head][BACKWARDS] = wrong[head]
        if head in ("threat", "pin", "fork"):
            named[head][COPY] = (piece != EMPTY).astype(np.uint8)
    named["threat"]["attacked by the side to move"] = exact["ours"]
    named["piece"][EXCHANGED] = SWAPPED[piece]
    named["control"][EXCHANGED] = 2 - exact["control"]
    named["control"][COPY] = np.where(piece == EMPTY, 1, np.where(piece < 6, 2, 0)).astype(np.uint8)
    return {
        head: {name: value for name, value in every.items() if name == EXACT or (value != every[EXACT]).any()}
        for head, every in named.items()
    }


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
