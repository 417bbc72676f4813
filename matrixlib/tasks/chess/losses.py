"""Losses of the chess task: fp32 sums over valid items, with metrics as sums over the same items.

Shapes: B rows, L legal moves (padded), c classes. rows: mask (B,) bool of the rows that count. A sum over no items is a
differentiable zero. Nothing here synchronises with the device.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from matrixlib.tasks.chess.config import LossConfig

PAD_LOGIT = -1e9  # finite, so that 0 * PAD_LOGIT is not NaN
PAD_INDEX = -1
UNKNOWN_RESULT = 2
MOVES_LEFT_SCALE, MOVES_LEFT_DELTA = 20.0, 10.0  # plies, as in Lc0's training
Sums = dict[str, Tensor]


def sums(values: Tensor, valid: Tensor, metrics: Mapping[str, Tensor]) -> tuple[Tensor, Sums]:
    """Sums of values and of metrics over the items of the mask `valid`; all of one shape."""
    totals = {name: torch.where(valid, value.detach().float(), 0.0).sum() for name, value in metrics.items()}
    return torch.where(valid, values, 0.0).sum(), totals


def visible_rows(batch: Mapping[str, Tensor]) -> Tensor:
    """Mask (B,) of the rows without hidden squares; the others train only the piece head."""
    if "hidden" not in batch:
        return torch.ones(len(batch["pieces"]), dtype=torch.bool, device=batch["pieces"].device)
    return batch["hidden"].eq(0).all(1)


def policy_rows(index: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """Mask (B,) of the rows with a policy target: weight on some move. index, weight: (B, L)."""
    return rows & _has_target(torch.where(index != PAD_INDEX, weight, 0.0))


def policy_target(index: Tensor, weight: Tensor) -> Tensor:
    """fp32 distribution (B, L) over the legal moves, 0 in pads; zeros in rows without weight."""
    weight = torch.where(index != PAD_INDEX, weight.float(), 0.0)
    total = weight.sum(1, keepdim=True)
    return weight / torch.where(total > 0, total, 1.0)


def training_target(target: Tensor, index: Tensor, options: LossConfig) -> Tensor:
    """Policy target (B, L) that is trained: the best moves in equal parts (`best_move`), or normalised p^(1/T); then
    label smoothing (Szegedy et al. 2016), (1 - e) p + e / n over the n legal moves. Zero rows are only smoothed."""
    most, temperature = target.amax(1, keepdim=True), options.policy_temperature
    if options.best_move:
        best = (target >= most) & (target > 0)
        target = best / best.sum(1, keepdim=True).clamp(min=1)
    elif temperature != 1:
        powers = (target / torch.where(most > 0, most, 1.0)).pow(1 / temperature)
        target = powers / powers.sum(1, keepdim=True).clamp(min=1)
    legal = index != PAD_INDEX
    share = options.label_smoothing / legal.sum(1, keepdim=True).clamp(min=1)
    return torch.where(legal, (1 - options.label_smoothing) * target + share, 0.0)


def entropy(target: Tensor) -> Tensor:
    """Entropy (B,) of distributions (B, n), nats."""
    return -torch.special.xlogy(target, target).sum(1)


def legal_logits(logits: Tensor, index: Tensor) -> Tensor:
    """fp32 logits (B, L) of the legal moves, gathered from (B, 4672) unless (B, L) already; PAD_LOGIT in pads."""
    picked = logits.float()
    if logits.shape != index.shape:
        picked = picked.gather(1, index.clamp(min=0).long())
    return torch.where(index != PAD_INDEX, picked, PAD_LOGIT)


def policy_loss(
    logits: Tensor, index: Tensor, weight: Tensor, rows: Tensor, options: LossConfig
) -> tuple[Tensor, Sums]:
    """Cross-entropy with the `training_target` over the legal moves, summed over `policy_rows`.

    logits: (B, 4672). index: (B, L), ALL legal moves in the network's frame, PAD_INDEX in pads. weight: (B, L), any
    scale. A temperature T also applies to the network's policy, which thus learns the target itself. Metrics, without
    temperature and smoothing: `top1`, `top3`, `top5` (the k likeliest moves contain one of the target's best), `kl` to
    the target, `skipped` (rows without a target).
    """
    valid, legal = policy_rows(index, weight, rows), index != PAD_INDEX
    scores, target = legal_logits(logits, index), policy_target(index, weight)
    log_p = torch.where(legal, scores.log_softmax(1), 0.0)
    temperature = options.policy_temperature
    learner = log_p if temperature == 1 else torch.where(legal, (scores / temperature).log_softmax(1), 0.0)
    with torch.no_grad():
        right = target >= target.amax(1, keepdim=True)
        hits = right.gather(1, scores.topk(min(5, scores.shape[1]), dim=1).indices)
        metrics = {f"top{k}": hits[:, :k].any(1) for k in (1, 3, 5)}
        metrics["kl"] = -(target * log_p).sum(1) - entropy(target)
    loss, totals = sums(-(training_target(target, index, options) * learner).sum(1), valid, metrics)
    return loss, totals | {"skipped": (rows & ~valid).sum().float()}


def policy_floor(index: Tensor, weight: Tensor, rows: Tensor, options: LossConfig) -> float:
    """Minimum of `policy_loss`: the entropy of its `training_target`."""
    target = training_target(policy_target(index, weight), index, options)
    return float(entropy(target[policy_rows(index, weight, rows)].double()).sum())


def value_target(wdl: Tensor, result: Tensor, result_share: float) -> tuple[Tensor, Tensor]:
    """Win-draw-loss target (B, 3) and mask (B,) of known rows, from an engine's `wdl` (B, 3) and the game's `result`.

    With s = result_share: (1 - s) wdl + s one_hot(result). Where one of them is unknown (wdl all 0, result 2) the other
    has all the weight, unless s gives it none. Rows without a target are 0.
    """
    share_wdl = (1 - result_share) * _has_target(wdl).float()
    share_result = result_share * (result != UNKNOWN_RESULT).float()
    classes = torch.arange(3, device=wdl.device)  # win 1 -> 0, draw 0 -> 1, loss -1 -> 2
    one_hot = (1 - result.long())[:, None].eq(classes).float()
    total = share_wdl + share_result
    shared = torch.where(share_wdl[:, None] > 0, share_wdl[:, None] * wdl.float(), 0.0)
    target = shared + share_result[:, None] * one_hot
    return target / torch.where(total > 0, total, 1.0)[:, None], total > 0


def expected_score(distribution: Tensor) -> Tensor:
    """Expected score win + draw / 2, (B,) in [0, 1], of win-draw-loss (B, 3)."""
    return distribution[:, 0] + distribution[:, 1] / 2


def wdl_loss(logits: Tensor, target: Tensor, rows: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of logits (B, 3) with targets (B, 3) over `rows`. Metrics: `accuracy` (any tie), `_moments`."""
    log_p = logits.float().log_softmax(1)
    with torch.no_grad():
        best = target >= target.amax(1, keepdim=True)
        metrics = {"accuracy": best.gather(1, log_p.argmax(1, keepdim=True)).squeeze(1)}
        metrics |= _moments(expected_score(log_p.exp()), expected_score(target))
    return sums(-(target * log_p).sum(1), rows, metrics)


def scalar_loss(value: Tensor, target: Tensor, rows: Tensor, options: LossConfig) -> tuple[Tensor, Sums]:
    """Squared or Huber error of values (B,) to win - loss of targets (B, 3) over `rows`. Metrics: `_moments`."""
    value, result = value.float(), target[:, 0] - target[:, 2]
    if options.scalar == "mse":
        loss = (value - result).square()
    else:
        loss = F.huber_loss(value, result, reduction="none", delta=options.huber_delta)
    return sums(loss, rows, _moments((value.detach() + 1) / 2, (result + 1) / 2))


def moves_left_rows(batch: Mapping[str, Tensor]) -> Tensor:
    """Mask (B,) of the rows with a known end of the game."""
    return visible_rows(batch) & batch["moves_left"].gt(0)


def moves_left_loss(out: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, Sums]:
    """Huber loss of predicted plies (B,), in units of MOVES_LEFT_SCALE. Metric: `error` in plies."""
    scaled = (out["moves_left"].float() - batch["moves_left"]) / MOVES_LEFT_SCALE
    delta = MOVES_LEFT_DELTA / MOVES_LEFT_SCALE
    loss = F.huber_loss(scaled, torch.zeros_like(scaled), reduction="none", delta=delta)
    return sums(loss, moves_left_rows(batch), {"error": MOVES_LEFT_SCALE * scaled.abs()})


def class_loss(logits: Tensor, classes: Tensor, squares: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of logits (B, c, 8, 8) with classes (B, 8, 8) over the mask `squares`; metric `accuracy`."""
    loss = F.cross_entropy(logits.float(), classes.long(), reduction="none")
    return sums(loss, squares, {"accuracy": logits.argmax(1) == classes})


def binary_loss(logits: Tensor, target: Tensor, squares: Tensor, positive: float = 1.0) -> tuple[Tensor, Sums]:
    """Binary cross-entropy of logits (B, 1, 8, 8) with targets (B, 8, 8) of 0 and 1 over the mask `squares` (B, 8, 8).

    positive: weight of the positives; pins and forks are on 0.21 % and 0.11 % of the squares. It raises the logits by
    ln(positive), which `calibrated` subtracts (Elkan 2001). Metrics of calibrated logits: `cross_entropy` (unweighted),
    `accuracy`, and the counts `hit` (true positives), `predicted`, `actual` for precision and recall.
    """
    scores, truth = logits.float().squeeze(1), target.float()
    # Filled on the device: a copy from the host would synchronise
    weight = scores.new_full((), positive) if positive != 1 else None
    loss = F.binary_cross_entropy_with_logits(scores, truth, reduction="none", pos_weight=weight)
    with torch.no_grad():
        true_scores = calibrated(scores, positive)
        guess, actual = true_scores > 0, target > 0
        metrics = {
            "cross_entropy": F.binary_cross_entropy_with_logits(true_scores, truth, reduction="none"),
            "accuracy": guess == actual,
            "hit": guess & actual,
            "predicted": guess,
            "actual": actual,
        }
    return sums(loss, squares, metrics)


def calibrated(scores: Tensor, positive: float) -> Tensor:
    return scores - math.log(positive)


def _has_target(target: Tensor) -> Tensor:
    """Mask (B,) of the rows of a target (B, n) that are not all 0."""
    # NaN rows count: excluded, they would make only the gradient NaN, which looks like an fp16 overflow
    return ~(target.sum(1) <= 0)


def _moments(x: Tensor, y: Tensor) -> Sums:
    """Moments x, x^2, y, y^2, xy of the expected scores (B,) of network and target, for their correlation."""
    return {"x": x, "x2": x * x, "y": y, "y2": y * y, "xy": x * y}
