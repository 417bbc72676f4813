"""What is tried before a run begins, with updates of a throwaway model: rows of a pass, layout, time, memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from matrixlib.files import read_json, write_json
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware import speed
from matrixlib.hardware.load import CROWDED, Clocks, Usage, load_average
from matrixlib.runs.data import RunData

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor

LOOK_SECONDS = 0.1
"""Time over which the processors are looked at as a run begins, at least: they are counted in hundredths of it."""


def tune_micro_batch(data: RunData) -> runtimes.Runtime:
    """The runtime with the best micro-batch of those that fit in memory, by trying."""
    from matrixlib.engine.microbatch import tune_step
    from matrixlib.engine.step import throwaway

    with throwaway(data.task, data.runtime, data.config) as step:
        tuning = tune_step(step, _tensors(data.training.batch(0)), data.config.memory.limit)
    data.messages.append(f"train.micro_batch: auto -> {tuning.size}, by trying:\n{tuning.table().to_string()}")
    return replace(data.runtime, micro_batch=tuning.size)


def choose_layout(data: RunData, fixed: bool) -> runtimes.Runtime:
    """The runtime with the layout that updates are fastest in; fixed: with its memory format, which the user named."""
    from matrixlib.engine import layout

    return layout.choose_layout(data.task, _tensors(data.training.batch(0)), data.runtime, data.config, fixed)


def fit_steps(data: RunData) -> tuple[int, float]:
    """Updates that fit in `train.minutes`, and the seconds of one."""
    from matrixlib.engine import pace
    from matrixlib.engine.step import throwaway

    with throwaway(data.task, data.runtime, data.config) as step:
        seconds = pace.trial(lambda i: step(_tensors(data.training.batch(i))))
    return pace.fit(data.config.train.minutes, seconds), seconds


def start_notes(runtime: runtimes.Runtime, clocks: Clocks) -> list[str]:
    """What a person should know of the machine as a run begins. clocks: those of some time before."""
    load = load_average()
    if load is not None and load < CROWDED:
        return []  # nobody can have been busy for long
    time.sleep(max(0.0, LOOK_SECONDS - (time.monotonic() - clocks.wall)))
    usage = Usage.since(clocks)
    if not usage.crowded(runtime.threads):
        return []
    return [f"warning: the machine is busy: {usage.words()}; updates will take longer than they could"]


def _tensors(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


def memory_table(data: RunData) -> pd.DataFrame:
    """Where the memory of one update goes, in MiB: a row for each part of the network, weights and optimiser."""
    from matrixlib.engine import memory, step

    with step.throwaway(data.task, data.runtime, data.config) as updates:
        batch = _tensors(data.training.batch(0))
        return memory.by_part(lambda: updates(batch), updates.model, updates.optimiser)


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
