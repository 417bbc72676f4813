"""What the targets of the self-supervised terms hold, to be looked at while a run trains."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matrixlib.engine.task import Batch
from matrixlib.files import plain, utc_now

BINS = 16
"""Of a histogram of values that are not classes."""


def target_figures(targets: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Term -> dtype, shape, least and greatest value, values that are not finite, and a histogram: value -> how often,
    or the lower bounds of 16 equal bins -> how often where there are more different values than that."""
    return {name: _figures(target.detach().cpu()) for name, target in targets.items()}


def _figures(target: Tensor) -> dict[str, Any]:
    finite = target[target.isfinite()] if target.is_floating_point() else target
    figures = {"dtype": str(target.dtype).removeprefix("torch."), "shape": list(target.shape)}
    if not finite.numel():
        return figures | {"not_finite": target.numel(), "histogram": {}}
    least, greatest = float(finite.min()), float(finite.max())
    values, counts = finite.double().unique(return_counts=True)
    if len(values) > BINS:
        counts = torch.histc(finite.double(), BINS, least, greatest)
        values = least + (greatest - least) / BINS * torch.arange(BINS)
    histogram = {f"{value:g}": int(count) for value, count in zip(values.tolist(), counts.tolist(), strict=True)}
    missing = target.numel() - finite.numel()
    return figures | {"least": least, "greatest": greatest, "not_finite": missing, "histogram": histogram}


class TargetLog:
    """targets.jsonl of a run: a row of `target_figures` at every so many updates; one that is repeated after a rollback
    stands twice."""

    def __init__(self, path: Path, interval: int, targets: Callable[[Batch], Mapping[str, Tensor]]) -> None:
        """interval: 0 = no file. targets: of a batch on the host, by term."""
        self._path, self._interval, self._targets = path, interval, targets

    def look(self, step: int, batch: Batch) -> None:
        """Write down the targets of update `step`, if it is one of those."""
        if self._interval and step % self._interval == 0:
            row = {"time": utc_now(), "step": step, "targets": target_figures(self._targets(batch))}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(plain(row)) + "\n")
