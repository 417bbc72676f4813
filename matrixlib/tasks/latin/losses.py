"""Losses, metrics, chance levels and floors of completed grids.

Arrays: B batch, N side, K = N digit indices; `log_p` (B, N, N, K) fp32 log-probabilities of each cell's digit indices,
`target` (B, N, N) int64 digit indices, `hidden` (B, N, N) bool, `size` (B,) int64.
"""

import torch
from torch import Tensor
from torch.nn import functional

from matrixlib.engine.task import Batch, Sums
from matrixlib.tasks.latin.vocabulary import EMPTY, PAD

IMPOSSIBLE = -1e9  # log-probability of a digit that the puzzle does not have


def inside(size: Tensor, side: int) -> Tensor:
    """(B, side, side) bool: cells inside grids of these sizes (B,)."""
    places = torch.arange(side, device=size.device) < size[:, None]
    return places[:, :, None] & places[:, None, :]


def tokens(batch: Batch) -> Tensor:
    """(B, N, N) int64 input tokens: given digits, EMPTY, PAD outside."""
    square = batch["square"]
    digits = batch["digits"].gather(1, square.long().flatten(1)).view_as(square)
    return torch.where(inside(batch["size"], square.shape[1]), torch.where(batch["hidden"], EMPTY, digits), PAD)


def digit_log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Token logits (B, N, N, 35) to log-probabilities (B, N, N, K) of digits with tokens (B, K), 0 = none."""
    side = logits.shape[1]
    index = tokens[:, None, None].expand(-1, side, side, -1)
    digit_logits = logits.float().gather(3, index)
    return digit_logits.masked_fill(index == 0, IMPOSSIBLE).log_softmax(3)


def sinkhorn(logits: Tensor, tokens: Tensor, digits: Tensor, iterations: int) -> Tensor:
    """Token logits (B, N, N, 35), fp32, in which the digits (B, K), 0 = none, of every empty cell are log-probabilities
    after alternate normalisation over rows, columns and cells (Sinkhorn and Knopp 1967; Mena et al. 2018).

    Digits that stand in the cell's row or column are IMPOSSIBLE. Sums over each line and digit approach 1 with the
    iterations; those of a cell are 1. tokens: the grids (B, N, N).
    """
    logits, digits = logits.float(), digits[:, None, None]
    placed = tokens[..., None] == digits
    empty = (tokens == EMPTY)[..., None]
    ruled_out = placed.any(1)[:, None] | placed.any(2)[:, :, None] | ~empty | (digits == PAD)
    index = digits.expand_as(placed)
    log_p = logits.gather(3, index).masked_fill(ruled_out, IMPOSSIBLE)
    for axis in (2, 1, 3) * iterations:
        log_p = (log_p - log_p.logsumexp(axis, keepdim=True)).masked_fill(ruled_out, IMPOSSIBLE)
    return torch.where(empty, logits.scatter(3, index, log_p), logits)


def cell_loss(log_p: Tensor, target: Tensor, hidden: Tensor, size: Tensor, smoothing: float) -> tuple[Tensor, Sums]:
    """Cross-entropy summed over hidden cells, label-smoothed over the n digits. Metrics over the same cells: accuracy,
    entropy of the prediction (nats)."""
    loss = -log_p.gather(3, target[..., None])[..., 0]
    possible = log_p.masked_fill(log_p < IMPOSSIBLE / 2, 0.0)
    if smoothing:
        spread = -possible.sum(3) / size[:, None, None]
        loss = (1 - smoothing) * loss + smoothing * spread
    with torch.no_grad():
        hits = (log_p.argmax(3) == target) & hidden
        entropy = -(possible * log_p.exp()).sum(3)
        metrics = {"accuracy": hits.sum(), "entropy": torch.where(hidden, entropy, 0.0).sum()}
    return torch.where(hidden, loss, 0.0).sum(), metrics


def constraint_loss(log_p: Tensor, target: Tensor, hidden: Tensor, size: Tensor) -> tuple[Tensor, Sums]:
    """Penalty on digits expected more than once: the mean over lines and digits of relu(E - 1)^2, rows plus columns,
    summed over grids with a hidden cell.

    E: expected count of a digit in a line, from predictions in hidden cells and given digits elsewhere. Metrics over
    the same grids: valid (the best digits solve the grid), violations (repeated digits over all lines).
    """
    k = log_p.shape[3]
    grid = inside(size, log_p.shape[1])
    given = functional.one_hot(target, k) * grid[..., None]
    p = torch.where(hidden[..., None], log_p.exp(), given.float())
    over = sum((p.sum(axis) - 1).clamp(min=0).square().sum((1, 2)) for axis in (1, 2))
    rows = hidden.flatten(1).any(1)
    with torch.no_grad():
        filled = torch.where(hidden, log_p.argmax(3), target)
        wrong = violations(filled, size)
        metrics = {"valid": ((wrong == 0) & rows).sum(), "violations": torch.where(rows, wrong, 0).sum()}
    return torch.where(rows, over / size.square(), 0.0).sum(), metrics


def violations(filled: Tensor, size: Tensor) -> Tensor:
    """(B,) int64: digits of full grids (B, N, N) that repeat an earlier one of their row or column."""
    side = filled.shape[1]
    digits = functional.one_hot(filled, side) * inside(size, side)[..., None]
    return sum((digits.sum(axis) - 1).clamp(min=0).sum((1, 2)) for axis in (1, 2))  # type: ignore[return-value]


def cell_floor(hidden: Tensor, size: Tensor, smoothing: float) -> float:
    """Lowest `cell_loss`: the entropy of the smoothed targets; with several completions no network reaches it."""
    n = size.double()
    rest = smoothing / n
    top = 1 - smoothing + rest
    entropy = -(torch.xlogy(top, top) + (n - 1) * torch.xlogy(rest, rest))
    return (hidden.flatten(1).sum(1) * entropy).sum().item()
