"""One trial of a sweep: a configuration trained with each seed, every run in a folder of its own, and where it runs."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

from matrixlib import files
from matrixlib.runs import run as runs


@dataclass(frozen=True)
class Job:
    """What whoever trains a trial needs to know; plain data, for any process that sees the reports root.

    limits: seed -> update -> validation loss above which the trial is pruned. log: gets what a process of its own
    prints.
    """

    number: int
    names: Mapping[int, str]  # seed -> name of the run
    preset: str
    overrides: Mapping[str, Any]
    log: Path
    limits: Mapping[int, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a trial ended; reason: why, unless it is complete."""

    state: Literal["complete", "pruned", "failed"]
    reason: str = ""


class Backend(Protocol):
    """Where jobs are trained: in this process, in others of this machine, or on a fleet."""

    slots: int
    """Jobs at once."""

    def submit(self, job: Job) -> None:
        """Begin a job; there is a free slot."""

    def collect(self) -> list[tuple[int, Outcome]]:
        """(number of the job, how it ended) of those that have ended since the last call; waits a moment for one."""

    def close(self) -> None:
        """End what is still running, so that it can go on later."""


def train(job: Job, tick: Callable[[], None] = lambda: None) -> Outcome:
    """Train every run of a trial, or go on with it. tick: is called after each update.

    Whatever its configuration trips over is the trial's outcome; Ctrl-C, SIGTERM, and folders that cannot be written
    end the sweep.
    """
    for seed, name in job.names.items():
        try:
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
    """The reason of a trial that failed by this error: a cell of a table, and a pipe that is read once its process has
    ended holds no more than 64 KiB."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


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


class Here:
    """This process trains one job after the other."""

    slots = 1

    def __init__(self, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._ended: list[tuple[int, Outcome]] = []

    def submit(self, job: Job) -> None:
        self._ended.append((job.number, train(job, self._tick)))

    def collect(self) -> list[tuple[int, Outcome]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Nothing is running."""


class Processes:
    """Processes of this machine, a job each; they end with this one. With several GPUs each takes one of them."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[
            int, tuple[int, int, BaseProcess, Connection]
        ] = {}  # sentinel -> number, slot, process, end

    def submit(self, job: Job) -> None:
        slot = min(set(range(self.slots)) - {slot for _, slot, _, _ in self._running.values()})
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_work, args=(job, slot, sender))
        process.start()
        sender.close()
        self._running[process.sentinel] = job.number, slot, process, receiver

    def collect(self) -> list[tuple[int, Outcome]]:
        ended = []
        for sentinel in wait(list(self._running), timeout=0.5):
            assert isinstance(sentinel, int)
            number, _, process, receiver = self._running.pop(sentinel)
            process.join()
            ended.append((number, self._outcome(process, receiver)))
        return ended

    def _outcome(self, process: BaseProcess, receiver: Connection) -> Outcome:
        with receiver, contextlib.suppress(EOFError):
            result = receiver.recv()
            if isinstance(result, Outcome):
                return result
            raise result
        code = process.exitcode or 0
        if code in INTERRUPTED:
            raise KeyboardInterrupt  # by a signal to it alone: the trial is not judged by that
        how = f"killed by signal {-code}, perhaps out of memory" if code < 0 else f"ended with exit code {code}"
        return Outcome("failed", f"its process was {how}")

    def close(self) -> None:
        """SIGTERM to each, which finishes its update and saves."""
        for _, _, process, _ in self._running.values():
            process.terminate()
        began = time.monotonic()
        for _, _, process, _ in self._running.values():
            process.join(max(0.0, GRACE - (time.monotonic() - began)))
            process.kill()
            process.join()
        self._running.clear()


GRACE = 30.0
"""Seconds that a process gets to save."""
INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes after Ctrl-C and SIGTERM, which outside a training end the process themselves."""
LONGEST = 2000  # characters of a reason


def _work(job: Job, slot: int, sender: Connection) -> None:
    """A process of one job: sends its outcome."""
    files.end_with_parent()
    sys.stdout = sys.stderr = job.log.open("a", encoding="utf-8", buffering=1)
    _take_gpu(slot)
    try:
        sender.send(train(job))
    except files.FolderError as error:
        sender.send(files.FolderError(str(error)))
    except KeyboardInterrupt:
        sys.exit(130)


def _take_gpu(slot: int) -> None:
    """Let this process see one of the GPUs, where there are several; before CUDA is begun."""
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = names if len(names) == count else [str(number) for number in range(count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot % count]
