"""What is tried before a run begins, with updates of a throwaway model: whether device and dtype compute what the CPU
does, rows of a pass, layout, the compiler, time, memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from matrixlib.config import Config
from matrixlib.files import read_json, write_json
from matrixlib.hardware import machine, speed
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.load import CROWDED, Clocks, Usage, load_average
from matrixlib.runs.data import RunData, RunError
from matrixlib.runs.record import runtime_config

if TYPE_CHECKING:
    import pandas as pd

    from matrixlib.engine.task import Batch, Task

ISSUE = "pytorch issue 177116"
LOOK_SECONDS = 0.1
"""Time over which the processors are looked at as a run begins, at least: they are counted in hundredths of it."""


def settle(data: RunData, requested: Config) -> RunData:
    """The data of a run that begins, with the runtime that updates are right and fast in; what was tried stands in its
    reasons. Nothing is tried in fp32 on the CPU.

    Raises RunError where the user named a device or a dtype whose updates are not what the CPU computes.
    """
    if requested.runtime.shard and data.ranks.size > 1:
        return data  # one device may have no room for what would be tried
    data, most = _agreeing(data, requested)
    if data.runtime.device != "cpu" and requested.train.micro_batch == "auto":
        data = _with(data, tune_micro_batch(data, most))
    if data.runtime.device == "cuda":
        data = _with(data, choose_layout(data, fixed=requested.runtime.channels_last != "auto"))
        data.runtime.apply()
    if data.runtime.device == "cuda" and requested.runtime.compile == "auto":
        from matrixlib.engine.trials import choose_compile

        gpu = machine.facts().gpu
        card = gpu.name if gpu else data.runtime.device
        choice = choose_compile(data.task, data.batch(0), data.runtime, data.config, card)
        data = _with(data, data.runtime.with_choice("compile", *choice))
    return data


def _agreeing(data: RunData, requested: Config) -> tuple[RunData, int]:
    """Data with a runtime in which an update is what the CPU computes; rows of a pass at most, 0 = any number."""
    runtime, linear_rows, messages = agreeing(data.runtime, data.task, lambda: data.batch(0), data.config, requested)
    if runtime is not data.runtime:
        data.messages.extend(messages)
        data = _with(data, runtime)
    return _capped(data, linear_rows)


def agreeing(
    runtime: runtimes.Runtime, task: Task, batch: Callable[[], Batch], config: Config, requested: Config
) -> tuple[runtimes.Runtime, int, list[str]]:
    """(runtime in which an update of some rows of a batch is what the CPU computes, rows of its largest linear layer's
    input for each row, 0 where nothing was tried, messages).

    Where it is not, fp32 stands in for another dtype, and the CPU for another device, unless the user named them, which
    raises RunError. requested: the configuration as the user has it.
    """
    from matrixlib.engine.trials import compare

    messages: list[str] = []
    while runtime.device != "cpu" or runtime.dtype != "fp32":
        trial = compare(task, batch(), runtime, config)
        if not trial.problem:
            return runtime, trial.linear_rows, messages
        name, value = ("dtype", runtime.dtype) if runtime.dtype != "fp32" else ("device", runtime.device)
        if name in runtime.requested:
            option = "precision" if name == "dtype" else name
            raise RunError(
                f"{option} '{value}' was asked for, but an update in it on {runtime.device} is not what the CPU "
                f"computes: {trial.problem}; use 'auto', which takes what works"
            )
        why = f"{value} was tried and is wrong here: {trial.problem}"
        if name == "dtype":
            runtime = runtime.in_fp32(why)
        else:
            options = requested.runtime.model_copy(update={"device": "cpu"})
            runtime = runtimes.resolve(options, requested.train, requested.data).with_choice("device", "cpu", why)
            runtime.apply()
        messages.append(f"warning: {name} {value} -> {getattr(runtime, name)}: {why}")
    return runtime, 0, messages


def _capped(data: RunData, linear_rows: int) -> tuple[RunData, int]:
    """As `_agreeing`. linear_rows: of the largest linear layer's input for each row of a pass."""
    if data.runtime.device != "mps" or not linear_rows:
        return data, 0
    most = max(1, runtimes.LINEAR_ROWS // linear_rows)
    if data.runtime.micro_batch > most:
        why = f"with more than {runtimes.LINEAR_ROWS:,} rows of a linear layer mps makes wrong gradients ({ISSUE})"
        data.messages.append(f"train.micro_batch: {data.runtime.micro_batch} -> {most}: {why}")
        data = _with(data, data.runtime.with_choice("micro_batch", most, why))
    return data, most


def _with(data: RunData, runtime: runtimes.Runtime) -> RunData:
    """The same data with another runtime, in the configuration too."""
    return replace(data, runtime=runtime, config=runtime_config(data.config, runtime))


def tune_micro_batch(data: RunData, most: int = 0) -> runtimes.Runtime:
    """The runtime with the best micro-batch of those that fit in memory, by trying. most: rows of one; 0 = all."""
    from matrixlib.engine.microbatch import tune_step
    from matrixlib.engine.step import throwaway
    from matrixlib.engine.task import rows, slice_batch

    with throwaway(data.task, data.runtime, data.config) as step:
        batch = data.batch(0)
        parts = -(-rows(batch) // most) if most else 1
        tuning = tune_step(step, slice_batch(batch, 0, -(-rows(batch) // parts)), data.config.memory.limit)
    data.messages.append(f"train.micro_batch: auto -> {tuning.size}, by trying:\n{tuning.table().to_string()}")
    return data.runtime.with_choice("micro_batch", tuning.size, "the fastest of those that fit in memory, by trying")


def choose_layout(data: RunData, fixed: bool) -> runtimes.Runtime:
    """The runtime with the layout that updates are fastest in; fixed: with its memory format, which the user named."""
    from matrixlib.engine import layout

    return layout.choose_layout(data.task, data.batch(0), data.runtime, data.config, fixed)


def fit_steps(data: RunData) -> tuple[int, float]:
    """Updates that fit in `train.minutes`, and the seconds of one."""
    from matrixlib.engine import pace
    from matrixlib.engine.step import throwaway

    with throwaway(data.task, data.runtime, data.config) as step:
        seconds = pace.trial(lambda i: step(data.batch(i)))
    return pace.fit(data.config.train.minutes, seconds), seconds


def start_notes(runtime: runtimes.Runtime, clocks: Clocks) -> list[str]:
    """What a person should know of the machine as a run begins. clocks: those of some time before, with children:
    compiler and loader are ours."""
    load = load_average()
    if load is not None and load < CROWDED:
        return []  # nobody can have been busy for long
    time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - clocks.wall)))
    usage = Usage.since(clocks, children=True)
    if not usage.crowded(runtime.threads):
        return []
    return [f"warning: the machine is busy: {usage.words()}; updates will take longer than they could"]


def memory_table(data: RunData) -> pd.DataFrame:
    """Where the memory of one update goes, in MiB: a row for each part of the network, weights and optimiser."""
    from matrixlib.engine import footprint, step

    with step.throwaway(data.task, data.runtime, data.config) as updates:
        batch = data.batch(0)
        return footprint.by_part(lambda: updates(batch), updates.model, updates.optimiser)


def measure_peak(folder: Path, runtime: runtimes.Runtime, flops: float | None) -> float | None:
    """Rows a second that would take the device's whole matrix rate, measured as the run in `folder` begins; kept in
    run.json, also for when it is resumed. flops: of a row. None without them, or without memory to measure.
    """
    if not flops:
        return None
    record = read_json(folder / "run.json")
    needs = {"device": runtime.device, "dtype": runtime.dtype, "position_flops": flops}
    peak = record.get("peak", {})
    if not needs.items() <= peak.items():
        from matrixlib.engine.memory import out_of_memory

        try:
            gflops = speed.matrix_rate(runtime.device, runtime.dtype, runtime.threads)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None
        peak = {"gflops": gflops} | needs
        write_json(folder / "run.json", record | {"peak": peak})
    return float(peak["gflops"] * 1e9 / flops)
