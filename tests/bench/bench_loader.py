"""Rows per second of the loader's gather, beside reading a dense NPZ in the same run.

Run from the repository root: ``python tests/bench/bench_loader.py``. One process; medians after a warm-up.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from matrixlib.data.loader import Loader
from matrixlib.data.shards import Batch, Layout, write_shard

RECORD = np.dtype([("body", "u1", (40,)), ("game", "<u8"), ("counts", "<u2", (5,)), ("label", "<i2")])
LAYOUT = Layout("bench", 1, RECORD, {"policy": {"index": np.dtype("<u2"), "weight": np.dtype("<u2")}})
META = {"source": "made", "generator": "bench_loader", "seed": 0, "split": "train"}
SHARDS, ROWS, SIZE, DENSE = 8, 25_000, 1024, 4_000


def made(seed: int) -> Batch:
    """Rows of 60 bytes and about 30 ragged items of 4 bytes each, as large as real ones."""
    rng = np.random.default_rng(seed)
    offset = np.concatenate([[0], np.cumsum(rng.integers(20, 41, ROWS))]).astype("<i8")
    index, weight = rng.integers(0, 4672, (2, int(offset[-1]))).astype("<u2")
    records = np.frombuffer(rng.bytes(ROWS * RECORD.itemsize), RECORD)
    return {"records": records, "policy_offset": offset, "policy_index": index, "policy_weight": weight}


def keep(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A `prepare` that does next to nothing: what is left is reading."""
    return {"body": batch["records"]["body"]}


def rate(work: Callable[[int], object], rows: int, repeats: int = 60) -> float:
    """Median rows per second of work(i)."""
    for i in range(repeats):
        work(i)
    seconds = []
    for i in range(repeats, 2 * repeats):
        start = time.perf_counter()
        work(i)
        seconds.append(time.perf_counter() - start)
    return rows / statistics.median(seconds)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        infos = [write_shard(folder / f"{i}.npz", LAYOUT, made(i), META) for i in range(SHARDS)]
        paths = [info.path for info in infos]
        per_row = sum(info.bytes for info in infos) / (SHARDS * ROWS)
        print(f"{SHARDS} shards, {SHARDS * ROWS:,} rows, {per_row:.0f} bytes a row, batches of {SIZE:,}")
        for window in (0, 4):
            loader = Loader(paths, LAYOUT, SIZE, 0, keep, window_blocks=window)
            for i in range(loader.per_epoch):  # every block is checked by its first reader
                loader.batch(i)
            print(f"  loader, window_blocks {window}: {rate(loader.batch, SIZE):>12,.0f} rows/s")
        start = time.perf_counter()
        fresh = Loader(paths, LAYOUT, SIZE, 0, keep)
        for i in range(fresh.per_epoch):
            fresh.batch(i)
        seconds = time.perf_counter() - start
        print(f"  first epoch, blocks checked: {fresh.per_epoch * SIZE / seconds:>10,.0f} rows/s")
        dense = folder / "dense.npz"
        np.savez(
            dense, planes=np.zeros((DENSE, 19, 8, 8), np.float32), policy=np.zeros((DENSE, 4672), np.float32)
        )
        order = np.random.default_rng(0)

        def read_dense(_: int) -> np.ndarray:
            with np.load(dense) as archive:  # what a loader over dense NPZ files does for each file
                planes, policy = archive["planes"], archive["policy"]
            rows = order.permutation(DENSE)
            return np.concatenate([planes[rows].reshape(DENSE, -1)[:, :1], policy[rows][:, :1]], axis=1)

        print(f"  numpy.load of dense rows:    {rate(read_dense, DENSE, 4):>12,.0f} rows/s")


if __name__ == "__main__":
    sys.exit(main())
