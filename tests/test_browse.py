"""Looking through runs: what is listed, what a menu shows, and that nothing but pictures is made headless."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chess
import pytest
from matplotlib.figure import Figure
from networks import random_net, save_run

from matrixlib.engine.metrics import MetricsLog
from matrixlib.runs import browse

GAME = "1. f3 e5 2. g4 Qh4# 0-1\n"


def make_run(root: Path, name: str, started: str, **summary: Any) -> Path:
    """A complete run with random weights and two updates."""
    folder = root / name
    net = random_net(ssl=["threat", "control"])
    save_run(folder, net)
    asked = {"task": "chess", "model": {"ssl": ["threat", "control"]}}
    (folder / "run.json").write_text(json.dumps({"kind": "train", "started": started, "requested": asked}))
    (folder / "summary.json").write_text(json.dumps({"complete": True, "steps": 2, **summary}))
    with MetricsLog(folder / "metrics.jsonl") as log:
        for step in (1, 2):
            row = {
                "step": step,
                "loss": 4.0 - step,
                "losses": {"policy": 3.0},
                "grad_norm": 1.0,
                "seconds": 0.1,
            }
            log.write(row)
    return folder


@pytest.fixture
def shelf(reports: Path, tmp_path: Path) -> browse.Shelf:
    make_run(reports, "older", "2026-01-01T00:00:00Z", headline="top-1 9%")
    make_run(reports, "newer", "2026-02-01T00:00:00Z", verdict={"passed": True})
    (tmp_path / "game.pgn").write_text(GAME)
    return browse.open_shelf("older", game=str(tmp_path / "game.pgn"), device="cpu")


def test_runs_are_listed_newest_first(shelf: browse.Shelf, reports: Path) -> None:
    (reports / "data").mkdir()
    assert shelf.names == ("newer", "older")
    assert browse.table(shelf.names).to_dict("index") == {
        "newer": {"verdict": "PASS", "updates": 2, "result": ""},
        "older": {"verdict": "no verdict", "updates": 2, "result": "top-1 9%"},
    }


def test_checkpoints_and_chess_runs(shelf: browse.Shelf, reports: Path) -> None:
    assert browse.checkpoints("older") == ("best", "newest", "step_00000007")
    (reports / "newer" / "run.json").write_text('{"requested": {"task": "latin"}}')
    assert browse.chess_runs(shelf.names) == ("older",)
    assert browse.checkpoints("absent") == ()


def test_a_game_is_stepped_through_to_its_end(shelf: browse.Shelf) -> None:
    places = shelf.positions()
    assert [list(one.chosen) for one in places] == [["f2f3"], ["e7e5"], ["g2g4"], ["d8h4"], []]
    net = browse._net("older", "best", "cpu")
    titles = [axes.get_title() for axes in browse.board_figure(net, places[0]).axes]
    assert titles[:4] == ["network", "played", "control", "threat"]
    assert "the game is over" in browse.board_figure(net, places[-1]).get_suptitle()


def test_what_is_said_of_a_board(shelf: browse.Shelf) -> None:
    board = chess.Board()
    (seen,) = browse._net("older", "best", "cpu").evaluate_boards([board])
    said = browse.words(seen, board)
    assert said.startswith("White to move, ")
    assert said.count("%") == 3 + browse.SHOWN


def test_curves_of_one_run_or_two(shelf: browse.Shelf) -> None:
    assert browse.curves_figure("older").get_suptitle() == "older"
    two = browse.curves_figure("older", "newer")
    assert {line.get_label() for line in two.axes[0].get_lines()} >= {"older", "newer"}
    assert len(browse.curves_figure("older", "older").axes) == len(browse.curves_figure("older").axes)


def test_held_out_positions_have_the_teachers_moves(reports: Path) -> None:
    make_run(reports, "mine", "2026-01-01T00:00:00Z")
    shelf = browse.open_shelf(positions=3, device="cpu")
    assert shelf.run == "mine"
    for one in shelf.positions():
        assert sum(one.chosen.values()) == pytest.approx(1)
        assert {chess.Move.from_uci(move) for move in one.chosen} <= set(one.board.legal_moves)
    assert all(passed for _, passed, _ in shelf.checks())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"against": "ab"}, "no run 'ab'"),
        ({"run": "ab"}, "no complete run 'ab'"),
        ({"position": 5}, "0 to 4"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_not_there_is_named(shelf: browse.Shelf, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        browse.open_shelf(**{"run": "older", "game": shelf.game, "device": "cpu", **given})


def drawn(value: str, position: int = 0) -> Figure:
    if value == "bad":
        raise ValueError("cannot be drawn")
    figure = Figure(figsize=(1, 1))
    figure.suptitle(f"{value} {position}")
    return figure


def test_headless_one_picture_and_no_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    monkeypatch.setenv("MATRIXLIB_LIVE", "0")
    monkeypatch.setattr(IPython.display, "display", shown.append)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # an import of it would fail
    browse.show(drawn, {"value": (("a", "b"), "a")}, ("position", 3, 1))
    assert [type(one) for one in shown] == [IPython.display.Image]


def test_menus_slider_and_buttons_draw_again_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    handle = SimpleNamespace(update=lambda picture: shown.append("updated"))

    def display(value: Any, display_id: bool = False) -> Any:
        shown.append(value)
        return handle if display_id else None

    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    monkeypatch.setattr(IPython.display, "display", display)
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(browse, "_image", lambda figure: figure)

    def draw(value: str, position: int) -> Figure:
        calls.append((value, position))
        return drawn(value, position)

    browse.show(draw, {"value": (("a", "b", "bad"), "a")}, ("position", 3, 1))
    box = shown[0]
    (menu,), (slider, previous, following) = box.children[0].children, box.children[1].children
    said = box.children[2]
    menu.value = "b"
    following.click()
    following.click()  # the last one already
    previous.click()
    assert calls == [("a", 1), ("b", 1), ("b", 2), ("b", 1)]
    assert shown[2:] == ["updated"] * 3
    menu.value = "bad"
    assert said.value == "cannot be drawn"
    slider.value = 0
    menu.value = "a"
    assert said.value == ""


def test_the_menu_of_checkpoints_follows_the_run(shelf: browse.Shelf, reports: Path) -> None:
    import ipywidgets as widgets

    (reports / "newer" / "checkpoints" / "step_00000007").rename(
        reports / "newer" / "checkpoints" / "step_00000009"
    )
    run = widgets.Dropdown(options=["older", "newer"], value="older")
    checkpoint = widgets.Dropdown(options=browse.checkpoints("older"), value="step_00000007")
    browse._follow(run, checkpoint)
    run.value = "newer"
    assert checkpoint.options == ("best", "newest", "step_00000009")
    assert checkpoint.value == "best"
