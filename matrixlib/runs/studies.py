"""Studies that a sweep can be: arms beside each other, sizes at fixed budgets, changes one after the other."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure
from pandas import DataFrame

from matrixlib.config import ConfigError
from matrixlib.runs import sizes
from matrixlib.runs.compare import T_QUANTILES, t_interval
from matrixlib.runs.proposals import helped
from matrixlib.runs.sweep import Result, Sweep
from matrixlib.runs.sweep_config import ARM, COMPUTE, request
from matrixlib.tasks import load_config
from matrixlib.tasks.plotting import beside, log, panels

RATE = "optim.learning_rate"


def arms_table(sweep: Sweep) -> DataFrame:
    """A row for each arm: its best trial over the rest of the space, its size, and the difference to the first arm's
    best where it has one (with its 95 % interval from two seeds on, by pairs of one seed). Empty without arms."""
    rows: dict[str, dict[str, Any]] = {}
    base: Result | None = None
    arms = list(sweep.config.arms) if sweep.config.method != "staged" else []
    for arm in arms:
        trials = [one for one in sweep.results() if one.measures and one.trial.values[ARM] == arm]
        best = min(trials, key=lambda one: sweep.better(one.mean), default=None)
        if best is None:
            rows[arm] = {"best of": 0}
            continue
        base = best if arm == arms[0] else base
        config = load_config(*request(sweep.config, best.trial.values))
        row: dict[str, Any] = {"best of": len(trials), **{k: v for k, v in best.trial.values.items() if k != ARM}}
        row |= {"parameters": best.parameters, "forward MFLOP": _megaflops(config), "updates": best.updates}
        row |= {sweep.config.measure: best.mean} | _difference(best, base, "first")
        rows[arm] = row | {"seconds": best.seconds}
    return pandas.DataFrame.from_dict(rows, orient="index")


def rate_note(sweep: Sweep) -> str:
    """What the result of an arm, or of a size at fixed budgets, owes to its learning rate, in a sentence; "" without
    either. One rate for all of them favours the one that it fits."""
    if not (sweep.config.arms or sweep.config.compute) or sweep.config.method == "staged":
        return ""
    each = "arm" if sweep.config.arms else "size"
    own = [arm for arm, changes in sweep.config.arms.items() if RATE in changes]
    if RATE not in sweep.config.space:
        given = f"of its own for {', '.join(own)}" if own else f"the same for all {each}s"
        return f"The learning rate was not searched for each {each} (it was {given}): part of a difference may be that."
    edge = []
    rates = sorted(float(one.trial.values[RATE]) for one in sweep.results())
    for arm in sweep.config.arms:
        trials = [one for one in sweep.results() if one.measures and one.trial.values[ARM] == arm]
        best = min(trials, key=lambda one: sweep.better(one.mean), default=None)
        if best is not None and best.trial.values[RATE] in (rates[0], rates[-1]):
            edge.append(arm)
    text = f"The learning rate was searched for each {each}."
    if edge:
        text += f" At the edge of what was tried: {', '.join(edge)}, so a wider range may change the order."
    return text


def stages_table(sweep: Sweep) -> DataFrame:
    """A row for each stage of a staged sweep: the change, what it was made to, its difference to that with the 95 %
    interval, and whether it was kept. Empty for another."""
    rows = {}
    results = sweep.results() if sweep.config.method == "staged" else []
    told = sweep.told([one.trial.number for one in results])
    base = 0
    for number, result in enumerate(results):
        if number == 0:
            rows["base"] = {sweep.config.measure: result.mean, "kept": "base"}
            continue
        change = str(result.trial.values[ARM]).rpartition("+")[2]
        kept = helped(told[number], told[base])
        to = results[base].trial.values[ARM] or "base"
        row = {"added to": to, sweep.config.measure: result.mean, **_difference(result, results[base], "base")}
        rows[change] = row | {"kept": "yes" if kept else "no"}
        base = number if kept else base
    return pandas.DataFrame.from_dict(rows, orient="index")


def _difference(result: Result, base: Result | None, name: str) -> dict[str, float]:
    if base is None or not (result.measures and base.measures):
        return {}
    pairs = [a - b for a, b in zip(result.measures, base.measures, strict=True)]
    row = {f"difference to {name}": statistics.fmean(pairs)}
    interval = t_interval(pairs)
    return row | ({"from": interval[0], "to": interval[1]} if interval else {})


def _megaflops(config: Any) -> float:
    try:
        return sizes.flops(config) / 1e6
    except ConfigError:
        return math.nan


@dataclass(frozen=True)
class PowerLaw:
    """y = factor * x ** exponent, by least squares of the logarithms. interval: 95 % of the exponent, by Student's t;
    None below three points, where nothing is left to judge it by."""

    factor: float
    exponent: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        ends = f" (95 % {self.interval[0]:.3g} to {self.interval[1]:.3g})" if self.interval else " (no interval)"
        return f"{self.factor:.4g} x^{self.exponent:.3g}{ends}"


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The power law through points. ValueError below two different ones, or where one is not positive."""
    if len(set(x)) < 2 or min(*x, *y) <= 0:
        raise ValueError("a power law needs two different points at least, all positive")
    a, b = np.log(np.array(x, float)), np.log(np.array(y, float))
    slope, offset = np.polyfit(a, b, 1)
    free = len(x) - 2
    interval = None
    if free:
        error = math.sqrt(float(((b - offset - slope * a) ** 2).sum()) / free / float(((a - a.mean()) ** 2).sum()))
        half = T_QUANTILES[min(free, len(T_QUANTILES)) - 1] * error
        interval = float(slope - half), float(slope + half)
    return PowerLaw(float(np.exp(offset)), float(slope), interval)


