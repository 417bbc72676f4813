"""Quality figures of a shard that mean something for every task; the catalogue stores them as JSON."""

import numpy as np

from matrixlib.data.shards import Batch, Layout

Figures = dict[str, float | int]


def figures(batch: Batch, layout: Layout, *, keys: np.ndarray | None = None, weight: str = "") -> Figures:
    """Figures of a whole shard (its batch, or the mapped ``shard.arrays``): JSON data.

    `keys` (n,) tells rows apart: equal keys are duplicates. `weight` names a ragged array of non-negative
    weights ("target_weight"), whose rows give entropies and the share of rows without any weight.

    records: rows. duplicates: rows whose key came before. <group>_min, _mean, _max: items in a row.
    <weight>_entropy_mean, _entropy_std: nats, over the rows that have weight. <weight>_zero: share of rows
    whose weights are all zero. Raises ValueError for an unknown weight or keys of another length.
    """
    count = len(batch["records"])
    if not count:
        raise ValueError("no records, so there is nothing to measure")
    out: Figures = {"records": count}
    if keys is not None:
        if len(keys) != count:
            raise ValueError(f"{len(keys)} keys for {count} records; give one for each")
        out["duplicates"] = count - len(np.unique(keys))
    for group in layout.ragged:
        length = np.diff(batch[f"{group}_offset"])
        out |= {f"{group}_min": int(length.min()), f"{group}_max": int(length.max())}
        out[f"{group}_mean"] = float(length.mean())
    if weight:
        group = _group(layout, weight)
        entropy, has_weight = row_entropy(batch[weight], batch[f"{group}_offset"])
        known = entropy[has_weight]
        out[f"{weight}_entropy_mean"] = float(known.mean()) if len(known) else 0.0
        out[f"{weight}_entropy_std"] = float(known.std()) if len(known) else 0.0
        out[f"{weight}_zero"] = float(1 - has_weight.mean())
    return out


def row_entropy(weights: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(entropy (n,) in nats, has weight (n,) bool) of the rows of `weights` (K,) cut by `offset` (n+1,).

    Each row is divided by its sum W: H = ln W - (1/W) sum w ln w, and 0 for a row without weight.
    """
    count = len(offset) - 1
    some = np.flatnonzero(weights)  # few, where only one move was played
    row = np.searchsorted(offset, some, side="right") - 1
    value = np.asarray(weights[some], np.float64)
    total = np.bincount(row, value, count)
    own = np.bincount(row, value * np.log(value), count)
    has_weight = total > 0
    safe = np.where(has_weight, total, 1.0)
    return np.where(has_weight, np.maximum(np.log(safe) - own / safe, 0.0), 0.0), has_weight


def robust_z(value: float, others: np.ndarray) -> float:
    """How far a figure is from the median of `others` (n,), in robust standard deviations.

    One is 1.4826 times their median absolute deviation, at least 2 % of the median and 0.01 (entropies in nats, shares,
    points).
    """
    median = float(np.median(others))
    scale = max(1.4826 * float(np.median(np.abs(others - median))), 0.02 * abs(median), 0.01)
    return (value - median) / scale


def _group(layout: Layout, weight: str) -> str:
    for group, members in layout.ragged.items():
        if weight in {f"{group}_{member}" for member in members}:
            return group
    known = [f"{group}_{member}" for group, members in layout.ragged.items() for member in members]
    raise ValueError(f"layout '{layout.task}' has no ragged array '{weight}'; it has {', '.join(known)}")
