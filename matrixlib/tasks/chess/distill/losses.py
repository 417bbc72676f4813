"""Distillation losses: policy, win-draw-loss, features; learned temperature; storage of teacher outputs.

Losses are fp32 sums over rows, as in `chess.losses`. Shapes: B rows, L legal moves (padded), C and D channels of the
two networks, S samples per row: 64 squares, or their mean (1). The teacher's policy is given as log-probabilities of
the legal moves, with arbitrary values in pads.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.data.shards import Batch, Layout
from matrixlib.engine.optim import SGDParameters
from matrixlib.tasks.chess.config import TeacherConfig
from matrixlib.tasks.chess.losses import PAD_INDEX, PAD_LOGIT, Sums, entropy, legal_logits, sums

MIN_NORM = 1e-12  # avoids division by 0
CKA_ROWS = 128  # batch size of CKA
MIN_TEMPERATURE, MAX_TEMPERATURE = 1.0, 5.0  # of a learned one; higher ones flatten the policy completely
WARMUP_SHARE = 0.2  # of the training, with a constant temperature
KEPT_MOVES = 32  # likeliest moves stored per position
NO_PLACE = 255  # no position has more than 218 moves
MIN_REST_SHARE = 1e-7  # probability of the other moves, at least: float16 may round it to 0
RECORD = np.dtype([("move", "u1", KEPT_MOVES), ("log_p", "<f2", KEPT_MOVES), ("rest", "<f2"), ("wdl", "<f2", 3)])
LAYOUT = Layout("chess teacher", 1, RECORD, {})  # moves as positions in the list of legal moves, 104 bytes


def policy_rows(index: Tensor, rows: Tensor) -> Tensor:
    """Mask (B,) of rows with a legal move. index: (B, L)."""
    return rows & (index != PAD_INDEX).any(1)


def softened(scores: Tensor, index: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities (B, L) of logits (B, L) / temperature (B,) over the legal moves, probability 0 in pads."""
    # Masked before the division: infinities would make the temperature's gradient NaN
    return (torch.where(index != PAD_INDEX, scores, PAD_LOGIT) / temperature[:, None]).log_softmax(1)


def policy_loss(
    logits: Tensor, index: Tensor, teacher: Tensor, rows: Tensor, temperature: Tensor
) -> tuple[Tensor, Sums]:
    """T^2 KL(teacher || student), both softened by T, over the legal moves (Hinton et al. 2015, arXiv:1503.02531).

    logits: (B, 4672). index: (B, L) in the network's frame. teacher: (B, L). temperature: (B,), differentiable. T^2
    keeps the gradient's scale independent of T. Metrics: `kl` at T = 1, `top1` (equal best moves), `temperature`.
    """
    scores = legal_logits(logits, index)
    with torch.no_grad():
        metrics = {
            "kl": _kl(scores, index, teacher, torch.ones_like(temperature)),
            "top1": scores.argmax(1) == torch.where(index != PAD_INDEX, teacher, PAD_LOGIT).argmax(1),
            "temperature": temperature,
        }
    loss = temperature.square() * _kl(scores, index, teacher, temperature)
    return sums(loss, policy_rows(index, rows), metrics)


