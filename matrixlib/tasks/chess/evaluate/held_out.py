"""Held-out evaluation: accuracy with baselines, calibration of the value head, agreement with a teacher."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from matrixlib.data.loader import Loader
from matrixlib.engine.task import Batch
from matrixlib.engine.validation import validate
from matrixlib.tasks.chess.evaluate.net import INPUTS, POSITION, Net
from matrixlib.tasks.chess.losses import expected_score
from matrixlib.tasks.chess.records import captured_value
from matrixlib.tasks.spec import NoTargets

MIN_MOVES = 3  # for a correlation: two points always lie on a line


def held_out(net: Net, loader: Loader, sample: int = 0, batch_size: int = 512) -> dict[str, Any]:
    """Metrics on held-out positions with their baselines. sample: number of positions, 0 for all.

    top1, top3, top5: accuracy against the labels' best moves. policy_kl: nats. wdl_accuracy. value_correlation: Pearson
    of expected scores. reliability: `calibration` of `win`, `draw` and `loss`, or of the `score` in [0, 1] of a scalar
    head. The last three need value targets. Baselines: uniform over legal moves, best capture by piece value (wrong
    without a capture), majority class.
    """
    base: dict[str, float] = defaultdict(float)
    names = ("score",) if net.task.config.model.value.kind == "scalar" else ("win", "draw", "loss")
    values: list[Tensor] = []  # (2, rows, classes) predicted and true

    def keep_values(out: dict[str, Any], batch: Batch) -> Tensor:
        target, known = net.task.value_target(batch)
        value: Tensor = out["value"].float()
        both = ((value + 1) / 2, expected_score(target)) if value.ndim == 1 else (value.softmax(1), target)
        values.append(torch.stack(both)[:, known].reshape(2, -1, len(names)).cpu())
        return value.new_zeros(())

    def batches() -> Iterator[Batch]:
        for batch in loader.sequential(batch_size, sample=sample):
            arrays = {name: tensor.numpy() for name, tensor in batch.items()}
            for name, amount in baselines(arrays, net.task.config.loss.result_share).items():
                base[name] += amount
            base["rows"] += len(batch["pieces"])
            yield batch

    terms = frozenset({"policy", "value", "reliability"})
    task = replace(net.task, loss_functions={**net.task.loss_functions, "reliability": keep_values})
    validation = validate(task, net.model, batches(), net.runtime, terms, "full")
    if validation is None or not validation.counts["policy"]:
        raise NoTargets("the held-out positions have no policy targets; import others")
    metrics, policy, value = validation.metrics, validation.counts["policy"], validation.counts["value"]
    chance = {name: amount / policy for name, amount in base.items() if name.startswith(("uniform_", "best_capture"))}
    figures: dict[str, Any] = {
        "positions": int(base["rows"]),
        **{name: metrics[f"policy/{name}"] for name in ("top1", "top3", "top5")},
        "policy_kl": metrics["policy/kl"],
        "baselines": chance,
    }
    if value:
        x, y, x2, y2, xy = (metrics[f"value/{name}"] for name in ("x", "y", "x2", "y2", "xy"))
        spread = (x2 - x**2) * (y2 - y**2)
        figures["value_correlation"] = (xy - x * y) / spread**0.5 if spread > 0 else 0.0
        columns = zip(names, *torch.cat(values, 1).mT.numpy(), strict=True)
        figures["reliability"] = {name: calibration(said, true).to_dict("list") for name, said, true in columns}
    if value and "value/accuracy" in metrics:
        figures["wdl_accuracy"] = metrics["value/accuracy"]
        figures["baselines"]["majority_wdl"] = max(base[f"class_{k}"] for k in range(3)) / value
    return figures


def baselines(batch: dict[str, np.ndarray], result_share: float) -> dict[str, float]:
    """Sums of the baselines over the rows of a host batch with a policy target (classes: with a value target)."""
    index, weight = batch["policy_index"], batch["policy_weight"].astype(np.float64)
    legal = index >= 0
    total = weight.sum(1)
    known = total > 0
    target = weight[known] / total[known, None]
    n_legal = legal.sum(1)[known]
    best = legal[known] & (target >= target.max(1, keepdims=True))
    entropy = -(target * np.log(np.where(target > 0, target, 1))).sum(1)
    gain = np.where(legal, captured_value(batch["pieces"], index), 0)[known]
    capture = gain.argmax(1)
    right = (gain.max(1) > 0) & best[np.arange(len(best)), capture]
    has_wdl = (batch["wdl"].sum(1) > 0) & (result_share < 1)
    has_result = (batch["result"] != 2) & (result_share > 0)  # win 1, draw 0, loss -1, unknown 2
    classes = np.where(has_wdl, batch["wdl"].argmax(1), 1 - batch["result"])[has_wdl | has_result]
    ties = best.sum(1)
    # Draws without replacement: probability that draw k + 1 misses the `ties` best moves as well
    missed = [np.clip((n_legal - ties - k) / np.maximum(n_legal - k, 1), 0, 1) for k in range(5)]
    hit = 1 - np.cumprod(missed, axis=0)
    return {
        **{f"uniform_top{k}": float(hit[k - 1].sum()) for k in (1, 3, 5)},
        "uniform_kl": float((np.log(n_legal) - entropy).sum()),
        "best_capture_top1": float(right.sum()),
        **{f"class_{k}": float((classes == k).sum()) for k in range(3)},
    }


def calibration(
    probability: np.ndarray, truth: np.ndarray, edges: Sequence[float] = tuple(np.arange(1, 10) / 10)
) -> pd.DataFrame:
    """A row per non-empty bin: mean predicted `probability`, observed `share`, `count`. truth: (N,), in [0, 1]."""
    groups = pd.DataFrame({"probability": probability, "share": truth}).groupby(np.digitize(probability, edges))
    return groups.mean().assign(count=groups.size()).reset_index(drop=True)


def calibration_error(points: pd.DataFrame) -> float:
    """Expected calibration error: mean |probability - share|, weighted by count."""
    return float(np.average((points["probability"] - points["share"]).abs(), weights=points["count"]))


def agreement(net: Net, teacher: Net, loader: Loader, sample: int = 0, batch_size: int = 512) -> dict[str, Any]:
    """Metrics of `held_out` plus agreement with the teacher. sample: number of positions, 0 for all.

    teacher_correlation: Pearson correlation of the log-probabilities over a position's legal moves, median over
    positions (pooling would inflate it). label_correlation: the same with the labels, over moves with weight.
    teacher_kl: KL(teacher || network), nats. teacher_top1: equal best moves. teacher_value_correlation: Pearson of
    expected scores. ValueError as in `held_out`.
    """
    parts = []
    for tensors in loader.sequential(batch_size, sample=sample):
        batch = {name: tensor.numpy() for name, tensor in tensors.items()}
        own = net.predict({name: batch[name] for name in INPUTS if name in batch})
        theirs = teacher.predict({name: batch[name] for name in POSITION})  # as it taught
        legal, labels = batch["policy_index"] >= 0, batch["policy_weight"]
        share = np.exp(np.where(legal, theirs["policy"], -np.inf))
        values = (
            own["policy"].argmax(1) == theirs["policy"].argmax(1),
            np.where(legal, share * (theirs["policy"] - own["policy"]), 0).sum(1),
            correlations(own["policy"], theirs["policy"], legal),
            correlations(own["policy"], np.log(np.where(labels > 0, labels, 1)), legal & (labels > 0)),
            own["value"],
            theirs["value"],
        )
        parts.append([value[legal.any(1)] for value in values])
    same, kl, with_teacher, with_labels, value, their_value = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    return held_out(net, loader, sample) | {
        "teacher_top1": float(same.mean()),
        "teacher_kl": float(kl.mean()),
        "teacher_correlation": float(pd.Series(with_teacher).median()),
        "label_correlation": float(pd.Series(with_labels).median()),
        "teacher_value_correlation": float(correlations(value[None], their_value[None])[0]),
    }


def correlations(x: np.ndarray, y: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """Pearson correlations (B,) of rows (B, L) over the mask `among`; nan below MIN_MOVES entries or variance 0."""
    among = np.ones(x.shape, bool) if among is None else among
    count = among.sum(1)
    x, y = (np.where(among, side, 0).astype(np.float64) for side in (x, y))
    x, y = (np.where(among, side - (side.sum(1) / np.maximum(count, 1))[:, None], 0) for side in (x, y))
    spread = np.sqrt((x * x).sum(1) * (y * y).sum(1))
    known = (count >= MIN_MOVES) & (spread > 1e-12)
    return np.where(known, (x * y).sum(1) / np.where(known, spread, 1), np.nan)
