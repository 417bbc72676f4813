"""What all pictures share: small type, a faint grid, plain numbers at the ticks, legends beside what is drawn.

Only Figure objects are used, never pyplot's global state: nothing leaks and no backend is chosen for anyone.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

RED = "#b3261e"  # of what is wrong
DIGITS = 10  # of a number, at most
LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 1.1, "handletextpad": 0.4, "columnspacing": 0.9}


def plain_number(x: float, _: Any = None) -> str:
    """The text of a tick: with commas, never a power of ten."""
    return f"{round(x, DIGITS) + 0.0:,.{DIGITS}f}".rstrip("0").rstrip(".")


def panels(
    count: int = 1, size: tuple[float, float] = (7.0, 3.5), across: int = 4, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, at least one, row by row and `across` beside each other; size: of one, in inches.
    options: of `Figure.subplots`."""
    count = max(count, 1)
    columns = min(count, across)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in grid[count:]:
        axes.remove()
    for axes in grid[:count]:
        plain(axes)
    return figure, grid[:count]


def plain(axes: Axes) -> None:
    """Small type, a faint grid behind what is drawn, and plain numbers at the ticks; before names are put there."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(8)
        axis.set_major_formatter(plain_number)


def caption(axes: Axes, text: str) -> None:
    """Words over a panel; `set_title` by itself would forget their size."""
    axes.set_title(text, fontsize=9)


def whole(axes: Axes, label: str = "update step") -> None:
    """Ticks at whole numbers alone along the bottom, even where there is room for one only."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def log(axes: Axes, values: Iterable[float], name: Literal["x", "y"] = "y") -> None:
    """Make one axis logarithmic, if all values are positive."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0:
        return
    axes.set(**{f"{name}scale": "log"})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    decades = math.log10(max(finite) / min(finite))
    some = (1.0, 3.0) if name == "x" and decades > 1 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # labels are broad, not high
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else some))
    axis.set_major_formatter(plain_number)
    axis.set_minor_formatter(NullFormatter())


def beside(figure: Figure) -> None:
    """One legend for all panels, at the right of them, with each label once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(list(entries.values()), list(entries), loc="outside right upper", fontsize=8, **LEGEND)


def above(axes: Axes, handles: Sequence[Any] = (), labels: Sequence[str] = (), note: str = "") -> None:
    """A legend over the panel, of everything with a label unless told; a note after it."""
    if not handles:
        handles, labels = axes.get_legend_handles_labels()
    if note:
        handles, labels = [*handles, Line2D([], [], linestyle="none")], [*labels, note]
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "borderaxespad": 0.1}
    axes.legend(handles, labels, fontsize=6.5, **place, **LEGEND)
