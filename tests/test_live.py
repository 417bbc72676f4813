"""Live panel: throttled, no widget headless, one static picture at the end."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import papermill
import pytest

from matrixlib.engine.stats import Stats
from matrixlib.runs import live as live_module
from matrixlib.runs.figures import Mark, charts, frame
from matrixlib.runs.live import LivePlot
from matrixlib.runs.panel import view


def stats(step: int) -> Stats:
    losses = {"policy": 1.0, "value": 0.5}
    return Stats(step, 1.5, 0.5, losses=losses, learning_rate=1e-3, throughput=1000.0)


def test_a_resumed_run_continues_its_curves_and_own_numbers_are_drawn() -> None:
    plot = LivePlot(10, history=[stats(step).row() for step in range(1, 5)])
    for step in (5, 6, 7):
        plot.update(replace(stats(step), steps=8), norm=step / 2)
    table = plot.table()
    assert table.index.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert table["losses/policy"].tolist() == [1.0] * 7
    assert table["extra/norm"].dropna().to_dict() == {5: 2.5, 6: 3.0, 7: 3.5}
    assert plot.total == 8, "the run's end has been moved"


def test_a_rollback_and_a_long_run_leave_a_short_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module.metrics, "MAX_ROWS", 100)
    plot = LivePlot(400)
    for step in (*range(1, 201), *range(151, 401)):
        plot.update(stats(step))
    assert plot.table().index.tolist() == [*range(4, 401, 4)]


PROGRAM = """
from matrixlib.engine.stats import Stats
from matrixlib.runs.live import LivePlot
with LivePlot(3) as plot:
    for step in (1, 2, 3):
        plot.update(Stats(step, 1.0, 1.0, losses={"a": 1.0}))
import sys
assert "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.parametrize(("live", "count"), [("", 3), ("0", 0)])
def test_headless_training_prints_a_line_with_its_time_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], live: str, count: int
) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.delenv("MATRIXLIB_LIVE", raising=False)
    if live:
        monkeypatch.setenv("MATRIXLIB_LIVE", live)
    clock = [100.0]
    monkeypatch.setattr(live_module.time, "perf_counter", lambda: clock[0])
    with LivePlot(1000, "quick") as plot:
        for step in range(1, 101):
            clock[0] += 0.16
            plot.update(stats(step))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count, "16 seconds"
    words = r"\d\d:\d\d:\d\d \S+  quick: step 32/1,000 \(3%\) \| 160 ms a step \| 2 min 35 s left \| policy 1.000 .*"
    assert all(re.fullmatch(words, line) for line in lines[:1])


@pytest.mark.parametrize(("cost", "redraws"), [(0.0, 5), (0.02, 3)])
def test_the_panel_is_throttled_and_replaced_by_one_picture(
    monkeypatch: pytest.MonkeyPatch, cost: float, redraws: int
) -> None:
    """2.5 seconds: curves each half second, fewer where they cost much; bar and text go on."""
    import IPython.display

    outputs: list[Any] = []
    handle = SimpleNamespace(update=outputs.append)
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    monkeypatch.setattr(IPython.display, "display", lambda box, display_id: outputs.append(box) or handle)
    clock, charts = [100.0], live_module.figures.charts
    monkeypatch.setattr(live_module.time, "perf_counter", lambda: clock[0])

    def slow(table: Any) -> Any:
        clock[0] += cost
        return charts(table)

    monkeypatch.setattr(live_module.figures, "charts", slow)
    with pytest.raises(KeyboardInterrupt), LivePlot(100) as plot:  # noqa: PT012
        panel = outputs[0]
        views: list[Any] = []
        panel.observe(lambda change: views.append(change["new"]), "view")
        assert panel.view["charts"] == []
        for step in range(1, 26):
            clock[0] += 0.1
            plot.update(stats(step))
            if step == 1:
                assert {len(chart["steps"]) for chart in panel.view["charts"]} == {8}, "the first update is seen"
        assert panel.progress["step"] >= 20
        assert re.fullmatch(r"step 2\d/100 \(2\d%\) \| 1\d\d ms a step \| \d\.\d s left", panel.progress["text"])
        assert panel.progress["line"] == "policy 1.000 value 0.500 | learning rate 0.001 | 1,000 positions/s"
        assert len(views) == redraws
        clock[0] += 1
        plot.update(replace(stats(26), steps=26))
        assert "left" not in panel.progress["text"]
        raise KeyboardInterrupt
    assert len(outputs) == 2
    assert isinstance(outputs[1], IPython.display.Image)
    assert panel.comm is None, "no widget outlives its kernel"


def test_the_front_end_gets_curves_as_bytes() -> None:
    rows = [stats(1).row(), replace(stats(2), validation={"loss": 2.0}).row(), stats(3).row()]
    shown = view(charts(frame(rows)), [Mark(2, "phase", "phase 1 begins")])
    total = shown["charts"][0]
    assert (total["label"], total["held_out"]) == ("total loss", True)
    assert np.frombuffer(total["steps"]).tolist() == [1, 2, 3]
    values = np.frombuffer(total["values"], np.float32).reshape(3, 3)
    assert [curve["kind"] for curve in total["curves"]] == ["raw", "line", "held-out"]
    np.testing.assert_array_equal(values[2], [math.nan, 2.0, math.nan])
    assert shown["marks"] == [(2, "phase 1 begins", False)]
    assert json.dumps([chart["levels"] for chart in shown["charts"]])


def test_papermill_leaves_one_static_picture(tmp_path: Path) -> None:
    """Headless, and with the panel forced on: either way the notebook holds one PNG and no widget."""
    sources = [f"import os\nos.environ['MATRIXLIB_LIVE'] = '{live}'\n{PROGRAM}" for live in (0, 1)]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, tmp_path / "in.ipynb")
    papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False)
    for cell in json.loads((tmp_path / "out.ipynb").read_text())["cells"]:
        (output,) = cell["outputs"]
        assert output["output_type"] == "display_data"
        assert set(output["data"]) == {"image/png", "text/plain"}
        assert "0x" not in "".join(output["data"]["text/plain"])
