"""What is said of one position, one game or many boards: by the network, by a search, in text and on boards."""

from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
import torch
from cells import definitions
from networks import material_net, random_net

from matrixlib.runs import run as runs
from matrixlib.tasks import load_config
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.blocks import AttentionBlock
from matrixlib.tasks.chess.evaluate import analysis

MATE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1"
DRAWN = "4k3/8/8/3q4/8/8/5N2/4K2R w - - 100 90"  # by the fifty-move rule, without a claim
KIWIPETE = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R b KQkq - 0 1"


def test_a_position_is_told_and_shown() -> None:
    result = analysis.analyse(random_net(ssl=["piece", "threat", "control"]), KIWIPETE, 60)
    board = chess.Board(KIWIPETE)
    for san in result.line:
        board.push_san(san)
    assert len(result.line) >= 2
    assert sum(result.visits.values()) == pytest.approx(1, abs=1e-5)
    assert set(result.visits) <= set(result.moves)
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["network", "search", "line"]
    assert "Black" in lines[1]
    shown = result.boards().data
    assert [f"<b>{title}</b>" in shown for title in ("network", "search", "control", "piece", "threat")] == [True] * 5


def test_arrows_and_maps_lie_on_the_real_board() -> None:
    """Black's too: the board is never turned."""
    (arrow,) = plots.arrows({"c3d1": 0.9})
    assert (arrow.tail, arrow.head) == (chess.C3, chess.D1)
    values = np.zeros((8, 8))
    values[0, 3] = 1  # d1
    fill = plots.map_fill("threat", values)
    assert [square for square, colour in fill.items() if colour != fill[chess.A8]] == [chess.D1]
    assert plots.map_fill("threat", values, values == 1).keys() == {chess.D1}
    board = chess.Board("4k3/8/8/8/8/2n5/8/3QK3 b - - 0 1")
    shown = plots.boards([plots.Card(board, "a < b", {"c3d1": 0.9}, fill)]).data
    assert shown.count("<line") == 1
    assert "a &lt; b" in shown


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("encoding", ["oriented", "matrix0"])
@pytest.mark.parametrize(("turn", "looks", "at"), [("w", "e2", "e4"), ("b", "e7", "e5")])
def test_attention_lies_on_the_real_board(encoding: str, norm: str, turn: str, looks: str, at: str) -> None:
    """A network whose pawn looks two squares ahead: Black's positions are mirrored inside, files are not."""
    net = random_net(encoding=encoding, attention={"every": 1, "heads": 2, "norm": norm, "bias": True})
    turned = 56 if encoding == "matrix0" and turn == "w" else 0  # whose planes are White's board, rank 8 first
    first, second = (chess.parse_square(name) ^ turned for name in ("e2", "e4"))
    (block,) = (module for module in net.model.modules() if isinstance(module, AttentionBlock))
    with torch.no_grad():
        block.qkv.weight.zero_()
        assert block.bias is not None
        block.bias[0, 1, first, second] = 30
    board = chess.Board(chess.STARTING_FEN.replace(" w ", f" {turn} "))
    weights = net.attention(board)
    assert weights.shape == (1, 2, 64, 64)
    np.testing.assert_allclose(weights.sum(3), 1, atol=1e-5)
    assert [tuple(map(chess.square_name, pair)) for pair in np.argwhere(weights[0, 1] > 0.9)] == [(looks, at)]
    assert weights[0, 0].max() < 0.02, "the other head looks everywhere"
    cards = list(definitions("browse")["attention_cards"](net, board, looks))
    darkest = [max(card.fill, key=lambda square: -int(card.fill[square][5:], 16)) for card in cards]
    assert [chess.square_name(square) for square in darkest] == [at, at]
    assert not any(block._forward_pre_hooks.values())


def test_a_network_without_attention_says_so() -> None:
    with pytest.raises(ValueError, match=r"no attention blocks: train one with model\.attention\.every above 0"):
        random_net().attention(chess.Board())


def test_what_is_no_position_to_analyse_is_named() -> None:
    net = random_net()
    for fen, message in (
        ("nonsense", "not a FEN"),
        (DRAWN, "over in .*1/2"),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.analyse(net, fen)


def test_the_search_knows_the_game_so_far() -> None:
    """A queen up, one move leads to the third occurrence of a position."""
    start, moves = "7k/8/8/8/8/8/8/KQ6 w - - 0 1", "b1b2 h8h7 b2b3 h7h8 b3b2 h8h7 b2b4 h7h8"
    net = material_net()
    told = analysis.analyse(net, f"fen {start} moves {moves}", 200)
    alone = analysis.analyse(net, told.fen, 200)
    assert told.visits.get("b4b2", 0) < alone.visits["b4b2"]
    claim = "startpos moves " + " ".join(["g1f3", "g8f6", "f3g1", "f6g8"] * 2)
    assert analysis.analyse(net, claim, 8).visits


def test_the_course_of_a_game_is_seen_from_white(tmp_path: Path) -> None:
    path = tmp_path / "game.pgn"
    path.write_text('[Event "x"]\n\n1. e4 d5 2. exd5 Qxd5 3. Nc3 Qe6+ 4. Be2 Nf6 {a comment} (4... h6) 5. d4 *\n')
    boards = analysis.read_game(path)
    cells: dict[str, Any] = definitions("eval")
    cells["net"], along = material_net(), cells["along"]
    values = along(boards)
    assert (values[[3, 4]] > [0.05, -0.05]).tolist() == [True, True], "White is a pawn up after 2. exd5"
    mate = [chess.Board("R5k1/5ppp/8/8/8/8/8/K7 b - - 0 1"), chess.Board("k7/2Q5/8/8/8/8/8/K7 b - - 0 1")]
    assert along(mate).tolist() == [1, 0]


@pytest.mark.parametrize("text", [")", "\x00\xff", "1. e5 *\n", ""])
def test_a_file_that_holds_no_game_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "game.pgn").write_text(text)
    with pytest.raises(ValueError, match=r"'game\.pgn' does not start with a game"):
        analysis.read_game(tmp_path / "game.pgn")
    with pytest.raises(ValueError, match="no PGN file"):
        analysis.read_game("x" * 5000)


# Boards to look through


def test_a_game_is_stepped_through_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "game.pgn").write_text("1. f3 e5 2. g4 Qh4# 0-1\n")
    game = analysis.game_viewer(tmp_path / "game.pgn")
    assert [list(one.moves) for one in game.positions] == [["f2f3"], ["e7e5"], ["g2g4"], ["d8h4"], []]
    net = random_net(ssl=["threat", "control"])
    shown = game.figure(net, 0, "mine").data
    assert [f"<b>{title}</b>" in shown for title in ("network", "played", "control", "threat")] == [True] * 4
    assert "White to move, " in shown
    assert "the game is over" in game.figure(net, len(game) - 1, "mine").data
    assert game.check(net)[1]
    board = game.board(net, 0, "mine")
    assert board.page["arrows"]["played"] == [["f2f3", 1.0]]
    assert "destinations" not in board.page, "it is looked at, not played on"
    assert game.board(net, 1, "mine", board) is board
    assert (board.page["turn"], board.page["last"]) == ("black", ["f2", "f3"])


def test_held_out_positions_have_the_teachers_moves() -> None:
    held_out = analysis.held_out_viewer(runs.held_out_data(load_config("demo")), 3)
    assert len(held_out) == 3
    for one in held_out.positions:
        assert sum(one.moves.values()) == pytest.approx(1)
        assert {chess.Move.from_uci(move) for move in one.moves} <= set(one.board.legal_moves)
