"""Pictures of a sweep."""

import math
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from matrixlib.runs.sweep import Result, Sweep
from matrixlib.runs.sweep_config import dimensions
from matrixlib.tasks.plotting import beside, caption, log, panels, whole

COLUMNS = 3
BEST = "C3"
NAMED = 12  # trials in a legend


def curves_figure(sweep: Sweep) -> Figure:
    """Validation loss of every trial (mean over its seeds) on one axis, from the best (dark) to the worst (light); the
    best one thick, pruned ones dashed."""
    figure, (axes,) = panels(size=(9, 4))
    best = sweep.best()
    results = [result for result in sweep.results() if result.curve]
    order = sorted(results, key=lambda result: _last(result, sweep))
    colours = colormaps["viridis"](np.linspace(0, 0.95, max(1, len(order))))
    for result, colour in reversed(list(zip(order, colours, strict=True))):
        is_best = best is not None and result.trial.number == best.trial.number
        style: dict[str, Any] = {"color": BEST, "linewidth": 2.2, "zorder": 3} if is_best else {"color": colour}
        style |= {"linestyle": "--"} if result.trial.state == "pruned" else {}
        label = f"trial {result.trial.number}" + (" (best)" if is_best else "")
        label = label if is_best or len(order) <= NAMED else ""
        axes.plot(list(result.curve), list(result.curve.values()), marker="o", markersize=3, label=label, **style)
    whole(axes)
    axes.set_ylabel("validation loss [nat]")
    if len(order) > NAMED:
        caption(axes, f"{len(order)} trials, dark: low at the end; dashed: pruned")
    beside(figure)
    return figure


def dimensions_figure(sweep: Sweep) -> Figure:
    """The measure of every complete trial over each dimension's values; the best one marked, pruned ones as ticks at
    the upper edge."""
    space = dimensions(sweep.config)
    figure, grid = panels(len(space), (10 / min(COLUMNS, len(space)), 3), across=COLUMNS, sharey=True)
    complete = [result for result in sweep.results() if result.measures]
    pruned = [result for result in sweep.results() if result.trial.state == "pruned"]
    best = sweep.best()
    for axes, dimension in zip(grid, space, strict=True):
        choices = dimension.choices
        if sweep.config.method == "staged":  # whose arms add up
            choices = tuple(result.trial.values[dimension.key] for result in sweep.results())
        names = [str(choice) for choice in choices]
        numbers = not names or all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in choices)
        key = dimension.key

        def place(result: Result, key: str = key, names: list[str] = names, numbers: bool = numbers) -> float:
            value = result.trial.values[key]
            return float(value) if numbers else float(names.index(str(value)) if str(value) in names else -1)

        axes.plot([place(one) for one in complete], [one.mean for one in complete], "o", markersize=4, alpha=0.7)
        if best is not None:
            axes.plot([place(best)], [best.mean], "o", markersize=8, color=BEST, label=f"trial {best.trial.number}")
        top = axes.get_xaxis_transform()
        axes.plot([place(one) for one in pruned], [0.985] * len(pruned), "|", color="0.5", transform=top)
        if not numbers:
            axes.set_xticks(range(len(names)), names, rotation=20 if max(map(len, names)) > 8 else 0)
            axes.set_xlim(-0.5, len(names) - 0.5)
        elif dimension.log or _spread(complete, key):
            log(axes, [place(one) for one in (*complete, *pruned)], "x")
        elif 0 < len(names) < 8:
            axes.set_xticks([float(choice) for choice in choices], names)
        axes.set_xlabel(key)
    for axes in grid[::COLUMNS]:
        axes.set_ylabel("validation loss [nat]" if sweep.config.measure == "loss" else sweep.config.measure)
    beside(figure)
    return figure


def _spread(results: list[Result], key: str) -> bool:
    """Whether numbers lie so far apart that an even axis would show nothing."""
    values = [float(result.trial.values[key]) for result in results]
    return bool(values) and min(values) > 0 and max(values) >= 20 * min(values)


def _last(result: Result, sweep: Sweep) -> float:
    return sweep.better(result.mean) if result.measures else math.inf
