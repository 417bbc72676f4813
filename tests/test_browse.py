"""Looking through runs: what is listed, what a menu shows, and that nothing but pictures is made headless."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cells import Shown, run_notebook
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
    with closing(MetricsLog(folder / "metrics.jsonl")) as log:
        for step in (1, 2):
            row = {"step": step, "loss": 4.0 - step, "losses": {"policy": 3.0}}
            log.write(row | {"grad_norm": 1.0, "seconds": 0.1})
    return folder


@pytest.fixture
def look(reports: Path, tmp_path: Path) -> Callable[..., Shown]:
    """The notebook over two runs and the file of a game."""
    make_run(reports, "older", "2026-01-01T00:00:00Z", headline="top-1 9%")
    make_run(reports, "newer", "2026-02-01T00:00:00Z", verdict={"passed": True})
    (tmp_path / "game.pgn").write_text(GAME)
    options = {"run": "older", "game": str(tmp_path / "game.pgn"), "device": "cpu"}
    return lambda **more: run_notebook("browse", **options | more)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was displayed, in JupyterLab."""
    import IPython.display

    outputs: list[Any] = []
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    return outputs


def test_runs_are_listed_newest_first_and_headless_there_is_no_widget(
    look: Callable[..., Shown], reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reports / "data").mkdir()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # an import of it would fail
    shown = look(against="newer")
    assert shown.values["names"] == ["newer", "older", "shipped"]
    assert re.search(r"newer +PASS +2 *\n.*older +no verdict +2 +top-1 9%", shown.text)
    titles = [axes.get_title() for axes in shown.values["pictures"].axes]
    assert titles == ["policy loss", "gradient norm"], "what both have; total losses are of two objectives"
    assert {line.get_label() for line in shown.values["pictures"].axes[0].get_lines()} >= {"older", "newer"}
    assert isinstance(boards := shown.values["boards"], HTML)
    assert all(f"{name}: move 1 of the game" in boards.data for name in ("older", "newer"))
    assert shown.values["curves"]("older", "none").get_suptitle() == "older"
    assert not shown.failed


def test_two_networks_see_the_same_position(look: Callable[..., Shown], display: list[Any]) -> None:
    run, _, against, position = look().values["boards"].children[0].children
    (first,) = display[-1].children
    against.value = "newer"
    assert display[-1].children[0] is first
    position.value = 2
    pages = [board.page for board in display[-1].children]
    assert [page["status"] for page in pages] == ["older: move 2 of the game", "newer: move 2 of the game"]
    assert pages[0]["fen"] == pages[1]["fen"]
    run.value = "newer"
    assert [board.page["status"] for board in display[-1].children] == ["newer: move 2 of the game"]


def test_the_newest_run_is_looked_at_first(reports: Path) -> None:
    make_run(reports, "mine", "2026-01-01T00:00:00Z")
    shown = run_notebook("browse", positions=3, device="cpu")
    assert (shown.values["run"], len(shown.values["viewer"]), shown.text.count("pass  ")) == ("mine", 3, 2)


def test_the_menus_hold_checkpoints_and_runs_of_the_same_task(look: Callable[..., Shown], reports: Path) -> None:
    assert browse.checkpoints("older") == ["best", "newest", "step_00000007"]
    (reports / "older" / "checkpoints" / "best_00000005").mkdir()  # of a course that was left
    assert browse.checkpoints("older") == ["best", "newest", "step_00000007", "best_00000005"]
    (reports / "newer" / "run.json").write_text('{"requested": {"task": "latin"}}')
    assert browse.runs_like("older", ["newer", "older"]) == ["older"]


@pytest.mark.parametrize("task", ["latin", "somebody.elses:TASK"])
def test_a_task_with_nothing_to_look_through_shows_curves_alone(
    look: Callable[..., Shown], reports: Path, task: str
) -> None:
    (reports / "older" / "run.json").write_text(json.dumps({"requested": {"task": task}}))
    shown = look()
    assert isinstance(shown.values["pictures"], Figure)
    assert f"nothing to look through with a run of the task '{task}'" in shown.text
    assert shown.text.count("pass  ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": "ab"}, "no run 'ab'"),
        ({"run": "ab"}, "no complete run 'ab'"),
        ({"position": 5}, "0 to 4"),
        ({"checkpoint": "step_8"}, "no checkpoint 'step_8' of .*; there are: best, newest, step_00000007"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_not_there_is_named(look: Callable[..., Shown], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        look(**arguments)


def test_another_position_is_drawn_in_place(
    look: Callable[..., Shown],
    display: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    *_, position = look().values["boards"].children[0].children
    (board,) = display[-1].children
    assert isinstance(board, BoardWidget)
    pages = [board.page]
    for position.value in (1, 2, 1):
        pages.append(board.page)
    assert pages[1] == pages[3] != pages[2]
    position.value = 99
    assert position.value == position.max == 4
    assert display[-1].children == (board,), "the same board, changed"
    monkeypatch.setattr(BoardViewer, "board", lambda *_: (_ for _ in ()).throw(ValueError("cannot be drawn")))
    position.value = 0
    assert "cannot be drawn" in capsys.readouterr().out


def test_the_menu_of_checkpoints_follows_the_run(
    look: Callable[..., Shown], reports: Path, display: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = reports / "newer" / "checkpoints"
    (checkpoints / "step_00000007").rename(checkpoints / "step_00000009")
    run, checkpoint, *_ = look().values["boards"].children[0].children
    checkpoint.value = "step_00000007"
    run.value = "newer"
    assert checkpoint.options == ("best", "newest", "step_00000009")
    assert checkpoint.value == "best"
    assert "is corrupt" in capsys.readouterr().out, "a renamed checkpoint is reported"


def test_newest_and_best_are_those_of_now(look: Callable[..., Shown], reports: Path) -> None:
    """While a run goes on."""
    first: Any = browse.network("older", "newest", "cpu")
    assert browse.network("older", "newest", "cpu") is first, "it is kept"
    state = {name: tensor + 1 for name, tensor in first.model.state_dict().items()}
    Checkpoints(reports / "older" / "checkpoints", 2).save(9, {"model": state}, {}, wait=True)
    second: Any = browse.network("older", "newest", "cpu")
    differ = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert any((one != two).any() for one, two in differ)
