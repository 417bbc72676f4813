"""Faults for trainings in tests: batches that are changed on their way, outputs that are spoiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from torch import nn

from matrixlib.data.loader import Loader, Tensors


def change_batches(
    numbers: Container[int], change: Callable[[Tensors], object] = lambda batch: None
) -> Callable[[], int]:
    """Change the batches with these numbers before any skip, of any loader of this process, in any phase.

    Returns what tells that number of the batch that was handed out last.
    """
    now, batches = [-1], Loader.batches

    def changing(loader: Loader, start: int, stop: int | None = None) -> Iterator[Tensors]:
        with contextlib.closing(batches(loader, start, stop)) as inner:  # type: ignore[type-var]
            for i, batch in enumerate(inner, start):
                now[0] = loader.unskipped_index(i)
                if now[0] in numbers:
                    change(batch)
                yield batch

    Loader.batches = changing  # type: ignore[method-assign, assignment]
    return lambda: now[0]


def spoil_output(value: float, when: Callable[[], bool]) -> Callable[..., None]:
    """A forward hook that puts a value over all that a module makes of its first row in training."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training and when():
            parts = output.values() if isinstance(output, Mapping) else output
            for tensor in parts if isinstance(output, (Mapping, tuple, list)) else (output,):
                tensor[0] = value  # in place, so that it is what is trained on

    return hook
