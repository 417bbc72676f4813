"""Pictures of the numbers that people compare: shares as bars, Elo as points, each with its 95 % interval."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from matrixlib.tasks.plotting import bars, beside, panels

BASELINE = "best capture"
GROUPS = 12  # of puzzles beside each other: all, bands of rating, the first themes
SHOWN_ELO = 1500  # beyond it, intervals of matches without a point would take the picture


def shares_figure(table: pd.DataFrame, column: str) -> Figure:
    """A group of bars for each row name of a table of `puzzles.solve` or `solve_suites`, a bar for each solver.

    column: of `Share`s. The baseline is grey.
    """
    groups = list(dict.fromkeys(table.index))[:GROUPS]
    solvers = list(dict.fromkeys(table["solver"]))
    figure, (axes,) = panels(size=(max(6.0, 2.2 + 0.85 * len(groups)), 3.4))
    series, ends = {}, {}
    for number, solver in enumerate(solvers):
        shares = table[table["solver"] == solver].loc[groups, column]
        series[solver] = "0.7" if solver == BASELINE else f"C{number}", [100 * share.share for share in shares]
        ends[solver] = 100 * np.array([share.interval() for share in shares]).T
    counts = table.iloc[:, 0].groupby(level=0, sort=False).first()
    bars(axes, [f"{group}\n{counts[group]:,}" for group in groups], series, ends)
    axes.set(ylabel=f"{column} [%]", ylim=(0, 100))
    beside(figure)
    return figure


def elo_figure(table: pd.DataFrame) -> Figure:
    """A point for each player of a table of `strength.ratings`, best first, with its interval."""
    figure, (axes,) = panels(size=(7, 0.9 + 0.32 * len(table)))
    lines = np.arange(len(table))[::-1]
    low, middle, high = (np.clip(table[name].to_numpy(float), -SHOWN_ELO, SHOWN_ELO) for name in ("low", "Elo", "high"))
    axes.hlines(lines, low, high, color="C0", linewidth=2)
    axes.plot(middle, lines, "o", color="C0")
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_yticks(lines, table.index)
    axes.set(xlabel="Elo on the scale of all these players", ylim=(-0.7, len(table) - 0.3))
    return figure
