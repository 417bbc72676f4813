"""Losses of the chess task: SUMS over valid items in fp32, and metrics as sums over the same items.

Shapes: B rows, L places for legal moves (padded), c classes. `rows` (B,) bool says which rows may give a
loss at all. A sum without any valid item is a zero that keeps its graph. Nothing here waits for the device.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

FILL = -1e9  # logit of a pad: finite, so that nothing times it is NaN
PAD = -1  # policy index of a pad
UNKNOWN = 2  # result
Sums = dict[str, Tensor]


def plain_rows(batch: Mapping[str, Tensor]) -> Tensor:
    """(B,) bool: rows whose whole board is shown; the others train the piece head alone."""
    if "hidden" not in batch:
        return torch.ones(len(batch["pieces"]), dtype=torch.bool, device=batch["pieces"].device)
    return batch["hidden"].eq(0).all(1)


def policy_rows(index: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """(B,) bool: rows with a policy target, that is some weight on a listed move, of index and weight (B, L)."""
    return rows & _given(torch.where(index != PAD, weight, 0.0))


def policy_target(index: Tensor, weight: Tensor) -> Tensor:
    """(B, L) fp32 distribution over the listed moves, 0 at pads; all 0 in rows without weight."""
    weight = torch.where(index != PAD, weight.float(), 0.0)
    total = weight.sum(1, keepdim=True)
    return weight / torch.where(total > 0, total, 1.0)


def smoothed(target: Tensor, index: Tensor, smoothing: float) -> Tensor:
    """(1 - e) target + e / n over the n listed moves, never over pads or illegal moves (Szegedy et al. 2016)."""
    legal = index != PAD
    share = smoothing / legal.sum(1, keepdim=True).clamp(min=1)
    return torch.where(legal, (1 - smoothing) * target + share, 0.0)


def entropy(target: Tensor) -> Tensor:
    """(B,) nats of distributions (B, n); 0 log 0 = 0."""
    return -torch.special.xlogy(target, target).sum(1)


def legal_logits(logits: Tensor, index: Tensor) -> Tensor:
    """(B, L) fp32 logits of the listed moves out of (B, 4672), or given as (B, L); FILL at pads."""
    picked = logits.float()
    if logits.shape != index.shape:
        picked = picked.gather(1, index.clamp(min=0).long())
    return torch.where(index != PAD, picked, FILL)


def best_alone(target: Tensor) -> Tensor:
    """Targets (B, L) with all of their weight on the best move, in equal parts on several; rows of zeros stay."""
    best = (target >= target.amax(1, keepdim=True)) & (target > 0)
    return best / best.sum(1, keepdim=True).clamp(min=1)


def sharpened(target: Tensor, temperature: float) -> Tensor:
    """Targets p (B, L) as p^(1/T), again with a sum of 1; rows of zeros stay. T > 1 softens."""
    if temperature == 1:
        return target
    most = target.amax(1, keepdim=True)
    powers = (target / torch.where(most > 0, most, 1.0)).pow(1 / temperature)
    return powers / powers.sum(1, keepdim=True).clamp(min=1)


def policy_loss(
    logits: Tensor,
    index: Tensor,
    weight: Tensor,
    rows: Tensor,
    smoothing: float,
    best: bool = False,
    temperature: float = 1.0,
) -> tuple[Tensor, Sums]:
    """Cross-entropy over the legal moves, summed over `policy_rows`.

    logits (B, 4672); index (B, L) ALL legal moves in the network's frame, PAD elsewhere; weight (B, L) of
    any scale. What is learned, but no metric knows of: best: the best move alone; temperature T: both the target and
    what the logits say with p^(1/T) in place of p, so that the logits stay those of the target itself. Metrics: `top1`,
    `top3` and `top5` (one of so many best moves is one of the target's best), `kl` to the target without smoothing,
    `skipped` (rows without a target, so per valid row after division).
    """
    valid, legal = policy_rows(index, weight, rows), index != PAD
    scores, target = legal_logits(logits, index), policy_target(index, weight)
    log_p = torch.where(legal, scores.log_softmax(1), 0.0)
    learned = best_alone(target) if best else sharpened(target, temperature)
    learner = log_p if temperature == 1 else torch.where(legal, (scores / temperature).log_softmax(1), 0.0)
    loss = -(smoothed(learned, index, smoothing) * learner).sum(1)
    with torch.no_grad():
        right = target >= target.amax(1, keepdim=True)
        top = scores.topk(min(5, scores.shape[1]), dim=1).indices
        hits = right.gather(1, top) & valid[:, None]
        kl = -(target * log_p).sum(1) - entropy(target)
        metrics = {
            "top1": hits[:, 0].sum(),
            "top3": hits[:, :3].any(1).sum(),
            "top5": hits.any(1).sum(),
            "kl": torch.where(valid, kl, 0.0).sum(),
            "skipped": (rows & ~valid).sum(),
        }
    return torch.where(valid, loss, 0.0).sum(), _floats(metrics)


def policy_bounds(
    index: Tensor, weight: Tensor, rows: Tensor, smoothing: float, best: bool = False, temperature: float = 1.0
) -> tuple[float, float]:
    """(chance, floor) sums: ln(number of legal moves), and the entropy of the smoothed target."""
    valid = policy_rows(index, weight, rows)
    moves = (index != PAD).sum(1)[valid].double()
    target = policy_target(index, weight)
    target = best_alone(target) if best else sharpened(target, temperature)
    target = smoothed(target, index, smoothing)[valid].double()
    return float(moves.log().sum()), float(entropy(target).sum())


def value_known(wdl: Tensor, result: Tensor, result_share: float) -> Tensor:
    """(B,) bool: rows of which `value_target` makes a target."""
    known = torch.zeros(len(wdl), dtype=torch.bool, device=wdl.device)
    if result_share < 1:
        known = known | _given(wdl)
    return known | (result != UNKNOWN) if result_share > 0 else known


def value_target(wdl: Tensor, result: Tensor, result_share: float) -> tuple[Tensor, Tensor]:
    """(target (B, 3) win-draw-loss, known (B,) bool) from the teacher's `wdl` (B, 3) and the game's `result` (B,).

    With s = result_share: both known, (1 - s) wdl + s one_hot(result); wdl alone (result 2), wdl, or nothing
    if s is 1; result alone (wdl all 0), one_hot(result), or nothing if s is 0; neither, nothing. So an
    unknown part has no weight and the other takes all of it. Rows with nothing have a target of zeros.
    """
    share_wdl = (1 - result_share) * _given(wdl).float()
    share_result = result_share * (result != UNKNOWN).float()
    classes = torch.arange(3, device=wdl.device)  # win 1 -> 0, draw 0 -> 1, loss -1 -> 2
    one_hot = (1 - result.long())[:, None].eq(classes).float()
    total = share_wdl + share_result
    shared = torch.where(share_wdl[:, None] > 0, share_wdl[:, None] * wdl.float(), 0.0)
    target = shared + share_result[:, None] * one_hot
    return target / torch.where(total > 0, total, 1.0)[:, None], value_known(wdl, result, result_share)


def expected_score(distribution: Tensor) -> Tensor:
    """(B,) win + draw / 2, from 0 to 1, of (B, 3)."""
    return distribution[:, 0] + distribution[:, 1] / 2


def wdl_loss(logits: Tensor, target: Tensor, rows: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of logits (B, 3) with targets (B, 3), summed over `rows`.

    Metrics: `accuracy` (the likeliest class is one of the target's likeliest) and the moments of `_moments`.
    """
    log_p = logits.float().log_softmax(1)
    loss = -(target * log_p).sum(1)
    with torch.no_grad():
        best = target >= target.amax(1, keepdim=True)
        right = best.gather(1, log_p.argmax(1, keepdim=True)).squeeze(1) & rows
        metrics = {"accuracy": right.sum()} | _moments(expected_score(log_p.exp()), expected_score(target), rows)
    return torch.where(rows, loss, 0.0).sum(), _floats(metrics)


def scalar_loss(value: Tensor, target: Tensor, rows: Tensor, kind: str, delta: float) -> tuple[Tensor, Sums]:
    """Squared (`mse`) or `huber` error of values (B,) in -1..1 against win - loss of targets (B, 3), summed over
    `rows`. Metrics: the moments of `_moments`.
    """
    result = target[:, 0] - target[:, 2]
    loss = _scalar(value.float(), result, kind, delta)
    with torch.no_grad():
        metrics = _moments((value.float() + 1) / 2, (result + 1) / 2, rows)
    return torch.where(rows, loss, 0.0).sum(), _floats(metrics)


def value_bounds(target: Tensor, rows: Tensor, scalar: bool, kind: str, delta: float) -> tuple[float, float]:
    """(chance, floor) sums: ln 3 and the target's entropy; for the scalar head the loss of the value 0, and 0."""
    target = target[rows].double()
    if not scalar:
        return len(target) * math.log(3), float(entropy(target).sum())
    result = target[:, 0] - target[:, 2]
    return float(_scalar(torch.zeros_like(result), result, kind, delta).sum()), 0.0


def class_loss(logits: Tensor, classes: Tensor, squares: Tensor) -> tuple[Tensor, Sums]:
    """Cross-entropy of logits (B, c, 8, 8) with classes (B, 8, 8), summed over `squares` (B, 8, 8) bool.

    Metric: `accuracy`.
    """
    loss = F.cross_entropy(logits.float(), classes.long(), reduction="none")
    with torch.no_grad():
        right = (logits.argmax(1) == classes) & squares
    return torch.where(squares, loss, 0.0).sum(), _floats({"accuracy": right.sum()})


def binary_loss(logits: Tensor, target: Tensor, squares: Tensor, positive: float = 1.0) -> tuple[Tensor, Sums]:
    """Binary cross-entropy of logits (B, 1, 8, 8) with targets (B, 8, 8) of 0 and 1, summed over `squares`.

    positive: how many times a 1 counts. Pins and forks stand on 0.21 % and 0.11 % of the squares of the sample set,
    where an unweighted mean is small before anything is learned. Such a weight w trains the logit of the odds times w,
    so `calibrated` takes ln w away again (Elkan 2001): probabilities stay true.
    Metrics, all of calibrated logits: `cross_entropy`, unweighted, `accuracy`, and `hit` (true and predicted),
    `predicted` and `actual`, of which precision and recall are made.
    """
    scores, truth = logits.float().squeeze(1), target.float()
    # filled where it is, as a copy from the host would wait for the device
    weight = scores.new_full((), positive) if positive != 1 else None
    loss = F.binary_cross_entropy_with_logits(scores, truth, reduction="none", pos_weight=weight)
    with torch.no_grad():
        true_scores = calibrated(scores, positive)
        plain = F.binary_cross_entropy_with_logits(true_scores, truth, reduction="none")
        guess, actual = (true_scores > 0) & squares, (target > 0) & squares
        metrics = {
            "cross_entropy": torch.where(squares, plain, 0.0).sum(),
            "accuracy": ((guess == actual) & squares).sum(),
            "hit": (guess & actual).sum(),
            "predicted": guess.sum(),
            "actual": actual.sum(),
        }
    return torch.where(squares, loss, 0.0).sum(), _floats(metrics)


def calibrated(scores: Tensor, positive: float) -> Tensor:
    """Logits of the true odds, from logits that were trained with 1 counting `positive` times."""
    return scores - math.log(positive)


def binary_bounds(target: Tensor, squares: Tensor, positive: float) -> tuple[float, float]:
    """(chance, floor) sums of `binary_loss`: ln 2 a square, times its weight, and 0."""
    actual = int(((target > 0) & squares).sum())
    return (int(squares.sum()) + (positive - 1) * actual) * math.log(2), 0.0


def _given(target: Tensor) -> Tensor:
    """(B,) bool: rows of a target (B, n) that is not all 0. One with a NaN counts, so that it makes the loss NaN: left
    out of the loss it would make the gradient NaN alone (0 times NaN), which passes for an overflow of fp16.
    """
    return ~(target.sum(1) <= 0)


def _scalar(value: Tensor, result: Tensor, kind: str, delta: float) -> Tensor:
    if kind == "mse":
        return (value - result).square()
    return F.huber_loss(value, result, reduction="none", delta=delta)


def _moments(x: Tensor, y: Tensor, rows: Tensor) -> Sums:
    """Sums over `rows` of x, x^2, y, y^2 and xy: expected scores of network and target, for their correlation."""
    x, y = torch.where(rows, x, 0.0), torch.where(rows, y, 0.0)
    return {"x": x.sum(), "x2": (x * x).sum(), "y": y.sum(), "y2": (y * y).sum(), "xy": (x * y).sum()}


def _floats(sums: Sums) -> Sums:
    return {name: value.detach().float() for name, value in sums.items()}
