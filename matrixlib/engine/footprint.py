"""Where the memory of one update goes, by part of the network."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd
import torch
from torch import nn

from matrixlib.engine.diagnostics import hooked
from matrixlib.engine.memory import MEBI


def by_part(update: Callable[[], object], model: nn.Module, optimiser: torch.optim.Optimizer) -> pd.DataFrame:
    """Where the memory of one update goes: what each part of `model` keeps from its forward pass, in MiB.

    update: makes one with the model and optimiser; it is called twice, the first time to warm up. What is kept is
    there until the backward pass. Weights, gradients and the optimiser's state are a row each.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    on_device = next(model.parameters()).is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    parts = set(_parts(model))
    running: list[Any] = []
    names: list[str] = []

    def enter(name: str, *_: Any) -> None:
        if name in parts:
            names.append(name)
            running.append(record_function(name).__enter__())

    def leave(name: str, *_: Any) -> None:
        if name in parts:
            running.pop().__exit__(None, None, None)

    update()
    with hooked(model, enter, leave), profile(activities=activities, profile_memory=True) as profiler:
        update()
    used = {
        event.key: event.device_memory_usage if on_device else event.cpu_memory_usage
        for event in profiler.key_averages()
    }
    weights = _bytes(model.parameters())
    state = _bytes(value for entry in optimiser.state.values() for value in entry.values())
    table = {name: used[name] for name in names if name in used}
    table |= {"weights": weights, "their gradients": weights, "optimiser": state}
    return pd.DataFrame({"MiB": table}).div(MEBI).round(2)


def _parts(model: nn.Module) -> Iterator[str]:
    """Names of the network's parts: its children, and those of its lists and dicts of modules."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from (f"{name}.{inner}" for inner, _ in child.named_children())
        else:
            yield name


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
