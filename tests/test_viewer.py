"""Boards to look through: a game with its moves, held-out positions with the teacher's, and what a network says."""

from pathlib import Path

import chess
import pytest
from networks import random_net

from matrixlib.runs import run as runs
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.evaluate import viewer


def test_a_game_is_stepped_through_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "game.pgn").write_text("1. f3 e5 2. g4 Qh4# 0-1\n")
    game = viewer.game_viewer(tmp_path / "game.pgn")
    assert [list(one.moves) for one in game.positions] == [["f2f3"], ["e7e5"], ["g2g4"], ["d8h4"], []]
    net = random_net(ssl=["threat", "control"])
    titles = [axes.get_title() for axes in game.figure(net, 0).axes]
    assert titles[:4] == ["network", "played", "control", "threat"]
    assert "the game is over" in game.figure(net, len(game) - 1).get_suptitle()
    assert game.check(net)[1]


def test_a_widget_shows_one_position_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "game.pgn").write_text("1. e4 e5 *\n")
    game, net = viewer.game_viewer(tmp_path / "game.pgn"), random_net(ssl=["threat"])
    board = game.board(net, 0)
    assert board.page["arrows"]["played"] == [["e2e4", 1.0]]
    assert len(board.page["arrows"]["network"]) == 20
    assert "destinations" not in board.page, "it is looked at, not played on"
    assert game.board(net, 1, board) is board
    assert (board.page["turn"], board.page["last"]) == ("black", ["e2", "e4"])
    assert len(board.page["maps"]["threat"]) == 64


def test_held_out_positions_have_the_teachers_moves() -> None:
    held_out = viewer.held_out_viewer(runs.held_out_data(load_config("demo")), 3)
    assert len(held_out) == 3
    for one in held_out.positions:
        assert sum(one.moves.values()) == pytest.approx(1)
        assert {chess.Move.from_uci(move) for move in one.moves} <= set(one.board.legal_moves)


def test_a_board_is_described_in_a_line() -> None:
    (evaluation,) = random_net().evaluate_boards([chess.Board()])
    text = viewer.describe(evaluation, chess.Board())
    assert text.startswith("White to move, ")
    assert text.count("%") == 3 + viewer.MOVES


def test_a_policy_that_is_none_over_the_legal_moves_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "game.pgn").write_text("1. e4 *\n")
    game, net = viewer.game_viewer(tmp_path / "game.pgn"), random_net()
    evaluations = list(net.evaluate_boards([one.board for one in game.positions]))
    evaluations[0].moves.popitem()
    monkeypatch.setattr(net, "evaluate_boards", lambda boards: iter(evaluations))
    assert not game.check(net)[1]
