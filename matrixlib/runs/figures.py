"""Curves of a run over its updates.

`PLOTS` and the losses are shown by the live panel, training.png and the report; add a chart by adding an entry.
`charts` and `marks` define the contents, `training_figure` draws them once, `panel/panel.js` live.
"""

import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from matrixlib.engine.metrics import flatten, messages, not_finite
from matrixlib.engine.stats import DECISIONS, Event
from matrixlib.engine.timing import FIRST_UPDATES
from matrixlib.tasks.plotting import log, plain, whole

MAX_POINTS = 1000  # of a curve
SMOOTH_POINTS, SMOOTH_SHARE = 5, 1 / 30  # window of running means: at least, and of all points
MAX_LOSS_CHARTS = 6  # more terms share one chart
SLOW = 0.75  # of the usual throughput
LEGEND_SHARE = 0.4  # of the curves' height, above them
LEGEND: dict[str, Any] = {"frameon": False, "handlelength": 1.2, "borderaxespad": 0.1, "labelspacing": 0.2}
INCHES, ACROSS, DPI = (9.0, 2.3), 3, 200  # size of a row, charts a row, dots per inch
GREY, RED = "#808080", "#d93a2f"  # legible on white and on black
COLOURS = ("#2f7ed8", "#e8710a", "#159a6b", "#c2478f", "#8a63d2", "#a58a00", "#0fa3b1", "#d1495b")
LOGGED = ("loss", "losses", "metrics", "validation", "extra", "initial", "learning_rate", "grad_norm", "throughput")
HELD_OUT = "validation/"
BOUNDS = ("strength/low", "strength/high")  # of an interval: faint
NAMES = {"grad_norm": "gradient norm", "rss_mib": "process", "allocated_mib": "GPU tensors", "driver_mib": "GPU"}
Kind = Literal["raw", "line", "held-out"]
FrameT = TypeVar("FrameT", DataFrame, Series)


@dataclass(frozen=True)
class Plot:
    """A chart over updates.

    label: title with unit. columns: regular expression matched against whole column names of `frame`, validation
    included. scale: factor of the values. log: y axis. smooth: faint raw values, strong running means. levels:
    horizontal lines, by name of a `frame` column (its last value).
    """

    label: str
    columns: str
    scale: float = 1.0
    log: bool = False
    smooth: bool = True
    levels: Mapping[str, str] = field(default_factory=dict)


PLOTS = [
    Plot("accuracy [%]", rf"({HELD_OUT})?metrics/(?!ssl_)(.*/)?(top1|top3|accuracy|valid)[^/]*", scale=100),
    Plot("SSL accuracy [%]", rf"({HELD_OUT})?metrics/ssl_.*/accuracy", scale=100),
    Plot("Elo over the anchor, 95 %", "strength/(elo|low|high)", smooth=False),
    Plot("learning rate", "learning_rate", smooth=False),
    Plot("gradient norm", "grad_norm", log=True, levels={"clipped above": "clip", "95 % below": "p95"}),
    Plot("positions/s", "throughput"),
    Plot("memory [GiB]", r"memory/(rss|allocated|driver)_mib", scale=1 / 1024, smooth=False),
    Plot("GPU use [%]", "memory/busy", scale=100, smooth=False),
]


@dataclass(frozen=True)
class Curve:
    """values: at the chart's `steps`, NaN where missing. colour: CSS and matplotlib name."""

    name: str
    values: np.ndarray
    kind: Kind
    colour: str


@dataclass(frozen=True)
class Chart:
    """steps: updates of the values. levels: (name, value) of horizontal lines."""

    label: str
    steps: np.ndarray
    curves: Sequence[Curve]
    levels: Sequence[tuple[str, float]] = ()
    log: bool = False

    @property
    def held_out(self) -> bool:
        return any(curve.kind == "held-out" for curve in self.curves)