def best_size(parameters: Sequence[float], losses: Sequence[float]) -> tuple[float, bool]:
    """(parameters with the least loss, whether both smaller and larger networks were worse), at one budget.

    It is the lowest point of a parabola through the losses over the logarithm of the size (approach 2 of Hoffmann et
    al. 2022, https://arxiv.org/abs/2203.15556); at an edge, the best size that was tried.
    """
    order = np.argsort(parameters)
    x, y = np.log(np.array(parameters, float)[order]), np.array(losses, float)[order]
    best = int(y.argmin())
    if not 0 < best < len(x) - 1:
        return float(np.exp(x[best])), False
    curvature, slope, _ = np.polyfit(x, y, 2)
    lowest = -slope / (2 * curvature) if curvature > 0 else x[best]
    return float(np.exp(np.clip(lowest, x[best - 1], x[best + 1]))), True


@dataclass(frozen=True)
class Scaling:
    """Sizes at fixed budgets. table: a row a budget (floating-point operations of a training). loss: the least at each
    budget over the operations; size: the best size over them, None where fewer than two budgets have one inside."""

    table: DataFrame
    loss: PowerLaw | None
    size: PowerLaw | None
    points: dict[float, list[tuple[float, float]]]  # budget -> (parameters, loss) of each size

    def __str__(self) -> str:
        lines = [f"loss = {self.loss}, x in FLOP of a training" if self.loss else "one budget: no law of the loss"]
        text = f"best number of parameters = {self.size}" if self.size else "no law of the best size"
        why = "" if self.size else ": two budgets need a best size with worse ones on both sides"
        return "\n".join([*lines, text + why])


def scaling(sweep: Sweep) -> Scaling | None:
    """What a sweep over sizes and `compute` shows; None of another, or where no budget has a complete trial.

    Each size counts with its best trial over the rest of the space. The loss's floor is not fitted, so the law holds
    for these budgets and not far beyond.
    """
    points: dict[float, dict[float, float]] = {}
    for result in sweep.results():
        if result.measures and COMPUTE in result.trial.values:
            budget = points.setdefault(float(result.trial.values[COMPUTE]), {})
            budget[result.parameters] = min(result.mean, budget.get(result.parameters, math.inf))
    if not points or sweep.config.highest:
        return None
    rows: dict[float, dict[str, Any]] = {}
    inside: dict[float, float] = {}
    for compute, losses in sorted(points.items()):
        size, between = best_size(list(losses), list(losses.values()))
        inside |= {compute: size} if between else {}
        row = {"sizes": len(losses), "least": min(losses.values()), "best parameters": size}
        rows[compute] = row | {"worse on both sides": "yes" if between else "no"}
    table = pandas.DataFrame.from_dict(rows, orient="index").rename_axis("compute")
    least = [min(losses.values()) for _, losses in sorted(points.items())]
    law = power_law(sorted(points), least) if len(points) > 1 and min(least) > 0 else None
    of_size = power_law(list(inside), list(inside.values())) if len(inside) > 1 else None
    return Scaling(table, law, of_size, {compute: sorted(losses.items()) for compute, losses in points.items()})


def compared(sweep: Sweep, study: Scaling | None) -> DataFrame | None:
    """A table of the sizes, the stages or the arms of a sweep; None of one that has none of them."""
    if study is not None:
        return study.table
    if sweep.config.method == "staged":
        return stages_table(sweep)
    return arms_table(sweep) if sweep.config.arms else None


def scaling_figure(study: Scaling) -> Figure:
    """Loss over the size at each budget, and the least loss over the budget with its law."""
    figure, (left, right) = panels(2, (5, 3.8))
    budgets = sorted(study.points)
    for number, compute in enumerate(budgets):
        x, y = zip(*study.points[compute], strict=True)
        left.plot(x, y, "o-", markersize=4, color=f"C{number}", label=f"{compute:.2g} FLOP")
        left.axvline(
            float(study.table["best parameters"].to_dict()[compute]), color=f"C{number}", linewidth=0.8, linestyle=":"
        )
        right.plot([compute] * len(y), y, "o", markersize=3, color=f"C{number}", alpha=0.5)
    if study.loss is not None:
        places = np.geomspace(budgets[0], budgets[-1], 50)
        right.plot(
            places, study.loss.factor * places**study.loss.exponent, color="0.3", linewidth=1, label=str(study.loss)
        )
    left.set_xlabel("parameters (dotted: best size)")
    right.set_xlabel("floating-point operations of a training")
    log(left, [size for points in study.points.values() for size, _ in points], "x")
    log(right, budgets, "x")
    for axes in (left, right):
        axes.set_ylabel("validation loss [nat]")
    beside(figure)
    return figure
