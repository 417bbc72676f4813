"""Static pictures of runs: curves of one, of two sides, of faults put in; scores; where the time of an update goes."""

import io
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matrixlib.engine.metrics import flatten, not_finite
from matrixlib.engine.timing import FIRST_UPDATES, PHASES, phase_seconds
from matrixlib.play.elo import share_interval
from matrixlib.tasks.plotting import RED, above, beside, caption, log, panels, plain, whole

POINTS = 2000  # per curve
SMOOTH = 30  # a drawn line is the mean over so manieth part of its points
APART = 10  # times smaller than the next larger, or squared than the largest: a loss that belongs on another axis
AXES = 3  # of losses, at most
TALL = 3  # times the median: the highest bar of times
SLOW = 0.75  # of the usual throughput: what is below is marked
SHARES = ("top1", "top3", "accuracy", "valid")  # a metric whose last name starts so is drawn as a share
SINGLE = {"learning_rate": "learning rate", "grad_norm": "gradient norm before clipping", "throughput": "positions/s"}
"""Quantities with a picture of their own, and its label."""
Rows = Sequence[Mapping[str, Any]]


class Curve:
    """Points (step, value) of one quantity in bounded memory.

    When there are 2,000, neighbours are averaged in pairs, so that a long run is drawn from the means of
    2, 4, 8 ... successive values.
    """

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._each = 1
        self._waiting: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """Append one value; steps rise."""
        self._waiting.append((step, value))
        if len(self._waiting) < self._each:
            return
        self._points.append(_mean(self._waiting))
        self._waiting.clear()
        if len(self._points) >= POINTS:
            self._points = [_mean(pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)]
            self._each *= 2

    def cut(self, step: float) -> None:
        """Forget the points from `step` on: a rollback goes over them again."""
        self._points = [point for point in self._points if point[0] < step]
        self._waiting.clear()

    def points(self) -> tuple[list[float], list[float]]:
        """Steps and values, with the mean of those not yet averaged as the last point."""
        points = [*self._points, _mean(self._waiting)] if self._waiting else self._points
        return [step for step, _ in points], [value for _, value in points]


Curves = defaultdict[str, Curve]


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


class History:
    """Curves by name of everything that is drawn, gathered from rows of metrics.jsonl."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.losses: Curves = defaultdict(Curve)
        self.held_out_losses: Curves = defaultdict(Curve)
        self.shares: Curves = defaultdict(Curve)  # metrics such as top1
        self.held_out_shares: Curves = defaultdict(Curve)
        self.single: Curves = defaultdict(Curve)  # those of SINGLE
        self.clipped = Curve()  # share of clipped gradients
        self.p95 = math.nan  # of the latest gradient norms
        self.not_finite = 0  # updates with a loss or gradient norm that is not finite
        self.rollbacks: list[int] = []  # first updates after a rollback
        self.phases: list[int] = []  # first updates of the curriculum's later phases
        self._phase: int | None = None
        self.step = self._rolled_back = 0
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row: `step` and any of `losses`, `metrics`, `learning_rate`, `grad_norm`, `throughput`,
        `validation` (a mapping like losses and metrics together, nested or flat)."""
        step = int(row["step"])
        if step <= self.step:
            held_out = (self.held_out_losses, self.held_out_shares)
            for curves in (self.losses, self.shares, self.single, *held_out):
                for curve in curves.values():
                    curve.cut(step)
            self.clipped.cut(step)
            self.phases, self._phase = [first for first in self.phases if first < step], row.get("phase")
        if row.get("rollbacks", 0) > self._rolled_back:
            self._rolled_back = row["rollbacks"]
            self.rollbacks.append(step)
        if (phase := row.get("phase")) != self._phase and self._phase is not None:
            self.phases.append(step)
        self._phase = phase
        self.step = step
        losses = numbers(row.get("losses"))
        single = numbers({key: row.get(key) for key in SINGLE})
        self.not_finite += not_finite(row)
        for name, value in losses:
            self.losses[name].add(step, value)
        for name, value in single:
            self.single[name].add(step, value)
        if row.get("clip_share") is not None:
            self.clipped.add(step, row["clip_share"])
        self.p95 = (row.get("statistics") or {}).get("gradient_norm", {}).get("p95", self.p95)
        for name, value in numbers(row.get("metrics")):
            if _is_share(name):
                self.shares[name].add(step, value)
        for name, value in numbers(row.get("validation")):
            name = name.removeprefix("losses/").removeprefix("metrics/")
            if _is_share(name):
                self.held_out_shares[name].add(step, value)
            elif name in self.losses or name.rsplit("/", 1)[-1] == "loss":
                self.held_out_losses[name].add(step, value)


