"""Every picture can be read: its legends beside the curves, its ticks plain, and whole where updates are counted."""

import re

from matrixlib.tasks.plotting import beside, panels, whole


def test_legends_cover_nothing_and_ticks_are_plain() -> None:
    figure, grid = panels(2)
    beside(figure)
    assert not figure.legends, "nothing has a label yet"
    for axes, height in zip(grid, ([0.000_001, 30_000], [350_000.0, 350_000.5]), strict=True):
        axes.plot([1, 9_000], height, label="loss")
        whole(axes)
    beside(figure)
    figure.draw_without_rendering()
    (box,) = (legend.get_window_extent() for legend in figure.legends)
    assert figure.bbox.contains(box.x1 - 1, box.y1 - 1), "inside the picture"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["loss"], "each label once"
    for axes in figure.axes:
        assert not box.padded(-3).overlaps(axes.get_window_extent())
        ticks = [text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels()]
        assert not [text for text in ticks if re.fullmatch(r"\d{4,}.*|.*e[+-].*", text)], "commas, no powers of ten"
        assert not axes.xaxis.get_offset_text().get_text() + axes.yaxis.get_offset_text().get_text()
        assert all(float(at).is_integer() for at in axes.get_xticks())
