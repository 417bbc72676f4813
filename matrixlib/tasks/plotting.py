"""Shared style of plots: small type, faint grid, plain tick numbers, legends outside.

Only Figure objects, not pyplot: no global state, no backend choice.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

DIGITS = 10  # most digits of a number
LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 1.1, "handletextpad": 0.4, "columnspacing": 0.9}


def plain_number(x: float, _: Any = None) -> str:
    """Tick label with thousands separators and no exponent."""
    return f"{round(x, DIGITS) + 0.0:,.{DIGITS}f}".rstrip("0").rstrip(".")


def panels(
    count: int = 1, size: tuple[float, float] = (7.0, 3.5), across: int = 4, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row, `across` a row. size: of a panel, inches. options: of `Figure.subplots`."""
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
    """Small type, faint grid, plain tick numbers; call before setting labels."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(8)
        axis.set_major_formatter(plain_number)


def caption(axes: Axes, text: str) -> None:
    """Title of a panel at the shared size, which `set_title` alone would reset."""
    axes.set_title(text, fontsize=9)


def whole(axes: Axes, label: str = "update step") -> None:
    """Integer ticks on the x axis, at least one."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def log(axes: Axes, values: Iterable[float], name: Literal["x", "y"] = "y") -> None:
    """Make one axis logarithmic if all values are positive."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0:
        return
    axes.set(**{f"{name}scale": "log"})
    axis = {"x": axes.xaxis, "y": axes.yaxis}[name]
    decades = math.log10(max(finite) / min(finite))
    some = (1.0, 3.0) if name == "x" and decades > 1 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)  # labels are wide
    axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else some))
    axis.set_major_formatter(lambda x, _: plain_number(x) if x >= 1e-4 else f"{x:.0e}")  # wide, and 0 below 1e-6
    axis.set_minor_formatter(NullFormatter())


def beside(figure: Figure) -> None:
    """One legend for all panels, right of them, each label once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(list(entries.values()), list(entries), loc="outside right upper", fontsize=8, **LEGEND)