def draw(figure: Figure, history: History, title: str, total: int = 0) -> None:
    """Fill `figure` with one small picture for each quantity; `total` > 0 sets the step axis."""
    figure.clear()
    notes = [f"{history.not_finite:,} updates not finite"] if history.not_finite else []
    notes += [f"rolled back to update {step - 1:,}" for step in history.rollbacks]
    note = "".join(f" - {text}" for text in notes)
    figure.suptitle(title + note, fontsize=11, color=RED if note else "black")
    groups = loss_groups(history)
    entries = max(len(groups[0]), len({**history.shares, **history.held_out_shares}))
    top = max(0.5, 0.87 - 0.027 * max(0, entries // 3 - 2))  # for legends of more than three lines, with their note
    # fixed margins: matplotlib's constrained layout takes half of the drawing time
    grid = figure.add_gridspec(2, 3, left=0.072, right=0.985, bottom=0.085, top=top, wspace=0.28, hspace=0.42)
    column = grid[:, 0].subgridspec(len(groups), 1, hspace=0.14 + 0.14 * len(groups))
    colours = {name: f"C{index}" for index, name in enumerate({**history.losses, **history.held_out_losses})}
    losses = [figure.add_subplot(column[index]) for index in range(len(groups))]
    rest = [figure.add_subplot(grid[row, column]) for row in (0, 1) for column in (1, 2)]
    for axes in (*losses, *rest):
        plain(axes)
    for axes, names in zip(losses, groups, strict=True):
        own, dots = (
            {name: curves[name] for name in names if name in curves}
            for curves in (history.losses, history.held_out_losses)
        )
        log(axes, _curves(axes, own, dots, "loss [nat]", colours))
    colours = {name: f"C{index}" for index, name in enumerate({**history.shares, **history.held_out_shares})}
    _curves(rest[0], history.shares, history.held_out_shares, "accuracy [%]", colours, scale=100)
    if colours:
        rest[0].set_ylim(bottom=0)
    for axes, (name, label) in zip(rest[1:], SINGLE.items(), strict=True):
        if name not in history.single:
            _nothing(axes, label)
            continue
        steps, values = history.single[name].points()
        if name == "learning_rate":
            axes.plot(steps, values, color="C0", linewidth=1)
        else:
            _raw_and_smooth(axes, steps, values, "C0")
        axes.set_ylabel(label)
        if name == "grad_norm":
            log(axes, values)
            _clip_rate(axes, history)
        else:
            axes.set_ylim(bottom=0)
        if name == "throughput":
            _mark_slow(axes, steps, values)
    for axes in (*losses, *rest):
        for step in history.rollbacks:
            axes.axvline(step, color=RED, linewidth=0.8, linestyle=":")
        for step in history.phases:
            axes.axvline(step, color="0.6", linewidth=0.8, linestyle="--")
        whole(axes, "" if axes in losses[:-1] else "update step")
        axes.tick_params(labelbottom=axes not in losses[:-1])
        if total:
            axes.set_xlim(0, max(total, history.step))


def loss_groups(history: History) -> list[list[str]]:
    """Names of the losses by size, largest first: what would be a flat line beside the others has an axis of its own.

    A new group begins where a loss is APART times smaller than the next larger one, or its square times than the
    group's largest; AXES groups at most.
    """
    sizes: dict[str, float] = {}
    for name in {**history.losses, **history.held_out_losses}:
        values = (history.losses if name in history.losses else history.held_out_losses)[name].points()[1]
        finite = [value for value in values if math.isfinite(value)]
        sizes[name] = statistics.median(finite) if finite else 0.0
    groups: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        largest, least = [sizes[groups[-1][at]] for at in (0, -1)] if groups else (math.inf, math.inf)
        if len(groups) < AXES and (sizes[name] * APART < least or sizes[name] * APART**2 < largest):
            groups.append([])
        groups[-1].append(name)
    return groups or [[]]


def _smooth(values: Sequence[float]) -> Any:
    """Running means over a part of the curve, those at its beginning over what there is."""
    return pandas.Series(values).rolling(max(1, len(values) // SMOOTH), min_periods=1).mean()


def _raw_and_smooth(axes: Axes, steps: Sequence[float], values: Sequence[float], colour: str, label: str = "") -> None:
    axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.25)
    axes.plot(steps, _smooth(values), color=colour, linewidth=1.4, label=label or None)


def _mark_slow(axes: Axes, steps: Sequence[float], values: Sequence[float]) -> None:
    """Where the throughput fell: the updates, and how far at the worst. What it is a mean of begins with warming up."""
    later = np.array(steps) > FIRST_UPDATES
    smooth = _smooth([value for value, counts in zip(values, later, strict=True) if counts])
    share, at = (smooth / smooth.median()).to_numpy(), np.array(steps)[later]
    slow = share < SLOW
    if not slow.any():
        return
    edges = [at[0] - 0.5, *(at[1:] + at[:-1]) / 2, at[-1] + 0.5]
    axes.stairs(slow, edges, fill=True, transform=axes.get_xaxis_transform(), color=RED, alpha=0.15)
    worst = int(np.nanargmin(share))
    text = f"{share[worst] - 1:.0%} at {at[worst]:,.0f}"
    axes.set_title(f"red: slower than usual, {text}", fontsize=7, color=RED, loc="left", pad=3)


def _clip_rate(axes: Axes, history: History) -> None:
    """The share of clipped gradients beside the gradient norm, and the norm that 95% of the latest were below."""
    steps, shares = history.clipped.points()
    if any(shares):
        beside = axes.twinx()
        beside.plot(steps, [100 * share for share in shares], color="C3", linewidth=1, alpha=0.6)
        beside.set_ylim(0, 100)
        beside.set_yticks([0, 50, 100])
        beside.tick_params(labelsize=7, colors="C3", direction="in", pad=-16)  # beside it lies another picture's label
        axes.plot([], [], color="C3", linewidth=1, alpha=0.6, label="clipped [%], right")
    if math.isfinite(history.p95):
        axes.axhline(history.p95, color="0.4", linewidth=0.8, linestyle="-.", label=f"95% below {history.p95:.3g}")
    if any(shares) or math.isfinite(history.p95):
        above(axes)


def numbers(values: Mapping[str, Any] | None) -> list[tuple[str, float]]:
    """Numeric leaves by "outer/inner" name; None and text are left out."""
    leaves = flatten(values) if values else ()
    return [(name, float(value)) for name, value in leaves if isinstance(value, (int, float))]


def _is_share(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith(SHARES)


def _curves(
    axes: Axes,
    training: Mapping[str, Curve],
    held_out: Mapping[str, Curve],
    label: str,
    colours: Mapping[str, str],
    scale: float = 1.0,
) -> list[float]:
    """Those of training faint with a smooth line over them, held-out ones as dots of the same colour; returns what was
    drawn."""
    drawn: list[float] = []
    names = list(dict.fromkeys([*training, *held_out]))
    for name in names:
        if name in training:
            steps, values = training[name].points()
            values = [scale * value for value in values]
            _raw_and_smooth(axes, steps, values, colours[name], name)
            drawn += values
        if name in held_out:
            steps, values = held_out[name].points()
            values = [scale * value for value in values]
            edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 3}
            axes.plot(steps, values, "o--", markersize=4.5, linewidth=0.8, color=colours[name], label=name, **edge)
            drawn += values
    if not names:
        _nothing(axes, label)
        return drawn
    axes.set_ylabel(label)
    handles = {str(line.get_label()): line for line in reversed(axes.get_lines())}
    entries = {name: handles[name] for name in names}
    above(axes, list(entries.values()), list(entries), "dots: held-out" if held_out else "")
    return drawn


def _nothing(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.text(0.5, 0.5, "nothing yet", ha="center", va="center", fontsize=8, color="grey", transform=axes.transAxes)


def training_figure(rows: Iterable[Mapping[str, Any]], title: str = "training") -> Figure:
    """Curves of a run from the rows of its metrics.jsonl (see `metrics.read`), resumed or not."""
    figure = Figure(figsize=(10, 5.6))
    draw(figure, History(rows), title)
    return figure


def phases_figure(rows: Sequence[Mapping[str, Any]], bins: int = 40) -> Figure:
    """Milliseconds of an update by phase over the training, stacked: means over equal stretches of updates.

    What is far above the median is cut off and says its height.
    """
    figure, (axes,) = panels(size=(9, 3.2))
    if not rows:
        _nothing(axes, "ms an update")
        return figure
    parts = np.array_split(np.arange(len(rows)), min(bins, len(rows)))
    steps = np.array([rows[part[0]]["step"] - rows[part[0]].get("updates", 1) + 1 for part in parts])
    edges = np.append(steps, rows[-1]["step"] + 1)
    bottom = np.zeros(len(parts))
    times = phase_seconds(rows).fillna(0.0)
    for name in (*PHASES, "other"):
        if name not in times:
            continue
        seconds = np.array([times[name].to_numpy()[part].sum() for part in parts])
        height = 1000 * seconds / [sum(rows[i].get("updates", 1) for i in part) for part in parts]
        if height.any():
            axes.stairs(bottom + height, edges, baseline=bottom, fill=True, label=name)
            bottom = bottom + height
    highest = TALL * float(np.median(bottom))
    for left, right, top in zip(edges, edges[1:], bottom, strict=False):
        if top > highest:  # a validation would flatten all others
            axes.set_ylim(0, highest)
            style: dict[str, Any] = {"rotation": 90, "ha": "center", "va": "top", "fontsize": 7}
            axes.text((left + right) / 2, 0.98 * highest, f"{top:,.0f}", **style)
    whole(axes)
    axes.set_ylabel("ms an update")
    beside(figure)
    return figure


def png(figure: Figure, dpi: int = 100) -> bytes:
    """PNG file of a figure; `dpi` dots an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def comparison_figure(sides: Mapping[str, Sequence[Rows]], loss_label: str = "loss [nat]") -> Figure:
    """Loss, gradient norm and update steps a second of the runs of each side, by label.

    Lines are running means over a fiftieth of the updates, averaged over the runs of a side, in a band from the least
    to the greatest of them. Dots are full validations, and the single runs' speeds (of their median update).
    """
    figure, (loss, norm, speed) = panels(3, (3.5, 3.4), width_ratios=(2, 2, 1))
    drawn: list[float] = []
    norms: list[float] = []
    for index, (label, runs) in enumerate(sides.items()):
        colour = f"C{index}"
        drawn += _band(loss, runs, "loss", colour, label)
        norms += _band(norm, runs, "grad_norm", colour, label)
        for rows in runs:
            full = [row for row in rows if row.get("validation", {}).get("kind") == "full"]
            dots = [row["validation"]["loss"] for row in full]
            loss.plot([row["step"] for row in full], dots, "o", markersize=4, color=colour)
            drawn += dots
        medians = [statistics.median(row["seconds"] for row in rows) for rows in runs]
        rates = [1 / seconds for seconds in medians if seconds]  # 0: too short for the clock
        speed.bar(index, statistics.fmean(rates or [0.0]), color=colour, alpha=0.5)
        speed.plot([index] * len(rates), rates, "o", markersize=4, color=colour)
    log(loss, drawn)
    log(norm, norms)
    speed.set_xticks([])
    for axes, name in zip(
        (loss, norm, speed), (loss_label, "gradient norm before clipping", "update steps/s"), strict=True
    ):
        caption(axes, name)
    for axes in (loss, norm):
        whole(axes)
    beside(figure)
    return figure


def _band(axes: Axes, runs: Sequence[Rows], name: str, colour: str, label: str) -> list[float]:
    """Running means over a fiftieth of the rows, at the steps that all runs have: their mean as a line, least to
    greatest as a band; returns what was drawn."""
    columns = [
        pandas.Series([row[name] for row in rows], [row["step"] for row in rows])
        .rolling(max(1, len(rows) // 50), min_periods=1)
        .mean()
        for rows in runs
    ]
    frame = pandas.concat(columns, axis=1, join="inner")
    frame = frame.iloc[:: len(frame) // POINTS + 1]
    mean, low, high = frame.mean(axis=1), frame.min(axis=1), frame.max(axis=1)
    axes.plot(mean.index, mean, color=colour, linewidth=1.2, label=label)
    axes.fill_between(mean.index, low, high, color=colour, alpha=0.25, linewidth=0)
    return [*mean, *low, *high]


def scores_figure(scores: Mapping[str, tuple[float, Mapping[str, float]]], count: int) -> Figure:
    """Shares of `count` rows as points with 95 % intervals, the first above, and their baselines as ticks.

    scores: name -> (share, baseline -> share). The intervals take the rows as independent, so of positions of the same
    games they are too narrow.
    """
    figure, (axes,) = panels(size=(9, 0.9 + 0.32 * len(scores)))
    baselines = list(dict.fromkeys(baseline for _, against in scores.values() for baseline in against))
    for line, (share, against) in enumerate(scores.values()):
        low, high = share_interval(share, count)
        axes.plot([100 * low, 100 * high], [line, line], color="C0", linewidth=2)
        axes.plot(100 * share, line, "o", color="C0", label=f"network, of {count:,}")
        for baseline, value in against.items():
            colour = f"C{1 + baselines.index(baseline)}"
            axes.plot(100 * value, line, "|", markersize=12, markeredgewidth=2, color=colour, label=baseline)
    axes.set_yticks(range(len(scores)), list(scores))
    axes.set(xlim=(-1, 101), ylim=(len(scores) - 0.4, -0.6), xlabel="[%]")
    beside(figure)
    return figure
