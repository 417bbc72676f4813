"""Looking through runs: what is listed, what a menu shows, and that nothing but pictures is made headless."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from networks import random_net, save_run

from matrixlib.engine.metrics import MetricsLog
from matrixlib.runs import browse
from matrixlib.tasks.chess.board.widget import BoardWidget
from matrixlib.tasks.chess.evaluate.analysis import BoardViewer

GAME = "1. f3 e5 2. g4 Qh4# 0-1\n"


def make_run(root: Path, name: str, started: str, **summary: Any) -> Path:
    """A complete run with random weights and two updates."""
    folder = root / name
    save_run(folder, random_net(ssl=["threat", "control"]))
    requested = {"task": "chess", "model": {"ssl": ["threat", "control"]}}
    record = {"kind": "train", "started": started, "requested": requested}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "summary.json").write_text(json.dumps({"complete": True, "steps": 2, **summary}))
    with MetricsLog(folder / "metrics.jsonl") as log:
        for step in (1, 2):
            row = {"step": step, "loss": 4.0 - step, "losses": {"policy": 3.0}}
            log.write(row | {"grad_norm": 1.0, "seconds": 0.1})
    return folder


@pytest.fixture
def shelf(reports: Path, tmp_path: Path) -> browse.Shelf:
    make_run(reports, "older", "2026-01-01T00:00:00Z", headline="top-1 9%")
    make_run(reports, "newer", "2026-02-01T00:00:00Z", verdict={"passed": True})
    (tmp_path / "game.pgn").write_text(GAME)
    return browse.open_shelf("older", game=str(tmp_path / "game.pgn"), device="cpu")


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was displayed."""
    import IPython.display

    outputs: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    return outputs


def test_runs_are_listed_newest_first(shelf: browse.Shelf, reports: Path) -> None:
    (reports / "data").mkdir()
    assert shelf.names == ("newer", "older")
    assert browse.table(shelf.names).to_dict("index") == {
        "newer": {"verdict": "PASS", "updates": 2, "result": ""},
        "older": {"verdict": "no verdict", "updates": 2, "result": "top-1 9%"},
    }


def test_the_menus_hold_checkpoints_and_runs_of_the_same_task(shelf: browse.Shelf, reports: Path) -> None:
    assert browse.checkpoints("older") == ("best", "newest", "step_00000007")
    (reports / "older" / "checkpoints" / "best_00000005").mkdir()  # of a course that was left
    assert browse.checkpoints("older") == ("best", "newest", "step_00000007", "best_00000005")
    (reports / "newer" / "run.json").write_text('{"requested": {"task": "latin"}}')
    assert browse.runs_like("older", shelf.names) == ("older",)
    assert browse.checkpoints("absent") == ()


def test_a_task_with_nothing_to_look_through_shows_curves_alone(
    shelf: browse.Shelf, reports: Path, display: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, task in enumerate(("latin", "somebody.elses:TASK")):
        (reports / f"other{number}").mkdir()
        for name in ("summary.json", "metrics.jsonl", "config.yaml"):
            (reports / f"other{number}" / name).write_bytes((reports / "older" / name).read_bytes())
        (reports / f"other{number}" / "run.json").write_text(json.dumps({"requested": {"task": task}}))
        other = browse.open_shelf(f"other{number}", device="cpu")
        other.curves()
        other.boards()
        assert f"nothing to look through with a run of the task '{task}'" in capsys.readouterr().out
        assert [passed for _, passed, _ in other.checks()] == [True]
    assert len(display) == 2


def test_curves_of_one_run_or_two(shelf: browse.Shelf) -> None:
    assert browse.curves_figure("older").get_suptitle() == "older"
    two = browse.curves_figure("older", "newer")
    assert {line.get_label() for line in two.axes[0].get_lines()} >= {"older", "newer"}
    assert len(browse.curves_figure("older", "older").axes) == len(browse.curves_figure("older").axes)


def test_the_newest_run_is_looked_at_first(reports: Path) -> None:
    make_run(reports, "mine", "2026-01-01T00:00:00Z")
    shelf = browse.open_shelf(positions=3, device="cpu")
    assert shelf.run == "mine"
    viewer = shelf.viewer()
    assert viewer is not None
    assert len(viewer) == 3
    assert [passed for _, passed, _ in shelf.checks()] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": "ab"}, "no run 'ab'"),
        ({"run": "ab"}, "no complete run 'ab'"),
        ({"position": 5}, "0 to 4"),
        ({"checkpoint": "step_8"}, "no checkpoint 'step_8' in .*; there are: best, newest, step_00000007"),
        ({"positions": 0}, "at least 1"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_not_there_is_named(shelf: browse.Shelf, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        browse.open_shelf(**{"run": "older", "game": shelf.file, "device": "cpu", **arguments})


def test_headless_one_picture_and_no_widget(
    shelf: browse.Shelf, display: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import IPython.display

    monkeypatch.setenv("MATRIXLIB_LIVE", "0")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # an import of it would fail
    shelf.boards()
    assert [type(one) for one in display] == [IPython.display.HTML]


def test_menus_slider_and_buttons_draw_again_in_place(display: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    calls: list[tuple[str, int]] = []
    pictures: list[bytes] = []

    def draw(value: str, position: int) -> Figure:
        if value == "bad":
            raise ValueError("cannot be drawn")
        calls.append((value, position))
        return Figure(figsize=(1, len(calls)))

    browse.show(draw, {"value": (("a", "b", "bad"), "a")}, ("position", 3, 1))
    box = display[0]
    (menu,), (slider, previous, following) = box.children[0].children, box.children[1].children
    note, picture = box.children[2:]
    pictures.append(picture.value)
    picture.observe(lambda change: pictures.append(change.new), "value")
    menu.value = "b"
    following.click()
    following.click()  # the last one already
    previous.click()
    assert calls == [("a", 1), ("b", 1), ("b", 2), ("b", 1)]
    assert len(set(pictures)) == len(pictures) == 4
    assert len(display) == 1, "no output is updated: a page that was loaded again would not show it"
    menu.value = "bad"
    assert note.value == "cannot be drawn"
    slider.value = 0
    menu.value = "a"
    assert note.value == ""


def test_the_menu_of_checkpoints_follows_the_run(
    shelf: browse.Shelf, reports: Path, display: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    checkpoints = reports / "newer" / "checkpoints"
    (checkpoints / "step_00000007").rename(checkpoints / "step_00000009")
    networks, board = [], BoardViewer.board
    monkeypatch.setattr(BoardViewer, "board", lambda self, net, *more: networks.append(net) or board(self, net, *more))
    shelf.boards()
    run, checkpoint = display[0].children[0].children
    checkpoint.value = "step_00000007"
    run.value = "newer"
    assert checkpoint.options == ("best", "newest", "step_00000009")
    assert checkpoint.value == "best"
    assert (len(display), len(networks)) == (1, 2), "the same board, drawn again"
    assert isinstance(display[0].children[3], BoardWidget)
    assert "damaged" in display[0].children[2].value, "a renamed checkpoint is none, and that is told"
