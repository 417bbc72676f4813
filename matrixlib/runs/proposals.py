"""What a sweep tries next: a function of the trial's number and of the results before it, so that a sweep that was
killed goes on as if it had not been.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.runs.compare import t_interval
from matrixlib.runs.sweep_config import ARM, Dimension, SweepConfig, dimensions, grid


class OptunaError(ValueError):
    """Optuna is needed and not installed."""


@dataclass(frozen=True)
class Told:
    """What a method is told of an earlier trial. state: complete, pruned or failed. losses: of each seed, less is
    better; empty unless complete. curve: update -> validation loss, the mean over the seeds."""

    values: Mapping[str, Any]
    state: str
    losses: tuple[float, ...]
    curve: Mapping[int, float]

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.losses))


Method = Callable[[int, Sequence[Told]], dict[str, Any]]
"""(number of the trial, the trials before it that it may know of) -> its values."""


def method(sweep: SweepConfig) -> tuple[Method, int]:
    """(what proposes, how many trials there are). OptunaError where Optuna is not installed."""
    if sweep.method == "grid":
        points = list(grid(sweep))
        return lambda number, told: points[number], len(points)
    if sweep.method == "staged":
        return lambda number, told: stage(list(sweep.arms), number, told), 1 + len(sweep.arms)
    space = dimensions(sweep)
    if sweep.method == "random":
        return lambda number, told: draw(space, sweep.seed, number), sweep.trials
    _optuna()
    return lambda number, told: tpe(space, sweep.seed, number, told), sweep.trials


def draw(space: Sequence[Dimension], seed: int, number: int) -> dict[str, Any]:
    """Values drawn independently, by a stream of the trial's own."""
    places = np.random.default_rng([seed, number]).random(len(space))
    return {dimension.key: dimension.at(place) for dimension, place in zip(space, places, strict=True)}


def stage(arms: Sequence[str], number: int, told: Sequence[Told]) -> dict[str, Any]:
    """Trial 0 is the base; each later one adds an arm to the best so far: a change that helped is part of the base of
    the next one. By two seeds and more it has helped where the interval of its difference lies below 0."""
    accepted: list[str] = []
    base = 0
    for k in range(1, number):
        if helped(told[k], told[base]):
            accepted, base = [*accepted, arms[k - 1]], k
    return {ARM: "+".join([*accepted, arms[number - 1]] if number else [])}


def helped(trial: Told, base: Told) -> bool:
    """Whether a trial is better than the base of its stage."""
    if trial.state != "complete" or base.state != "complete":
        return False
    interval = t_interval([a - b for a, b in zip(trial.losses, base.losses, strict=True)])
    return interval[1] < 0 if interval else trial.loss < base.loss


def tpe(space: Sequence[Dimension], seed: int, number: int, told: Sequence[Told]) -> dict[str, Any]:
    """The tree-structured Parzen estimator (Bergstra et al. 2011) of Optuna: a study made anew of the results."""
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=(seed * 1_000_003 + number) % 2**32, multivariate=False)
    study = optuna.create_study(sampler=sampler)
    _add(study, space, told)
    trial = study.ask({dimension.key: _distribution(dimension) for dimension in space})
    return {dimension.key: _value(dimension, trial.params[dimension.key]) for dimension in space}


def write_journal(path: Path, sweep: SweepConfig, told: Sequence[Told]) -> None:
    """The results as Optuna's file storage (a journal), for its dashboard and other tools. Nothing reads it here."""
    optuna = _optuna()
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(temporary)))
    _add(optuna.create_study(study_name=path.parent.name, storage=storage), dimensions(sweep), told)
    temporary.replace(path)


def _add(study: Any, space: Sequence[Dimension], told: Sequence[Told]) -> None:
    optuna = _optuna()
    states = optuna.trial.TrialState
    for one in told:
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED}.get(one.state, states.FAIL)
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                params={dimension.key: _parameter(dimension, one.values[dimension.key]) for dimension in space},
                distributions={dimension.key: _distribution(dimension) for dimension in space},
                values=[one.loss] if one.state == "complete" else None,
                intermediate_values={step: loss for step, loss in one.curve.items() if math.isfinite(loss)},
            )
        )


def _distribution(dimension: Dimension) -> Any:
    """Choices by their number, as Optuna knows plain values only."""
    kinds = _optuna().distributions
    if dimension.choices:
        return kinds.CategoricalDistribution(range(len(dimension.choices)))
    if dimension.whole:
        return kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _parameter(dimension: Dimension, value: Any) -> Any:
    return dimension.choices.index(value) if dimension.choices else value


def _value(dimension: Dimension, parameter: Any) -> Any:
    return dimension.choices[parameter] if dimension.choices else dimension.tidy(parameter)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise OptunaError(
            "method tpe needs Optuna: pip install 'matrixlib[sweep]' (or optuna); grid and random need nothing"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