@dataclass(frozen=True)
class Mark:
    """An event in update `step`. event: an `Event`, "phase" or "slow"."""

    step: int
    event: str
    text: str

    @property
    def bad(self) -> bool:
        return self.event in DECISIONS or self.event == "slow"


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Plotted numbers of a metrics.jsonl row by `frame` column, and its step."""
    norms = row.get("statistics", {}).get("gradient_norm", {})
    parts = {key: row[key] for key in (*LOGGED, "strength", "memory") if row.get(key) is not None}
    return {"step": row["step"], **dict(flatten(parts)), **{key: norms[key] for key in ("p95", "clip") if key in norms}}


def frame(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """Numbers of metrics.jsonl rows by update; columns such as "losses/policy"."""
    return tabulated(map(numbers, rows))


def tabulated(values: Iterable[Mapping[str, float]]) -> DataFrame:
    """`frame` from `numbers`. The last row of an update wins, after rollbacks."""
    table = DataFrame([{"step": math.nan}, *values])[1:]  # keeps the column if there are no rows
    steps = table["step"].to_numpy()
    later = np.minimum.accumulate(steps[::-1])[::-1]
    kept = np.append(steps[:-1] < later[1:], True)[: len(steps)]
    return table[kept].set_index("step").select_dtypes("number")


def charts(table: DataFrame) -> list[Chart]:
    """Charts of a `frame`: total loss, terms, SSL terms, `PLOTS`, the user's numbers. Long curves are thinned."""
    if len(table) > MAX_POINTS:
        part = np.arange(len(table)) * MAX_POINTS // len(table)
        table = table.reset_index().groupby(part).mean().set_index("step")
    table = table.replace([math.inf, -math.inf], math.nan).dropna(axis=1, how="all")
    own = [name for name in map(str, table) if name.startswith("extra/")]
    plots = [*_loss_plots(table), *PLOTS, *(Plot(readable(name), re.escape(name)) for name in own)]
    smooth = smoothed(table).where(table.notna())
    return [chart for chart in (_chart(plot, table, smooth) for plot in plots) if chart.curves]


def _loss_plots(table: DataFrame) -> list[Plot]:
    terms = list(dict.fromkeys(name.removeprefix(HELD_OUT)[7:] for name in map(str, table) if "losses/" in name))
    auxiliary = [term for term in terms if term.startswith("ssl_")]
    main = [term for term in terms if term not in auxiliary]
    groups = [(f"{readable(term)} loss", [term]) for term in main]
    if len(main) > MAX_LOSS_CHARTS:
        groups = [("losses", main)]
    groups += [("SSL losses", auxiliary)] * bool(auxiliary)
    plots = [Plot("total loss", f"({HELD_OUT})?loss")] * (len(terms) > 1)
    for label, members in groups:
        levels = {name: f"initial/{members[0]}/{name}" for name in ("chance", "floor")} if len(members) == 1 else {}
        pattern = rf"({HELD_OUT})?losses/({'|'.join(map(re.escape, members))})"
        plots.append(Plot(label, pattern, log=len(members) > 1, levels=levels))
    return plots


def _chart(plot: Plot, table: DataFrame, smooth: DataFrame) -> Chart:
    columns = [name for name in map(str, table) if re.fullmatch(plot.columns, name)]
    names = list(dict.fromkeys(map(readable, columns)))
    steps, curves = table.index.to_numpy(), list[Curve]()
    for column in columns:
        name, values = readable(column), plot.scale * table[column].to_numpy()
        colour = COLOURS[names.index(name) % len(COLOURS)]
        if column in BOUNDS:
            curves.append(Curve(name, values, "raw", COLOURS[0]))
        elif column.startswith(HELD_OUT):
            curves.append(Curve(name, values, "held-out", colour))
        elif plot.smooth:
            curves.append(Curve(name, values, "raw", colour))
            curves.append(Curve(name, plot.scale * smooth[column].to_numpy(), "line", colour))
        else:
            curves.append(Curve(name, values, "line", colour))
    found = ((name, table[column].dropna()) for name, column in plot.levels.items() if column in table)
    levels = [(name, plot.scale * float(values.iloc[-1])) for name, values in found]
    return Chart(plot.label, steps, curves, levels, plot.log)


