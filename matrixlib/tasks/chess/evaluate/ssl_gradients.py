"""How the gradients of the self-supervised heads at the trunk stand to those of policy and value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from matrixlib.data.loader import Loader
from matrixlib.engine.task import to_device
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.ssl_outputs import batches as held_out_batches
from matrixlib.tasks.chess.model import PolicyValueNet

MAIN = ("policy", "value")
BATCH = 256  # positions of one measured gradient

Estimate = tuple[float, float]
"""A number and half of its 95 % interval."""


@dataclass(frozen=True)
class Conflict:
    """How a head's gradient at the trunk stands to those of policy and value: main term -> estimate; None where the
    main term's own gradient cannot be told from noise.

    effect: what the head's weighted gradient adds to a small step down the main term's own, as a share of what that
    step gains: -0.1 takes a tenth away.
    """

    cosine: dict[str, Estimate | None]
    effect: dict[str, Estimate | None]


def conflicts(net: Net, loader: Loader, batches: int = 16, seed: int = 0) -> dict[str, Conflict]:
    """Each head's conflict, over batches of 256 positions.

    One batch's gradient is mostly noise, and terms of one batch share it. So inner products are taken between
    different batches alone, which leaves those of the true gradients, and intervals by leaving a batch out in turn
    (jackknife). In fp32 and evaluation mode; all gradients are held on the host, 4 bytes for each batch, term and
    parameter of the trunk. Empty where no head's gradient reaches the trunk. ValueError for fewer than 4 batches.
    """
    task, device = net.task, net.runtime.torch_device
    known = {*MAIN, *task.gated}  # a teacher is not asked here
    terms = sorted(term for term, weight in task.weights.items() if weight > 0 and term in known)
    heads = [head for head in task.config.model.ssl if f"ssl_{head}" in terms]
    if not (task.config.model.ssl_trunk and heads):
        return {}
    assert isinstance(net.model, PolicyValueNet)
    trunk = net.model.trunk_parameters()
    gradients = []
    try:
        for value in trunk:
            value.requires_grad_(True)
        for batch, hidden in held_out_batches(net, loader, batches * BATCH, BATCH, seed):
            if len(batch["pieces"]) < BATCH:
                continue
            rows = []
            for term in terms:
                inputs = hidden if term == "ssl_piece" else batch
                losses, _ = task.losses(net.model, to_device(inputs, device), frozenset({term}))
                grads = torch.autograd.grad(losses[term] / max(1, task.counts(inputs)[term]), trunk)
                rows.append(torch.cat([grad.flatten() for grad in grads]).cpu())
            gradients.append(torch.stack(rows).numpy())
    finally:
        net.model.requires_grad_(False)
    if len(gradients) < 4:
        raise ValueError(
            f"{len(gradients)} batches of {BATCH} held-out positions tell too little of the gradients; take 4 at least"
        )
    main = {term: terms.index(term) for term in MAIN if term in terms}
    weights = [float(task.weights[term]) for term in terms]
    return {head: conflict(np.stack(gradients), terms.index(f"ssl_{head}"), main, weights) for head in heads}


def conflict(gradients: NDArray[np.float32], head: int, main: Mapping[str, int], weights: Sequence[float]) -> Conflict:
    """A head's conflict by gradients (batches, terms, parameters); head, main: places among the terms."""
    cosine, effect = {}, {}
    for name, m in main.items():
        inner, own, other = (_across(gradients, *pair) for pair in ((head, m), (m, m), (head, head)))
        known = own[0] > 2 * _jackknife(own)
        ratio = weights[head] / weights[m] * inner / np.maximum(own, 1e-30)
        effect[name] = (float(ratio[0]), 1.96 * _jackknife(ratio)) if known else None
        known = known and other[0] > 2 * _jackknife(other)
        angle = inner / np.sqrt(np.maximum(own * other, 1e-30))
        cosine[name] = (float(angle[0]), 1.96 * _jackknife(angle)) if known else None
    return Conflict(cosine, effect)


def table(conflicts: Mapping[str, Conflict]) -> pd.DataFrame:
    """A row a head: the cosine of its gradient with those of policy and value, and what it does to their steps; empty
    where no head's gradient reaches the trunk (model.ssl_trunk, loss.ssl).
    """

    def text(estimate: Estimate | None, form: str) -> str:
        return f"{estimate[0]:+{form}} +- {estimate[1]:{form}}" if estimate else "not to be told"

    rows = {}
    for head, one in conflicts.items():
        row = {}
        for main in one.cosine:
            row[f"cosine with {main}"] = text(one.cosine[main], ".2f")
            row[f"to the step of {main}"] = text(one.effect[main], ".0%")
        rows[head] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def _across(gradients: NDArray[np.float32], a: int, b: int) -> NDArray[np.float64]:
    """(1 + batches,): mean inner product of term a's and term b's gradients of different batches, over all batches and
    over all but one.
    """
    gram = (gradients[:, a] @ gradients[:, b].T).astype(np.float64)
    n = len(gram)
    diagonal = np.diag(gram)
    total = gram.sum() - diagonal.sum()
    without = total - (gram.sum(0) + gram.sum(1) - 2 * diagonal)
    return np.concatenate([[total / (n * (n - 1))], without / ((n - 1) * (n - 2))])


def _jackknife(estimates: NDArray[np.float64]) -> float:
    """Standard error of the first estimate, of all batches, from the others, each without one of them."""
    without = estimates[1:]
    n = len(without)
    return float(math.sqrt((n - 1) / n * np.square(without - without.mean()).sum()))
