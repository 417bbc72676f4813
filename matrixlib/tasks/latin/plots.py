"""Pictures: a grid filled step by step, and rates beside their baselines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matrixlib.tasks.latin.rates import Rate
from matrixlib.tasks.latin.vocabulary import digits

GIVEN, NEW, OLD = "black", "tab:red", "tab:blue"
PANEL = 1.6  # inches of one grid


def filling_figure(steps: Sequence[np.ndarray], mode: str, panels: int = 8, title: str = "") -> Figure:
    """One grid at up to `panels` moments of being filled, from the puzzle to the end.

    steps: (n, n) digit indices, -1 where empty, of every step; the first is the puzzle. Givens are black, digits
    put in since the panel before red, earlier ones blue.
    """
    if not len(steps):
        raise ValueError("there is no step to draw; decode with keep_steps=True")
    shown = np.unique(np.linspace(0, len(steps) - 1, min(panels, len(steps))).round().astype(int))
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(PANEL * columns, PANEL * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    before = steps[0]
    for axis, number in zip(axes, shown, strict=False):
        _draw(axis, steps[number], steps[0], before, digits(mode, len(steps[0])))
        axis.set_title("puzzle" if number == 0 else f"after {number}", fontsize=8)
        before = steps[number]
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    figure.suptitle(title or f"{mode}, size {len(steps[0])}", fontsize=9)
    return figure


def _draw(axis: Axes, grid: np.ndarray, first: np.ndarray, before: np.ndarray, names: Sequence[int]) -> None:
    n = len(grid)
    axis.set(xlim=(0, n), ylim=(n, 0), xticks=range(n + 1), yticks=range(n + 1), aspect="equal")
    axis.tick_params(length=0, labelbottom=False, labelleft=False)
    axis.grid(True, color="0.7", linewidth=0.6)
    size = min(12.0, 60 / n)
    for row, column in np.argwhere(grid >= 0):
        colour = GIVEN if first[row, column] >= 0 else OLD if before[row, column] >= 0 else NEW
        text = str(names[grid[row, column]])
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=size)


def rates_figure(rates: Sequence[Rate]) -> Figure:
    """Valid grids by size, a panel for each mode and fill: one pass, exact, iterative and without a network."""
    kinds = sorted({(rate.mode, rate.fill) for rate in rates})
    if not kinds:
        raise ValueError("there is no rate to draw")
    figure = Figure(figsize=(3.0 * min(4, len(kinds)), 2.4 * -(-len(kinds) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(kinds) // 4), min(4, len(kinds)), squeeze=False, sharey=True).ravel()
    for axis, (mode, fill) in zip(axes, kinds, strict=False):
        mine = sorted((rate for rate in rates if (rate.mode, rate.fill) == (mode, fill)), key=lambda r: r.size)
        sizes = [rate.size for rate in mine]
        axis.plot(sizes, [rate.iterative_baseline for rate in mine], "s--", color="0.6", label="no network")
        axis.plot(sizes, [rate.iterative for rate in mine], "o-", label="iterative")
        axis.plot(sizes, [rate.valid for rate in mine], "^-", label="one pass")
        if any(rate.exact is not None for rate in mine):
            exact = [np.nan if rate.exact is None else rate.exact for rate in mine]
            axis.plot(sizes, exact, "k:", label="one pass, exact")
        low, high = fill
        axis.set(title=f"{mode}, {f'{low:g} to {high:g} revealed' if high else 'empty'}", ylim=(-0.03, 1.03))
        axis.set_xticks(sizes)
        axis.title.set_fontsize(8)
    for axis in axes[len(kinds) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("valid grids")
    max(axes, key=lambda axis: len(axis.lines)).legend(fontsize=7)
    return figure
