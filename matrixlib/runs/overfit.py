"""Overfit check: can this network learn 16 rows by heart? If not, why not?

A network that cannot is broken, and no amount of data will show it as clearly. The check trains through the same run
and trainer as everything else, then names the fault by what happened. What "by heart" means is the task's word:
`TaskSpec.overfit`.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from matrixlib.config import merge
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.task import active_terms
from matrixlib.runs import run as runs
from matrixlib.runs.run import Run, RunError
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.spec import Check, Overfit

ROWS = 16
STEPS = 100
GAP = 0.05  # nats above the least loss, where the task says nothing else
VISITS = 8  # batches in which labels are compared between visits

OVERRIDES: dict[str, Any] = {
    "data": {"limit": ROWS, "workers": 0},
    "optim": {"schedule": "linear", "final_fraction": 0.1, "warmup_steps": 5, "weight_decay": 0.0, "ema_decay": 0.0},
    "train": {"steps": STEPS, "batch_size": ROWS, "micro_batch": ROWS, "statistics_interval": 20},
    "validation": {"interval": STEPS, "sample": ROWS, "patience": 0, "plateau": 0, "target_loss": 0.0},
    "checkpoint": {"interval": STEPS},
}
"""Overrides that turn a preset into its overfit check: nothing that regularises, 16 rows, 100 updates."""


@dataclass(frozen=True)
class Progress:
    """After an update: how far each term's loss is above the least possible (nats), and the metrics to become 1."""

    step: int
    gaps: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Diagnosis:
    """Outcome of the check. gaps: what is allowed of each term. problems: faults, in words. curve: all updates."""

    gaps: Mapping[str, float]
    problems: tuple[str, ...]
    curve: tuple[Progress, ...]

    @property
    def learned(self) -> bool:
        """True when everything is learned by heart and nothing looks wrong."""
        return all(passed for _, passed, _ in self.checks())

    def checks(self) -> list[Check]:
        """Name, whether it holds, what is demanded: each term, each metric, no fault."""
        last = self.curve[-1] if self.curve else Progress(0, {}, {})
        rows = [
            (
                f"{term} learned by heart",
                last.gaps.get(term, np.inf) <= gap,
                f"within {gap:g} nats of the least possible loss",
            )
            for term, gap in self.gaps.items()
        ]
        rows += [(f"{name} 100 %", value >= 1.0, "every row right") for name, value in last.metrics.items()]
        faults = "; ".join(self.problems) or "labels, gradients, learning rate"
        return [*rows, ("no fault", not self.problems, faults)]


def open_run(preset: str, device: str, seed: int, run: str, steps: int, overrides: Mapping[str, Any]) -> Run:
    """A run of `run.open_run` with OVERRIDES and the task's own under the caller's."""
    spec = get_task(load_config(preset).task)
    base = merge(OVERRIDES, spec.overfit.overrides)
    return runs.open_run(preset, device, seed, run, steps, merge(base, overrides), kind="overfit")


def check(run: Run, watch: Callable[[Any], None] = lambda stats: None) -> Diagnosis:
    """Train `run` (opened with `open_run`) and say whether it learned its rows, and if not, why.

    watch: called with the stats of every update, for a live plot. RunError for a run that has ended, and where the
    configuration leaves nothing to judge.
    """
    if run.complete:
        raise RunError(f"run '{run.name}' has ended; leave `run` empty or give another name")
    demands = run.spec.overfit
    if needs := demands.needs(run.config):
        raise RunError(f"the overfit check needs {needs}; override them")
    gaps = demands.gaps or dict.fromkeys(sorted(active_terms(run.task)), GAP)
    bounds = _bounds(run, sorted({*gaps, *(name.partition("/")[0] for name in demands.exact)}))
    problems = [*run.spec.label_problems(run.task, run.data.training.batch(0)), *_restless_labels(run, demands)]
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    curve: list[Progress] = []
    failure = ""
    try:
        for stats in run.train():
            watch(stats)
            above = {term: stats.losses[term] - bounds[term][1] for term in gaps}
            curve.append(Progress(stats.step, above, {name: stats.metrics[name] for name in demands.exact}))
    except TrainingHalted as error:  # the loss or the gradient stays non-finite
        failure = str(error)
    diagnosis = Diagnosis(gaps, tuple(problems), tuple(curve))
    if diagnosis.learned and not failure:
        return diagnosis
    start = {term: bounds[term][0] - bounds[term][1] for term in gaps}
    problems += _gradients(run) + _learning_rate(run, before, curve, start, failure)
    if not problems:
        last = curve[-1]
        figures = [f"{term} {gap:.3f} nats above the floor" for term, gap in last.gaps.items()]
        figures += [f"{name} {value:.0%}" for name, value in last.metrics.items()]
        problems.append(
            f"the network did not learn {ROWS} rows in {last.step} updates ({', '.join(figures)}) and no known fault "
            "was found: try more width or another learning rate"
        )
    return Diagnosis(gaps, tuple(problems), tuple(curve))


