"""Every picture can be read: its legends beside the curves, its ticks plain, and whole where updates are counted."""

import re

from matrixlib.tasks.plotting import beside, panels, whole


def test_legends_cover_nothing_and_ticks_are_plain() -> None:
    figure, grid = panels(2)
    for axes in grid:
        axes.plot([1, 9_000], [0.000_001, 30_000], label="loss")
        whole(axes)
    beside(figure)
    figure.draw_without_rendering()
    (box,) = (legend.get_window_extent() for legend in figure.legends)
    assert figure.bbox.contains(box.x1 - 1, box.y1 - 1), "inside the picture"
    for axes in figure.axes:
        assert not box.padded(-3).overlaps(axes.get_window_extent())
        ticks = [text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()]
        assert not [text for text in ticks if re.fullmatch(r"\d{4,}.*|.*e[+-].*", text)], "commas, no powers of ten"
        assert not axes.xaxis.get_offset_text().get_text() + axes.yaxis.get_offset_text().get_text()
        assert all(float(at).is_integer() for at in axes.get_xticks())


def test_large_numbers_have_commas_and_close_ones_no_offset() -> None:
    figure, (axes,) = panels()
    axes.plot([0, 1], [350_000.0, 350_000.5])
    figure.draw_without_rendering()
    assert {"350,000", "350,000.5"} <= {text.get_text() for text in axes.get_yticklabels()}
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
