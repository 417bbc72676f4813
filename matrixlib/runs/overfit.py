"""Overfit check: can this network learn 16 positions by heart? If not, why not?

A network that cannot is broken, and no amount of data will show it as clearly. The check trains through the same run
and trainer as everything else, then names the fault from what it saw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib.config import load, merge
from matrixlib.engine.health import TrainingHalted
from matrixlib.runs import run as runs
from matrixlib.runs.run import Run, RunError

if TYPE_CHECKING:
    from matrixlib.tasks.chess.task import ChessTask

POSITIONS = 16
STEPS = 100
POLICY_GAP = 0.05  # nats above the entropy of the targets, the least that any network can reach
VISITS = 8  # batches in which labels are compared between visits

OVERRIDES: dict[str, Any] = {
    "data": {"limit": POSITIONS, "mirror": False, "workers": 0},
    "model": {"droppath": 0.0, "dropout": 0.0, "ssl": [], "value": {"kind": "wdl"}},
    "loss": {"label_smoothing": 0.0},
    "optim": {
        "schedule": "linear",
        "final_fraction": 0.1,
        "warmup_steps": 5,
        "weight_decay": 0.0,
        "ema_decay": 0.0,
    },
    "train": {"steps": STEPS, "batch_size": POSITIONS, "micro_batch": POSITIONS, "statistics_interval": 20},
    "validation": {"interval": STEPS, "sample": POSITIONS, "patience": 0, "plateau": 0, "target_loss": 0.0},
    "checkpoint": {"interval": STEPS},
}
"""Overrides that turn a preset into its overfit check: nothing that regularises, 16 positions, 100 updates."""


@dataclass(frozen=True)
class Diagnosis:
    """Outcome of the check. losses: (update, policy loss above its floor, WDL accuracy)."""

    step: int
    policy_gap: float
    accuracy: float
    problems: tuple[str, ...]
    losses: tuple[tuple[int, float, float], ...]

    @property
    def learned(self) -> bool:
        """True when policy and value are learned by heart and nothing suspicious was seen."""
        return self.policy_gap <= POLICY_GAP and self.accuracy >= 1.0 and not self.problems


def open_run(preset: str, device: str, seed: int, run: str, steps: int, overrides: Mapping[str, Any]) -> Run:
    """A run of `run.open_run` with OVERRIDES under the caller's own. RunError where the preset is not of chess."""
    if (task := load(preset).task) != "chess":
        raise RunError(f"the overfit check is for chess; preset '{preset}' trains {task}")
    return runs.open_run(preset, device, seed, run, steps, merge(OVERRIDES, overrides), kind="overfit")


def check(run: Run, watch: Callable[[Any], None] = lambda stats: None) -> Diagnosis:
    """Train `run` (opened with OVERRIDES) and say whether it learned its positions, and if not, why.

    watch: called with the stats of every update, for a live plot.
    """
    if run.complete:
        raise RunError(f"run '{run.name}' has ended; leave `run` empty or give another name")
    from matrixlib.tasks.chess.task import ChessTask

    assert isinstance(run.task, ChessTask)
    weights = run.config.loss
    if not (weights.policy and weights.value) or run.config.model.value.kind != "wdl":
        raise RunError(
            "the overfit check needs loss.policy and loss.value above 0 and model.value.kind wdl; override them"
        )
    problems = _labels(run, run.task)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    chance, floor = _bounds(run, run.training.batch(0))
    curve: list[tuple[int, float, float]] = []
    failure = ""
    try:
        for stats in run.train():
            watch(stats)
            curve.append((stats.step, stats.losses["policy"] - floor, stats.metrics["value/accuracy"]))
    except TrainingHalted as error:  # the loss or the gradient stays non-finite
        failure = str(error)
    step, gap, accuracy = curve[-1] if curve else (0, float("inf"), 0.0)
    learned = gap <= POLICY_GAP and accuracy >= 1.0
    if failure or not learned:
        problems += _gradients(run) + _learning_rate(
            run, before, [c[1] for c in curve], chance - floor, failure
        )
    if not problems and not learned:
        problems.append(
            f"the network did not learn {POSITIONS} positions in {step} updates (policy {gap:.3f} nats "
            f"above the floor, WDL accuracy {accuracy:.0%}) and no known fault was seen: "
            "try more width or another learning rate"
        )
    return Diagnosis(step, gap, accuracy, tuple(problems), tuple(curve))


