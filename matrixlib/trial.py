"""Timed updates of a throwaway model, made before a run begins: how many fit in its time, how many rows in a pass."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from matrixlib.config import Config
from matrixlib.runtime import Runtime

if TYPE_CHECKING:
    from matrixlib.data.loader import Loader
    from matrixlib.engine.step import Step
    from matrixlib.engine.task import Task
    from matrixlib.engine.tuner import Tuning

WARM_UPDATES, MOST_UPDATES, TRIAL_SECONDS = 4, 100, 6.0
SHORTEST = 20  # updates of a run, where they are slow
TUNING_SECONDS = 30.0


def fit_steps(config: Config, runtime: Runtime, task: Task, training: Loader) -> int:
    """Updates that fit in `train.minutes`; torch's random stream on the CPU is left as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        step = _step(config, runtime, task)
        times: list[float] = []
        # The first updates are slow: kernels are compiled and memory is taken.
        for i in range(WARM_UPDATES + MOST_UPDATES):
            started = time.perf_counter()
            step({name: torch.from_numpy(array) for name, array in training.batch(i).items()})
            times.append(time.perf_counter() - started)
            if i >= WARM_UPDATES and sum(times[WARM_UPDATES:]) > TRIAL_SECONDS:
                break
    seconds = statistics.median(times[WARM_UPDATES:])
    return max(SHORTEST, int(config.train.minutes * 60 / seconds))


def tune_micro_batch(config: Config, runtime: Runtime, task: Task, training: Loader) -> Tuning:
    """The micro-batch with the best rate of those that fit in memory, for updates of `train.batch_size`."""
    import torch

    from matrixlib.engine import tuner

    batch = {name: torch.from_numpy(array) for name, array in training.batch(0).items()}
    with torch.random.fork_rng(devices=[]):
        step = _step(config, runtime, task)

        def update(rows: int) -> None:
            step.micro_batch = rows
            step({name: tensor[:rows] for name, tensor in batch.items()})
            if step.micro_batch < rows:  # the step has helped itself
                raise torch.OutOfMemoryError(f"{rows} rows do not fit")

        size = config.train.batch_size
        start = min(runtime.micro_batch, size)
        return tuner.tune(
            update,
            size,
            runtime.torch_device,
            TUNING_SECONDS,
            start=start,
            most=size,
            limit=config.memory.limit,
        )


def _step(config: Config, runtime: Runtime, task: Task) -> Step:
    from matrixlib.engine.step import make_step

    return make_step(task, task.build_model(), runtime, config, 1000)
