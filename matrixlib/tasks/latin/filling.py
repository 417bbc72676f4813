"""A grid that is filled cell by cell, as a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from matrixlib.tasks.latin import decode, pool
from matrixlib.tasks.latin.task import LatinTask
from matrixlib.tasks.latin.vocabulary import MODES, digits
from matrixlib.tasks.plotting import caption, panels

GIVEN, NEW, OLD = "black", "tab:red", "tab:blue"
PANEL = 1.6  # inches of one grid


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
    figure = filling_figure([step[0].numpy() for step in decoded.steps], mode)
    return figure, bool(decoded.valid[0])


def filling_figure(steps: Sequence[np.ndarray], mode: str, count: int = 8, title: str = "") -> Figure:
    """One grid at up to `count` moments of being filled, from the puzzle to the end.

    steps: (n, n) digit indices, -1 where empty, of every step; the first is the puzzle. Givens are black, digits
    put in since the panel before red, earlier ones blue.
    """
    if not len(steps):
        raise ValueError("there is no step to draw; decode with keep_steps=True")
    shown = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
    figure, axes = panels(len(shown), (PANEL, PANEL + 0.2))
    before = steps[0]
    for axis, number in zip(axes, shown, strict=True):
        _draw(axis, steps[number], steps[0], before, digits(mode, len(steps[0])))
        caption(axis, "puzzle" if number == 0 else f"after {number}")
        before = steps[number]
    figure.suptitle(title or f"{mode}, size {len(steps[0])}", fontsize=9)
    return figure


def _draw(axis: Axes, grid: np.ndarray, first: np.ndarray, before: np.ndarray, names: Sequence[int]) -> None:
    n = len(grid)
    axis.set(xlim=(0, n), ylim=(n, 0), xticks=range(n + 1), yticks=range(n + 1), aspect="equal")
    axis.tick_params(length=0, labelbottom=False, labelleft=False)
    axis.grid(color="0.7", linewidth=0.6, alpha=1)
    size = min(12.0, 60 / n)
    for row, column in np.argwhere(grid >= 0):
        colour = GIVEN if first[row, column] >= 0 else OLD if before[row, column] >= 0 else NEW
        text = str(names[grid[row, column]])
        axis.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=size)
