"""Every picture can be read: its legends beside the curves, its ticks plain, and whole where updates are counted."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from matplotlib.figure import Figure

from matrixlib.runs import figures
from matrixlib.tasks.plotting import beside, panels

ROWS: list[dict[str, Any]] = [
    {
        "step": step,
        "seconds": 2.0 if step == 9 else 0.1,
        "loss": 4.0 - 0.1 * step,
        "losses": {"ssl_pin": 30.0 / step, "ssl_threat": 0.7},
        "metrics": {"teacher_policy/temperature": 2.0 - 1e-6 * step, "teacher_policy/raw": -1.098 - 1e-6 * step},
        "grad_norm": 1.0,
        "gate": 1.0,
        "times": {"forward": 0.05, "validation": 1.9 if step == 9 else 0.0},
        "validation": {"kind": "full", "loss": 3.5},
    }
    for step in range(1, 10)
]
PICTURES: dict[str, Callable[[], Figure]] = {
    "times": lambda: figures.phases_figure(ROWS),
}
COUNTED = ("update step", "generation", "size")


@pytest.mark.parametrize("name", PICTURES)
def test_legends_cover_nothing_and_ticks_are_plain(name: str) -> None:
    figure = PICTURES[name]()
    figure.draw_without_rendering()
    areas = [axes.get_window_extent() for axes in figure.axes]
    for legend in filter(None, [*figure.legends, *(axes.get_legend() for axes in figure.axes)]):
        box = legend.get_window_extent()
        assert figure.bbox.contains(box.x1 - 1, box.y1 - 1), "inside the picture"
        assert not [area for area in areas if box.padded(-3).overlaps(area)]
    for axes in figure.axes:
        ticks = [text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()]
        assert not [text for text in ticks if re.fullmatch(r"\d{4,}.*|.*e[+-].*", text)], "commas, no powers of ten"
        assert not axes.xaxis.get_offset_text().get_text() + axes.yaxis.get_offset_text().get_text()
        if axes.get_xlabel() in COUNTED:
            low, high = sorted(axes.get_xlim())
            assert all(float(at).is_integer() for at in axes.get_xticks() if low <= at <= high)


def test_large_numbers_have_commas_and_close_ones_no_offset() -> None:
    figure, (axes,) = panels()
    axes.plot([0, 1], [350_000.0, 350_000.5])
    figure.draw_without_rendering()
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert "350,000" in labels
    assert "350,000.5" in labels
    assert axes.yaxis.get_offset_text().get_text() == ""


def test_a_legend_names_each_label_once_and_none_is_no_error() -> None:
    figure, grid = panels(3, across=2)
    beside(figure)
    assert not figure.legends
    assert len(figure.axes) == 3, "no empty fourth"
    for axes in grid:
        axes.plot([0, 1], label="loss")
    beside(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["loss"]
