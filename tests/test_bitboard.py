"""The bitboard core against python-chess."""

from functools import cache

import chess
import numpy as np
import pytest
from positions import KIWIPETE, hard_positions, random_positions

from matrixlib.tasks.chess import bitboard, records

PERFT = (
    # Known counts: chessprogramming.org/Perft_Results, positions 1 to 6, and en-passant and promotion traps.
    (chess.STARTING_FEN, 5, 4865609),
    (KIWIPETE, 4, 4085603),
    ("8/2p5/3p4/KP5r/1R3p1k/8/4P1P1/8 w - - 0 1", 5, 674624),
    ("r3k2r/Pppp1ppp/1b3nbN/nP6/BBP1P3/q4N2/Pp1P2PP/R2Q1RK1 w kq - 0 1", 4, 422333),
    ("rnbq1k1r/pp1Pbppp/2p5/8/2B5/8/PPP1NnPP/RNBQK2R w KQ - 1 8", 4, 2103487),
    ("r4rk1/1pp1qppp/p1np1n2/2b1p1B1/2B1P1b1/P1NP1N2/1PP1QPPP/R4RK1 w - - 0 10", 4, 3894594),
    ("n1n5/PPPk4/8/8/8/8/4Kppp/5N1N b - - 0 1", 5, 3605103),
)


@cache
def boards() -> list[chess.Board]:
    return hard_positions() + random_positions(400, seed=11)


def moves_of(rows: records.Records) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return bitboard.legal_moves(rows["pieces"], rows["castling"], rows["en_passant"])


def to_chess(code: int, turn: chess.Color) -> chess.Move:
    flip = 0 if turn else 56
    return chess.Move((code & 63) ^ flip, (code >> 6 & 63) ^ flip, (code >> 12) + 1 if code >> 12 else None)


def perft(rows: np.ndarray, depth: int) -> int:
    """Leaves of the trees of legal moves, all positions of a ply at once, some at a time."""
    total = 0
    for part in np.array_split(rows, len(rows) // 100_000 + 1):
        codes, _, offsets = moves_of(part)
        if depth == 1:
            total += len(codes)
        elif len(codes):
            total += perft(records.play(np.repeat(part, np.diff(offsets)), codes), depth - 1)
    return total


@pytest.mark.parametrize("fen, depth, count", PERFT)
def test_perft(fen: str, depth: int, count: int) -> None:
    for board in (chess.Board(fen), chess.Board(fen).mirror()):
        assert perft(records.from_boards([board]), depth) == count


def test_legal_moves_and_the_positions_after_them() -> None:
    """Every legal move of every position, and the record after it, equal python-chess's."""
    some = boards()
    rows = records.from_boards(some)
    codes, indices, offsets = moves_of(rows)
    assert (len(offsets), offsets[0], offsets[-1]) == (len(some) + 1, 0, len(codes))
    parent = np.repeat(np.arange(len(some)), np.diff(offsets))
    after = records.play(rows[parent], codes)
    expected = []
    for i, board in enumerate(some):
        result = {to_chess(int(c), board.turn) for c in codes[offsets[i] : offsets[i + 1]]}
        assert result == set(board.legal_moves), board.fen()
        keys = indices[offsets[i] : offsets[i + 1]].astype(int)
        assert (np.diff(keys) > 0).all(), board.fen()
        for k in range(offsets[i], offsets[i + 1]):
            board.push(to_chess(int(codes[k]), board.turn))
            expected.append(board.copy(stack=False))
            board.pop()
    reference = records.from_boards(expected)
    for name in ("pieces", "castling", "en_passant", "halfmove", "side", "ply"):
        for i in np.flatnonzero((after[name] != reference[name]).reshape(len(after), -1).any(1)):
            raise AssertionError((name, some[parent[i]].fen(), expected[i].fen()))


def test_the_longest_list_of_moves_of_chess() -> None:
    row = np.atleast_1d(records.from_boards([chess.Board("R6R/3Q4/1Q4Q1/4Q3/2Q4Q/Q4Q2/pp1Q4/kBNN1KB1 w - - 0 1")])[0])
    rows = np.repeat(row, 50)  # more than the buffer's first size
    assert (np.diff(moves_of(rows)[2]) == 218).all()


def test_a_board_full_of_queens_overruns_nothing() -> None:
    board = chess.Board(None)
    for square in chess.SQUARES:
        board.set_piece_at(square, chess.Piece(chess.QUEEN, (square // 8 + square) % 2 == 0))
    board.set_piece_at(chess.A1, chess.Piece(chess.KING, chess.WHITE))
    board.set_piece_at(chess.C4, chess.Piece(chess.KING, chess.BLACK))
    masks = [board.pieces_mask(kind, colour) for colour in (chess.WHITE, chess.BLACK) for kind in chess.PIECE_TYPES]
    pieces = bitboard.pieces_of(np.array([masks], np.uint64))
    assert len(bitboard.legal_moves(pieces, [0], [-1])[0]) == board.legal_moves.count()
    assert bitboard.ssl_maps(pieces).shape == (1, 5)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(N, 32\)"):
        bitboard.ssl_maps(np.zeros(32, np.uint8))
    with pytest.raises(ValueError, match=r"columns \(N,\), got"):
        bitboard.legal_moves(np.full((2, 32), 0xCC, np.uint8), [0], [-1, -1])
    with pytest.raises(ValueError, match=r"\(N, 12\)"):
        bitboard.pieces_of(np.zeros((1, 13), np.uint64))


def test_empty_batches_and_read_only_views() -> None:
    rows = records.from_boards([])
    codes, _, offsets = moves_of(rows)
    assert (len(codes), offsets.tolist()) == (0, [0])
    frozen = records.from_boards([chess.Board()])
    frozen.flags.writeable = False
    assert len(moves_of(frozen)[0]) == 20
