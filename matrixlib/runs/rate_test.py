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
from matrixlib.engine.parts import Parts
from matrixlib.engine.stats import Action
from matrixlib.engine.step import Step
from matrixlib.runs.run import Run
from matrixlib.tasks.plotting import beside, panels

LOWEST, HIGHEST = 1e-6, 1.0
"""Learning rates of the first and, unless the loss diverges before, of the last update."""
AVERAGE_DECAY = 0.8
DIVERGED = 4.0
"""Moving average of the loss over its least value so far, at which the loss has diverged."""
MAX_OVERFLOWS = 5
"""In a row, more of which are no search for the loss scale."""
WINDOW_SHARE = 0.1
"""Share of the updates in the window whose mean is the smooth curve."""


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
        axes.semilogx(self.rates, self.losses, ".", color="C0", alpha=0.35, label="each update")
        axes.semilogx(self.rates, self.smooth, color="C0", label="mean of neighbours")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, color="C3", label=f"suggested: {self.suggestion:g}")
        axes.axvline(self.own, color="0.4", linestyle="--", label=f"as configured: {self.own:g}")
        usual = self.losses[: int(np.argmin(self.smooth)) + 1]
        if room := max(usual) - min(usual):  # else the divergence would take the whole height
            axes.set_ylim(min(usual) - 0.1 * room, max(usual) + room)
        axes.set(xlabel="learning rate", ylabel="training loss [nat]")
        beside(figure)
        return figure


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

    def ramp(update: int) -> float:
        return float(LOWEST * (HIGHEST / LOWEST) ** (update / (updates - 1)))

    trainer, data = run.trainer, run.data
    device = trainer.runtime.torch_device
    streams = rng.capture(device)
    try:
        phases = trainer.curriculum
        task, source = data.batches(phases.phases[phases.phase] if phases is not None else None)
        runtime = replace(trainer.runtime, compile="")
        train = trainer.config.train.model_copy(update={"dropout_stages": ()})  # the copy has the rates of its stage
        config = trainer.config.model_copy(update={"train": train})
        step = Step(
            task, copy.deepcopy(trainer.model), runtime, config, updates, data.teacher, parts=Parts(schedule=ramp)
        )
        rates, losses, end = list[float](), list[float](), "the highest rate was reached"
        average = least = math.inf
        overflows = 0
        with contextlib.closing(source.skipping(trainer.skip).batches(trainer.step, trainer.step + updates)) as batches:  # type: ignore[type-var]
            for batch in batches:
                stats = step(batch)
                overflows = overflows + 1 if stats.overflow else 0
                if stats.overflow and not (rates and overflows > MAX_OVERFLOWS):  # while the loss scale is found
                    continue
                if not stats.finite:
                    end = "the loss was no longer finite"
                    break
                loss = stats.main_loss
                average = AVERAGE_DECAY * average + (1 - AVERAGE_DECAY) * loss if losses else loss
                least = min(least, average)
                rates.append(stats.learning_rate)
                losses.append(loss)
                if stats.action is not Action.OK or average > DIVERGED * least:
                    end = "the loss had diverged"
                    break
    finally:
        rng.restore(streams, device)
    if not rates:
        raise ValueError(f"the range test made no update: {end}; look at the first updates of a training")
    window = max(3, round(WINDOW_SHARE * updates))
    smooth = tuple(pandas.Series(losses).rolling(window, center=True, min_periods=1).mean())
    return RateTest(tuple(rates), tuple(losses), smooth, end, trainer.config.optim.learning_rate)
