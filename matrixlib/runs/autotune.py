"""Measured when a run starts: whether device and dtype agree with the CPU, and how many updates fit."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from matrixlib.config import Config
from matrixlib.files import read_json, write_json
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware import speed
from matrixlib.runs.data import RunData, RunError
from matrixlib.runs.record import runtime_config

if TYPE_CHECKING:
    from matrixlib.engine.task import Batch, Task

WARMUP_UPDATES, MIN_UPDATES, MAX_UPDATES, FIT_SECONDS = 4, 5, 100, 5.0
"""Updates that are not timed, and how many are, within about so many seconds."""
MIN_STEPS = 20  # updates of a run, where they are slow
OVERHEAD = 1.02  # time of an update in a run / timed alone: averages, metrics, validation, checkpoints


def checked_runtime(data: RunData, requested: Config) -> RunData:
    """Data of a new run with a checked runtime; trials are recorded in its reasons. fp32 on the CPU needs none.

    RunError if a device or dtype that the user named computes wrong updates.
    """
    if requested.runtime.shard and data.ranks.size > 1:
        return data  # a single device may lack the memory for trials
    runtime, linear_rows, messages = working_runtime(
        data.runtime, data.task, lambda: data.batch(0), data.config, requested
    )
    if runtime.device == "cuda" and requested.train.micro_batch == "auto":
        size = data.config.train.batch_size
        runtime = runtime.with_choice("micro_batch", size, "the whole update; halved where memory runs out")
    most = max(1, runtimes.LINEAR_ROWS // linear_rows) if runtime.device == "mps" and linear_rows else 0
    if most and runtime.micro_batch > most:
        why = f"above {runtimes.LINEAR_ROWS:,} rows of a linear layer mps makes wrong gradients (pytorch issue 177116)"
        messages.append(f"train.micro_batch: {runtime.micro_batch} -> {most}: {why}")
        runtime = runtime.with_choice("micro_batch", most, why)
    data.messages.extend(messages)
    return replace(data, runtime=runtime, config=runtime_config(data.config, runtime))


def working_runtime(
    runtime: runtimes.Runtime, task: "Task", batch: "Callable[[], Batch]", config: Config, requested: Config
) -> tuple[runtimes.Runtime, int, list[str]]:
    """(runtime whose update matches the CPU's, largest number of linear-layer rows per row (0 if not tried), messages).

    Otherwise fp32 replaces another dtype, and the CPU another device, unless the user named them: RunError. requested:
    the configuration as given.
    """
    messages: list[str] = []
    while runtime.device != "cpu" or runtime.dtype != "fp32":
        from matrixlib.engine import self_test

        problem, linear_rows = self_test.compare(task, batch(), runtime, config)
        if not problem:
            return runtime, linear_rows, messages
        name, value = ("dtype", runtime.dtype) if runtime.dtype != "fp32" else ("device", runtime.device)
        if name in runtime.requested:
            option = "precision" if name == "dtype" else name
            raise RunError(
                f"{option} '{value}' was asked for, but an update in it on {runtime.device} is not what the CPU "
                f"computes: {problem}; use 'auto', which takes what works"
            )
        why = f"{value} was tried and is wrong here: {problem}"
        if name == "dtype":
            runtime = runtime.with_choice("dtype", "fp32", why).with_choice("scaler", False, "fp32 needs none")
        else:
            options = requested.runtime.model_copy(update={"device": "cpu"})
            runtime = runtimes.resolve(options, requested.train, requested.data).with_choice("device", "cpu", why)
            runtime.apply()
        messages.append(f"warning: {name} {value} -> {getattr(runtime, name)}: {why}")
    return runtime, 0, messages


def planned_steps(data: RunData) -> tuple[int, str]:
    """Updates of a run with steps `auto`, and what they are for."""
    train = data.config.train
    if train.epochs:
        steps = max(1, round(train.epochs * data.training.count / train.batch_size))
        return steps, f"for {train.epochs:g} epochs of {data.training.count:,} positions"
    return fit_steps(data), f"to fit {train.minutes:g} minutes"


def fit_steps(data: RunData) -> int:
    """Updates that fit in `train.minutes`, by timing a few, once, when a run starts."""
    from matrixlib.engine.step import trial_step

    seconds: list[float] = []
    with trial_step(data.task, data.runtime, data.config) as step:
        began = time.monotonic()
        for i in range(WARMUP_UPDATES + MAX_UPDATES):  # the first compile kernels and allocate
            started, batch = time.monotonic(), data.batch(i)
            making = 0.0 if data.runtime.workers else time.monotonic() - started  # workers run in parallel
            seconds.append(making + speed.seconds_of(partial(step, batch), data.runtime.device))
            if i == WARMUP_UPDATES - 1:
                seconds, began = [], time.monotonic()
            elif len(seconds) >= MIN_UPDATES and time.monotonic() - began > FIT_SECONDS:
                break
    return max(MIN_STEPS, int(60 * data.config.train.minutes / (OVERHEAD * statistics.median(seconds))))


def measure_peak(folder: Path, runtime: runtimes.Runtime, flops: float | None) -> float | None:
    """Rows/s at the device's full matrix rate, measured as a run starts, kept in run.json. flops: of a row, or None."""
    if not flops:
        return None
    record = read_json(folder / "run.json")
    needs = {"device": runtime.device, "dtype": runtime.dtype, "position_flops": flops}
    peak = record.get("peak", {})
    if not needs.items() <= peak.items():
        peak = {"gflops": speed.matrix_rate(runtime.device, runtime.dtype, runtime.threads)} | needs
        write_json(folder / "run.json", record | {"peak": peak})
    return float(peak["gflops"] * 1e9 / flops)
