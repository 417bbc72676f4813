"""A game against a network: the rules (python-chess is the oracle), taking back, what a page is told, thinking that can
be ended."""

import io
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import chess
import chess.pgn
import pytest
from networks import material_net, random_net

from matrixlib.tasks.chess.board.session import Page, Session

MATE = "r1bqkbnr/pppp1ppp/2n5/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4"  # Qxf7


@pytest.fixture(scope="module")
def net() -> Any:
    return random_net(ssl=["threat", "control"])


def session(net: Any, **options: Any) -> Session:
    return Session(net, simulations=16, **options)


def test_a_game_follows_the_rules_and_comes_back_from_its_pgn(net: Any) -> None:
    game = session(net)
    board = chess.Board()
    for _ in range(3):
        squares = {(start, end) for start, ends in game.page()["destinations"].items() for end in ends}
        assert squares == {(str(one)[:2], str(one)[2:4]) for one in board.legal_moves}
        uci = min(map(str, board.legal_moves))
        game.play(uci)
        board.push_uci(uci)
        assert game.network_to_move
        assert game.page()["destinations"] == {}
        game.think()
        answer = game.answer()
        assert answer in board.legal_moves
        board.push(answer)
        assert game.board.fen() == board.fen()
    read_back = chess.pgn.read_game(io.StringIO(game.pgn()))
    assert read_back.errors == []
    assert read_back.end().board().fen() == game.board.fen()
    assert [sum(chances) for chances in game.chance_curve()] == pytest.approx([1] * 7, abs=1e-3)


def test_nobody_moves_for_the_network_or_after_the_end(net: Any) -> None:
    game = session(net, start=MATE)
    game.play("h5f7")
    assert (game.result, game.chance_curve()[-1]) == (("1-0", "checkmate"), (1, 0, 0))
    with pytest.raises(ValueError, match="the game is over: 1-0 checkmate"):
        game.play("a7a6")
    with pytest.raises(ValueError, match="over"):
        game.think()
    with pytest.raises(ValueError, match="network's turn"):
        session(net, side="black").play("e2e4")


def test_a_claimable_draw_ends_the_game(net: Any) -> None:
    game = session(net, start="startpos moves g1f3 g8f6 f3g1 f6g8 g1f3 g8f6 f3g1")
    game.board.push_uci("f6g8")
    fifty = session(net, start="4k3/8/8/8/8/8/3R4/4K3 w - - 100 90")
    assert game.result[0] == fifty.result[0] == "1/2-1/2"


def test_a_move_is_taken_back_with_its_answer_and_a_resignation_too(net: Any) -> None:
    game = session(net, side="black")
    game.think()
    first = game.answer()
    game.play("e7e5")
    game.think()
    game.answer()
    game.handle({"kind": "resign"}, lambda page: None)
    assert game.result == ("1-0", "resigned")
    game.take_back()
    assert (game.board.move_stack, game.result[0]) == ([first], "*")
    game.play("d7d5")
    game.take_back()  # before it was answered
    assert game.board.move_stack == [first]
    game.take_back()
    game.take_back()
    assert game.board == chess.Board(), "and no further"
    game = session(net)
    game.play("e2e4")
    game.think()
    game.take_back()
    game.play("a2a3")
    assert (game.evaluation.fen, game.evaluation.search) == (game.board.fen(), None), "not that of the first move"


def test_the_best_move_is_played_and_shown() -> None:
    game = session(material_net(), start="6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1", side="black")
    thought = game.think()
    assert thought.line == ("Rd8#",)
    assert game.page()["arrows"]["search"][0][0] == "d1d8"
    assert game.answer() == chess.Move.from_uci("d1d8")
    assert game.page()["line"].startswith("1. Rd8# (+1.00 for White, "), "though Black is to move now"


