"""ONNX export, and the proof that the exported network says the same.

Needs `onnx`, `onnxscript` and `onnxruntime`, which nothing else here needs: the extra `onnx` of pyproject.toml.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from matrixlib.tasks.latin.model import LatinNet
from matrixlib.tasks.latin.vocabulary import EMPTY, MODES, PAD, SIDE, token_table

INPUTS = ("input_grid", "grid_size", "mode")


class ForExport(nn.Module):
    """The network as its consumers call it, on grids of 16 x 16."""

    def __init__(self, model: LatinNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_grid: Tensor, grid_size: Tensor, mode: Tensor) -> Tensor:
        """(b, 16, 16), (b,), (b,) int64 -> cell_logits (b, 35, 16, 16)."""
        logits: Tensor = self.model(input_grid, grid_size, mode)
        return logits.permute(0, 3, 1, 2)


def export(model: LatinNet, path: Path | str) -> None:
    """Write `model` as one ONNX file with a free batch size; weights inside it, not in a file beside it.

    Raises ValueError where the packages are missing.
    """
    _need("onnx")
    _need("onnxscript")
    example = tuple(torch.from_numpy(array) for array in puzzles(2, SIDE, seed=0))
    batch = torch.export.Dim("batch", min=1)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel's strides do not survive the exporter
        torch.onnx.export(
            ForExport(model).cpu().eval(),
            example,
            str(path),
            input_names=list(INPUTS),
            output_names=["cell_logits"],
            dynamic_shapes=[{0: batch}] * len(INPUTS),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def parity(model: LatinNet, path: Path | str, seed: int = 0) -> float:
    """Largest difference of a logit inside the grids, between `model` and the file, over all sizes and modes
    and batches of 1 and 3.
    """
    session = _need("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    module = ForExport(model).cpu().eval()
    worst = 0.0
    for size in range(3, SIDE + 1):
        for count in (1, 3):
            given = puzzles(count, size, seed)
            with torch.inference_mode():
                ours = module(*(torch.from_numpy(array) for array in given)).numpy()
            theirs = session.run(None, dict(zip(INPUTS, given, strict=True)))[0]
            difference = np.abs(ours - theirs)[:, :, :size, :size]
            worst = max(worst, float(difference.max()))
    return worst


def puzzles(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs for `count` grids of a size, about half revealed, the modes in turn: (b, 16, 16), (b,), (b,) int64.

    Revealed digits are random: nothing here needs a valid puzzle.
    """
    rng = np.random.default_rng([seed, size])
    mode = np.arange(count) % len(MODES)
    grid = np.full((count, SIDE, SIDE), PAD, np.int64)
    digits = token_table()[mode, size][np.arange(count)[:, None], rng.integers(0, size, (count, size * size))]
    shown = np.where(rng.random(digits.shape) < 0.5, digits, EMPTY)
    grid[:, :size, :size] = shown.reshape(count, size, size)
    return grid, np.full(count, size, np.int64), mode


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"'{name}' is not installed; `make install` brings it, or the extra: pip install '.[onnx]'"
        ) from None
