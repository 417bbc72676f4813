"""Losses of a network that learns from a teacher's outputs: sums over rows in fp32, as those of `chess.losses`.

Shapes: B rows, L places for legal moves (padded). The teacher's policy is log-probabilities over a row's legal moves,
anything in pads. These take part as finite numbers times zero: an infinity would make every sum NaN, whatever it is
multiplied by.
"""

import math

import torch
from torch import Tensor

from matrixlib.tasks.chess.losses import FILL, PAD, Sums, entropy, legal_logits


def policy_rows(index: Tensor, rows: Tensor) -> Tensor:
    """(B,) bool: rows with a legal move, of policy indices (B, L)."""
    return rows & (index != PAD).any(1)


def softened(scores: Tensor, index: Tensor, temperature: Tensor) -> Tensor:
    """(B, L) log-probabilities of logits (B, L) over the legal moves divided by temperatures (B,).

    Pads get a probability of exactly 0 and a finite logarithm, whatever is in them. They are masked before the
    division: its gradient at an infinity would make that of the temperature NaN.
    """
    return (torch.where(index != PAD, scores, FILL) / temperature[:, None]).log_softmax(1)


def policy_loss(
    logits: Tensor, index: Tensor, teacher: Tensor, rows: Tensor, temperature: Tensor
) -> tuple[Tensor, Sums]:
    """T^2 KL(teacher || student), both softened by T, over the legal moves (Hinton et al. 2015, arXiv:1503.02531).

    logits (B, 4672); index (B, L) in the network's frame; teacher (B, L); temperature (B,), through which a gradient
    goes. T^2 keeps the size of the gradient where T changes. Metrics: `kl` at T = 1, `top1` (the same best move), and
    `temperature`.
    """
    valid, scores = policy_rows(index, rows), legal_logits(logits, index)
    loss = temperature.square() * _kl(scores, index, teacher, temperature)
    with torch.no_grad():
        plain = _kl(scores, index, teacher, torch.ones_like(temperature))
        same = scores.argmax(1) == torch.where(index != PAD, teacher, FILL).argmax(1)
        metrics = {
            "kl": torch.where(valid, plain, 0.0).sum(),
            "top1": (same & valid).float().sum(),
            "temperature": torch.where(valid, temperature, 0.0).sum(),
        }
    return torch.where(valid, loss, 0.0).sum(), metrics


def _kl(scores: Tensor, index: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """(B,) KL(teacher || student) of two policies softened alike, in nats."""
    theirs, own = softened(teacher, index, temperature), softened(scores, index, temperature)
    return (theirs.exp() * (theirs - own)).sum(1)


def policy_bounds(index: Tensor, teacher: Tensor, rows: Tensor, temperature: Tensor) -> tuple[float, float]:
    """(chance, floor) sums: T^2 (ln n - H) of a student that finds n moves alike, H the entropy of the softened
    teacher, and 0.
    """
    valid = policy_rows(index, rows)
    theirs = softened(teacher, index, temperature)[valid].double()
    legal = (index != PAD)[valid]
    spread = -(theirs.exp() * theirs).sum(1)
    start = temperature[valid].double().square() * (legal.sum(1).double().log() - spread)
    return float(start.clamp(min=0).sum()), 0.0


def wdl_loss(logits: Tensor, teacher: Tensor, rows: Tensor) -> tuple[Tensor, Sums]:
    """KL(teacher || student) of win-draw-loss, of logits and probabilities (B, 3). Metric: `accuracy`, the same
    likeliest class.
    """
    log_p = logits.float().log_softmax(1)
    loss = -(teacher * log_p).sum(1) - entropy(teacher)
    right = (log_p.argmax(1) == teacher.argmax(1)) & rows
    return torch.where(rows, loss, 0.0).sum(), {"accuracy": right.float().sum()}


def wdl_bounds(teacher: Tensor, rows: Tensor) -> tuple[float, float]:
    """(chance, floor) sums: ln 3 - H, H the teacher's entropy, and 0."""
    return float((math.log(3) - entropy(teacher[rows].double())).sum()), 0.0