def _kl(scores: Tensor, index: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """KL(teacher || student) (B,) of both softened policies, nats."""
    theirs, own = softened(teacher, index, temperature), softened(scores, index, temperature)
    return (theirs.exp() * (theirs - own)).sum(1)


def wdl_loss(logits: Tensor, teacher: Tensor, rows: Tensor) -> tuple[Tensor, Sums]:
    """KL(teacher || student) of logits (B, 3), probabilities (B, 3). Metric: `accuracy` (equal likeliest classes)."""
    log_p = logits.float().log_softmax(1)
    same = log_p.argmax(1) == teacher.argmax(1)
    return sums(-(teacher * log_p).sum(1) - entropy(teacher), rows, {"accuracy": same})


def block_pairs(config: TeacherConfig, own: int, theirs: int) -> Sequence[tuple[int, int]]:
    """(student block, teacher block) pairs: `teacher.layers`, or every student block at equal relative depth. own,
    theirs: numbers of blocks. ValueError for a block that does not exist."""
    layers = config.layers or tuple((block, max((block + 1) * theirs // own - 1, 0)) for block in range(own))
    for place, (name, count) in enumerate((("the student", own), ("the teacher", theirs))):
        if wrong := [pair[place] for pair in layers if pair[place] >= count] or [0] * (count == 0):
            raise ValueError(f"teacher.layers: {name} has {count} blocks, counted from 0, and no block {wrong[0]}")
    return layers


def feature_loss(own: Sequence[Tensor], theirs: Sequence[Tensor], rows: Tensor) -> Tensor:
    """1 - `linear_cka`, mean over the pairs of blocks, summed over the rows in groups of CKA_ROWS. rows: mask (B,).
    Additive over micro-batches whose sizes are multiples of CKA_ROWS."""
    total = torch.zeros((), device=rows.device)
    for start in range(0, len(rows), CKA_ROWS):
        part = slice(start, start + CKA_ROWS)
        aligned = [linear_cka(x[part], y[part], rows[part]) for x, y in zip(own, theirs, strict=True)]
        total = total + rows[part].sum() * (1 - torch.stack(aligned).mean())
    return total


def linear_cka(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Linear CKA in [0, 1] of features (B, C, S) and (B, D, S) over the samples of the mask `rows` (B,)
    (Kornblith et al. 2019, arXiv:1905.00414). Invariant to rotation and scaling, so widths may differ."""
    x, y = _samples(x, rows), _samples(y, rows)
    spread = (x.T @ x).norm() * (y.T @ y).norm()
    return (x.T @ y).square().sum() / spread.clamp(min=MIN_NORM)


def _samples(features: Tensor, rows: Tensor) -> Tensor:
    """Samples (B * S, C), centred and normalised to avoid overflow; zeros for masked rows."""
    weight = rows.float().repeat_interleave(features.shape[2])[:, None]
    features = features.to(torch.promote_types(features.dtype, torch.float32))  # sums overflow in fp16
    samples = torch.where(weight > 0, features.transpose(1, 2).flatten(0, 1), 0.0)
    centred = (samples - samples.sum(0) / weight.sum().clamp(min=1)) * weight
    return centred / centred.norm().clamp(min=MIN_NORM)


class LearnedTemperature(SGDParameters):
    """Adversarial temperature T = 1 + 4 sigmoid(raw) by gradient reversal (CTKD, Li et al. 2022, arXiv:2211.16231).
    Trained by SGD: Adam would cancel the factor of the reversed gradient."""

    def __init__(self, initial: float, rate: float) -> None:
        super().__init__()
        self.rate = rate
        share = (initial - MIN_TEMPERATURE) / (MAX_TEMPERATURE - MIN_TEMPERATURE)
        self.raw = nn.Parameter(torch.tensor(math.log(share / (1 - share))))

    def forward(self, factor: Tensor) -> Tensor:
        """T as a 0-d tensor; its gradient to `raw` is multiplied by -factor."""
        raw = self.raw.detach() - factor * (self.raw - self.raw.detach())
        return MIN_TEMPERATURE + (MAX_TEMPERATURE - MIN_TEMPERATURE) * raw.sigmoid()


def reversal_factor(progress: float) -> float:
    """Factor of the reversed gradient: 0 for WARMUP_SHARE of the training, then a cosine to 1."""
    place = max(0.0, progress - WARMUP_SHARE) / (1 - WARMUP_SHARE)
    return (1 - math.cos(math.pi * min(place, 1.0))) / 2


def scheduled_temperature(config: TeacherConfig, progress: float) -> float:
    """T at a fraction of the training; the initial one if T is learned."""
    if config.schedule != "linear":
        return config.temperature
    return config.temperature + (config.final_temperature - config.temperature) * progress


def pack_outputs(log_p: np.ndarray, wdl: np.ndarray, index: np.ndarray) -> np.ndarray:
    """RECORD rows (B,) of log-probabilities (B, L) of the moves `index` (B, L), -1 in pads, and wdl (B, 3)."""
    rows = np.zeros(len(index), RECORD)
    scores = np.where(index >= 0, log_p, -np.inf)
    top = np.argsort(-scores, axis=1, kind="stable")[:, :KEPT_MOVES]
    best = np.take_along_axis(scores, top, axis=1)
    rows["move"] = np.where(np.isfinite(best), top, NO_PLACE)
    rows["log_p"] = np.where(np.isfinite(best), best, 0).clip(-6e4, 0)
    rows["rest"] = (1 - np.exp(best).sum(1)).clip(0, 1)
    rows["wdl"] = wdl
    return rows


def unpack_outputs(batch: Batch) -> Batch:
    """The batch with `policy_teacher` (K,) float32, log-probabilities of the moves `policy_index`, from its `sidecar`
    (B,) RECORD if present. Moves beyond KEPT_MOVES share the rest equally."""
    if "sidecar" not in batch:
        return batch
    rows, offset = batch["sidecar"], batch["policy_offset"]
    others = np.maximum(np.diff(offset) - KEPT_MOVES, 1)
    rest = np.log(np.maximum(rows["rest"].astype(np.float32), MIN_REST_SHARE) / others)
    log_p = np.repeat(rest.astype(np.float32), np.diff(offset))
    row, place = np.nonzero(rows["move"] != NO_PLACE)
    log_p[offset[row] + rows["move"][row, place]] = rows["log_p"][row, place]
    return {**batch, "policy_teacher": log_p}
