"""A toy layout with no game in it, and shards of it, for the tests of the data package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.shards import Batch, Layout, ShardInfo, write_shard

RECORD = np.dtype([("row", "<i8"), ("pixels", "u1", (5,)), ("label", "<u2")])
LAYOUT = Layout("toy", 1, RECORD, {"target": {"index": np.dtype("<u2"), "weight": np.dtype("<u2")}})
META = {"source": "made", "generator": "toy", "seed": 0, "split": "train", "created": "2026-01-02T03:04:05Z"}


def toy_batch(count: int, first: int = 0, seed: int = 0, longest: int = 6) -> Batch:
    """`count` rows; "row" numbers them from `first`, so that a test sees which ones came."""
    rng = np.random.default_rng(seed)
    records = np.zeros(count, RECORD)
    records["row"] = np.arange(first, first + count)
    records["pixels"] = rng.integers(0, 256, (count, 5))
    records["label"] = rng.integers(0, 65536, count)
    offset = np.concatenate([[0], np.cumsum(rng.integers(0, longest + 1, count))]).astype("<i8")
    index, weight = rng.integers(0, 65536, (2, int(offset[-1]))).astype("<u2")
    return {"records": records, "target_offset": offset, "target_index": index, "target_weight": weight}


def toy_shards(folder: Path, counts: list[int], **meta: Any) -> list[ShardInfo]:
    """Shards a.npz, b.npz ... whose rows are numbered through."""
    starts = np.concatenate([[0], np.cumsum(counts)])
    return [
        write_shard(folder / f"{chr(97 + i)}.npz", LAYOUT, toy_batch(n, int(starts[i]), seed=i), META | meta)
        for i, n in enumerate(counts)
    ]


def same(left: Batch, right: Batch) -> bool:
    """Equal names, dtypes and bytes."""
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and left[k].tobytes() == right[k].tobytes() for k in left
    )
