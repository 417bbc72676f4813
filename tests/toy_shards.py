"""A toy layout with no game in it, and shards of it, for the tests of the data package."""

import os
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Toy:
    """A task's `prepare`: rows, a random draw for each, and the sum of the ragged member."""

    fail_at: int = -1
    pid_file: str = ""

    def prepare(self, batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
        rows = batch["records"]["row"].astype(np.int64)
        if self.fail_at in rows:
            raise KeyError(f"label of row {self.fail_at}")
        if self.pid_file:
            mine = Path(f"{self.pid_file}.{os.getpid()}")
            mine.write_text(str(os.getpid()))
            os.replace(mine, self.pid_file)
        running = np.concatenate([[0], np.cumsum(batch["target_weight"].astype(np.int64))])
        sums = running[batch["target_offset"]]
        noise = rng.random((len(rows), 3), np.float32)
        return {"row": rows, "noise": noise, "sum": np.diff(sums), "pixels": batch["records"]["pixels"]}


def process(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The process in which this runs, and its threads: a batch that is not a function of its number."""
    import torch  # the tests of shards and catalogue need none

    facts = {"process": os.getpid(), "threads": torch.get_num_threads()}
    return {name: np.full(len(batch["records"]), fact) for name, fact in facts.items()}
