"""Looking through runs: what is listed, what a menu shows, and that nothing but pictures is made headless."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.display import HTML
from matplotlib.figure import Figure
from networks import random_net, save_run

from matrixlib.engine.checkpoint import Checkpoints
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
def browser(reports: Path, tmp_path: Path) -> browse.RunBrowser:
    make_run(reports, "older", "2026-01-01T00:00:00Z", headline="top-1 9%")
    make_run(reports, "newer", "2026-02-01T00:00:00Z", verdict={"passed": True})
    (tmp_path / "game.pgn").write_text(GAME)
    return browse.open_browser("older", game=str(tmp_path / "game.pgn"), device="cpu")


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was displayed."""
    import IPython.display

    outputs: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    return outputs


def test_runs_are_listed_newest_first(browser: browse.RunBrowser, reports: Path) -> None:
    (reports / "data").mkdir()
    assert browser.names == ("newer", "older")
    assert browse.table(browser.names).to_dict("index") == {
        "newer": {"verdict": "PASS", "updates": 2, "result": ""},
        "older": {"verdict": "no verdict", "updates": 2, "result": "top-1 9%"},
    }


def test_the_menus_hold_checkpoints_and_runs_of_the_same_task(browser: browse.RunBrowser, reports: Path) -> None:
    assert browse.checkpoints("older") == ("best", "newest", "step_00000007")
    (reports / "older" / "checkpoints" / "best_00000005").mkdir()  # of a course that was left
    assert browse.checkpoints("older") == ("best", "newest", "step_00000007", "best_00000005")
    (reports / "newer" / "run.json").write_text('{"requested": {"task": "latin"}}')
    assert browse.runs_like("older", browser.names) == ("older",)
    assert browse.checkpoints("absent") == ()


def test_a_task_with_nothing_to_look_through_shows_curves_alone(
    browser: browse.RunBrowser, reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, task in enumerate(("latin", "somebody.elses:TASK")):
        (reports / f"other{number}").mkdir()
        for name in ("summary.json", "metrics.jsonl", "config.yaml"):
            (reports / f"other{number}" / name).write_bytes((reports / "older" / name).read_bytes())
        (reports / f"other{number}" / "run.json").write_text(json.dumps({"requested": {"task": task}}))
        other = browse.open_browser(f"other{number}", device="cpu")
        assert isinstance(other.curves(), Figure)
        assert other.boards() is None
        assert f"nothing to look through with a run of the task '{task}'" in capsys.readouterr().out
        assert [passed for _, passed, _ in other.checks()] == [True]


def test_curves_of_one_run_or_two(browser: browse.RunBrowser) -> None:
    assert browse.curves_figure("older").get_suptitle() == "older"
    two = browse.curves_figure("older", "newer")
    assert {line.get_label() for line in two.axes[0].get_lines()} >= {"older", "newer"}
    assert len(browse.curves_figure("older", "older").axes) == len(browse.curves_figure("older").axes)


def test_the_newest_run_is_looked_at_first(reports: Path) -> None:
    make_run(reports, "mine", "2026-01-01T00:00:00Z")
    browser = browse.open_browser(positions=3, device="cpu")
    assert browser.run == "mine"
    viewer = browser.viewer()
    assert viewer is not None
    assert len(viewer) == 3
    assert [passed for _, passed, _ in browser.checks()] == [True, True]


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
def test_what_is_not_there_is_named(browser: browse.RunBrowser, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        browse.open_browser(**{"run": "older", "game": browser.file, "device": "cpu", **arguments})


def test_headless_one_picture_and_no_widget(browser: browse.RunBrowser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_LIVE", "0")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # an import of it would fail
    assert isinstance(browser.boards(), HTML)
    assert isinstance(browser.curves(), Figure)


def test_another_position_is_drawn_in_place(
    browser: browse.RunBrowser,
    display: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    *_, position = browser.boards().children[0].children
    assert isinstance(display[0], BoardWidget)
    pages = [display[0].page]
    for position.value in (1, 2, 1):
        pages.append(display[0].page)
    assert pages[1] == pages[3] != pages[2]
    position.value = 99
    assert position.value == position.max == 4
    assert len(display) == 1, "the same board, changed"
    monkeypatch.setattr(BoardViewer, "board", lambda *_: (_ for _ in ()).throw(ValueError("cannot be drawn")))
    position.value = 0
    assert "cannot be drawn" in capsys.readouterr().out


def test_the_menu_of_checkpoints_follows_the_run(
    browser: browse.RunBrowser,
    reports: Path,
    display: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    checkpoints = reports / "newer" / "checkpoints"
    (checkpoints / "step_00000007").rename(checkpoints / "step_00000009")
    run, checkpoint, _ = browser.boards().children[0].children
    checkpoint.value = "step_00000007"
    run.value = "newer"
    assert checkpoint.options == ("best", "newest", "step_00000009")
    assert checkpoint.value == "best"
    assert "damaged" in capsys.readouterr().out, "a renamed checkpoint is none, and that is told"


def test_newest_and_best_are_those_of_now(browser: browse.RunBrowser, reports: Path) -> None:
    """While a run goes on."""
    first = browse._network("older", "newest", "cpu")
    assert browse._network("older", "newest", "cpu") is first, "it is kept"
    state = {name: tensor + 1 for name, tensor in first.model.state_dict().items()}
    Checkpoints(reports / "older" / "checkpoints", 2).save(9, {"model": state}, {}, wait=True)
    second = browse._network("older", "newest", "cpu")
    differ = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert any((one != two).any() for one, two in differ)
