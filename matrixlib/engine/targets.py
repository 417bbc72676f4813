"""What the targets of the self-supervised terms hold, to be looked at while a run trains."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from matrixlib.engine.stats import Stats
from matrixlib.engine.task import Batch
from matrixlib.files import plain, utc_now

BINS = 16
"""Of a histogram of values that are not classes."""


def target_figures(target: Tensor) -> dict[str, Any]:
    """dtype, shape, least and greatest value, values that are not finite, and a histogram: value -> how often, or the
    lower bounds of 16 equal bins -> how often where there are more different values than that."""
    values = target.detach().cpu().double().numpy().ravel()
    finite = values[np.isfinite(values)]
    figures: dict[str, Any] = {"dtype": str(target.dtype).removeprefix("torch."), "shape": list(target.shape)}
    figures["not_finite"] = len(values) - len(finite)
    if not len(finite):
        return figures | {"histogram": {}}
    bounds, counts = np.unique(finite, return_counts=True)
    if len(bounds) > BINS:
        counts, bounds = np.histogram(finite, BINS)
    histogram = {f"{bound:g}": int(count) for bound, count in zip(bounds, counts, strict=False)}
    return figures | {"least": finite.min(), "greatest": finite.max(), "histogram": histogram}


class TargetLog:
    """targets.jsonl of a run, a hook: a row of `target_figures` by term; an update that is repeated after a rollback
    stands twice."""

    def __init__(self, path: Path, targets: Callable[[Batch], Mapping[str, Tensor]]) -> None:
        """targets: of a batch on the host, by term."""
        self._path, self._targets = path, targets

    def __call__(self, stats: Stats, batch: Batch) -> None:
        figures = {name: target_figures(target) for name, target in self._targets(batch).items()}
        row = {"time": utc_now(), "step": stats.step, "targets": figures}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain(row)) + "\n")
