"""Work of the latin notebook: what a finished run does with puzzles, as a table and as a picture."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

from matrixlib.tasks.latin import decode, plots, pool
from matrixlib.tasks.latin.rates import Rate
from matrixlib.tasks.latin.task import LatinTask
from matrixlib.tasks.latin.vocabulary import MODES
from matrixlib.tasks.spec import Check

ONE_PASS = {4: 0.9, 5: 0.7}
"""Size -> share of the exact probabilities' valid grids that is demanded in one pass."""


def rates(figures: Mapping[str, Any]) -> list[Rate]:
    """The rates by size, mode and fill of a run's evaluation."""
    return [Rate(**{**row, "fill": tuple(row["fill"])}) for row in figures["rates"]]


def table(figures: Mapping[str, Any]) -> pd.DataFrame:
    """The rates, a row for each kind of puzzle; what decodes without a network stands beside each decoder."""
    rows = {}
    for rate in rates(figures):
        low, high = rate.fill
        fill = f"{low:.1f}-{high:.1f}" if high else "empty"
        rows[rate.size, rate.mode, fill] = {
            "one pass": rate.valid,
            "exact": rate.exact,
            "cells": rate.accuracy,
            "repeats": rate.violations,
            "iterative": rate.iterative,
            "(random)": rate.iterative_baseline,
            "beam": rate.beam,
            "(random) ": rate.beam_baseline,
        }
    frame = pd.DataFrame.from_dict(rows, orient="index").round(3)
    return frame.rename_axis(index=["size", "mode", "fill"])


def targets(figures: Mapping[str, Any]) -> list[Check]:
    """What a network that had its time has to reach in STANDARD: checks by size.

    In one pass at 50 to 70 % fill, a share of what the exact probabilities reach; decoded from the empty grid, more
    valid grids than without a network, where that leaves room.
    """
    checks: list[Check] = []
    for rate in rates(figures):
        if rate.mode != "standard":
            continue
        share, least = rate.of_exact, ONE_PASS.get(rate.size)
        if rate.fill == (0.5, 0.7) and share is not None and least is not None:
            text = f"{rate.valid:.1%} valid, {share:.0%} of what the exact probabilities reach, {least:.0%} demanded"
            checks.append((f"size {rate.size} in one pass", share >= least, text))
        if rate.fill == (0.0, 0.0):
            baseline, valid = rate.iterative_baseline, rate.iterative
            text = f"{valid:.1%} valid, {baseline:.1%} without a network, {rate.grids} grids"
            checks.append((f"size {rate.size} from the empty grid", valid > baseline or valid == 1, text))
    return checks


def filling(
    task: LatinTask, model: nn.Module, shards: Iterable[Path], size: int, mode: str, revealed: float, seed: int = 0
) -> tuple[Figure, bool]:
    """A held-out puzzle filled cell by cell with the network's help: the picture, and whether it came out valid.

    shards: of the held-out squares. revealed: share of the cells that are given. Raises ValueError for a size or mode
    that the task does not know.
    """
    if size not in task.every_size or mode not in task.modes:
        raise ValueError(f"size {size}, mode '{mode}': the run knows sizes {task.every_size}, modes {list(task.modes)}")
    squares = pool.read(shards)[size]
    rng = np.random.default_rng([seed, size])
    square = torch.from_numpy(squares[rng.integers(len(squares))].astype(np.int64))[None]
    hidden = torch.from_numpy(rng.random((1, size, size)) >= revealed)
    sizes = torch.full((1,), size)
    predict = decode.network(task, model.cpu(), sizes, torch.full_like(sizes, MODES.index(mode)))
    with torch.inference_mode():
        stream = torch.Generator().manual_seed(seed)
        grids = decode.puzzle(square, hidden, sizes)
        decoded = decode.iterative(grids, sizes, predict, stream, keep_steps=True)
    figure = plots.filling_figure([step[0].numpy() for step in decoded.steps], mode)
    return figure, bool(decoded.valid[0])
