"""The curves of a run over its update steps.

`PLOTS` are what the live panel, training.png and the report show: another picture is one entry more.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from matrixlib.engine.metrics import flatten, not_finite
from matrixlib.engine.timing import FIRST_UPDATES
from matrixlib.tasks.plotting import RED, above, log, plain, whole

MAX_POINTS = 2000  # per curve
SMOOTH = 30  # a smooth line is the mean over so manieth part of the points
APART = 10  # times smaller than the next larger one: a loss that belongs on another axis
LOSS_AXES = 3  # at most
SLOW = 0.75  # of the usual throughput: what is below is marked
DRAWN = ("loss", "losses", "metrics", "validation", "extra", "learning_rate", "grad_norm", "clip_share", "throughput")
"""What `frame` takes of a row, with marks of rollbacks and phases."""
HELD_OUT = "validation/"


@dataclass(frozen=True)
class Plot:
    """One picture over update steps.

    label: of its y axis. columns: regular expression that whole names of `frame`'s columns match; those of validations
    are drawn as dots, in the colour of the column with the same name. scale: factor of the values. log: logarithmic
    where all are positive. smooth: raw values are faint under running means. more: draws more into it, of the table.
    """

    label: str
    columns: str
    scale: float = 1.0
    log: bool = False
    smooth: bool = True
    more: Callable[[Axes, DataFrame], None] = lambda axes, table: None


def _clip_rate(axes: Axes, table: DataFrame) -> None:
    """The share of clipped gradients beside the gradient norm, and the norm that 95% of the latest were below."""
    shares, p95 = (table.get(name, Series(dtype=float)).dropna() for name in ("clip_share", "p95"))
    if shares.any():
        right = axes.twinx()
        right.plot(shares.index, 100 * shares, color="C3", linewidth=1, alpha=0.6)
        right.set(ylim=(0, 100), yticks=[0, 50, 100])
        right.tick_params(labelsize=7, colors="C3", direction="in", pad=-16)  # beside it lies another picture's label
        axes.plot([], [], color="C3", linewidth=1, alpha=0.6, label="clipped [%], right")
    if len(p95):
        last = p95.iloc[-1]
        axes.axhline(last, color="0.4", linewidth=0.8, linestyle="-.", label=f"95% below {last:.3g}")
    if shares.any() or len(p95):
        above(axes)


def _mark_slow(axes: Axes, table: DataFrame) -> None:
    """Where the throughput fell: the updates, and how far at the worst. What it is a mean of begins with warming up."""
    smooth = smoothed(table["throughput"].dropna().loc[FIRST_UPDATES + 1 :])
    share = smooth / smooth.median()
    slow = share[share < SLOW]
    if len(slow):
        axes.vlines(slow.index, 0, 1, colors=RED, alpha=0.15, linewidth=2, transform=axes.get_xaxis_transform())
        text = f"red: slower than usual, {slow.min() - 1:.0%} at {slow.idxmin():,.0f}"
        axes.set_title(text, fontsize=7, color=RED, loc="left", pad=3)


LOSSES = Plot("loss [nat]", rf"({HELD_OUT})?losses/.*|{HELD_OUT}loss", log=True)
"""Drawn on an axis each for losses of one size (`loss_groups`)."""
PLOTS = [
    Plot("accuracy [%]", rf"({HELD_OUT})?metrics/(.*/)?(top1|top3|accuracy|valid)[^/]*", scale=100),
    Plot("learning rate", "learning_rate", smooth=False),
    Plot("gradient norm before clipping", "grad_norm", log=True, more=_clip_rate),
    Plot("positions/s", "throughput", more=_mark_slow),
]


def frame(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """What is drawn of rows of metrics.jsonl: a column for each number, such as "losses/policy", by update step.

    Of steps that a rollback went back over, the last row counts. `not finite` counts updates up to each row.
    """
    rows = list(rows)
    values = [dict(flatten({key: row[key] for key in DRAWN if row.get(key) is not None})) for row in rows]
    for row, value in zip(rows, values, strict=True):
        norms = row.get("statistics", {}).get("gradient_norm", {})
        value |= {"rollbacks": row.get("rollbacks", 0), "phase": row.get("phase", 0), "p95": norms.get("p95", math.nan)}
    table = DataFrame(values, index=pd.Index([row["step"] for row in rows], dtype=float, name="step"))
    table["not finite"] = np.cumsum([not_finite(row) for row in rows])
    steps = table.index.to_numpy()
    later = np.minimum.accumulate(steps[::-1])[::-1]
    return table[np.append(steps[:-1] < later[1:], True)[: len(steps)]].select_dtypes("number")


def training_figure(rows: Iterable[Mapping[str, Any]], title: str = "training") -> Figure:
    """Curves of a run from the rows of its metrics.jsonl (see `metrics.read`), resumed or not."""
    figure = Figure(figsize=(10, 5.6))
    draw(figure, frame(rows), title)
    return figure


def draw(figure: Figure, table: DataFrame, title: str, total: int = 0) -> None:
    """Fill `figure` with the curves of a table of `frame`; `total` > 0 is the last update step of the axis."""
    figure.clear()
    while len(table) > MAX_POINTS:
        table = _thin(table)
    bad = math.ceil(table["not finite"].max()) if len(table) else 0
    went_back = _changes(table, "rollbacks")
    notes = [f"{bad:,} updates not finite"] * bool(bad) + [f"rolled back to update {at - 1:,.0f}" for at in went_back]
    figure.suptitle(" - ".join([title, *notes]), fontsize=11, color=RED if notes else "black")
    terms = {name: _name(name) for name in _matching(table, LOSSES)}
    groups = [[re.escape(name) for name in terms if terms[name] in group] for group in loss_groups(table)]
    losses = [replace(LOSSES, columns="|".join(group)) for group in groups]
    own = [Plot(name.removeprefix("extra/"), re.escape(name)) for name in map(str, table) if name.startswith("extra/")]
    rest = [*PLOTS, *own]
    entries = max(len({_name(name) for name in _matching(table, plot)}) for plot in (*losses[:1], *rest))
    top = max(0.5, 0.87 - 0.027 * max(0, entries // 3 - 2))  # for legends of more than three lines, with their note
    # fixed margins: matplotlib's constrained layout takes half of the drawing time
    columns = 1 + math.ceil(len(rest) / 2)
    figure.set_size_inches(10 / 3 * columns, figure.get_figheight())
    edges = {"left": 0.216 / columns, "right": 1 - 0.045 / columns, "bottom": 0.085, "top": top}
    grid = figure.add_gridspec(2, columns, wspace=0.28, hspace=0.42, **edges)
    left = grid[:, 0].subgridspec(len(losses), 1, hspace=0.14 + 0.14 * len(losses))
    axes = [figure.add_subplot(left[index]) for index in range(len(losses))]
    axes += [figure.add_subplot(grid[index // (columns - 1), 1 + index % (columns - 1)]) for index in range(len(rest))]
    colours = {name: f"C{index}" for index, name in enumerate(dict.fromkeys(terms.values()))}
    for number, (one, plot) in enumerate(zip(axes, [*losses, *rest], strict=True)):
        plain(one)
        _draw(one, plot, table, colours if number < len(losses) else {})
        for at in went_back:
            one.axvline(at, color=RED, linewidth=0.8, linestyle=":")
        for at in _changes(table, "phase"):
            one.axvline(at, color="0.6", linewidth=0.8, linestyle="--")
        inner = number < len(losses) - 1
        whole(one, "" if inner else "update step")
        one.tick_params(labelbottom=not inner)
        if total:
            one.set_xlim(0, max(total, table.index.max() if len(table) else 0))


def _thin(table: DataFrame) -> DataFrame:
    """Means over pairs of successive rows."""
    halved = table.reset_index().groupby(np.arange(len(table)) // 2).mean().set_index("step")
    return halved.assign(rollbacks=np.floor(halved["rollbacks"]), phase=np.floor(halved["phase"]))


def _changes(table: DataFrame, name: str) -> list[float]:
    """Steps at which a number has become another one."""
    return table.index[table[name].diff().fillna(0) != 0].tolist() if name in table else []


def _matching(table: DataFrame, plot: Plot) -> list[str]:
    return [name for name in map(str, table) if re.fullmatch(plot.columns, name) and table[name].notna().any()]


def _name(column: str) -> str:
    """For the legend."""
    return column.removeprefix(HELD_OUT).removeprefix("losses/").removeprefix("metrics/")


def loss_groups(table: DataFrame) -> list[list[str]]:
    """Names of the losses by size, largest first: what would be a flat line beside the others has an axis of its own,
    LOSS_AXES at most; it begins where a loss is APART times smaller than the next larger one."""
    finite = table[_matching(table, LOSSES)].replace([math.inf, -math.inf], math.nan)
    sizes = finite.median().fillna(0.0).groupby(_name, sort=False).first().sort_values(ascending=False, kind="stable")
    groups: list[list[str]] = [[]]
    for name, size in sizes.items():
        if groups[-1] and len(groups) < LOSS_AXES and size * APART < sizes[groups[-1][-1]]:
            groups.append([])
        groups[-1].append(str(name))
    return groups


def smoothed(values: Series) -> Series:
    """Running means over a part of the curve, those at its beginning over what there is."""
    return values.rolling(max(1, len(values) // SMOOTH), min_periods=1).mean()


def _draw(axes: Axes, plot: Plot, table: DataFrame, colours: Mapping[str, str]) -> None:
    """Curves, raw and smooth, and dots of validations, with a legend over them where there are several."""
    axes.set_ylabel(plot.label)
    columns = _matching(table, plot)
    if not columns:
        axes.text(0.5, 0.5, "nothing yet", ha="center", va="center", fontsize=8, color="grey", transform=axes.transAxes)
        return
    names = list(dict.fromkeys(map(_name, columns)))
    colours = colours or {name: f"C{index}" for index, name in enumerate(names)}
    dots = [column for column in columns if column.startswith(HELD_OUT)]
    for column in columns:
        values, colour = plot.scale * table[column].dropna(), colours[_name(column)]
        if column in dots:
            edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
            axes.plot(values, "o--", markersize=4.5, linewidth=0.8, color=colour, label=_name(column), **edge)
        else:
            axes.plot(values, color=colour, linewidth=0.7, alpha=0.25 if plot.smooth else 1.0)
            label = _name(column) if len(columns) > 1 else None
            axes.plot(smoothed(values) if plot.smooth else values, color=colour, linewidth=1.4, label=label)
    if plot.log:
        log(axes, (plot.scale * table[columns]).to_numpy().ravel().tolist())
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if table[columns].min().min() < 0 else 0)
    if dots or len(names) > 1:
        handles = {str(line.get_label()): line for line in reversed(axes.get_lines())}
        above(axes, [handles[name] for name in names], names, "dots: held-out" if dots else "")
    plot.more(axes, table)


def png(figure: Figure, dpi: int = 100) -> bytes:
    """PNG file of a figure; `dpi` dots an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
