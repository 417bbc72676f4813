"""Work of the latin notebook: what a finished run does with puzzles, as a table and as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from matrixlib.runs.run import Run, RunError
from matrixlib.tasks.spec import Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from matrixlib.tasks.latin.rates import Rate


ONE_PASS = {4: 0.9, 5: 0.7}
"""Size -> share of the exact probabilities' valid grids that is demanded in one pass."""


def rates(figures: Mapping[str, Any]) -> list[Rate]:
    """The rates by size, mode and fill of a run's evaluation."""
    from matrixlib.tasks.latin.rates import Rate

    return [Rate(**{**row, "fill": tuple(row["fill"])}) for row in figures["rates"]]


def table(figures: Mapping[str, Any]) -> str:
    """Text table of the rates, a line for each kind of puzzle."""
    from matrixlib.tasks.latin import rates as found

    return found.table(rates(figures))


def targets(figures: Mapping[str, Any]) -> list[Check]:
    """What a network that had its time has to reach in STANDARD: checks by size.

    In one pass at 50 to 70 % fill, a share of what the exact probabilities reach; decoded from the empty grid, more
    valid grids than without a network, where that leaves room.
    """
    found: list[Check] = []
    for rate in rates(figures):
        if rate.mode != "standard":
            continue
        share, demanded = rate.of_exact, ONE_PASS.get(rate.size)
        if rate.fill == (0.5, 0.7) and share is not None and demanded is not None:
            said = f"{rate.valid:.1%} valid, {share:.0%} of what the exact probabilities reach, {demanded:.0%} demanded"
            found.append((f"size {rate.size} in one pass", share >= demanded, said))
        if rate.fill == (0.0, 0.0):
            line, reached = rate.iterative_baseline, rate.iterative
            said = f"{reached:.1%} valid, {line:.1%} without a network, {rate.grids} grids"
            found.append((f"size {rate.size} from the empty grid", reached > line or reached == 1, said))
    return found


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