def test_a_time_a_move_is_kept_and_the_simulations_are_counted(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is the test's own: a batch takes a tenth of a second."""
    now = [0.0]
    game = Session(net, simulations=0, seconds=2.0)
    searched = game.game_search.net
    predict = searched.predict

    def slow(*arguments: Any) -> Any:
        now[0] += 0.1
        return predict(*arguments)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(searched, "predict", slow)
    thought = game.think()
    assert 2.0 <= now[0] < 2.3
    assert thought is not None
    assert thought.search.simulations > 20


def test_a_name_with_quotes_keeps_its_place_in_the_pgn(net: Any) -> None:
    """PGN's standard, 8.1.1 and 7: a quote and a backslash stand behind a backslash."""
    text = session(net, name=r'my "best" \ net').pgn()
    assert r'[Black "my \"best\" \\ net"]' in text


def test_a_network_of_another_task_is_refused() -> None:
    net: Any = SimpleNamespace(task=SimpleNamespace(config=SimpleNamespace(task="latin")))
    with pytest.raises(ValueError, match="'mine' is a network of latin, not of chess"):
        Session(net, "mine")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"simulations": 0}, "finite and not both 0"),
        ({"seconds": float("inf")}, "finite and not both 0"),
        ({"side": "red"}, "white or black, not 'red'"),
        ({"start": "8/8/8/8/8/8/8/8 w - - 0 1"}, "KING"),
    ],
)
def test_what_is_not_so_is_refused(net: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Session(net, **options)


class Visitor:
    """A page: the pages that it was shown; waits for the one that it wants."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.news = threading.Condition()

    def __call__(self, page: Page) -> None:
        with self.news:
            self.pages.append(page)
            self.news.notify_all()

    def wait(self, wanted: Callable[[Page], bool]) -> Page:
        with self.news:
            assert self.news.wait_for(lambda: wanted(self.pages[-1]), timeout=60)
            return self.pages[-1]


def test_a_page_plays_and_is_answered(net: Any) -> None:
    visitor = Visitor()
    game = session(net, side="black")
    game.handle({"kind": "open"}, visitor)
    page = visitor.wait(lambda page: not page["thinking"])
    assert page["pgn"].count("1. ") == 1, "White's move was played"
    game.handle({"kind": "move", "move": "e2e4"}, visitor)
    assert "illegal" in visitor.pages[-1]["problem"]
    game.handle({"kind": "move", "move": "e7e5"}, visitor)
    page = visitor.wait(lambda page: not page["thinking"])
    assert (page["turn"], page["problem"], len(page["chances"])) == ("black", "", 4)
    assert [name for name, _ in page["keys"]["control"]] == ["theirs", "even", "ours"]
    assert set(page["maps"]["control"]) <= {colour for _, colour in page["keys"]["control"]}
    assert page["line"].startswith("2. ")
    game.handle({"kind": "search"}, visitor)
    page = visitor.wait(lambda page: not page["thinking"] and page["arrows"]["search"] != [])
    assert page["turn"] == "black", "a search alone plays nothing"


def test_thinking_ends_with_the_page_and_goes_on_with_the_next(net: Any) -> None:
    visitor = Visitor()
    game = Session(net, simulations=0, seconds=3600)
    game.handle({"kind": "open"}, visitor)
    game.handle({"kind": "move", "move": "e2e4"}, visitor)
    assert visitor.pages[-1]["thinking"]
    (thread,) = (one for one in threading.enumerate() if one.name == "board")
    game.handle({"kind": "closed"}, visitor)
    assert not thread.is_alive()
    assert not visitor.pages[-1]["thinking"]
    assert game.board.move_stack == [chess.Move.from_uci("e2e4")], "no answer was played"
    game.handle({"kind": "open"}, visitor)
    game.handle({"kind": "limit", "simulations": 8, "seconds": 0}, visitor)
    visitor.wait(lambda page: not page["thinking"] and page["turn"] == "white")


def test_a_second_page_of_a_game_ends_the_thinking_of_the_first_unless_it_is_closed(net: Any) -> None:
    game = Session(net, simulations=0, seconds=3600, side="black")
    first, second = Visitor(), Visitor()
    game.handle({"kind": "open"}, first)
    (thread,) = (one for one in threading.enumerate() if one.name == "board")
    game.handle({"kind": "closed"}, second)
    assert thread.is_alive()
    game.handle({"kind": "resign"}, second)
    assert not thread.is_alive()
    assert not first.pages[-1]["thinking"], "and its page knows"


def test_simulations_are_a_whole_number(net: Any) -> None:
    visitor, game = Visitor(), session(net, seconds=1.0)
    for typed, simulations, problem in (("1e3", 1000, ""), ("", 0, ""), ("1.5", 0, "must be a whole number, not 1.5")):
        game.handle({"kind": "limit", "simulations": typed, "seconds": "1"}, visitor)
        assert game.simulations == simulations
        assert visitor.pages[-1]["problem"].endswith(problem)


def test_a_search_that_breaks_off_is_told(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    game, visitor = session(net, side="black"), Visitor()

    def broken(stop: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(game, "think", broken)
    game.handle({"kind": "open"}, visitor)
    page = visitor.wait(lambda page: bool(page["problem"]))
    assert not page["thinking"]
    assert "search failed" in page["problem"]
    assert page["status"] == "the network is to move: press search here"
