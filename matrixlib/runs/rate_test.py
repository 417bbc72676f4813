"""The range test of the learning rate: updates with a rate that grows, on a copy of a run's network (Smith 2015,
https://arxiv.org/abs/1506.01186).
"""

import contextlib
import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import pandas
from matplotlib.figure import Figure

from matrixlib.engine import rng
from matrixlib.engine.schedule import Schedule
from matrixlib.engine.stats import Action
from matrixlib.engine.step import Step
from matrixlib.hardware import openmp
from matrixlib.runs.run import Run
from matrixlib.tasks.plotting import beside, log, panels

LOWEST, HIGHEST = 1e-6, 1.0
"""Learning rates that it begins and, unless the loss diverges before, ends with."""
LAG = 0.8
"""Weight of what was before in the moving average that tells divergence."""
DIVERGED = 4.0
"""Times the least of that average which it has reached when the loss has diverged."""
OVERFLOWS = 5
"""In a row, more of which are no search for the loss scale."""
PART = 0.1
"""Of the updates: the width of the window whose mean is the smooth curve."""


@dataclass(frozen=True)
class Ramp(Schedule):
    """From `lowest` to `peak`, by the same factor at each update."""

    lowest: float = LOWEST

    def __call__(self, update: int) -> float:
        return float(self.lowest * (self.peak / self.lowest) ** (update / max(1, self.steps - 1)))


@dataclass(frozen=True)
class RateTest:
    """What came of it. rates, losses, smooth: of each update; smooth: means of neighbours. end: why it ended. own: the
    rate that the run is configured with.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smooth: tuple[float, ...]
    end: str
    own: float

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss falls fastest, by its decade, before it is least; None where it never falls."""
        least = int(np.argmin(self.smooth))
        if least < 2:
            return None
        slopes = np.gradient(self.smooth[: least + 1], np.log10(self.rates[: least + 1]))
        return float(f"{self.rates[int(np.argmin(slopes))]:.2g}")

    def __str__(self) -> str:
        text = f"{len(self.rates)} updates from {self.rates[0]:.2g} to {self.rates[-1]:.2g}: {self.end}; "
        if self.suggestion is None:
            return f"{text}the loss has not fallen, so no rate can be suggested"
        return f"{text}suggested: {self.suggestion:g}, where the loss falls fastest; the run has {self.own:g}"

    def figure(self) -> Figure:
        """Loss over the rate, each update and their smooth curve; the suggested rate and the run's own."""
        figure, (axes,) = panels()
        axes.plot(self.rates, self.losses, ".", color="C0", alpha=0.35, label="each update")
        axes.plot(self.rates, self.smooth, color="C0", label="mean of neighbours")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C3", label=f"suggested: {self.suggestion:g}")
        axes.axvline(self.own, color="0.4", linestyle="--", label=f"as configured: {self.own:g}")
        log(axes, self.rates, "x")
        usual = self.losses[: int(np.argmin(self.smooth)) + 1]
        if room := max(usual) - min(usual):  # else the divergence would take the whole height
            axes.set_ylim(min(usual) - 0.1 * room, max(usual) + room)
        axes.set_xlabel("learning rate")
        axes.set_ylabel("training loss [nat]")
        beside(figure)
        return figure


@openmp.considerate()
def rate_test(run: Run, updates: int = 100) -> RateTest:
    """So many updates of a copy of the run's network as it stands, on its next batches, with the rate growing from
    `LOWEST` to `HIGHEST`; it ends where the loss diverges. The optimiser begins anew; clipping and all else are the
    run's. Weights, optimiser, loss scale, random streams and place in the data are the copy's own.

    ValueError for less than ten updates, and of a run whose ranks train in processes of their own.
    """
    if run.processes > 1:
        raise ValueError("a range test is made by one process: make it with `ranks` 1, the rate is the same")
    if updates < 10:
        raise ValueError(f"a range test of {updates} updates shows nothing: give 10 at least, better 100")
    trainer, data = run.trainer, run.data
    device = trainer.runtime.torch_device
    streams = rng.capture(device)
    try:
        phases = trainer.curriculum
        task, source = data.batches(phases.phases[phases.phase] if phases is not None else None)
        runtime = replace(trainer.runtime, compile="")
        train = trainer.config.train.model_copy(update={"dropout_stages": ()})  # the copy has the rates of its stage
        config = trainer.config.model_copy(update={"train": train})
        step = Step(task, copy.deepcopy(trainer.model), runtime, config, updates, data.teacher)
        step.schedule = Ramp(HIGHEST, "constant", 1.0, 0, updates)
        rates, losses, end = list[float](), list[float](), "the highest rate was reached"
        average = least = math.inf
        overflows = 0
        with contextlib.closing(source.skipping(trainer.skip).batches(trainer.step, trainer.step + updates)) as batches:  # type: ignore[type-var]
            for batch in batches:
                stats = step(batch)
                overflows = overflows + 1 if stats.overflow else 0
                if stats.overflow and not (rates and overflows > OVERFLOWS):  # while the loss scale is found
                    continue
                if not stats.finite:
                    end = "the loss was no longer finite"
                    break
                rates.append(stats.learning_rate)
                losses.append(stats.main_loss)
                average = stats.main_loss if math.isinf(average) else LAG * average + (1 - LAG) * stats.main_loss
                least = min(least, average)
                if stats.action is not Action.OK or average > DIVERGED * least:
                    end = "the loss had diverged"
                    break
    finally:
        rng.restore(streams, device)
    if not rates:
        raise ValueError(f"the range test made no update: {end}; look at the first updates of a training")
    return RateTest(tuple(rates), tuple(losses), _smooth(losses, updates), end, trainer.config.optim.learning_rate)


def _smooth(losses: list[float], updates: int) -> tuple[float, ...]:
    window = max(3, round(PART * updates))
    return tuple(pandas.Series(losses).rolling(window, center=True, min_periods=1).mean())