def _restless_labels(run: Run, demands: Overfit) -> list[str]:
    """Labels of a row that change between visits, where the task says what a row and its label are."""
    if not demands.inputs:
        return []
    known: dict[bytes, bytes] = {}
    changes = 0
    for visit in range(VISITS):
        batch = run.data.training.batch(visit)
        for row in range(ROWS):
            label = _digest(batch, demands.labels, row)
            changes += known.setdefault(_digest(batch, demands.inputs, row), label) != label
    if not changes:
        return []
    return [
        f"labels change between visits: {changes} times a row came back with other targets; "
        "check the task's prepare for randomness that does not belong there"
    ]


def _digest(batch: dict[str, np.ndarray], names: Sequence[str], row: int) -> bytes:
    return hashlib.blake2b(b"".join(batch[name][row].tobytes() for name in names), digest_size=16).digest()


def _bounds(run: Run, terms: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(chance, floor) of each term's mean loss over the whole subset (one batch holds it)."""
    batch = {name: torch.from_numpy(array) for name, array in run.data.training.batch(0).items()}
    counts = run.task.counts(batch)
    if missing := [term for term in terms if not counts[term]]:
        raise RunError(
            f"none of the {ROWS} rows has a target for {' and '.join(missing)}: take a data set that has them"
        )
    bounds = run.task.bounds(batch)
    return {term: (bounds[term][0] / counts[term], bounds[term][1] / counts[term]) for term in terms}


def _gradients(run: Run) -> list[str]:
    report = run.trainer.gradients
    dead = sorted({*report.missing, *report.zero}) if report is not None else []
    if not dead:
        return []
    layers = sorted({name.rsplit(".", 1)[0] for name in dead})
    return [f"cut off from the gradient: {', '.join(layers[:4])}{' ...' if len(layers) > 4 else ''}"]


def _learning_rate(
    run: Run, before: dict[str, Any], curve: Sequence[Progress], start: Mapping[str, float], failure: str
) -> list[str]:
    """A learning rate of zero moves nothing; one far too large moves weights by more than their own size."""
    rate = run.config.optim.learning_rate
    if failure:
        return [f"learning rate far too large ({rate:g}) or a broken loss: {failure}"]
    now = {name: value.detach().cpu() for name, value in run.model.named_parameters()}
    if all(torch.equal(now[name], old.cpu()) for name, old in before.items()):
        return [f"no weight moved: the learning rate is zero (optim.learning_rate {rate:g})"]
    old_norm = torch.stack([value.float().norm().cpu() for value in before.values()]).norm()
    shift = torch.stack([(now[name] - old.cpu()).float().norm() for name, old in before.items()]).norm()
    worst = {term: max((update.gaps[term] for update in curve), default=0.0) for term in start}
    rose = [term for term, gap in worst.items() if gap > 2 * start[term]]
    if not rose and shift <= 2 * old_norm:
        return []
    losses = ", ".join(f"{term} rose to {worst[term]:.2f} nats (start {start[term]:.2f})" for term in worst)
    return [
        f"learning rate far too large ({rate:g}): above its floor the loss of {losses}, the weights moved "
        f"{shift / old_norm:.1f} times their norm"
    ]
