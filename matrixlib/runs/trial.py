"""One trial of a sweep: a configuration trained with each seed, every run in a folder of its own, and where it runs."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from matrixlib import files
from matrixlib.runs import run as runs
from matrixlib.runs.processes import Lost
from matrixlib.runs.record import locked

LONGEST = 2000  # characters of a reason
PATIENCE = 600.0
"""Seconds that another process may go on writing a run: one on a node that was given up saves before it ends."""


@dataclass(frozen=True)
class Job:
    """What whoever trains a trial needs to know; plain data, for any process that sees the reports root.

    limits: seed -> update -> validation loss above which the trial is pruned.
    """

    number: int
    names: Mapping[int, str]  # seed -> name of the run
    preset: str
    overrides: Mapping[str, Any]
    limits: Mapping[int, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended; reason: why, unless it is complete."""

    state: Literal["complete", "pruned", "failed"]
    reason: str = ""


def train(job: Job, tick: Callable[[], None] = lambda: None) -> Outcome:
    """Train every run of a trial, or go on with it. tick: is called after each update.

    Whatever its configuration trips over is the trial's outcome; Ctrl-C, SIGTERM, a full disk, and folders that cannot
    be written, or that another process does not stop to write, end the sweep.
    """
    for seed, name in job.names.items():
        try:
            _wait_for(name)
            reason = _train_run(job, seed, name, tick)
        except files.FolderError:
            raise
        except Exception as error:  # noqa: BLE001 - of one configuration of many: its row says so
            return Outcome("failed", in_a_line(error))
        finally:
            gc.collect()  # run and trainer hold each other: the next one needs the memory of the device
        if reason:
            return Outcome("pruned", reason)
    return Outcome("complete")


def in_a_line(error: Exception) -> str:
    """The reason of a trial that failed by this error: a cell of a table."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


def _wait_for(name: str) -> None:
    """Return when no other process writes a run; FolderError where one does not end."""
    ends, folder = time.monotonic() + PATIENCE, files.reports_root() / name
    while (folder / "lock").exists() and locked(folder):
        if time.monotonic() > ends:
            raise files.FolderError(
                f"run '{name}' has been written by another process for {PATIENCE / 60:g} minutes, maybe on a node that "
                "went away: end that process, and start the sweep again"
            )
        warnings.warn(f"run '{name}' is being written by another process: waiting until it ends", stacklevel=2)


def _train_run(job: Job, seed: int, name: str, tick: Callable[[], None]) -> str:
    """Train one run to its end; returns why it was pruned, or an empty string."""
    limits = job.limits.get(seed, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"update \d+: ")  # they are in the metrics, and the run's report has them
        with contextlib.closing(runs.open_run(job.preset, "auto", seed, name, 0, job.overrides, "sweep")) as current:
            if current.complete:
                return ""
            for row in current.history() if limits else ():
                if reason := _above(limits, row["step"], row.get("validation")):
                    return reason
            with contextlib.closing(current.train()) as updates:
                for stats in updates:
                    tick()
                    if reason := _above(limits, stats.step, stats.validation):
                        return reason
    return ""


def _above(limits: Mapping[int, float], step: int, validation: Mapping[str, Any] | None) -> str:
    """Why an update's validation ends the trial, or an empty string. A loss that is not finite is above any."""
    if not validation or step not in limits or float(validation["loss"]) <= limits[step]:
        return ""
    return (
        f"validation loss {float(validation['loss']):.4g} after {step} updates, above the median of {limits[step]:.4g}"
    )


def outcome_of(result: Outcome | Lost) -> Outcome:
    """How a trial ended, by what its fleet says. KeyboardInterrupt where a signal came to its process alone: the trial
    is not judged by that."""
    if isinstance(result, Outcome):
        return result
    if result.interrupted:
        raise KeyboardInterrupt
    return Outcome("failed", f"its process {result.how}")
