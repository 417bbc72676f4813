"""What is tried before a run begins, with updates of a throwaway model: rows of a pass, updates in a time, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from matrixlib.hardware import runtime as runtimes
from matrixlib.runs.data import RunData

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor


def tune_micro_batch(data: RunData) -> runtimes.Runtime:
    """The runtime with the best micro-batch of those that fit in memory, by trying."""
    from matrixlib.engine.microbatch import tune_step
    from matrixlib.engine.step import throwaway

    with throwaway(data.task, data.runtime, data.config) as step:
        tuning = tune_step(step, _tensors(data.training.batch(0)), data.config.memory.limit)
    data.messages.append(f"train.micro_batch: auto -> {tuning.size}, by trying:\n{tuning.table().to_string()}")
    return replace(data.runtime, micro_batch=tuning.size)


def steps_in_time(data: RunData) -> int:
    """Updates that fit in `train.minutes`."""
    from matrixlib.engine.step import throwaway
    from matrixlib.engine.timing import fit_steps

    with throwaway(data.task, data.runtime, data.config) as step:
        return fit_steps(lambda i: step(_tensors(data.training.batch(i))), data.config.train.minutes)


def _tensors(batch: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


def memory_table(data: RunData) -> pd.DataFrame:
    """Where the memory of one update goes, in MiB: a row for each part of the network, weights and optimiser."""
    from matrixlib.engine import memory, step

    with step.throwaway(data.task, data.runtime, data.config) as updates:
        batch = _tensors(data.training.batch(0))
        return memory.by_part(lambda: updates(batch), updates.model, updates.optimiser)
