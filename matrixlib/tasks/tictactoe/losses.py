"""Loss sums, metrics, chance levels and floors of the tic-tac-toe task: sums over valid rows, in fp32.

Arrays: B rows; `target` (B, 9) shares of the moves, all 0 unknown; `free` (B, 9) bool; `result` (B,), 2 unknown.
"""

import math

import torch
from torch import Tensor

from matrixlib.tasks.tictactoe.records import UNKNOWN

FILL = -1e9  # logit of a taken square: finite, so that nothing times it is NaN
Sums = dict[str, Tensor]


def log_shares(logits: Tensor, free: Tensor) -> Tensor:
    """(B, 9) fp32 log-probabilities over the free squares, about FILL elsewhere."""
    return torch.where(free, logits.float(), FILL).log_softmax(1)


def policy_loss(logits: Tensor, target: Tensor, free: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy, summed over rows with a target. Metrics: `top1` (the best move is one of the target's best) and
    `kl` to the target."""
    log_p = log_shares(logits, free)
    loss = -(target * log_p).sum(1)  # 0 without a target
    with torch.no_grad():
        hits = _best(target).gather(1, log_p.argmax(1, keepdim=True))
        metrics = {"top1": hits.sum().float(), "kl": (loss - entropy(target)).sum()}
    return loss.sum(), metrics


def chances(target: Tensor, free: Tensor) -> Tensor:
    """(B,) of a random free square to count for `top1`, 0 without a target."""
    return _best(target).sum(1) / free.sum(1)


def value_loss(logits: Tensor, result: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of win, draw and loss, summed over known results. Metric: `accuracy`."""
    log_p, known = logits.float().log_softmax(1), result != UNKNOWN
    wanted = torch.where(known, 1 - result, 0)  # win 1 -> 0, draw 0 -> 1, loss -1 -> 2
    loss = -log_p.gather(1, wanted[:, None])[:, 0]
    right = (log_p.argmax(1) == wanted) & known
    return torch.where(known, loss, 0.0).sum(), {"accuracy": right.sum().float()}


def _best(target: Tensor) -> Tensor:
    """(B, 9) bool: the best moves, all that tie; none without a target."""
    return (target >= target.amax(1, keepdim=True)) & (target > 0)


def entropy(target: Tensor) -> Tensor:
    """(B,) nats."""
    return -torch.special.xlogy(target, target).sum(1)


def policy_bounds(target: Tensor, free: Tensor) -> tuple[float, float]:
    """(chance, floor): ln of the number of free squares, and the target's entropy."""
    known = target.sum(1) > 0
    return free.sum(1)[known].double().log().sum().item(), entropy(target.double()).sum().item()


def value_bounds(result: Tensor) -> tuple[float, float]:
    """(chance, floor): ln 3, and 0, as of a network that knows every game."""
    return (result != UNKNOWN).sum().item() * math.log(3), 0.0
