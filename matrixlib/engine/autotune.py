"""Timed updates of a throwaway model, made before a run begins: how many fit in its time, how many rows in a
pass, where the memory goes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from matrixlib.config import Config
from matrixlib.hardware.runtime import Runtime

if TYPE_CHECKING:
    from torch import nn

    from matrixlib.data.loader import Loader
    from matrixlib.engine.microbatch import Tuning
    from matrixlib.engine.step import Step
    from matrixlib.engine.task import Task

WARM_UPDATES, LEAST_UPDATES, MOST_UPDATES, TRIAL_SECONDS = 4, 20, 100, 6.0
PRECISE = 0.02  # timed updates end when their median is known to this share of it
SHORTEST = 20  # updates of a run, where they are slow
TUNING_SECONDS = 30.0
BESIDES = 1.1  # a run's update in timed ones: moving average, metrics, validation, checkpoints


def fit_steps(config: Config, runtime: Runtime, task: Task, training: Loader) -> int:
    """Updates that fit in `train.minutes`; torch's random stream on the CPU is left as it was."""
    import torch

    with torch.random.fork_rng(devices=[]):
        step = _step(task, task.build_model(), runtime, config)
        times: list[float] = []
        # The first updates are slow: kernels are compiled and memory is taken.
        for i in range(WARM_UPDATES + MOST_UPDATES):
            started = time.perf_counter()
            step({name: torch.from_numpy(array) for name, array in training.batch(i).items()})
            times.append(time.perf_counter() - started)
            if i >= WARM_UPDATES and (
                sum(times[WARM_UPDATES:]) > TRIAL_SECONDS or _settled(times[WARM_UPDATES:])
            ):
                break
    seconds = BESIDES * statistics.median(times[WARM_UPDATES:])
    return max(SHORTEST, int(config.train.minutes * 60 / seconds))


def _settled(times: list[float]) -> bool:
    """Whether the median is known well enough: the 95 % interval of order statistics, n / 2 -+ sqrt(n)."""
    count = len(times)
    if count < LEAST_UPDATES:
        return False
    ordered, half = sorted(times), math.ceil(math.sqrt(count))
    low, high = ordered[count // 2 - half], ordered[count // 2 + half]
    return high - low <= 2 * PRECISE * ordered[count // 2]


def tune_micro_batch(config: Config, runtime: Runtime, task: Task, training: Loader) -> Tuning:
    """The micro-batch with the best rate of those that fit in memory, for updates of `train.batch_size`."""
    import torch

    from matrixlib.engine import microbatch as tuner

    batch = {name: torch.from_numpy(array) for name, array in training.batch(0).items()}
    with torch.random.fork_rng(devices=[]):
        step = _step(task, task.build_model(), runtime, config)

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


def memory_table(config: Config, runtime: Runtime, task: Task, training: Loader) -> str:
    """Where the memory of one update goes: what each part of the network keeps from its forward pass, in MiB.

    Of a throwaway model that has warmed up; what is kept is there until the backward pass. torch's random stream on
    the CPU is left as it was. Weights, gradients and the optimiser's state are one line each.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    on_device = runtime.torch_device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with torch.random.fork_rng(devices=[]):
        model = task.build_model()
        step = _step(task, model, runtime, config)
        batches = [{n: torch.from_numpy(a) for n, a in training.batch(i).items()} for i in range(2)]
        step(batches[0])
        ranges: dict[str, list[Any]] = {}
        for name, part in _parts(model):

            def enter(module: nn.Module, inputs: Any, name: str = name) -> None:
                ranges.setdefault(name, []).append(record_function(name).__enter__())

            def leave(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                ranges[name].pop().__exit__(None, None, None)

            part.register_forward_pre_hook(enter)
            part.register_forward_hook(leave)
        with profile(activities=activities, profile_memory=True) as seen:
            step(batches[1])
    taken = {
        event.key: event.device_memory_usage if on_device else event.cpu_memory_usage
        for event in seen.key_averages()
        if event.key in ranges
    }
    weights = sum(value.numel() * value.element_size() for value in model.parameters())
    state = sum(
        value.numel() * value.element_size()
        for entry in step.optimiser.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    lines = [(name, taken[name]) for name in ranges if name in taken]
    lines += [("weights", weights), ("their gradients", weights), ("optimiser", state)]
    width = max(len(name) for name, _ in lines)
    size = min(step.micro_batch, config.train.batch_size)
    title = f"memory of one update, micro-batch {size} [MiB]"
    return "\n".join([title, *(f"{name:{width}}{amount / 2**20:10.2f}" for name, amount in lines)])


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The network's parts by name: its children, and those of its lists and dicts of modules."""
    from torch import nn

    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from ((f"{name}.{inner}", part) for inner, part in child.named_children())
        else:
            yield name, child


def _step(task: Task, model: nn.Module, runtime: Runtime, config: Config) -> Step:
    """A step for throwaway updates."""
    from matrixlib.engine.step import make_step

    return make_step(task, model, runtime, config, 1000)
