"""What is said of one position or game: by the network, by a search, in text and as pictures."""

import io
from pathlib import Path

import chess
import numpy as np
import pytest
from matplotlib.figure import Figure
from networks import MATRIX0, material_net, random_net

from matrixlib.tasks.chess.evaluate import analysis

MATE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1"
DRAWN = "4k3/8/8/3q4/8/8/5N2/4K2R w - - 100 90"  # by the fifty-move rule, without a claim
KIWIPETE = "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R b KQkq - 0 1"


def drawn(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def test_a_position_is_told_and_drawn() -> None:
    result = analysis.analyse(random_net(ssl=["piece", "threat", "control"]), KIWIPETE, 60)
    board = chess.Board(KIWIPETE)
    for san in result.line:
        board.push_san(san)
    assert len(result.line) >= 2
    assert sum(result.visits.values()) == pytest.approx(1, abs=1e-5)
    assert set(result.visits) <= set(result.network.moves)
    lines = str(result).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["network", "search", "line"]
    assert "Black" in lines[1]
    figure = result.figure()
    assert [axes.get_title() for axes in figure.axes] == ["policy", "search", "control", "piece", "threat", "", "", ""]
    assert drawn(figure).startswith(b"\x89PNG")


def test_arrows_point_on_the_real_board() -> None:
    """Black's too: the board is never turned."""
    board = chess.Board("4k3/8/8/8/8/2n5/8/3QK3 b - - 0 1")
    figure = analysis.plots.position_figure(board, {"policy": {"c3d1": 0.9}}, {})
    (arrow,) = [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None)]
    assert (tuple(arrow.xyann), tuple(arrow.xy)) == ((2, 2), (3, 0))
    men = {
        (text.get_position(), text.get_text(), text.get_color()) for text in figure.axes[0].texts if text is not arrow
    }
    white, black = ([((3, 0), "♛", "white"), ((4, 0), "♚", "white")], [((4, 7), "♚", "black"), ((2, 2), "♞", "black")])
    assert men == {*white, *black}


def test_a_mate_is_seen_by_the_search() -> None:
    result = analysis.analyse(random_net(**MATRIX0), MATE, 30)
    assert (result.value, result.plies, result.line) == (1.0, 1, ("Rd8#",))
    assert "mate 1" in str(result)
    assert "win" not in str(result), "a scalar head says no win, draw and loss"


def test_what_is_no_position_to_analyse_is_named() -> None:
    net = random_net()
    for fen, message in (
        ("nonsense", "not a FEN"),
        ("R5k1/5ppp/8/8/8/8/8/K7 b - - 0 1", "over in .*1-0"),
        (DRAWN, "over in .*1/2"),
    ):
        with pytest.raises(ValueError, match=message):
            analysis.analyse(net, fen)


def test_the_search_knows_the_game_so_far() -> None:
    """A queen up, one move leads to the third occurrence of a position."""
    start, moves = "7k/8/8/8/8/8/8/KQ6 w - - 0 1", "b1b2 h8h7 b2b3 h7h8 b3b2 h8h7 b2b4 h7h8"
    net = material_net()
    told = analysis.analyse(net, f"fen {start} moves {moves}", 200)
    alone = analysis.analyse(net, told.board.fen(), 200)
    assert told.visits.get("b4b2", 0) < alone.visits["b4b2"]
    claim = "startpos moves " + " ".join(["g1f3", "g8f6", "f3g1", "f6g8"] * 2)
    assert analysis.analyse(net, claim, 8).visits


def test_the_course_of_a_game_is_seen_from_white(tmp_path: Path) -> None:
    path = tmp_path / "game.pgn"
    path.write_text('[Event "x"]\n\n1. e4 d5 2. exd5 Qxd5 3. Nc3 Qe6+ 4. Be2 Nf6 {a comment} (4... h6) 5. d4 *\n')
    boards = analysis.read_game(path)
    assert len(boards) == 10
    values = analysis.along(material_net(), boards)
    assert values[0] == pytest.approx(0, abs=1e-3)
    assert (values[[3, 4]] > [0.05, -0.05]).tolist() == [True, True], "White is a pawn up after 2. exd5"
    queenless = [chess.Board("4k3/8/8/8/8/8/8/3QK3 w - - 0 1"), chess.Board("4k3/8/8/8/8/8/8/3QK3 b - - 0 1")]
    assert (analysis.along(material_net(), queenless) > 0.7).all()
    mate = [chess.Board("R5k1/5ppp/8/8/8/8/8/K7 b - - 0 1"), chess.Board("k7/2Q5/8/8/8/8/8/K7 b - - 0 1")]
    assert analysis.along(material_net(), mate).tolist() == [1, 0]
    assert drawn(analysis.game_figure(material_net(), boards)).startswith(b"\x89PNG")
    assert np.isfinite(values).all()
    for text in ("", "1. e5 *"):
        path.write_text(text)
        with pytest.raises(ValueError, match="does not start with a game"):
            analysis.read_game(path)
    with pytest.raises(ValueError, match="no PGN file"):
        analysis.read_game(tmp_path / "none.pgn")


@pytest.mark.parametrize("text", ["e4N)?", ")", "\x00\xff", "[Event", "1. e5 *\n", ""])
def test_a_file_that_holds_no_game_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "game.pgn").write_text(text)
    with pytest.raises(ValueError, match=r"'game\.pgn' does not start with a game"):
        analysis.read_game(tmp_path / "game.pgn")
    with pytest.raises(ValueError, match="no PGN file"):
        analysis.read_game("x" * 5000)
