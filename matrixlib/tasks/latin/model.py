"""A transformer over the cells of a grid.

Arrays: B batch, N side of the largest grid in a batch, L = N * N cells, row by row.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine import onnx
from matrixlib.tasks import transformer
from matrixlib.tasks.latin.config import LatinModelConfig
from matrixlib.tasks.latin.losses import sinkhorn
from matrixlib.tasks.latin.vocabulary import EMPTY, MODES, NAMES, PAD, SIDE, TOKENS, digits, token_table

RELATIONS = 4  # between two cells: 0 the same, 1 same row, 2 same column, 3 neither
DEVIATION = 0.02  # of the initial weights


class Block(transformer.Block):
    """A block whose attention has a bias by the relation of two cells."""

    def __init__(self, config: LatinModelConfig) -> None:
        width = config.width
        super().__init__(width, config.heads, config.feedforward * width, config.dropout, partial(nn.LayerNorm, width))
        self.relation = nn.Parameter(torch.zeros(config.heads, RELATIONS)) if config.relations else None

    def relate(self, relations: Tensor, mask: Tensor) -> Tensor:
        """Attention bias (B or 1, heads or 1, L, L) from relations (L, L) and mask (B or 1, 1, L, L), 0 or -inf."""
        return mask if self.relation is None else mask + self.relation[:, relations]

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x (B, L, width); bias from `relate`, equal in every repeat."""
        q, k, v = self.split(x)
        return self.mix(x, q, k, v, bias.to(q.dtype))


class LatinNet(nn.Module):
    """Tokens of a partial grid to logits over 35 tokens a cell.

    A cell's embedding is the sum of token, row, column, grid size and mode. `relations` adds a learned attention bias
    by head for cells of the same row or column. `sinkhorn`: see `losses.sinkhorn`.
    """

    digits: Tensor

    def __init__(self, config: LatinModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.token, self.mode = nn.Embedding(TOKENS, width), nn.Embedding(len(MODES), width)
        self.row, self.column = nn.Embedding(SIDE, width), nn.Embedding(SIDE, width)
        self.size = nn.Embedding(SIDE + 1, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS)
        if config.sinkhorn:
            self.register_buffer("digits", torch.from_numpy(token_table()), persistent=False)
        for name, parameter in self.named_parameters():
            if name.endswith("relation"):
                # Heads start with a bias for rows and columns in turn.
                with torch.no_grad():
                    parameter[0::2, 1] = 1.0
                    parameter[1::2, 2] = 1.0
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def edges(self) -> list[nn.Module]:
        """The output layer; inputs are embeddings."""
        return [self.head]

    def forward(self, tokens: Tensor, size: Tensor, mode: Tensor) -> Tensor:
        """tokens (B, N, N) int64, PAD outside the grid; size, mode (B,) int64 -> logits (B, N, N, 35)."""
        side = tokens.shape[1]
        places = torch.arange(side, device=tokens.device)
        whole = (self.size(size) + self.mode(mode))[:, None, None]
        first = self.token(tokens) + self.row(places)[:, None] + self.column(places) + whole
        first = first.flatten(1, 2)
        row, column = places.repeat_interleave(side), places.repeat(side)
        relations = 3 - 2 * (row == row[:, None]).long() - (column == column[:, None]).long()
        mask = self._mask(tokens.flatten(1))
        blocks, x = [cast(Block, block) for block in self.blocks], first
        kept = [block.relate(relations, mask) for block in blocks] if self.config.repeats > 1 else []
        for repeat in range(self.config.repeats):
            x = x + first if repeat else x
            for number, block in enumerate(blocks):
                x = block(x, kept[number] if kept else block.relate(relations, mask))
        logits: Tensor = self.head(self.norm(x)).unflatten(1, (side, side))
        if not self.config.sinkhorn:
            return logits
        with torch.autocast(logits.device.type, enabled=False):
            return sinkhorn(logits, tokens, self.digits[mode, size, :side], self.config.sinkhorn)

    def _mask(self, tokens: Tensor) -> Tensor:
        """(B, 1, L, L) fp32: 0 for visible cells, -inf outside the grid and, if causal, for later ones."""
        length = tokens.shape[1]
        hidden = (tokens == PAD)[:, None, None, :].expand(-1, 1, length, length)
        if self.config.causal:
            hidden = hidden | torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        return torch.zeros(hidden.shape, device=tokens.device).masked_fill(hidden, float("-inf"))


class LatinOnnx(onnx.OnnxModule):
    """The network for export, on 16 x 16 grids. sizes: those it was trained on."""

    inputs = ("input_grid", "grid_size", "mode")
    outputs = ("cell_logits",)

    def __init__(self, model: LatinNet, sizes: Sequence[int]) -> None:
        super().__init__()
        self.model, self.sizes = model, sizes

    def forward(self, input_grid: Tensor, grid_size: Tensor, mode: Tensor) -> Tensor:
        """(b, 16, 16), (b,), (b,) int64 -> cell_logits (b, 35, 16, 16)."""
        return self.model(input_grid, grid_size, mode).permute(0, 3, 1, 2)

    def metadata(self) -> dict[str, str]:
        """JSON, but for `task`, `board` and `cell_logits`. digits: mode -> size -> the digits of a puzzle."""
        by_mode = {mode: {size: digits(mode, size) for size in self.sizes} for mode in MODES}
        facts: dict[str, object] = {"tokens": NAMES, "sizes": [*self.sizes], "modes": MODES, "digits": by_mode}
        return {name: json.dumps(value) for name, value in facts.items()} | {
            "task": "latin",
            "board": f"input_grid: {SIDE} x {SIDE} indices of tokens, row by row; the puzzle has the first grid_size "
            "rows and columns, outside is token 0; mode: index of modes",
            "cell_logits": "by grid, token, row, column; leave out tokens other than the puzzle's digits, then softmax",
        }

    def meaningful(self, output: np.ndarray, inputs: onnx.Inputs) -> np.ndarray:
        """Inside the grid; all grids of a batch have one size."""
        size = int(inputs[1][0])
        return output[:, :, :size, :size]


def export(model: LatinNet, path: Path | str, sizes: Sequence[int]) -> onnx.OnnxFile:
    """Write a Latin-square network as ONNX; errors as `engine.onnx.export`. sizes: trained on. Compared inside the
    grids over all sizes, modes, and batches of 1 and 3."""
    batches = [_grids(rows, size) for size in range(3, SIDE + 1) for rows in (1, 3)]
    return onnx.export(LatinOnnx(model, sizes), path, batches)


def _grids(count: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random inputs for `count` grids of one size, modes in turn: (b, 16, 16), (b,), (b,) int64."""
    grid = np.full((count, SIDE, SIDE), PAD, np.int64)
    grid[:, :size, :size] = np.random.default_rng(size).integers(EMPTY, TOKENS, (count, size, size))
    return grid, np.full(count, size, np.int64), np.arange(count) % len(MODES)
