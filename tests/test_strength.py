"""Elo of a network: openings, matches with fixed players and with itself, tables."""

import itertools
import os
from pathlib import Path

import pytest
from networks import material_net
from test_stockfish import fake_engine

from matrixlib.play.elo import rating
from matrixlib.tasks.chess.evaluate import strength
from matrixlib.tasks.chess.records import move_from_index, to_board
from matrixlib.tasks.chess.stockfish.client import EngineError


def test_material_beats_a_random_player_and_every_pair_meets() -> None:
    matches = dict(strength.gauntlet(material_net(), [2, 32], games=4, plies=80))
    assert list(matches) == [
        ("network 2", "random"),
        ("network 2", "best capture"),
        ("network 32", "random"),
        ("network 32", "best capture"),
        ("network 32", "network 2"),
    ]
    assert all(match.pairs().sum() == 2 for match in matches.values())
    assert rating(matches["network 32", "random"].pairs()).score >= 0.5


def test_in_a_tournament_everybody_meets_everybody_once() -> None:
    net = material_net()
    matches = strength.gauntlet(net, [2, 4], games=2, plies=2, opponents={"rival": net}, tournament=True)
    names = [frozenset(pair) for pair in dict(matches)]
    players = {"network 2", "network 4", "random", "best capture", "rival 2", "rival 4"}
    assert set(names) == {frozenset(pair) for pair in itertools.combinations(players, 2)}
    assert len(names) == len(set(names)) == 15


LIMITED = """
import chess
board, options = chess.Board(), {}
for line in sys.stdin:
    word, *rest = line.split()
    if word == "uci":
        print("id name Fake 1\\noption name UCI_ShowWDL type check default false")
        print("option name UCI_LimitStrength type check default false")
        print("option name UCI_Elo type spin default 1320 min 1320 max 3190\\nuciok", flush=True)
    elif word == "setoption": options[rest[1]] = rest[3]
    elif word == "isready": print("readyok", flush=True)
    elif word == "position":
        start, _, moves = " ".join(rest[1:]).partition(" moves ")
        board = chess.Board(start)
        for uci in moves.split(): board.push_uci(uci)
    elif word == "go":
        assert rest == ["nodes", "50"]
        best, *_, worst = sorted(move.uci() for move in board.legal_moves) * 2
        limited = options.get("UCI_LimitStrength") == "true" and options["UCI_Elo"] == "1350"
        print(f"info depth 1 multipv 1 score cp 0 nodes 50 pv {best}")
        print(f"bestmove {worst if limited else best}", flush=True)
"""


def test_stockfish_is_met_at_its_elo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is limited to the Elo under whose name it plays, and plays its weaker move, not its best line's."""
    fake_engine(tmp_path, LIMITED).rename(tmp_path / "stockfish")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    matches = dict(strength.gauntlet(material_net(), [2], games=2, engine_elo=[1350, 1400], engine_nodes=50, plies=20))
    for elo, place in ((1350, -1), (1400, 0)):
        name, count = f"Stockfish {elo}", 0
        for game in matches["network 2", name].games:
            board = to_board(game.start)
            for index in game.moves:
                move = move_from_index(index, board)
                if game.players[not board.turn] == name:
                    assert move.uci() == sorted(one.uci() for one in board.legal_moves)[place]
                    count += 1
                board.push(move)
        assert count >= 10
    with pytest.raises(EngineError, match="Fake 1 refuses UCI_Elo 1: it has spin default 1320 min 1320 max 3190"):
        next(strength.gauntlet(material_net(), [2], games=2, engine_elo=[1]))
