"""Losses of the parts of a controller, frame by frame in fp32, and what the probabilities are that minimise them.

Shapes: ... rows and frames, K classes of a head; `logits` (..., 8 or K) and `choices` (..., 8 or 1) of one head. The
loss of the buttons is the mean over the eight, so that no part outweighs the others.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from matrixlib.tasks.melee.controller import Head

LIMIT = 60.0  # of logits
TINY = 1e-7
LEAST = 0.01  # what a class keeps at least of its share of the smoothing: below that, a network's noise would decide


@dataclass(frozen=True)
class Objective:
    """Options of the loss. weights: (8,) factors of pressed buttons, on the device of the logits. gamma: of the focal
    loss, 0 = none. smoothing: share of a class's target spread over all."""

    weights: Tensor
    gamma: float = 0.0
    smoothing: float = 0.0

    def losses(self, head: Head, logits: Tensor, choices: Tensor) -> Tensor:
        """(...) loss of each frame.

        Focal loss: the log-likelihood times (1 - p_t)^gamma, p_t the probability of what is true (Lin et al. 2017).
        Targets of buttons are never smoothed.
        """
        z = logits.float().clamp(-LIMIT, LIMIT)
        if head.name == "buttons":
            right = torch.where(choices > 0, z, -z)
            loss = -F.logsigmoid(right)
            if self.gamma:
                loss = loss * (self.gamma * F.logsigmoid(-right)).exp()
            weight = torch.where(choices > 0, self.weights, 1.0)
            return (weight * loss).mean(-1)
        log_p = z.log_softmax(-1)
        loss = -log_p
        if self.gamma:
            loss = loss * (1 - log_p.exp()).clamp(min=TINY) ** self.gamma
        own = loss.gather(-1, choices)[..., 0]
        return (1 - self.smoothing) * own + self.smoothing * loss.mean(-1) if self.smoothing else own

    def floor(self, head: Head) -> float:
        """The least loss of a frame: the entropy of the smoothed target; of a focal loss 0, which none is below."""
        if head.name == "buttons" or not self.smoothing or self.gamma:
            return 0.0
        rest = self.smoothing / head.classes
        top = 1 - self.smoothing + rest
        return -(math.log(top) * top if top else 0.0) - (head.classes - 1) * rest * math.log(rest)

    def correct(self, head: Head, logits: Tensor) -> Tensor:
        """Log-odds (..., 8) of the buttons, log-probabilities (..., K) of classes, of what the logits were trained for.

        The focal loss has its minimum elsewhere than at the true probabilities, which follow from those of the
        network q as q / phi(q), phi(q) = (1 - q)^gamma - gamma (1 - q)^(gamma - 1) q ln q (Charoenphakdee et al. 2021,
        "On Focal Loss for Class-Posterior Probability Estimation"). A weight of a pressed button multiplies its odds.
        Smoothing mixes every class's share into what is learned, and is taken out again.
        """
        z = logits.float().clamp(-LIMIT, LIMIT)
        if head.name == "buttons":
            odds = z
            if self.gamma:
                odds = odds - self._log_phi(F.logsigmoid(z), F.logsigmoid(-z))
                odds = odds + self._log_phi(F.logsigmoid(-z), F.logsigmoid(z))
            return odds - self.weights.log()
        log_p = z.log_softmax(-1)
        if self.gamma:
            others = (-log_p.clamp(max=-TINY).expm1()).log()
            log_p = (log_p - self._log_phi(log_p, others)).log_softmax(-1)
        if self.smoothing:
            share = self.smoothing / head.classes
            log_p = (log_p.exp() - share).clamp(min=LEAST * share).log().log_softmax(-1)
        return log_p

    def _log_phi(self, log_q: Tensor, log_rest: Tensor) -> Tensor:
        """ln phi(q) from ln q and ln (1 - q)."""
        return (self.gamma - 1) * log_rest + (log_rest.exp() - self.gamma * log_q.exp() * log_q).log()


def log_likelihood(head: Head, corrected: Tensor, choices: Tensor) -> Tensor:
    """(...) of what was done, of all eight buttons together, from `Objective.correct`."""
    if head.name == "buttons":
        return F.logsigmoid(torch.where(choices > 0, corrected, -corrected)).sum(-1)
    return corrected.gather(-1, choices)[..., 0]


def likeliest(head: Head, corrected: Tensor) -> Tensor:
    """(..., 8 or 1) choices."""
    return (corrected > 0).long() if head.name == "buttons" else corrected.argmax(-1, keepdim=True)
