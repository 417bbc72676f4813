"""Static pictures of runs: curves of one, of two sides, of planted faults; where the time of an update goes.

Only Figure objects are used, never pyplot's global state: nothing leaks and no backend is chosen for anyone.
"""

from __future__ import annotations

import io
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from matrixlib.engine.metrics import flatten

POINTS = 2000  # per curve
_ACCURACY = ("top1", "top3", "accuracy", "valid")  # a metric whose last name starts so is drawn as a share
_TRAIN = " (train)"
Rows = Sequence[Mapping[str, Any]]


class Curve:
    """Points (step, value) of one quantity in bounded memory.

    When there are 2,000, neighbours are averaged in pairs, so that a long run is drawn from the means of
    2, 4, 8 ... successive values.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.values: list[float] = []
        self._each = 1
        self._waiting: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> None:
        """Append one value; steps rise."""
        self._waiting.append((step, value))
        if len(self._waiting) < self._each:
            return
        self.steps.append(sum(step for step, _ in self._waiting) / self._each)
        self.values.append(sum(value for _, value in self._waiting) / self._each)
        self._waiting.clear()
        if len(self.values) >= POINTS:
            self.steps = [sum(pair) / 2 for pair in zip(self.steps[::2], self.steps[1::2], strict=True)]
            self.values = [sum(pair) / 2 for pair in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2

    def cut(self, step: float) -> None:
        """Forget the points from `step` on: a rollback goes over them again."""
        keep = sum(known < step for known in self.steps)
        del self.steps[keep:], self.values[keep:]
        self._waiting.clear()

    def points(self) -> tuple[list[float], list[float]]:
        """Steps and values, with the mean of those not yet averaged as the last point."""
        if not self._waiting:
            return self.steps, self.values
        count = len(self._waiting)
        step, value = (sum(column) / count for column in zip(*self._waiting, strict=True))
        return [*self.steps, step], [*self.values, value]


class History:
    """Curves by name of everything that is drawn, gathered from stats or from rows of metrics.jsonl."""

    def __init__(self) -> None:
        self.losses: dict[str, Curve] = {}
        self.validation: dict[str, Curve] = {}
        self.accuracy: dict[str, Curve] = {}
        self.single: dict[str, Curve] = {}  # learning_rate, grad_norm, throughput
        self.not_finite = 0  # updates with a loss or gradient norm that is not finite
        self.rollbacks: list[int] = []  # first updates after a rollback
        self.phases: list[int] = []  # first updates of the curriculum's later phases
        self._phase: int | None = None
        self.step = self._rolled_back = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """One row: `step` and any of `losses`, `metrics`, `learning_rate`, `grad_norm`, `throughput`,
        `validation` (a mapping like losses and metrics together, nested or flat)."""
        step = int(row["step"])
        if step <= self.step:
            for curves in (self.losses, self.validation, self.accuracy, self.single):
                for curve in curves.values():
                    curve.cut(step)
            self.phases, self._phase = [first for first in self.phases if first < step], row.get("phase")
        if row.get("rollbacks", 0) > self._rolled_back:
            self._rolled_back = row["rollbacks"]
            self.rollbacks.append(step)
        if (phase := row.get("phase")) != self._phase and self._phase is not None:
            self.phases.append(step)
        self._phase = phase
        self.step = step
        finite = True
        for name, value in _numbers(row.get("losses")):
            self.losses.setdefault(name, Curve()).add(step, value)
            finite = finite and math.isfinite(value)
        for name, value in _numbers(row.get("metrics")):
            if _is_accuracy(name):
                self.accuracy.setdefault(f"{name}{_TRAIN}", Curve()).add(step, value)
        for name, value in _numbers(row.get("validation")):
            name = name.removeprefix("losses/").removeprefix("metrics/")
            if _is_accuracy(name):
                self.accuracy.setdefault(name, Curve()).add(step, value)
            elif name in self.losses or name.rsplit("/", 1)[-1] == "loss":
                self.validation.setdefault(name, Curve()).add(step, value)
        for name, value in _numbers(
            {key: row.get(key) for key in ("learning_rate", "grad_norm", "throughput")}
        ):
            self.single.setdefault(name, Curve()).add(step, value)
            finite = finite and math.isfinite(value)
        self.not_finite += not finite


def draw(figure: Figure, history: History, title: str, total: int = 0) -> None:
    """Fill `figure` with one small picture for each quantity; `total` > 0 sets the step axis."""
    figure.clear()
    notes = [f"{history.not_finite:,} updates not finite"] if history.not_finite else []
    notes += [f"rolled back to update {step - 1:,}" for step in history.rollbacks]
    note = "".join(f" - {text}" for text in notes)
    figure.suptitle(title + note, fontsize=11, color="#b3261e" if note else "black")
    # fixed margins: matplotlib's constrained layout takes half of the drawing time
    grid = figure.add_gridspec(2, 3, left=0.065, right=0.985, bottom=0.085, top=0.92, wspace=0.28, hspace=0.3)
    losses = figure.add_subplot(grid[:, 0])
    _losses(losses, history)
    rest = [figure.add_subplot(grid[row, column]) for row in (0, 1) for column in (1, 2)]
    _accuracy(rest[0], history.accuracy)
    for axes, name, label in zip(
        rest[1:],
        ("learning_rate", "grad_norm", "throughput"),
        ("learning rate", "gradient norm before clipping", "positions/s"),
        strict=True,
    ):
        curve = history.single.get(name)
        if curve is None:
            _nothing(axes, label)
            continue
        axes.plot(*curve.points(), color="#1f77b4", linewidth=1)
        axes.set_ylabel(label, fontsize=8)
        if name == "grad_norm":
            _log_axis(axes, curve.points()[1])
        else:
            axes.set_ylim(bottom=0)
    for axes in (losses, *rest):
        for step in history.rollbacks:
            axes.axvline(step, color="#b3261e", linewidth=0.8, linestyle=":")
        for step in history.phases:
            axes.axvline(step, color="0.6", linewidth=0.8, linestyle="--")
        axes.set_xlabel("update step", fontsize=8)
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if total:
            axes.set_xlim(0, max(total, history.step))


def _numbers(values: Mapping[str, Any] | None) -> list[tuple[str, float]]:
    """Numeric leaves by "outer/inner" name; None and text are left out."""
    leaves = flatten(values) if values else ()
    return [(name, float(value)) for name, value in leaves if isinstance(value, (int, float))]


def _is_accuracy(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith(_ACCURACY)


def _losses(axes: Axes, history: History) -> None:
    """Training losses as lines, validation losses as dots of the same colour."""
    drawn: list[float] = []
    names = list(dict.fromkeys([*history.losses, *history.validation]))
    for index, name in enumerate(names):
        for curves, style in ((history.losses, "-"), (history.validation, "o--")):
            if name in curves:
                steps, values = curves[name].points()
                axes.plot(steps, values, style, markersize=3, linewidth=1, color=f"C{index}", label=name)
                drawn += values
    if not names:
        _nothing(axes, "loss [nat]")
        return
    axes.set_ylabel("loss [nat]", fontsize=8)
    _log_axis(axes, drawn)
    _legend(axes)


def _accuracy(axes: Axes, curves: Mapping[str, Curve]) -> None:
    """Training accuracies as lines, validation ones as dots of the same colour."""
    if not curves:
        _nothing(axes, "accuracy [%]")
        return
    names = list(dict.fromkeys(name.removesuffix(_TRAIN) for name in curves))
    for name in sorted(curves, key=lambda name: names.index(name.removesuffix(_TRAIN))):
        steps, values = curves[name].points()
        style = "-" if name.endswith(_TRAIN) else "o--"
        colour = f"C{names.index(name.removesuffix(_TRAIN))}"
        shares = [100 * value for value in values]
        label = name.removesuffix(_TRAIN)
        axes.plot(steps, shares, style, markersize=3, linewidth=1, color=colour, label=label)
    axes.set_ylabel("accuracy [%]", fontsize=8)
    axes.set_ylim(bottom=0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """One entry for each quantity, half transparent so that no curve is lost behind it."""
    handles = {str(line.get_label()): line for line in reversed(axes.get_lines())}
    entries = {label: handles[label] for label in reversed(handles) if not label.startswith("_")}
    title = "dots: held-out" if any(line.get_marker() == "o" for line in axes.get_lines()) else None
    axes.legend(entries.values(), entries.keys(), title=title, fontsize=7, title_fontsize=7, framealpha=0.5)


def _log_axis(axes: Axes, values: Iterable[float]) -> None:
    """Logarithmic where all values are positive, with labels that read as plain numbers."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) <= 0:
        return
    axes.set_yscale("log")
    wide = max(finite) > 100 * min(finite)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _nothing(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, fontsize=8)
    axes.text(
        0.5, 0.5, "nothing yet", ha="center", va="center", fontsize=8, color="grey", transform=axes.transAxes
    )


