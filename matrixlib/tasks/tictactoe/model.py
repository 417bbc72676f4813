"""The network: a multilayer perceptron over the nine squares."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.tasks.tictactoe.config import TicTacToeModelConfig
from matrixlib.tasks.tictactoe.game import SQUARES


class TicTacToeNet(nn.Module):
    """Squares (B, 9), 1 ours, -1 theirs, 0 empty, to logits of moves (B, 9) and of win, draw and loss (B, 3)."""

    def __init__(self, config: TicTacToeModelConfig) -> None:
        super().__init__()
        self.stem = nn.Linear(2 * SQUARES, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.layers))
        self.policy, self.value = nn.Linear(config.width, SQUARES), nn.Linear(config.width, 3)

    def edges(self) -> list[nn.Module]:
        """The layers that take the squares and those that give the outputs."""
        return [self.stem, self.policy, self.value]

    def forward(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(torch.cat([squares == 1, squares == -1], dim=1).float())
        for layer in self.layers:
            x = x + layer(F.silu(x))
        x = F.silu(x)
        return self.policy(x), self.value(x)
