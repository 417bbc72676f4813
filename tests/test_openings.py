"""Opening books: what is read is what python-chess replays; what cannot be played is named before any game."""

import struct
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import chess.polyglot
import numpy as np
import pytest

from matrixlib.config import ConfigError, OpeningOptions
from matrixlib.play.game import Openings, uniform
from matrixlib.play.match import Choice, Turn, play_pairs
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.runs import cycle
from matrixlib.tasks import get_task
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.openings import read_openings
from matrixlib.tasks.chess.records import from_boards, policy_index, to_board

GAME = ChessGame()
SHUFFLE = "Nf3 Nf6 Ng1 Ng8"  # back to the initial position
LINES = ["e4 e5 Nf3 Nc6", "d4 d5 c4", "e4 c5", SHUFFLE]
OVER = "8/8/8/8/8/5k2/6q1/6K1 w - - 0 1"


def boards_of(lines: list[str], plies: int) -> list[chess.Board]:
    boards = [chess.Board() for _ in lines]
    for board, line in zip(boards, lines, strict=True):
        for word in line.split()[:plies]:
            board.push_san(word)
    return boards


def book(path: Path, entries: list[tuple[str, str]]) -> Path:
    """A Polyglot file of (line before, move)."""
    made = []
    for line, uci in entries:
        (board,), move = boards_of([line], 99), chess.Move.from_uci(uci)
        made.append(
            struct.pack(">QHHI", chess.polyglot.zobrist_hash(board), move.from_square << 6 | move.to_square, 1, 0)
        )
    path.write_bytes(b"".join(sorted(made)))
    return path


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def same(found: Openings, boards: list[chess.Board]) -> None:
    """Whatever the order."""
    states = from_boards(boards)
    order, wanted = np.argsort(GAME.key(found.states)), np.argsort(GAME.key(states))
    assert found.states[order].tobytes() == states[wanted].tobytes()
    for row, board in zip(order, (boards[i] for i in wanted), strict=True):
        before = []
        while board.move_stack:
            board.pop()
            before.append(board.copy())
        assert found.history[row].tolist() == GAME.key(from_boards(before[::-1])).tolist()


@pytest.mark.parametrize("plies", [1, 3, 16])
def test_a_book_of_games_is_what_python_chess_replays(tmp_path: Path, plies: int) -> None:
    path = text(tmp_path / "book.pgn", "\n\n".join(f'[Event "{i}"]\n\n{line} *' for i, line in enumerate(LINES)))
    distinct = {board.fen().rsplit(" ", 2)[0]: board for board in boards_of(LINES, plies)}
    found = read_openings(str(path), plies, 99, 0)
    same(found, list(distinct.values()))
    if plies == 16:
        (row,) = np.flatnonzero(GAME.key(found.states) == GAME.key(GAME.initial(1)))
        assert found.states["repetition"][row] == 1


def test_positions_and_polyglot(tmp_path: Path) -> None:
    boards = boards_of(["e4", "d4 d5"], 9)
    lines = [boards[0].epd(bm=chess.Move.from_uci("e7e5")), "# a comment", "", boards[1].fen(), boards[1].fen()]
    found = read_openings(str(text(tmp_path / "list.epd", "\n".join(lines))), 1, 9, 0)
    assert {to_board(state).epd() for state in found.states} == {board.epd() for board in boards}
    castle = "e4 e5 Nf3 Nc6 Bb5 a6"
    entries = [("", "e2e4"), ("e4", "e7e5"), ("e4 e5", "g1f3"), ("e4 e5", "b1c3"), ("e4", "c7c5"), ("d4", "d7d5")]
    same(
        read_openings(str(book(tmp_path / "a.bin", entries)), 3, 9, 0),
        boards_of(["e4 e5 Nf3", "e4 e5 Nc3", "e4 c5"], 9),
    )
    moves = [str(move) for move in boards_of([castle], 9)[0].move_stack]
    steps = [(" ".join(castle.split()[:i]), move) for i, move in enumerate(moves)] + [(castle, "e1h1")]
    same(read_openings(str(book(tmp_path / "b.bin", steps)), 9, 9, 0), boards_of([castle + " O-O"], 9))


