"""How far a network agrees with another on held-out positions, beside how far it agrees with the labels."""

from typing import Any

import numpy as np
from torch import nn

from matrixlib.data.loader import Loader
from matrixlib.engine.task import Batch
from matrixlib.tasks.chess.evaluate.held_out import held_out
from matrixlib.tasks.chess.evaluate.net import Net

INPUTS = ("pieces", "state", "policy_index")
"""Of a batch of `prepare`: what networks are asked with. One that looks at history fills it up by its own rule."""
FEWEST = 3
"""Moves of a position whose log-probabilities are correlated: any two lie on a line."""


class Beside:
    """The task of a network that compares each batch that it scores with another one's answers: each is asked once.

    rows: by name, a value for each row (see `_of_rows`), in parts.
    """

    def __init__(self, net: Net, other: Net) -> None:
        self.task, self.other = net.task, other
        self.rows: dict[str, list[np.ndarray]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> tuple[Batch, Batch]:
        """As the task's."""
        out = self.task.forward(model, batch, active)
        sums = self.task.loss(out, batch, active)
        arrays = {name: value.cpu().numpy() for name, value in batch.items()}
        own = {name: value.float().cpu().numpy() for name, value in self.task.probabilities(out, batch).items()}
        theirs = self.other.predict({name: arrays[name] for name in INPUTS})
        for name, values in _of_rows(arrays, own, theirs).items():
            self.rows.setdefault(name, []).append(values)
        return sums


def agreement(net: Net, teacher: Net, loader: Loader, sample: int = 0) -> dict[str, Any]:
    """The figures of `held_out` with these (`sample`: on so many positions, 0 = all), by name.

    teacher_correlation: Pearson correlation of the two networks' log-probabilities over the legal moves of a position,
    which takes their means away, the median over positions; pooled over positions it would come out higher for any
    pair. label_correlation: the same with the labels, over the moves that have a share. teacher_kl: KL(teacher ||
    network), nats. teacher_top1: the same best move. teacher_value_correlation: Pearson of expected scores.
    ValueError as of `held_out`.
    """
    beside: Any = Beside(net, teacher)
    by_labels = held_out(net, loader, sample, task=beside)
    rows = {name: np.concatenate(values) for name, values in beside.rows.items()}
    return by_labels | {
        "teacher_top1": float(rows["same"].mean()),
        "teacher_kl": float(rows["kl"].mean()),
        "teacher_correlation": _median(rows["with_teacher"]),
        "label_correlation": _median(rows["with_labels"]),
        "teacher_value_correlation": float(correlations(rows["value"][None], rows["their_value"][None])[0]),
    }


def figures(net: Net, teacher: Net, loader: Loader, sample: int = 0) -> dict[str, float]:
    """What a network learned: by labels `top1`, `policy_kl`, `value_correlation`, by a teacher all of `agreement`."""
    of_both = agreement(net, teacher, loader, sample)
    names = ("top1", "policy_kl", "value_correlation")
    return {name: of_both[name] for name in of_both if name in names or name.startswith(("teacher_", "label_"))}


def correlations(x: np.ndarray, y: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """(B,) Pearson correlations of rows (B, L) over the entries `among` (B, L); nan for fewer than `FEWEST`, and where
    one side does not vary.
    """
    among = np.ones(x.shape, bool) if among is None else among
    count = among.sum(1)
    x, y = (np.where(among, side, 0).astype(np.float64) for side in (x, y))
    x, y = (np.where(among, side - (side.sum(1) / np.maximum(count, 1))[:, None], 0) for side in (x, y))
    spread = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    known = (count >= FEWEST) & (spread > 1e-12)
    return np.where(known, (x * y).sum(1) / np.where(known, spread, 1), np.nan)


def _of_rows(
    batch: dict[str, np.ndarray], own: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What is averaged, a value a row; rows without a legal move are left out."""
    legal = batch["policy_index"] >= 0
    rows = legal.any(1)
    share = np.exp(np.where(legal, theirs["policy"], -np.inf))
    labels = batch["policy_weight"]
    kl = np.where(legal, share * (theirs["policy"] - own["policy"]), 0).sum(1)
    with_labels = correlations(own["policy"], np.log(np.where(labels > 0, labels, 1)), legal & (labels > 0))
    values = {
        "same": own["policy"].argmax(1) == theirs["policy"].argmax(1),
        "kl": kl,
        "with_teacher": correlations(own["policy"], theirs["policy"], legal),
        "with_labels": with_labels,
        "value": own["value"],
        "their_value": theirs["value"],
    }
    return {name: value[rows] for name, value in values.items()}


def _median(values: np.ndarray) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else float("nan")