def _labels(run: Run, task: ChessTask) -> list[str]:
    """Faults of the targets: mass on illegal moves; labels of a position that change between visits."""
    problems = []
    seen: dict[bytes, bytes] = {}
    changed = 0
    for visit in range(VISITS):
        batch = run.training.batch(visit)
        mass = task.illegal_mass(batch)
        if (bad := int((mass > 0).sum())) and visit == 0:
            problems.append(
                f"{bad} of {len(mass)} positions have target mass on illegal moves (up to {mass.max():.1%}); "
                "the network can never give it: check the policy encoding of the source"
            )
        for row in range(len(mass)):
            position = _digest(batch, ("pieces", "state"), row)
            label = _digest(batch, ("policy_index", "policy_weight", "wdl", "result"), row)
            changed += seen.setdefault(position, label) != label
    if changed:
        problems.append(
            f"labels change between visits: {changed} times a position came back with other targets; "
            "check the task's prepare for randomness that does not belong there"
        )
    return problems


def _digest(batch: dict[str, np.ndarray], names: tuple[str, ...], row: int) -> bytes:
    return hashlib.blake2b(b"".join(batch[name][row].tobytes() for name in names), digest_size=16).digest()


def _bounds(run: Run, batch: dict[str, np.ndarray]) -> tuple[float, float]:
    """(chance, floor) of the policy loss per position over the whole subset (one batch holds it)."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    counts = run.task.counts(tensors)
    if lacking := [term for term in ("policy", "value") if not counts[term]]:
        raise RunError(
            f"none of the {POSITIONS} positions has a target for {' and '.join(lacking)}: take a data set that has them"
        )
    count = counts["policy"]
    chance, floor = run.task.bounds(tensors)["policy"]
    return chance / count, floor / count


def _gradients(run: Run) -> list[str]:
    report = run.trainer.gradients
    if report is None:
        return []
    dead = sorted({*report.missing, *report.zero})
    if not dead:
        return []
    layers = sorted({name.rsplit(".", 1)[0] for name in dead})
    return [f"cut off from the gradient: {', '.join(layers[:4])}{' ...' if len(layers) > 4 else ''}"]


def _learning_rate(
    run: Run, before: dict[str, Any], gaps: list[float], start: float, failure: str
) -> list[str]:
    """A learning rate of zero moves nothing; one far too large moves weights by more than their own size."""
    import torch

    if failure:
        return [
            f"learning rate far too large ({run.config.optim.learning_rate:g}) or a broken loss: {failure}"
        ]
    now = dict(run.model.named_parameters())
    moved = max(float((now[name].detach().cpu() - old.cpu()).abs().max()) for name, old in before.items())
    if moved == 0:
        return [
            f"no weight moved: the learning rate is zero (optim.learning_rate {run.config.optim.learning_rate:g})"
        ]
    old_norm = torch.stack([value.float().norm().cpu() for value in before.values()]).norm()
    shift = torch.stack([(now[n].detach().cpu() - v.cpu()).float().norm() for n, v in before.items()]).norm()
    if max(gaps, default=0.0) > 2 * start or shift > 2 * old_norm:
        return [
            f"learning rate far too large ({run.config.optim.learning_rate:g}): the policy loss rose to "
            f"{max(gaps):.2f} nats above its floor (start {start:.2f}), the weights moved "
            f"{shift / old_norm:.1f} times their norm"
        ]
    return []