def marks(rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Events in metrics.jsonl rows: messages, rollbacks, phases, slowdowns."""
    found: list[Mark] = []
    seen: set[str] = {Event.FIRST_UPDATE}
    for step, event, text in messages(rows):
        if event in DECISIONS or event not in seen:  # repeated warnings are marked once
            found.append(Mark(step, event, text))
            seen.add(event)
    reported = {mark.step for mark in found if mark.event == Event.ROLLBACK}
    for before, row in itertools.pairwise(rows):
        step = row["step"]
        if row.get("rollbacks", 0) > before.get("rollbacks", 0) and before["step"] not in reported:
            found.append(Mark(step, Event.ROLLBACK, f"rolled back to update {step - 1:,}"))
        if row.get("phase", 0) != before.get("phase", 0):
            found.append(Mark(step, "phase", f"phase {row['phase']} begins"))
    found += [Mark(row["step"], Event.SKIP, "not finite") for row in rows if not_finite(row) and not row.get("events")]
    speed = Series({row["step"]: row.get("throughput", math.nan) for row in rows}, dtype=float).dropna()
    speed = smoothed(speed.loc[FIRST_UPDATES + 1 :])  # without warm-up
    share = speed / speed.expanding().median()
    if (share < SLOW).any():
        found.append(Mark(int(share[share < SLOW].index.min()), "slow", f"throughput falls by {1 - share.min():.0%}"))
    return sorted(found, key=lambda mark: mark.step)


def readable(column: str) -> str:
    """A column's name for people: "metrics/policy/top1" is "policy top-1", "metrics/value/accuracy" is "value"."""
    name = re.sub(r"^(validation/)?(losses/|metrics/|extra/|memory/|strength/)?", "", column).removeprefix("ssl_")
    name = NAMES.get(name, name)
    return re.sub(r"top(\d)", r"top-\1", name.removesuffix("/accuracy")).replace("_", " ").replace("/", " ")


def smoothed(values: FrameT) -> FrameT:
    """Running means over a share of the curve, shorter at its start."""
    return values.rolling(max(SMOOTH_POINTS, int(len(values) * SMOOTH_SHARE)), min_periods=1).mean()


def training_figure(rows: Iterable[Mapping[str, Any]], title: str = "training") -> Figure:
    """Curves of a run from its metrics.jsonl rows (see `metrics.read`), legible on white and black."""
    rows = list(rows)
    shown, events = charts(frame(rows)), marks(rows)
    lines = -(-max(1, len(shown)) // ACROSS)
    height = 0.3 + INCHES[1] * lines
    figure = Figure(figsize=(INCHES[0], height), facecolor="none")
    # fixed margins: a layout engine would take half of the drawing time
    figure.subplots_adjust(0.065, 0.3 / height, 0.98, 1 - 0.55 / height, wspace=0.26, hspace=0.32)
    bad = [mark for mark in events if mark.bad]
    notes = [f"{mark.event} at update {mark.step:,}" for mark in bad[:3]] + [f"{len(bad) - 3} more"] * (len(bad) > 3)
    figure.suptitle(", ".join([title, *notes]), fontsize=10, color=RED if bad else GREY, y=1 - 0.08 / height, va="top")
    for axes, chart in zip(figure.subplots(lines, ACROSS, squeeze=False).flat, shown, strict=False):
        _draw(axes, chart, events)
    for axes in figure.axes[len(shown) :]:
        axes.remove()
    return figure


def _draw(axes: Axes, chart: Chart, events: Sequence[Mark]) -> None:
    plain(axes)
    axes.set_facecolor("none")
    title = chart.label + ", points: held-out" * chart.held_out
    axes.set_title(title, fontsize=9, loc="left", color=GREY, y=1.0)  # searching the place takes a quarter of the time
    axes.tick_params(labelsize=9, colors=GREY, which="both")
    for curve in chart.curves:
        there = ~np.isnan(curve.values)
        points = chart.steps[there], curve.values[there]
        if curve.kind == "held-out":
            axes.plot(*points, "o--", color=curve.colour, markersize=4, linewidth=0.8)
        elif curve.kind == "raw":
            axes.plot(*points, color=curve.colour, linewidth=0.7, alpha=0.3)
        else:
            axes.plot(*points, color=curve.colour, linewidth=1.6, label=curve.name)
    for _, value in chart.levels:
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle=":")
    for mark in events:
        axes.axvline(mark.step, color=RED if mark.bad else GREY, linewidth=0.8, linestyle="-" if mark.bad else "--")
    if chart.log:
        log(axes, np.concatenate([curve.values for curve in chart.curves]).tolist())
    if sum(curve.kind == "line" for curve in chart.curves) > 1:
        low, high = axes.get_ylim()
        ratio = (high / low) ** LEGEND_SHARE if axes.get_yscale() == "log" else 1 + LEGEND_SHARE * (1 - low / high)
        axes.set_ylim(low, high * ratio)
        axes.legend(ncols=2, loc="upper left", fontsize=9, labelcolor=GREY, **LEGEND)
    for name, value in chart.levels:
        _, height = axes.transAxes.inverted().transform(axes.transData.transform((0, value)))
        side = "top" if height > 0.92 else "bottom"  # inside the frame
        where = axes.get_yaxis_transform()
        axes.text(0.99, value, name, transform=where, ha="right", va=side, fontsize=9, color=GREY)
    for spine in axes.spines.values():
        spine.set_color(GREY)
    whole(axes, "")


def png(figure: Figure) -> bytes:
    """A figure as PNG at twice the screen resolution."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
