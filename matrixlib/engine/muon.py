"""Muon: momentum made orthogonal for the matrices of hidden layers, AdamW for everything else."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Newton and Schulz's iteration of the fifth degree, as torch has them: https://kellerjordan.github.io/posts/muon/."""
RMS = 0.2
"""Root mean square of an update of AdamW in units of its rate (Liu et al. 2025, https://arxiv.org/abs/2502.16982)."""
ROWS_DECAY = 0.95
"""Of the mean squares of rows (Li et al. 2025, https://arxiv.org/abs/2510.05491)."""


class Muon(torch.optim.AdamW):
    """Groups with `orthogonal: True` are moved by Muon, the others by AdamW; all by one learning rate.

    torch.optim.Muon takes matrices alone, and so no kernel of a convolution, and one at a time. Here a kernel
    (O, I, h, w) is a matrix (O, I * h * w), and matrices of one shape are made orthogonal together. An update has the
    size of AdamW's (torch's `match_rms_adamw`), so that rate and decay carry over from there.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, even_rows: bool = False, **options: Any
    ) -> None:
        """groups: of AdamW, each with the key `orthogonal`. momentum: of the matrices, with Nesterov's look ahead.
        even_rows: NorMuon, in which each output is moved about as far as the others.
        """
        super().__init__(groups, **options)
        self.momentum, self.even_rows = momentum, even_rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                self._move(group)
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not moved:
            return
        for parameter in moved:
            if not self.state[parameter]:  # AdamW's loading looks for a step in every state
                self.state[parameter] |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(parameter)}
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in moved]
        gradients = [parameter.grad for parameter in moved]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        directions = torch._foreach_lerp(gradients, buffers, self.momentum)
        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
        for places in _by_shape(directions):
            matrices = torch.stack([directions[place].flatten(1) for place in places])
            size = RMS * max(matrices.shape[1:]) ** 0.5
            updates = orthogonal(matrices)
            if self.even_rows:
                updates = self._evened([moved[place] for place in places], updates)
            for place, update in zip(places, updates, strict=True):
                moved[place].add_(update.view(moved[place].shape), alpha=-group["lr"] * size)

    def _evened(self, parameters: Sequence[Tensor], updates: Tensor) -> Tensor:
        """Orthogonal updates (N, R, C) with rows divided by the root of their mean squares of late; as large as before
        all together.
        """
        squares = updates.square().mean(2)
        for parameter, square in zip(parameters, squares, strict=True):
            state = self.state[parameter]
            if "row_squares" not in state:  # of as many dimensions as the parameter, as checkpoints want it
                state["row_squares"] = parameter.new_zeros(len(parameter), *[1] * (parameter.ndim - 1))
            late = state["row_squares"].view(-1)
            late.lerp_(square, 1 - ROWS_DECAY)
            square.copy_(late)
        even = updates / (squares.sqrt() + 1e-8).unsqueeze(2)
        return even * (updates.square().mean((1, 2), True) / even.square().mean((1, 2), True).clamp(min=1e-30)).sqrt()


def orthogonal(matrices: Tensor) -> Tensor:
    """(N, R, C) to about the nearest matrices with orthogonal rows (R <= C) or columns: singular values come out
    between 0.7 and 1.2, those that are next to nothing below.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).float()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = _by_squares(x) if x.is_cpu else _by_steps(x.bfloat16())
    return (x.mT if tall else x).to(matrices.dtype).contiguous()


def _by_steps(x: Tensor) -> Tensor:
    """Newton and Schulz's iteration as it is known, in bf16, for GPUs."""
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def _by_squares(x: Tensor) -> Tensor:
    """The same in a third of the time on a CPU: each step multiplies x by a polynomial of x x', and all of these
    commute, so they are multiplied with each other, small squares, and with x once.

    Not in TF32 or bf16: an eigenvalue of the square that rounding makes negative grows tenfold at each step.
    """
    a, b, c = COEFFICIENTS
    square = x @ x.mT
    one = torch.eye(square.shape[1], dtype=square.dtype)
    whole = one.expand_as(square)
    for number in range(STEPS):
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c).add_(one, alpha=a)
        whole = factor @ whole
        if number < STEPS - 1:
            square = factor @ square @ factor
    return whole @ x


def _by_shape(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of those whose matrices have one shape."""
    places: dict[torch.Size, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.flatten(1).shape, []).append(place)
    return list(places.values())
