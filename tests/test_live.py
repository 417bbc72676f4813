"""Training plots: bounded memory, no widget headless, one static picture at the end."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import papermill
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from matrixlib import progress
from matrixlib.progress import duration
from matrixlib.runs import live as plots
from matrixlib.runs.figures import POINTS, Curve, History, draw, png, training_figure
from matrixlib.runs.live import LivePlot


def stats(step: int, loss: float = 1.0, validation: dict[str, Any] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        step=step,
        losses={"policy": loss, "value": loss / 2},
        metrics={"policy/top1": 0.25, "policy/entropy": 2.0},
        learning_rate=1e-3,
        grad_norm=0.5,
        throughput=1000.0,
        rollbacks=0,
        phase=None,
        validation=validation,
    )


def row(step: int, **values: Any) -> dict[str, Any]:
    return vars(stats(step)) | values


def size(data: bytes) -> tuple[int, int]:
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 µs"),
        (84e-6, "84.0 µs"),
        (0.00084, "840 µs"),
        (0.0052, "5.2 ms"),
        (0.09999, "100 ms"),
        (0.9996, "1.0 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (86_399, "1 d 0 h"),
        (3 * 86_400 + 4 * 3600, "3 d 4 h"),
        (math.inf, "?"),
        (math.nan, "?"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_negative_duration_is_an_error() -> None:
    with pytest.raises(ValueError, match="negative"):
        duration(-1)


@given(st.floats(0, 1e9))
def test_duration_never_shows_a_full_next_unit(seconds: float) -> None:
    text = duration(seconds)
    assert not re.search(r"\b(1000 (µs|ms)|60(\.0)? (s|min)|24 h)", text)


def test_a_curve_is_bounded_and_keeps_its_mean_and_its_last_value() -> None:
    curve = Curve()
    for step in range(1, 50_001):
        curve.add(step, float(step))
    steps, values = curve.points()
    assert len(values) <= POINTS + 1
    assert steps == values  # both are averaged alike
    assert values == sorted(values)
    assert values[-1] > 49_900


def test_a_short_curve_is_exact() -> None:
    curve = Curve()
    for step in range(5):
        curve.add(step, step**2)
    assert curve.points() == ([0, 1, 2, 3, 4], [0, 1, 4, 9, 16])


def test_history_sorts_names_into_pictures() -> None:
    history = History()
    history.add(row(1))
    history.add(row(2, validation={"losses": {"policy": 1.5}, "metrics": {"policy/top1": 0.2}, "note": "x"}))
    history.add(row(3, validation={"loss": 2.0, "value": 0.7, "policy/top3": 0.4, "policy/top5": 0.5}))
    assert set(history.losses) == {"policy", "value"}
    assert set(history.validation) == {"policy", "loss", "value"}
    assert set(history.accuracy) == {"policy/top1 (train)", "policy/top1", "policy/top3"}, "no more"
    assert history.validation["policy"].points() == ([2], [1.5])
    assert history.step == 3


def test_updates_that_are_not_finite_are_counted_in_the_title() -> None:
    rows = [row(1), row(2, losses={"policy": math.nan}), row(3, grad_norm=math.inf)]
    figure = training_figure(rows, "run")
    assert figure.get_suptitle() == "run - 2 updates not finite"
    size(png(figure))


def test_figure_has_axes_with_units_and_is_a_picture() -> None:
    rows = [
        row(step, validation={"policy": 2.0, "policy/top1": 0.1} if step % 2 else None)
        for step in range(1, 9)
    ]
    figure = training_figure(rows)
    labels = {axes.get_ylabel() for axes in figure.axes}
    assert labels == {
        "loss [nat]",
        "accuracy [%]",
        "learning rate",
        "gradient norm before clipping",
        "positions/s",
    }
    assert {axes.get_xlabel() for axes in figure.axes} == {"update step"}
    assert size(png(figure, 50)) == (500, 280)


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [row(1, losses={"policy": 0.0}, grad_norm=0.0)]])
def test_little_or_nothing_to_draw_is_no_error(rows: list[dict[str, Any]]) -> None:
    size(png(training_figure(rows)))


def test_history_of_a_resumed_run_goes_on() -> None:
    plot = LivePlot(10, history=[row(step) for step in range(1, 5)], live=False)
    plot.update(stats(5))
    assert plot.history.losses["policy"].points()[0] == [1, 2, 3, 4, 5]


def test_headless_plot_makes_no_output_and_loads_no_widgets() -> None:
    code = """
import sys
from types import SimpleNamespace as N
from matrixlib.runs.live import LivePlot
with LivePlot(3) as plot:
    for step in (1, 2, 3):
        plot.update(N(step=step, losses={"a": 1.0}, metrics={}, learning_rate=0.1, grad_norm=1.0,
                      throughput=1.0, rollbacks=0, phase=None, validation=None))
assert plot.draws == 0
assert "ipywidgets" not in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == ""


