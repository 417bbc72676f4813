"""Pictures of the numbers that people compare: shares as bars, Elo as points, each with its 95 % interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "best capture"
GROUPS = 12  # of puzzles beside each other: all, bands of rating, the first themes
SHOWN_ELO = 1500  # beyond it, intervals of matches without a point would take the picture


def shares_figure(table: pd.DataFrame, column: str) -> Figure:
    """A group of bars for each row name of a table of `puzzles.solve` or `solve_suites`, a bar for each solver.

    column: of `Share`s. The baseline is grey.
    """
    groups = list(dict.fromkeys(table.index))[:GROUPS]
    solvers = list(dict.fromkeys(table["solver"]))
    figure = Figure(figsize=(max(6.0, 2.2 + 0.85 * len(groups)), 3.4), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / len(solvers)
    for number, solver in enumerate(solvers):
        rows = table[table["solver"] == solver]
        shares = [rows.loc[group, column] for group in groups]
        middle = 100 * np.array([share.share for share in shares])
        edges = 100 * np.array([share.interval() for share in shares]).T
        reach = np.abs(edges - middle)
        places = np.arange(len(groups)) + width * (number + 0.5) - 0.42
        colour = "0.7" if solver == BASELINE else f"C{number}"
        axes.bar(places, middle, width, color=colour, label=solver)
        axes.errorbar(places, middle, reach, fmt="none", ecolor="0.15", elinewidth=1, capsize=2)
    counts = table.iloc[:, 0].groupby(level=0, sort=False).first()
    axes.set_xticks(range(len(groups)), [f"{group}\n{counts[group]:,}" for group in groups], fontsize=8)
    axes.set(ylabel=f"{column} [%]", ylim=(0, 100))
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def elo_figure(table: pd.DataFrame) -> Figure:
    """A point for each player of a table of `strength.ratings`, best first, with its interval."""
    figure = Figure(figsize=(7, 0.9 + 0.32 * len(table)), layout="constrained")
    axes = figure.subplots()
    lines = np.arange(len(table))[::-1]
    low, middle, high = (np.clip(table[name].to_numpy(float), -SHOWN_ELO, SHOWN_ELO) for name in ("low", "Elo", "high"))
    axes.hlines(lines, low, high, color="C0", linewidth=2)
    axes.plot(middle, lines, "o", color="C0")
    axes.axvline(0, color="0.6", linewidth=0.8)
    axes.set_yticks(lines, table.index, fontsize=9)
    axes.set(xlabel="Elo on the scale of all these players", ylim=(-0.7, len(table) - 0.3))
    axes.grid(axis="x", alpha=0.3)
    return figure
