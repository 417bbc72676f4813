"""From what a network makes of a frame to a controller: 81 logits, decided part by part.

Shapes: ... any leading dimensions, W width; `choices` and `logits` as in controller.py.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matrixlib.tasks.melee.controller import HEADS, Head

SHOULDER_SHARE = 2  # the shoulder's head is so many times narrower
DEVIATION = 0.02  # of the last weights: a fresh network says nearly what a constant predictor does
SIZES = [head.classes for head in HEADS]
Correct = Callable[[Head, Tensor], Tensor]


class Heads(nn.Module):
    """Features (..., W) to logits. Autoregressive: each part also knows the choices of the parts before it.

    prior: (81,) logits that a fresh network starts with. weights: (8,) of pressed buttons in the loss, kept with the
    network, as what its logits mean depends on them.
    """

    weights: Tensor
    values: Tensor
    columns: Tensor

    def __init__(
        self, width: int, hidden: int, autoregressive: bool, prior: Sequence[float], weights: Sequence[float]
    ) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))
        # What each logit stands for: a value of a column of choices.
        values = torch.cat([torch.ones(8) if head.name == "buttons" else torch.arange(head.classes) for head in HEADS])
        columns = torch.cat([torch.arange(13)[head.choices].expand(head.classes) for head in HEADS])
        self.register_buffer("values", values.long(), persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        sizes = [hidden // SHOULDER_SHARE if head.name == "shoulder" else hidden for head in HEADS]
        self.inner = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        self.outer = nn.ModuleList(nn.Linear(size, head.classes) for size, head in zip(sizes, HEADS, strict=True))
        given = HEADS[:-1] if autoregressive else ()
        self.given = nn.ModuleList(nn.Linear(head.classes, width, bias=False) for head in given)
        start = torch.tensor(prior)
        with torch.no_grad():
            for head, layer in zip(HEADS, cast(Iterable[nn.Linear], self.outer), strict=True):
                layer.weight.normal_(std=DEVIATION)
                layer.bias.copy_(start[head.logits])

    def unfold(self, choices: Tensor) -> Tensor:
        """(..., 81) fp32 of whole controllers (..., 13): buttons as they are, a class as one of its places."""
        return (choices.index_select(-1, self.columns) == self.values).float()

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        """(..., 81) logits of each part, the parts before it being those of `choices` (..., 13)."""
        return self._run(x, lambda number, logits: choices[..., HEADS[number].choices])[0]

    def decide(self, x: Tensor, noise: Tensor, correct: Correct | None) -> tuple[Tensor, Tensor]:
        """(logits (..., 81), choices (..., 13)) with each part decided by what its noise (..., 81) makes greatest.

        noise: `gumbel` for a sample, zeros for the likeliest. correct: from logits of a head to log-odds (buttons) or
        log-probabilities, where the loss was not the likelihood.
        """
        noises = noise.split(SIZES, -1)

        def pick(number: int, logits: Tensor) -> Tensor:
            score = (logits if correct is None else correct(HEADS[number], logits.float())) + noises[number]
            return (score > 0).long() if number == 0 else score.argmax(-1, keepdim=True)

        return self._run(x, pick)

    def _run(self, x: Tensor, pick: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        parts, picks = [], []
        layers = zip_longest(self.inner, self.outer, self.values.split(SIZES), self.given)
        for number, (inner, outer, values, given) in enumerate(layers):
            parts.append(outer(F.relu(inner(x))))
            picks.append(pick(number, parts[-1]))
            if given is not None:
                x = x + given((picks[-1] == values).float())
        return torch.cat(parts, -1), torch.cat(picks, -1)


def gumbel(uniform: Tensor) -> Tensor:
    """Noise for `decide` from numbers (..., 81) between 0 and 1: logistic for buttons, Gumbel for classes, so that what
    becomes greatest is a sample (Maddison et al. 2014, "A* Sampling")."""
    u = uniform.clamp(1e-7, 1 - 1e-7)
    buttons = HEADS[0].logits
    return torch.cat([u[..., buttons].logit(), -(-u[..., buttons.stop :].log()).log()], -1)