def test_text_progress_is_throttled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(plots.time, "perf_counter", lambda: clock[0])
    plot = LivePlot(1000, progress="text", live=False)
    for step in range(1, 101):
        clock[0] += 0.25
        plot.update(stats(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # at once, after 10 s and after 20 s
    assert lines[1] == (
        "step 41/1,000 (4%) | 250 ms a step | 4 min 0 s left | "
        "policy 1.000 value 0.500 | learning rate 0.001 | 1,000 positions/s"
    )


def test_live_panel_is_throttled_and_replaced_by_one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    handle = SimpleNamespace(update=shown.append)
    monkeypatch.setattr(IPython.display, "display", lambda box, display_id: shown.append(box) or handle)
    clock = [100.0]
    monkeypatch.setattr(plots.time, "perf_counter", lambda: clock[0])
    with pytest.raises(KeyboardInterrupt), LivePlot(100, live=True) as plot:  # noqa: PT012
        for step in range(1, 26):
            clock[0] += 0.1
            plot.update(stats(step))
        size(bytes(plot._image.value))
        assert plot._bar.max == 100
        assert plot._bar.value >= 20
        assert plot._pace.value.endswith("left")
        assert plot._now.value == "policy 1.000 value 0.500 | learning rate 0.001 | 1,000 positions/s"
        draws = plot.draws
        raise KeyboardInterrupt
    assert 5 <= draws <= 7  # 2.5 seconds at 0.5, and the first
    assert len(shown) == 2
    assert isinstance(shown[1], IPython.display.Image)
    assert size(shown[1].data) == (1000, 560)


@pytest.mark.parametrize(("value", "live"), [("0", False), ("1", True)])
def test_environment_overrides(monkeypatch: pytest.MonkeyPatch, value: str, live: bool) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    monkeypatch.setenv("MATRIXLIB_LIVE", value)
    assert progress.interactive() is live
    monkeypatch.delenv("MATRIXLIB_LIVE")
    assert progress.interactive()
    monkeypatch.setenv("MATRIXLIB_LIVE", "yes")
    with pytest.raises(ValueError, match="set it to 0 or 1"):
        progress.interactive()


@pytest.mark.parametrize(
    ("value", "options", "shown"), [("0", {}, False), ("", {}, True), ("", {"disable": True}, False)]
)
def test_headless_bars_are_text_and_can_be_forbidden(
    monkeypatch: pytest.MonkeyPatch, value: str, options: dict[str, bool], shown: bool
) -> None:
    """A stored notebook must not depend on how slow the machine was."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("MATRIXLIB_LIVE", raising=False)
    if value:
        monkeypatch.setenv("MATRIXLIB_LIVE", value)
    with progress.live_bar(total=3, desc="games", **options) as bar:
        assert bar.disable is not shown


SOURCE = """
from types import SimpleNamespace as N
from matrixlib.runs.live import LivePlot
with LivePlot(3) as plot:
    for step in (1, 2, 3):
        plot.update(N(step=step, losses={"a": 1.0}, metrics={}, learning_rate=0.1, grad_norm=1.0,
                      throughput=1.0, rollbacks=0, phase=None, validation=None))
"""


@pytest.mark.parametrize("live", ["0", "1"])
def test_papermill_leaves_one_static_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: str
) -> None:
    """Headless, and with the panel forced on: either way the notebook holds one PNG and no widget."""
    monkeypatch.setenv("MATRIXLIB_LIVE", live)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SOURCE)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, tmp_path / "in.ipynb")
    papermill.execute_notebook(
        tmp_path / "in.ipynb", tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False
    )
    outputs = json.loads((tmp_path / "out.ipynb").read_text())["cells"][0]["outputs"]
    assert [output["output_type"] for output in outputs] == ["display_data"]
    assert set(outputs[0]["data"]) == {"image/png", "text/plain"}
    assert "0x" not in "".join(outputs[0]["data"]["text/plain"])


def test_a_rollback_is_drawn_over_and_marked_and_phases_are_marked() -> None:
    history = History()
    rows = [(1, 0, 0, 1.0), (2, 0, 0, 1.0), (3, 0, 1, 90.0), (2, 1, 0, 2.0), (3, 1, 1, 3.0), (4, 1, 1, 4.0)]
    for step, rollbacks, phase, loss in rows:
        history.add({"step": step, "rollbacks": rollbacks, "phase": phase, "losses": {"policy": loss}})
    assert history.losses["policy"].points() == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    assert history.rollbacks == [2]
    assert history.phases == [3]
    figure = Figure()
    draw(figure, history, "run")
    assert "rolled back to update 1" in figure.get_suptitle()


def test_a_bar_becomes_a_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.setattr(IPython.display, "display", lambda box, display_id: shown.append(box) or handle)
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    with progress.live_bar(total=3, desc="games", unit="game") as bar:
        bar.update(3)
        bar.set_postfix_str("loss 1.5")
    bar.close()  # twice does no harm
    box, data = shown
    assert type(box).__module__.startswith(("ipywidgets", "tqdm"))
    assert re.fullmatch(r"games: 3/3 \[00:00, .*game/s, loss 1\.5\]", data["text/plain"])
