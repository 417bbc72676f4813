"""FENs and UCI moves in bulk; python-chess is the oracle."""

import chess
import numpy as np
import pytest
from positions import hard_positions, random_positions

from matrixlib.tasks.chess.bitboard import NO_MOVE
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.importers.notation import legal_moves, move_code, normalise_castling, read_fens
from matrixlib.tasks.chess.records import from_boards, policy_index

START = chess.STARTING_FEN


def test_records_are_those_of_boards():
    boards = hard_positions() + random_positions(300, 1)
    for board in boards:
        board.fullmove_number = board.fullmove_number or 1
    want = from_boards(boards, source=3)
    for fens in ([b.fen(en_passant="fen") for b in boards], [b.fen(en_passant="legal") for b in boards]):
        records, faults = read_fens(fens, "puzzles")
        assert set(faults) == {""}
        assert (records == want).all()


@pytest.mark.parametrize(
    "fen, fault",
    [
        ("", notation.NOT_A_FEN),
        ("8/8/8/8/8/8/8 w - - 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K4 w - - 0 1", notation.NOT_A_FEN),
        ("4k3/9/8/8/8/8/8/4K3 w - - 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/7x/4K3 w - - 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/.7/4K3 w - - 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K3 x - - 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K3 w - e9 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K3 w X - 0 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K3 w - - -1 1", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K3 w - - 0 1 2", notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/4K3 w - - 0 " + "1" * 5000, notation.NOT_A_FEN),
        ("4k3/8/8/8/8/8/8/8 w - - 0 1", notation.NOT_A_POSITION),
        ("4k3/8/8/8/8/8/8/4KK2 w - - 0 1", notation.NOT_A_POSITION),
        ("4k2P/8/8/8/8/8/8/4K3 w - - 0 1", notation.NOT_A_POSITION),
        ("4k3/8/8/8/8/8/4R3/4K3 w - - 0 1", notation.NOT_A_POSITION),
        ("rk2r3/8/8/8/8/8/8/RK2R3 w EAea - 0 1", notation.CHESS960),
    ],
)
def test_what_is_wrong_is_said(fen, fault):
    records, faults = read_fens([START, fen, START], "epd")
    assert faults == ["", fault, ""]
    assert records[0] == records[2] == from_boards([chess.Board()], source=5)[0]
    assert np.diff(legal_moves(records).offset).tolist() == [20, 0, 20]


def test_rights_without_king_or_rook_are_dropped():
    records, _ = read_fens(["4k2r/8/8/8/8/8/8/R3K3 w KQkq - 0 1", "4k2r/8/8/8/8/8/8/R3K3 b KQkq - 0 1"], "epd")
    assert records["castling"].tolist() == [2 + 4, 8 + 1]


def test_every_legal_move_is_found_and_no_other():
    boards = hard_positions() + random_positions(60, 2)
    records = from_boards(boards)
    legal = legal_moves(records)
    for row, board in enumerate(boards):
        moves = list(board.legal_moves)
        black = int(not board.turn)
        codes = [move_code(move.uci(), black) for move in moves]
        places = legal.find([row] * len(codes), codes)
        indices = [policy_index(move, board.turn) for move in moves]
        assert legal.index[places].tolist() == indices
        assert sorted(places) == list(range(legal.offset[row], legal.offset[row + 1]))
        names = [f"{a}{b}" for a in chess.SQUARE_NAMES[::5] for b in chess.SQUARE_NAMES[::3] if a != b]
        others = [uci + end for uci in names for end in ("", "q", "n")]
        others = [uci for uci in others if chess.Move.from_uci(uci) not in moves]
        assert (legal.find([row] * len(others), [move_code(uci, black) for uci in others]) == -1).all()


@pytest.mark.parametrize("uci", ["", "e2", "e2e9", "e2e4k", "0000", "e2e4qq", "E2E4", "P@e4"])
def test_what_is_no_move_is_never_legal(uci):
    assert move_code(uci, 0) == NO_MOVE
    assert legal_moves(from_boards([chess.Board()])).find([0], [NO_MOVE]).tolist() == [-1]


def test_castling_as_king_takes_rook():
    boards = [chess.Board("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"), chess.Board("r3k2r/8/8/8/8/8/8/R3K2R b KQkq - 0 1")]
    records = from_boards(boards)
    for row, (short, long) in enumerate((("e1h1", "e1a1"), ("e8h8", "e8a8"))):
        pieces = records["pieces"][[row, row]]
        codes = normalise_castling(pieces, [move_code(short, row), move_code(long, row)])
        files = short[0] + short[1]
        assert codes.tolist() == [move_code(f"{files}g{short[1]}", row), move_code(f"{files}c{short[1]}", row)]
    rook = from_boards([chess.Board("3k4/8/8/8/8/8/8/K3R3 w - - 0 1"), chess.Board("3k4/8/8/8/8/8/8/R3KQ2 w - - 0 1")])
    code = move_code("e1h1", 0)
    assert normalise_castling(rook["pieces"], [code, code]).tolist() == [code, code]