def training_figure(rows: Iterable[Mapping[str, Any]], title: str = "training") -> Figure:
    """Curves of a run from the rows of its metrics.jsonl (see `metrics.read`), resumed or not."""
    history = History()
    for row in rows:
        history.add(row)
    figure = Figure(figsize=(10, 5.6))
    draw(figure, history, title)
    return figure


def phases_figure(rows: Sequence[Mapping[str, Any]], bins: int = 40) -> Figure:
    """Milliseconds of an update by phase over the training, stacked: means over equal stretches of updates."""
    from matrixlib.engine.timing import PHASES, totals

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    parts = np.array_split(np.arange(len(rows)), min(bins, len(rows)))
    steps = np.array([rows[part[0]]["step"] for part in parts])
    widths = np.diff(np.append(steps, rows[-1]["step"] + 1))
    bottom = np.zeros(len(parts))
    found = [totals([rows[i] for i in part]) for part in parts]
    for name in (*PHASES, "other"):
        seconds = np.array([one[name].sum() if name in one else 0.0 for one in found])
        height = 1000 * seconds / [len(part) for part in parts]
        if height.any():
            axes.bar(steps, height, widths, bottom=bottom, align="edge", label=name)
            bottom += height
    axes.set_xlabel("update step")
    axes.set_ylabel("ms an update")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
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
    figure = Figure(figsize=(10, 3.6))
    grid = figure.add_gridspec(1, 5, left=0.065, right=0.985, bottom=0.14, top=0.92, wspace=0.7)
    loss, norm, speed = (figure.add_subplot(grid[part]) for part in (slice(0, 2), slice(2, 4), 4))
    drawn: list[float] = []
    norms: list[float] = []
    for index, (label, runs) in enumerate(sides.items()):
        colour = f"C{index}"
        drawn += _band(loss, [_smoothed(rows, "loss") for rows in runs], colour, label)
        norms += _band(norm, [_smoothed(rows, "grad_norm") for rows in runs], colour, label)
        for rows in runs:
            full = [(row["step"], row["validation"]["loss"]) for row in rows if _fully_validated(row)]
            dots = [value for _, value in full]
            loss.plot([step for step, _ in full], dots, "o", markersize=4, color=colour)
            drawn += dots
        rates = [1 / statistics.median(row["seconds"] for row in rows) for rows in runs]
        speed.bar(label, statistics.fmean(rates), color=colour, alpha=0.5)
        speed.plot([label] * len(rates), rates, "o", markersize=4, color=colour)
    _log_axis(loss, drawn)
    _log_axis(norm, norms)
    loss.legend(fontsize=8)
    names = (loss_label, "gradient norm before clipping", "update steps/s")
    for axes, name in zip((loss, norm, speed), names, strict=True):
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=8, which="both")
        axes.grid(alpha=0.3)
    for axes in (loss, norm):
        axes.set_xlabel("update step", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def _fully_validated(row: Mapping[str, Any]) -> bool:
    return bool(row.get("validation", {}).get("kind") == "full")


def _smoothed(rows: Rows, name: str) -> dict[int, float]:
    """Step -> running mean over a fiftieth of the rows."""
    recent: deque[float] = deque(maxlen=max(1, len(rows) // 50))
    out = {}
    for row in rows:
        recent.append(row[name])
        out[row["step"]] = sum(recent) / len(recent)
    return out


def _band(axes: Axes, columns: Sequence[Mapping[int, float]], colour: str, label: str) -> list[float]:
    """Mean as a line, least to greatest as a band, at the steps that all columns have; returns what was drawn."""
    steps = sorted(set(columns[0]).intersection(*columns[1:]))
    steps = steps[:: len(steps) // POINTS + 1]
    values = [[column[step] for column in columns] for step in steps]
    means, low, high = [sum(row) / len(row) for row in values], list(map(min, values)), list(map(max, values))
    axes.plot(steps, means, color=colour, linewidth=1.2, label=label)
    axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
    return means + low + high


def faults_figure(clean: Sequence[Rows], planted: Mapping[str, tuple[Rows, Rows]]) -> Figure:
    """Training loss and validation losses (dots) of runs with a fault, each beside the first clean run.

    clean: rows of the clean runs; the first has the planted runs' seed, the others are drawn in grey. planted: by
    title (rows of the run, rows of the updates that it went back over: crosses, at the upper edge if beyond it).
    """
    columns = min(4, len(planted))
    lines = -(-len(planted) // columns)
    figure = Figure(figsize=(2.75 * columns, 2.1 * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    every = [row["loss"] for rows in clean for row in rows]
    floor = min(
        [*every, *(row["validation"]["loss"] for rows in clean for row in rows if "validation" in row)]
    )
    top = max(every) + 0.1
    for axes, (title, (rows, left)) in zip(grid.flat, planted.items(), strict=False):
        for other in clean[1:]:
            _loss_curve(axes, other, "0.8", "other seeds")
        _loss_curve(axes, clean[0], "C0", "clean")
        _loss_curve(axes, rows, "C1", "with the fault")
        heights = [min(row["loss"], top) if math.isfinite(row["loss"]) else top for row in left]
        axes.plot([row["step"] for row in left], heights, "x", color="C3", label="rolled back")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        axes.set_ylim(floor - 0.05, top + 0.05)
    for axes in list(grid.flat)[len(planted) :]:
        axes.set_axis_off()
    handles, labels = grid.flat[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(list(unique.values()), list(unique), loc="outside lower center", ncols=4, fontsize=8)
    figure.supylabel("loss [nat]", fontsize=8)
    return figure


def _loss_curve(axes: Axes, rows: Rows, colour: str, label: str) -> None:
    axes.plot(
        [row["step"] for row in rows], [row["loss"] for row in rows], color=colour, linewidth=1, label=label
    )
    checks = [(row["step"], row["validation"]["loss"]) for row in rows if "validation" in row]
    axes.plot([step for step, _ in checks], [loss for _, loss in checks], "o", markersize=3, color=colour)
