"""Chess as a Game against python-chess, and the search on chess: endings, repetition, fifty moves, tables, mates."""

import io
from itertools import product
from pathlib import Path

import chess
import chess.pgn
import numpy as np
import pytest
from positions import hard_positions, random_positions

from matrixlib.play.game import GameRecord, Moves, Offsets, States, Values, uniform
from matrixlib.play.game import endings as played_endings
from matrixlib.play.search import Search, SearchOptions
from matrixlib.tasks.chess.game import ChessGame, insufficient_material, open_tablebases
from matrixlib.tasks.chess.records import from_boards, legal_indices, move_from_index, policy_index

GAME = ChessGame()
WORTH = np.array([1, 3, 3, 5, 9, 0, -1, -3, -3, -5, -9, 0, 0])


def material(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
    """Uniform priors, and the balance of material: a queen up is worth 0.72."""
    pieces = states["pieces"]
    balance = WORTH[pieces & 15].sum(1) + WORTH[pieces >> 4].sum(1)
    return uniform(states, moves, offsets)[0], np.tanh(balance / 10).astype(np.float32)


def state(board: chess.Board) -> States:
    return from_boards([board])


def test_endings_of_games() -> None:
    """Mate, stalemate, dead positions and fifty moves in thousands of positions, some at the end of their patience."""
    boards = hard_positions() + random_positions(1500, seed=4)
    for i, board in enumerate(boards):
        if i % 5 == 0:
            board.halfmove_clock = 99 + i % 3
    states = from_boards(boards)
    values = GAME.terminal(states, np.diff(legal_indices(states)[1]))
    expected = []
    for board in boards:
        draw = board.is_stalemate() or board.is_insufficient_material() or board.halfmove_clock >= 100
        expected.append(-1 if board.is_checkmate() else 0 if draw else np.nan)
    np.testing.assert_array_equal(values, expected)
    assert {-1, 0} < set(expected)


def test_dead_positions() -> None:
    men, rng = ("", "N", "B", "NN", "BB", "NB", "P", "R", "Q"), np.random.default_rng(0)
    boards = []
    for ours, theirs, _ in product(men, men, range(8)):
        squares = rng.choice(np.arange(8, 56), len(ours + theirs), replace=False)
        pieces = dict(zip(squares.tolist(), ours + theirs.lower(), strict=True)) | {chess.A1: "K", chess.H8: "k"}
        board = chess.Board(None)
        board.set_piece_map({square: chess.Piece.from_symbol(symbol) for square, symbol in pieces.items()})
        if board.is_valid():
            boards.append(board)
    deaths = insufficient_material(from_boards(boards)["pieces"])
    assert deaths.tolist() == [board.is_insufficient_material() for board in boards]
    assert 0 < deaths.sum() < len(boards)


MATES = (
    ("4rkr1/4p1p1/8/8/8/8/8/4K2R w K - 0 1", "e1g1"),  # castling, either side
    ("2rkr3/2p1p3/8/8/8/8/8/R3K3 w Q - 0 1", "e1c1"),
    ("3rkr2/5p2/8/3pP3/8/7Q/8/K3R3 w - d6 0 1", "e5d6"),  # en passant, discovers the rook
    ("7k/P7/6K1/8/8/8/8/8 w - - 0 1", "a7a8q"),
    ("7k/P7/6K1/8/8/8/8/8 w - - 0 1", "a7a8r"),
    ("6rk/6pp/8/6N1/8/8/8/K7 w - - 0 1", "g5f7"),  # smothered
)


def test_every_mating_move_is_recognised() -> None:
    """Castling, en passant and promotion among them, for both sides, and no move that does not mate."""
    boards = [chess.Board(fen) for fen, _ in MATES]
    boards += [board.mirror() for board in boards] + hard_positions() + random_positions(2500, seed=8)
    boards = [board for board in boards if any(board.legal_moves)]
    states = from_boards(boards)
    moves, offsets = GAME.legal(states)
    endings = GAME.endings(states, moves, offsets)
    expected = played_endings(GAME, states, moves, offsets)
    assert ((endings == 1) == (expected == 1)).all()
    assert set(np.unique(endings[~np.isnan(endings)])) == {1}
    assert (expected == 1).sum() > 20
    for i, (_, uci) in enumerate(MATES):
        for row in (i, i + len(MATES)):  # the mirrored board has the same policy index
            span = slice(offsets[row], offsets[row + 1])
            assert policy_index(chess.Move.from_uci(uci), chess.WHITE) in moves[span][endings[span] == 1], uci


def test_keys_are_equal_where_positions_repeat() -> None:
    boards = hard_positions() + random_positions(2000, seed=6)
    keys = GAME.key(from_boards(boards))
    groups = {}
    for board, key in zip(boards, keys, strict=True):
        assert groups.setdefault(board._transposition_key(), key) == key
    assert len(set(groups.values())) == len(groups)
    # The clock and the number of the move do not matter; side, castling and a legal en-passant capture do.
    plain = chess.Board("r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1")
    others = [plain.fen().replace("- 0 1", "- 7 30")]
    different = [plain.fen().replace(" w ", " b "), plain.fen().replace("KQkq", "KQk")]
    key = GAME.key(state(plain))[0]
    assert all(GAME.key(state(chess.Board(fen)))[0] == key for fen in others)
    assert all(GAME.key(state(chess.Board(fen)))[0] != key for fen in different)


def test_threefold_repetition_through_the_game() -> None:
    """Knights out and home twice: the third occurrence of the start ends it, as python-chess says."""
    board, search = chess.Board(), Search(GAME, uniform)
    for uci in ("g1f3", "g8f6", "f3g1", "f6g8") * 2:
        assert not board.is_repetition(3)
        move = chess.Move.from_uci(uci)
        search.advance([0], [policy_index(move, board.turn)])
        board.push(move)
    assert board.is_repetition(3)
    assert search.states["repetition"][0] == 2
    assert GAME.terminal(search.states, np.array([20]))[0] == 0
    assert (search.states[["pieces", "side"]] == state(board)[["pieces", "side"]]).all()


def test_a_move_into_the_third_occurrence_is_worth_exactly_a_draw() -> None:
    """Two queens down, Black goes back to a square where the position has been twice."""
    board = chess.Board("7k/7p/8/8/1r6/8/3QQ3/K7 b - - 10 60")
    after = board.copy()
    after.push_uci("h8g8")
    search = Search(GAME, material)
    search.reset(0, state(board), history=np.repeat(GAME.key(state(after)), 2))
    result = search.run(400)[0]
    assert move_from_index(result.best, board).uci() == "h8g8"
    assert result.values[result.moves == result.best] == 0
    search.reset(0, state(board))
    assert search.run(400)[0].value < -0.5
    search.reset(0, state(board), history=np.repeat(GAME.key(state(board)), 2))
    with pytest.raises(ValueError, match="is over"):
        search.run(1)


def test_fifty_moves_are_a_draw_unless_the_last_one_mates() -> None:
    """At 99 half moves every quiet move draws, whatever the material; a mate still counts; a pawn move goes on."""
    search = Search(GAME, material)
    search.reset(0, state(chess.Board("8/7k/8/8/8/1Q6/8/K7 w - - 99 150")))
    result = search.run(200)[0]
    assert (result.proven, result.value) == (True, 0.0)
    for options in (SearchOptions(), SearchOptions(look_ahead=False)):
        search = Search(GAME, material, options)
        search.reset(0, state(chess.Board("7k/8/6K1/8/8/8/2Q5/8 w - - 99 150")))
        result = search.run(200)[0]
        assert (result.proven, result.value) == (True, 1.0)
    pawn = chess.Board("8/7k/8/8/8/1Q6/P7/K7 w - - 99 150")
    search.reset(0, state(pawn))
    best = move_from_index(search.run(400)[0].best, pawn)
    assert pawn.piece_type_at(best.from_square) == chess.PAWN


class Tables:
    """A table that knows three positions by the number of their men."""

    def __init__(self) -> None:
        self.fens: list[str] = []

    def get_wdl(self, board: chess.Board, default: int | None = None) -> int | None:
        self.fens.append(board.fen())
        return {3: 2 if board.turn == chess.WHITE else -2, 4: 1, 5: None}[len(board.piece_map())]


def test_tables_are_asked_where_they_are_exact() -> None:
    """Few men, no castling, and just after a capture or pawn move: else the clock may spoil a win."""
    tables = Tables()
    game = ChessGame(tables, pieces=5)
    fens = [
        "8/8/8/4k3/8/8/3R4/4K3 w - - 0 1",  # won
        "8/8/8/4k3/8/8/3R4/4K3 b - - 0 1",  # lost
        "8/8/8/4k3/8/8/3RN3/4K3 w - - 0 1",  # won but for the fifty moves
        "8/8/8/4k3/8/3P4/3RN3/4K3 w - - 0 1",  # not in the table
        "8/8/8/4k3/8/8/3R4/4K3 w - - 1 1",  # the clock runs
        "8/8/8/4k3/8/8/8/R3K3 w Q - 0 1",  # castling
        "8/pp6/8/4k3/8/8/PP6/4K3 w - - 0 1",  # six men
    ]
    values = game.proven(from_boards([chess.Board(fen) for fen in fens]))
    np.testing.assert_array_equal(values, [1, -1, 0, np.nan, np.nan, np.nan, np.nan])
    assert tables.fens == fens[:4]
    with pytest.raises(ValueError, match="rtbw"):
        open_tablebases(Path(__file__).parent)


def test_damaged_tables_are_named_and_asked_no_more(tmp_path: Path) -> None:
    (tmp_path / "KRvK.rtbw").write_bytes(bytes(80))
    game = ChessGame(open_tablebases(tmp_path), pieces=3)
    states = from_boards([chess.Board("8/8/8/4k3/8/8/3R4/4K3 w - - 0 1")] * 2)
    with pytest.warns(UserWarning, match="Syzygy tables are damaged .*invalid magic header") as caught:
        assert np.isnan(game.proven(states)).all()
    assert len(caught) == 1
    for folder in ("x" * 5000, "a\0b", "no/such/folder"):
        with pytest.raises(ValueError, match="no Syzygy tables"):
            open_tablebases(folder)


def test_written_games_are_read_back() -> None:
    board = chess.Board("4k3/P7/8/8/8/8/8/4K2R b K - 0 1")
    start, moves = state(board), []
    for uci in ("e8e7", "a7a8q", "e7f7", "e1g1"):
        move = chess.Move.from_uci(uci)
        moves.append(policy_index(move, board.turn))
        board.push(move)
    text = GAME.write(GameRecord(start, moves, -1, {"Round": "3.1"}, ["", "+0.9", "", ""], ("best", "next")))
    read = chess.pgn.read_game(io.StringIO(text))
    assert read.end().board().fen() == board.fen()
    assert (read.headers["White"], read.headers["Black"], read.headers["Result"]) == ("best", "next", "1-0")
    assert read.headers["Round"] == "3.1"
    assert "+0.9" in text
    assert not read.errors
    assert '[Result "*"]' in GAME.write(GameRecord(start, moves))


# --- mates ----------------------------------------------------------------------------------------