@pytest.mark.parametrize(
    ("name", "content", "refusal"),
    [
        ("none.pgn", None, r"none\.pgn' cannot be read: No such file"),
        ("a.txt", "e4", r"a\.txt': give a file whose name ends with \.pgn, \.epd"),
        ("a.pgn", "1. e4 e5 *\n\n1. e4 Ke7 *", r"a\.pgn', game 2: illegal move, 1\.\.\. Ke7 is not legal"),
        ("a.pgn", "1. f3 e5 2. g4 Qh4# *", r"a\.pgn', game 1: the game is over in 'rnb1kbnr"),
        ("a.pgn", "no game at all", r"a\.pgn"),
        ("a.epd", f"{chess.STARTING_FEN}\n\n{OVER}", r"a\.epd', line 3: the game is over"),
        ("a.fen", f"\n{chess.STARTING_FEN}\nrnbq w", r"a\.fen', line 3: not a FEN: 'rnbq w'"),
        ("a.fen", "\n", r"a\.fen': there is none in it"),
        ("a.bin", "0123456789", r"a\.bin': no Polyglot book"),
        ("a.bin", [("", "e2e4"), ("e4", "e2e5")], r"a\.bin': illegal uci: 'e2e5' in rnbq"),
        ("a.bin", [("e4", "e7e5")], r"a\.bin': there is none in it"),
        ("a.pgn", "1. e4 *", r"a\.pgn': 1 different ones, where 4 are asked for"),
    ],
)
def test_an_unusable_book_is_refused_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: Any, refusal: str
) -> None:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path / "reports"))
    path = tmp_path / name
    if content is not None:
        text(path, content) if isinstance(content, str) else book(path, content)
    with pytest.raises(ValueError, match=refusal):
        cycle.open_cycle("demo", "cpu", "c", {"match": {"openings": str(path)}})
    assert not (tmp_path / "reports").exists()


def test_other_games_have_no_books(reports: Path) -> None:
    with pytest.raises(ValueError, match="tic-tac-toe has no opening books; leave `openings` empty"):
        cycle.open_cycle("tictactoe", "cpu", "t", {"selfplay": {"openings": "book.pgn"}})


def test_the_seed_chooses(shared: Path) -> None:
    game: Any = get_task("chess").game
    masters = OpeningOptions(openings=str(shared / "games" / "masters.pgn"), opening_plies=8)
    chosen = [GAME.key(game.openings(masters, 50, seed, 0).states).tolist() for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 50


def test_games_start_from_the_book_with_its_repetitions(tmp_path: Path) -> None:
    """The shuffle's initial position has been there once: moving back to it a second time is a draw by repetition."""
    path = text(tmp_path / "book.pgn", f"{SHUFFLE} *\n\n1. e4 *")
    openings = read_openings(str(path), 16, 2, 0)
    options = SelfPlayOptions(num_simulations=2, plies=6)
    starts = [to_board(t.states[0]).epd() for t in play_games(GAME, uniform, range(5), options, None, 0, openings)]
    assert [starts.count(to_board(state).epd()) for state in openings.states] == [3, 2]

    def shuffle(turn: Turn) -> Choice:
        words, boards = ["g1f3", "g8f6", "f3g1", "f6g8"], [to_board(state) for state in turn.states]
        ucis = [words[len(moves) % 4] for moves in turn.moves]
        return Choice(
            np.array([policy_index(chess.Move.from_uci(u), b.turn) for u, b in zip(ucis, boards, strict=True)])
        )

    (row,) = np.flatnonzero(openings.states["repetition"] == 1)
    one = openings[row : row + 1]
    match = play_pairs(GAME, shuffle, shuffle, one.states, 40, history=one.history)
    assert [(len(game.moves), game.tags["Termination"]) for game in match.games] == [(4, "normal")] * 2
    assert len(play_pairs(GAME, shuffle, shuffle, GAME.initial(1), 40).games[0].moves) == 8


def test_a_cycle_keeps_to_its_book(tmp_path: Path, reports: Path) -> None:
    path = text(tmp_path / "book.pgn", "\n\n".join(f"1. {line} *" for line in LINES))
    overrides: dict[str, Any] = {
        "selfplay": {"openings": str(path), "num_simulations": 2, "random_plies": [0, 0], "plies": 3},
        "match": {"openings": str(path), "plies": 4},
    }
    opened = cycle.open_cycle("demo", "cpu", "c", overrides)
    (generation,) = opened.train()
    assert generation.decision
    wanted = {board.fen().split()[0] for board in boards_of(LINES, 16)}
    for file in (opened.folder / "matches").iterdir():
        with file.open() as games:
            while (game := chess.pgn.read_game(games)) is not None:
                assert game.board().fen().split()[0] in wanted
    cycle.open_cycle("demo", "cpu", "c", overrides)
    path.write_text(path.read_text() + "\n\n1. Nc3 *\n")
    with pytest.raises(cycle.CycleError, match=r"the openings of cycle 'c' \(.*book\.pgn\) are not the files"):
        cycle.open_cycle("demo", "cpu", "c", overrides)
    with pytest.raises((cycle.CycleError, ConfigError), match="another configuration"):
        cycle.open_cycle("demo", "cpu", "c", {**overrides, "match": {"openings": ""}})
