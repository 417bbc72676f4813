"""Work of the latin notebook: what a finished run does with puzzles, as a table and as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib.run import Run, RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from matrixlib.tasks.latin.rates import Rate


def rates(figures: Mapping[str, Any]) -> list[Rate]:
    """The rates by size, mode and fill of a run's evaluation."""
    from matrixlib.tasks.latin.rates import Rate

    return [Rate(**{**row, "fill": tuple(row["fill"])}) for row in figures["rates"]]


def table(figures: Mapping[str, Any]) -> str:
    """Text table of the rates, a line for each kind of puzzle."""
    from matrixlib.tasks.latin import rates as found

    return found.table(rates(figures))


def rates_figure(figures: Mapping[str, Any]) -> Figure:
    """Valid grids by size for each mode and fill, beside the decoder without a network."""
    from matrixlib.tasks.latin import plots

    return plots.rates_figure(rates(figures))


def filling(run: Run, size: int, mode: str, revealed: float, seed: int = 0) -> tuple[Figure, bool]:
    """A held-out puzzle filled cell by cell with the network's help: the picture, and whether it came out valid.

    revealed: share of the cells that are given. Raises RunError for another task, ValueError for a size or mode that
    the run does not know.
    """
    import torch

    from matrixlib.tasks.latin import decode, plots, pool
    from matrixlib.tasks.latin.task import LatinTask
    from matrixlib.tasks.latin.vocabulary import MODES

    task = run.task
    if not isinstance(task, LatinTask):
        raise RunError(f"this is for Latin squares; run '{run.name}' trains {run.config.task}")
    if size not in task.every_size or mode not in task.modes:
        raise ValueError(
            f"size {size}, mode '{mode}': the run knows sizes {task.every_size}, modes {list(task.modes)}"
        )
    squares = pool.read(row.path for row in run.catalogue.shards("validation"))[size]
    rng = np.random.default_rng([seed, size])
    square = torch.from_numpy(squares[rng.integers(len(squares))].astype(np.int64))[None]
    hidden = torch.from_numpy(rng.random((1, size, size)) >= revealed)
    sizes = torch.full((1,), size)
    predict = decode.network(
        task, run.trainer.evaluation_model().cpu(), sizes, torch.full_like(sizes, MODES.index(mode))
    )
    with torch.inference_mode():
        stream = torch.Generator().manual_seed(seed)
        filled = decode.iterative(
            decode.puzzle(square, hidden, sizes), sizes, predict, stream, keep_steps=True
        )
    figure = plots.filling_figure([step[0].numpy() for step in filled.steps], mode)
    return figure, bool(filled.valid[0])
