"""Pictures: a grid filled step by step, and rates beside their baselines."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matrixlib.play.elo import share_interval
from matrixlib.tasks.latin.rates import Rate
from matrixlib.tasks.latin.vocabulary import digits
from matrixlib.tasks.plotting import beside, caption, panels, whole

GIVEN, NEW, OLD = "black", "tab:red", "tab:blue"
SERIES = {  # of the rates: field, colour, marker
    "no network": ("iterative_baseline", "0.6", "s--"),
    "iterative": ("iterative", "C0", "o-"),
    "one pass": ("valid", "C1", "^-"),
}
PANEL = 1.6  # inches of one grid


def filling_figure(steps: Sequence[np.ndarray], mode: str, count: int = 8, title: str = "") -> Figure:
    """One grid at up to `count` moments of being filled, from the puzzle to the end.

    steps: (n, n) digit indices, -1 where empty, of every step; the first is the puzzle. Givens are black, digits
    put in since the panel before red, earlier ones blue.
    """
    if not len(steps):
        raise ValueError("there is no step to draw; decode with keep_steps=True")
    shown = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
    figure, axes = panels(len(shown), (PANEL, PANEL + 0.2))
    before = steps[0]
    for axis, number in zip(axes, shown, strict=True):
        _draw(axis, steps[number], steps[0], before, digits(mode, len(steps[0])))
        caption(axis, "puzzle" if number == 0 else f"after {number}")
        before = steps[number]
    figure.suptitle(title or f"{mode}, size {len(steps[0])}", fontsize=9)
    return figure


def _draw(axis: Axes, grid: np.ndarray, first: np.ndarray, before: np.ndarray, names: Sequence[int]) -> None:
    n = len(grid)
    axis.set(xlim=(0, n), ylim=(n, 0), xticks=range(n + 1), yticks=range(n + 1), aspect="equal")
    axis.tick_params(length=0, labelbottom=False, labelleft=False)
    axis.grid(color="0.7", linewidth=0.6, alpha=1)
    size = min(12.0, 60 / n)
    for row, column in np.argwhere(grid >= 0):
        colour = GIVEN if first[row, column] >= 0 else OLD if before[row, column] >= 0 else NEW
        text = str(names[grid[row, column]])
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=size)


def rates_figure(rates: Sequence[Rate]) -> Figure:
    """Valid grids by size with 95 % intervals, a panel for each mode and fill: one pass, exact, iterative and without a
    network."""
    kinds = sorted({(rate.mode, rate.fill) for rate in rates})
    if not kinds:
        raise ValueError("there is no rate to draw")
    figure, axes = panels(len(kinds), (3.0, 2.4), sharey=True)
    for axis, (mode, fill) in zip(axes, kinds, strict=True):
        mine = sorted((rate for rate in rates if (rate.mode, rate.fill) == (mode, fill)), key=lambda r: r.size)
        sizes = [rate.size for rate in mine]
        for label, (name, colour, style) in SERIES.items():
            shares = np.array([getattr(rate, name) for rate in mine])
            ends = np.array([share_interval(getattr(rate, name), rate.grids) for rate in mine]).T
            reach = 100 * np.abs(ends - shares)
            axis.errorbar(sizes, 100 * shares, reach, fmt=style, color=colour, elinewidth=1, capsize=2, label=label)
        if any(rate.exact is not None for rate in mine):
            exact = [np.nan if rate.exact is None else 100 * rate.exact for rate in mine]
            axis.plot(sizes, exact, "k:", label="one pass, exact")
        low, high = fill
        caption(axis, f"{mode}, {f'{low:g} to {high:g} revealed' if high else 'empty'}")
        axis.set_ylim(-3, 105)
        whole(axis, "size")
    for axis in axes[::4]:
        axis.set_ylabel("valid grids [%]")
    beside(figure)
    return figure
