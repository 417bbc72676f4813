"""Elo of a network: openings, matches with fixed players and with itself, tables."""

from __future__ import annotations

import io

import chess.pgn
import pytest
from networks import material_net

from matrixlib.play.elo import rating
from matrixlib.tasks.chess.evaluate import strength
from matrixlib.tasks.chess.stockfish.client import EngineError, find_stockfish


def test_material_beats_a_random_player_and_every_pair_meets() -> None:
    matches = list(strength.gauntlet(material_net(), [2, 32], games=4, plies=80))
    names = [names for names, _ in matches]
    assert names == [
        ("network 2", "random"),
        ("network 2", "best capture"),
        ("network 32", "random"),
        ("network 32", "best capture"),
        ("network 32", "network 2"),
    ]
    assert all(match.pairs().sum() == 2 for _, match in matches)
    assert rating(matches[2][1].pairs()).score >= 0.5
    text = strength.match_table(matches)
    assert "network 32     - random" in text
    assert len(text.splitlines()) == 5 + 1 + 4
    games = io.StringIO(strength.pgn(matches))
    headers = []
    while (game := chess.pgn.read_game(games)) is not None:
        assert not game.errors
        headers.append({game.headers["White"], game.headers["Black"]})
    assert headers == [set(pair) for pair in names for _ in range(4)]
    assert strength.match_table(matches[:1]).count("\n") == 1


def test_stockfish_is_met_at_its_elo() -> None:
    try:
        find_stockfish()
    except EngineError as error:
        pytest.skip(str(error))
    matches = dict(
        strength.gauntlet(material_net(), [2], games=2, engine_elo=[1350], engine_nodes=50, plies=20)
    )
    assert ("network 2", "Stockfish 1350") in matches
