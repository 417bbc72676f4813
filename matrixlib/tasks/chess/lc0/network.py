"""A residual network of Leela Chess Zero.

Shapes: B positions, 112 planes of 8 rows (ranks of the side to move, its first one first) and 8 columns (files).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.tasks.chess.lc0.moves import CONV_PLANES, POLICY, plane_table
from matrixlib.tasks.chess.lc0.weights import PLANES, Lc0Weights

SQUARES = 64


class Block(nn.Module):
    """Two convolutions, squeeze-and-excitation with a scale and a shift for each channel, and the way past them."""

    def __init__(self, filters: int, units: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(filters, filters, 3, padding=1)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1)
        self.reduce = nn.Linear(filters, units) if units else None
        self.expand = nn.Linear(units, 2 * filters) if units else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        if self.reduce is None or self.expand is None:
            return F.relu(x + y)
        scale, shift = self.expand(F.relu(self.reduce(y.mean((2, 3)))))[:, :, None, None].chunk(2, dim=1)
        return F.relu(torch.addcmul(x + shift, scale.sigmoid(), y))


class Lc0Network(nn.Module):
    """The network that a weight file describes."""

    order: Tensor

    def __init__(self, weights: Lc0Weights) -> None:
        super().__init__()
        filters = weights.filters
        self.wdl = weights.wdl
        self.input = nn.Conv2d(PLANES, filters, 3, padding=1)
        self.tower = nn.ModuleList(Block(filters, weights.units) for _ in range(weights.blocks))
        if weights.conv_policy:
            self.policy1 = nn.Conv2d(filters, weights.policy_filters, 3, padding=1)
            self.policy = nn.Conv2d(weights.policy_filters, CONV_PLANES, 3, padding=1)
            self.register_buffer("order", torch.from_numpy(plane_table()), persistent=False)
        else:
            self.policy = nn.Conv2d(filters, weights.policy_filters, 1)
            self.moves = nn.Linear(weights.policy_filters * SQUARES, POLICY)
        self.conv_policy = weights.conv_policy
        self.value = nn.Conv2d(filters, weights.value_filters, 1)
        self.value1 = nn.Linear(weights.value_filters * SQUARES, weights.hidden)
        self.value2 = nn.Linear(weights.hidden, 3 if weights.wdl else 1)
        self.load_state_dict({name: torch.from_numpy(array) for name, array in weights.arrays.items()}, strict=True)

    def forward(self, planes: Tensor, heads: frozenset[str] | None = None) -> dict[str, Any]:
        """Of "policy" (B, 1858) logits, "value" (B, 3) win-draw-loss logits or (B,) in -1..1, and "stream", what goes
        into the blocks and what comes out of each, (B, C, 8, 8), what `heads` names; the first two unless given; fp32.
        """
        names = heads if heads is not None else frozenset({"policy", "value"})
        x = F.relu(self.input(planes))
        out: dict[str, Any] = {"stream": [x]} if "stream" in names else {}
        for block in self.tower:
            x = block(x)
            if "stream" in names:
                out["stream"].append(x)
        if "policy" in names:
            if self.conv_policy:
                out["policy"] = self.policy(F.relu(self.policy1(x))).flatten(1).float()[:, self.order]
            else:
                out["policy"] = self.moves(F.relu(self.policy(x)).flatten(1)).float()
        if "value" in names:
            value = self.value2(F.relu(self.value1(F.relu(self.value(x)).flatten(1)))).float()
            out["value"] = value if self.wdl else torch.tanh(value).squeeze(1)
        return out
