"""The temperature that softens teacher and student: given, on a schedule, or learned against the student."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from matrixlib.engine.optim import PlainDescent
from matrixlib.tasks.chess.config import TeacherConfig

LEAST, MOST = 1.0, 5.0
"""Bounds of a learned temperature. Moves are 20 to 40, so that little is left of a policy far above."""
IDLE = 0.2
"""Share of the training in which a learned temperature rests."""


class _Reverse(torch.autograd.Function):
    """The identity, whose gradient is multiplied by -factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return -factor * gradients[0], None


class LearnedTemperature(PlainDescent):
    """T = 1 + 4 sigmoid(raw), which rises where that makes the student's task harder (CTKD, Li et al. 2022,
    arXiv:2211.16231): its gradient is reversed, and multiplied by a factor that begins at 0.

    That factor is why it is moved by plain descent: Adam divides it away, and decay alone would move it where it is 0.
    """

    def __init__(self, initial: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        share = (initial - LEAST) / (MOST - LEAST)
        self.raw = nn.Parameter(torch.tensor(math.log(share / (1 - share))))

    def forward(self, factor: Tensor) -> Tensor:
        """T () of the reversal's factor ()."""
        raw: Tensor = _Reverse.apply(self.raw, factor)
        return LEAST + (MOST - LEAST) * raw.sigmoid()


def reversal(progress: float) -> float:
    """Factor of the reversed gradient: 0 for the first fifth of the training, then along a cosine to 1."""
    place = max(0.0, progress - IDLE) / (1 - IDLE)
    return (1 - math.cos(math.pi * min(place, 1.0))) / 2


def scheduled(config: TeacherConfig, progress: float) -> float:
    """T at a share of the training; a learned one where it begins."""
    if config.schedule != "linear":
        return config.temperature
    return config.temperature + (config.final_temperature - config.temperature) * progress
