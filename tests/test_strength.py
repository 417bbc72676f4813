"""A network in a search says what `Net.evaluate` says; players made of it, fixed ones and engines; matches."""

import contextlib
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chess
import numpy as np
import pytest
from networks import MATRIX0, material_net, random_net
from positions import hard_positions, random_positions
from test_stockfish import fake_engine

from matrixlib.play.match import Turn, play_pairs, random_player
from matrixlib.play.search import Evaluator
from matrixlib.tasks.chess.evaluate import strength
from matrixlib.tasks.chess.evaluate.strength import capture_player
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards, move_from_index, to_board
from matrixlib.tasks.chess.stockfish.client import EngineError
from matrixlib.tasks.chess.stockfish.player import engine_player
from matrixlib.tasks.chess.uci import engine as uci
from matrixlib.tasks.chess.uci.protocol import read_position

GAME = ChessGame()


def positions(count: int) -> list[chess.Board]:
    """With castling, en passant and promotions, half of them Black's."""
    boards = hard_positions() + random_positions(count, seed=3)
    return [board for board in boards if any(board.legal_moves)]


def question(boards: list[chess.Board]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    states = from_boards(boards)
    return states, *GAME.legal(states)


def turn(boards: list[chess.Board]) -> Turn:
    none = [np.zeros(0, np.uint64)] * len(boards), [from_boards([])] * len(boards)
    return Turn(np.arange(len(boards)), from_boards(boards), *none, [[]] * len(boards))


@pytest.mark.parametrize("model", [{}, MATRIX0], ids=["oriented", "matrix0"])
def test_the_search_hears_what_evaluate_says(model: dict[str, object]) -> None:
    net, boards = random_net(**model), positions(150)
    states, moves, offsets = question(boards)
    priors, values = Evaluator(net)(states, moves, offsets)
    for i, (board, evaluation) in enumerate(zip(boards, net.evaluate_boards(boards), strict=True)):
        row = slice(offsets[i], offsets[i + 1])
        priors_by_move = {move_from_index(int(m), board).uci(): p for m, p in zip(moves[row], priors[row], strict=True)}
        assert priors_by_move == pytest.approx(evaluation.moves, abs=1e-5), board.fen()
        assert values[i] == pytest.approx(evaluation.value, abs=1e-5), board.fen()


def test_a_network_with_dropout_says_the_same_twice_and_must_not_be_training() -> None:
    net = random_net(dropout=0.5, droppath=0.5)
    evaluate, inputs = Evaluator(net), question(positions(20))
    for first, second in zip(evaluate(*inputs), evaluate(*inputs), strict=True):
        assert (first == second).all()
    next(net.model.children()).train()
    with pytest.raises(AssertionError, match="eval mode"):
        Evaluator(net)


def test_the_capture_player_takes_the_best_piece() -> None:
    board = chess.Board("4k3/8/8/3q1r2/4P3/2N5/8/4K3 w - - 0 1")
    boards = [board, chess.Board(), board.mirror()]
    player = capture_player(seed=1)
    moves = player(turn(boards)).moves
    assert move_from_index(int(moves[0]), boards[0]).uci() in ("e4d5", "c3d5")
    assert move_from_index(int(moves[2]), boards[2]).uci() in ("e5d4", "c6d4")
    assert (moves == player(turn(boards)).moves).all()


def test_an_engine_is_told_the_game_so_far_that_it_sees_repetitions() -> None:
    asked: list[str] = []

    def best_move(position: str, limit: str) -> str:
        asked.append(position)
        return next(iter(read_position(position).legal_moves)).uci()

    engine: Any = SimpleNamespace(new_game=lambda: asked.append("new"), best_move=best_move)
    player = engine_player(engine, "nodes 50")
    match = play_pairs(GAME, player, random_player(GAME, 0), GAME.initial(1), plies=4)
    told = [read_position(text) for text in asked if text != "new"]
    assert [len(board.move_stack) for board in told] == [0, 1, 2, 3]
    played = [[move_from_index(i, chess.Board()) for i in game.moves[:1]] for game in match.games]
    assert told[1].move_stack == played[1], "the second game's first move is the other player's"
    assert asked[::2] == ["new"] * 4, "its answer is of this game alone"


def test_an_engine_is_asked_by_one_thread_at_a_time() -> None:
    asked = list[str]()

    def best_move(position: str, limit: str) -> str:
        time.sleep(0.01)  # for the other thread to come between
        asked.append("move")
        return next(iter(read_position(position).legal_moves)).uci()

    player = engine_player(SimpleNamespace(new_game=lambda: asked.append("new"), best_move=best_move), "nodes 50")
    play_pairs(GAME, player, player, GAME.initial(4), plies=2, threads=2)
    assert asked == ["new", "move"] * 16


@contextlib.contextmanager
def limited(hash_mb: int, options: dict[str, Any]) -> Iterator[Any]:
    """An engine that plays the last move by name, or the first one under its own limit."""
    assert options["UCI_LimitStrength"] is True
    place = -1 if options["UCI_Elo"] == 1350 else 0

    def best_move(position: str, limit: str) -> str:
        assert limit == "nodes 50"
        return sorted(move.uci() for move in read_position(position).legal_moves)[place]

    yield SimpleNamespace(new_game=lambda: None, best_move=best_move)


def test_stockfish_is_met_at_its_elo_and_in_a_tournament_everybody_meets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is limited to the Elo under whose name it plays."""
    monkeypatch.setattr(strength, "Stockfish", limited)
    options: dict[str, Any] = {"games": 2, "engine_elo": [1350, 1400], "engine_nodes": 50, "plies": 8}
    matches = dict(strength.gauntlet(material_net(), [2, 4], tournament=True, **options))
    players = {"network 2", "network 4", "random", "best capture", "Stockfish 1350", "Stockfish 1400"}
    assert {frozenset(pair) for pair in matches} == {frozenset(pair) for pair in itertools.combinations(players, 2)}
    for elo, place in ((1350, -1), (1400, 0)):
        name = f"Stockfish {elo}"
        for game in matches["network 2", name].games:
            board = to_board(game.start)
            for index in game.moves:
                move = move_from_index(index, board)
                if game.players[not board.turn] == name:
                    assert move.uci() == sorted(one.uci() for one in board.legal_moves)[place]
                board.push(move)


FIRST_MOVE = """
import chess
board = chess.Board()
for line in sys.stdin:
    word, *rest = line.split()
    if word == "uci":
        print("id name First 1\\noption name Hash type spin default 16 min 1 max 64")
        print("option name Style type combo default Risky var Solid var Risky\\nuciok", flush=True)
    elif word == "isready": print("readyok", flush=True)
    elif word == "position":
        fen, _, moves = line.strip().removeprefix("position fen ").partition(" moves ")
        board = chess.Board(fen)
        for move in moves.split(): board.push_uci(move)
    elif word == "go":
        assert rest == ["depth", "3"]
        {answer}
        print("bestmove", min(move.uci() for move in board.legal_moves), flush=True)
"""


def test_any_engine_plays_with_its_limit_and_options(tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, FIRST_MOVE.replace("{answer}", ""))
    texts = [f"{engine} depth=3 Hash=8 Style=Solid", f"'{engine}' depth=3"]
    options: dict[str, Any] = {"games": 2, "plies": 6, "engines": texts, "tournament": True}
    matches = dict(strength.gauntlet(material_net(), [2], **options))
    ours, theirs = "First 1 depth 3", "First 1 depth 3 (2)"
    game = matches[ours, theirs].games[0]
    board = to_board(game.start)
    for index in game.moves:
        move = move_from_index(index, board)
        assert move.uci() == min(one.uci() for one in board.legal_moves)
        board.push(move)
    for change in ("Hash=99", "Hash=big", "Style=Wild", "Contempt=3"):
        with pytest.raises(EngineError, match=f"First 1 refuses {change.replace('=', ' ')}"):
            strength.check_engines([f"{engine} depth=3 {change}"])


@pytest.mark.parametrize(
    "text", ["", "fruit", "nodes=5", "fruit nodes=0", "fruit nodes=5 depth=3", "fruit nodes=5 Hash", "'"]
)
def test_an_engine_that_is_not_said_how_to_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"engine {text!r}: ")):
        strength.check_engines([text])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("print('bestmove e1e5', flush=True); continue", "First 1 answers 'e1e5' in `fen .*: "),
        ("sys.exit(4)", "no `bestmove` from First 1 in `position fen .*: exit status 4"),
        ("print('bestmove', flush=True); continue", "First 1 answers '' in `fen "),
    ],
)
def test_an_engine_that_fails_in_a_game_is_named_with_its_position(tmp_path: Path, answer: str, message: str) -> None:
    engine = fake_engine(tmp_path, FIRST_MOVE.replace("{answer}", answer))
    text = f"{engine} depth=3"
    for ask in (
        lambda: dict(strength.gauntlet(material_net(), [1], games=2, plies=6, engines=[text])),
        lambda: strength.check_engines([text]),
    ):
        with pytest.raises(EngineError, match=message):
            ask()
    with pytest.raises(EngineError, match=r"/absent cannot be started \(No such file or directory\): give its path"):
        strength.check_engines([f"{tmp_path}/absent depth=3"])


def test_an_engine_that_hangs_is_stopped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matrixlib.tasks.chess.stockfish.player.ANSWER_SECONDS", 3)
    engine = fake_engine(tmp_path, FIRST_MOVE.replace("{answer}", "time.sleep(600)"))
    with pytest.raises(EngineError, match=r"no `bestmove` from First 1 .*no answer within 3 s and was stopped"):
        strength.check_engines([f"{engine} depth=3"])


@pytest.mark.parametrize("name", ["matrixlib-uci", "stockfish", "current", "lc0", "gnuchess", "glaurung", "toga2"])
def test_real_engines_play(name: str, request: pytest.FixtureRequest) -> None:
    lc0 = request.getfixturevalue("lc0") if name == "lc0" else ""
    maia = Path(os.environ.get("MATRIXLIB_SHARED", "../shared")) / "maia" / "maia-1100.pb.gz"
    program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/games")
    found = {
        "matrixlib-uci": f"{sys.executable} -m {uci.__name__} --checkpoint shipped --device cpu nodes=2",
        "current": f"{current} nodes=20" if (current := os.environ.get("MATRIXLIB_STOCKFISH")) else "",
        "lc0": f"{lc0} --weights={maia} nodes=1" if lc0 and maia.exists() else "",
        "gnuchess": f"{program} --uci depth=1" if program else "",
        **{name: f"{program} depth=2" for name in ("glaurung", "toga2") if program},  # of nodes they know little
    }
    if not (text := found.get(name, f"{program} nodes=20" if program else "")):
        pytest.skip(f"{name} is not installed")
    matches = dict(strength.gauntlet(material_net(), [1], games=2, plies=6, engines=[text]))
    ((_, theirs),) = [names for names in matches if names[1] not in ("random", "best capture")]
    assert all(len(game.moves) == 6 for game in matches["network 1", theirs].games)
