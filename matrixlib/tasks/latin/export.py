"""The network for Latin squares as an ONNX file."""

from pathlib import Path

import numpy as np
from torch import Tensor

from matrixlib.engine.onnx import Inputs, OnnxFile, OnnxModule
from matrixlib.engine.onnx import export as write
from matrixlib.tasks.latin.model import LatinNet
from matrixlib.tasks.latin.vocabulary import EMPTY, MODES, PAD, SIDE, token_table


class LatinOnnx(OnnxModule):
    """The network as its consumers call it, on grids of 16 x 16."""

    inputs = ("input_grid", "grid_size", "mode")
    outputs = ("cell_logits",)

    def __init__(self, model: LatinNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_grid: Tensor, grid_size: Tensor, mode: Tensor) -> Tensor:
        """(b, 16, 16), (b,), (b,) int64 -> cell_logits (b, 35, 16, 16)."""
        logits: Tensor = self.model(input_grid, grid_size, mode)
        return logits.permute(0, 3, 1, 2)

    def metadata(self) -> dict[str, str]:
        return {"task": "latin"}

    def meaningful(self, output: np.ndarray, inputs: Inputs) -> np.ndarray:
        """Inside the grid; all grids of a batch have one size."""
        size = int(inputs[1][0])
        return output[:, :, :size, :size]


def export(model: LatinNet, path: Path | str) -> OnnxFile:
    """Write a network for Latin squares as ONNX; errors as of `engine.onnx.export`.

    Compared inside the grids, over all sizes and modes and batches of 1 and 3.
    """
    sizes = range(3, SIDE + 1)
    return write(LatinOnnx(model), path, [puzzles(rows, size, seed=0) for size in sizes for rows in (1, 3)])


def puzzles(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs for `count` grids of a size, about half revealed by random digits, the modes in turn: (b, 16, 16), (b,),
    (b,) int64."""
    rng = np.random.default_rng([seed, size])
    mode = np.arange(count) % len(MODES)
    grid = np.full((count, SIDE, SIDE), PAD, np.int64)
    digits = token_table()[mode, size][np.arange(count)[:, None, None], rng.integers(0, size, (count, size, size))]
    grid[:, :size, :size] = np.where(rng.random(digits.shape) < 0.5, digits, EMPTY)
    return grid, np.full(count, size, np.int64), mode
