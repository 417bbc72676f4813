"""Rows per second of the loader's gather, beside the limits of the machine and two plain ways, in the same run.

Run from the repository root: ``python tests/bench/bench_loader.py [--huge]``. Medians after a warm-up, one thread.
`--huge` adds opening a data set of 100 million rows, in files that take no room on the disk.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset
from toy_shards import sparse_shard

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.order import Order
from matrixlib.data.shards import BLOCK, Batch, Layout, write_shard

RECORD = np.dtype([("body", "u1", (39,)), ("game", "<u8"), ("counts", "<u2", (4,))])  # 55 bytes, as in chess
LAYOUT = Layout("bench", 1, RECORD, {"policy": {"index": np.dtype("<u2"), "weight": np.dtype("<u2")}})
META = {"source": "made", "generator": "bench_loader", "seed": 0, "split": "train"}
SHARDS, ROWS, SIZE, DENSE = 12, 32_768, 1024, 4_096
DENSE_BYTES = (19 * 64 + 4672 + 4672 + 3) * 4  # float planes, policy, mask of legal moves, win-draw-loss


def made(seed: int) -> Batch:
    """Rows of 55 bytes and about 30 ragged items of 4 bytes each, as large as real ones."""
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


def copied() -> float:
    """Bytes per second that one thread copies in memory (read once, written once)."""
    source = np.ones(2**28, np.uint8)
    target = np.empty_like(source)
    return rate(lambda _: np.copyto(target, source), source.nbytes, 5)


def with_workers(loader: Loader, batches: int = 400) -> float:
    """Rows per second of an iterator with its workers, once they run."""
    stream = loader.batches(0)
    for _ in range(50):
        next(stream)
    start = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return batches * loader.batch_size / (time.perf_counter() - start)


def dense_rate() -> float:
    """Rows per second of torch's own loader over dense float rows in memory, one process."""
    data = TensorDataset(
        torch.zeros(DENSE, 19, 8, 8), torch.zeros(DENSE, 4672), torch.zeros(DENSE, 4672), torch.zeros(DENSE, 3)
    )
    stream = DataLoader(data, batch_size=SIZE, shuffle=True)
    return rate(lambda _: list(stream), DENSE, 3)


def shuffling(rows: int = 4_096_000, game: int = 40, size: int = 4096, batches: int = 50) -> None:
    """How many pairs of rows of a batch are of one game, which a full shuffle hardly ever brings together."""
    first = np.append(np.arange(0, rows, BLOCK), rows)
    print(f"pairs of one game in a batch of {size:,}, of {rows:,} rows in games of {game}:")
    for window in (1, 4, 16, 64, 256, 0):
        order = Order(first, 0, 0, window)
        pairs = []
        for i in range(batches):
            games = order.rows(np.arange(i * size, (i + 1) * size)) // game
            counts = np.unique(games, return_counts=True)[1]
            pairs.append(int((counts * (counts - 1) // 2).sum()))
        share = f"window of {window:3} blocks" if window else "full shuffle"
        print(f"  {share:21} {statistics.mean(pairs):10,.1f}")


def huge(folder: Path) -> None:
    """Opening 100 million rows in 3,052 shards: seconds to the loader, to the first batch, and memory."""
    process, catalogue = psutil.Process(), Catalogue(folder)
    for i in range(3052):
        catalogue.add(sparse_shard(folder / f"{i:04d}.npz", ROWS, LAYOUT), "train", "made")
    before, start = process.memory_info().rss, time.perf_counter()
    loader = Loader(Catalogue(folder).shards("train"), LAYOUT, SIZE, 0, keep, window_blocks=256)
    opened = time.perf_counter() - start
    start = time.perf_counter()
    loader.batch(0)
    first = time.perf_counter() - start
    for i in range(1, 30):
        loader.batch(i)
    more = process.memory_info().rss - before
    print(
        f"  {loader.count:,} rows in 3,052 shards: opened in {opened:.2f} s, first batch {first:.2f} s later, "
        f"{more / 2**20:.0f} MiB more after 30 batches"
    )


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        infos = [write_shard(folder / f"{i}.npz", LAYOUT, made(i), META) for i in range(SHARDS)]
        paths = [info.path for info in infos]
        per_row = sum(info.bytes for info in infos) / (SHARDS * ROWS)
        print(f"{SHARDS} shards, {SHARDS * ROWS:,} rows, {per_row:.0f} bytes a row, batches of {SIZE:,}")
        start = time.perf_counter()
        cold = Loader(paths, LAYOUT, SIZE, 0, keep)
        for i in range(cold.per_epoch):
            cold.records(i)
        seconds = time.perf_counter() - start
        print(f"  first epoch, every block checked:  {cold.per_epoch * SIZE / seconds:>12,.0f} rows/s")
        gathered = rate(cold.records, SIZE)
        print(f"  gather from everywhere, warm:      {gathered:>12,.0f} rows/s")
        for window in (0, 4):
            loader = Loader(paths, LAYOUT, SIZE, 0, keep, window_blocks=window)
            for i in range(loader.per_epoch):
                loader.batch(i)
            print(f"  batches, window_blocks {window}:          {rate(loader.batch, SIZE):>12,.0f} rows/s")
        workers = Loader(paths, LAYOUT, SIZE, 0, keep, workers=1)
        print(f"  batches of one worker process:     {with_workers(workers):>12,.0f} rows/s")
        limit = copied() / per_row
        print(f"  limit, copying the bytes once:     {limit:>12,.0f} rows/s ({gathered / limit:.1%} reached)")
        records = np.concatenate([made(i)["records"] for i in range(SHARDS)])
        places = np.random.default_rng(0).integers(0, len(records), (200, SIZE))
        plain = rate(lambda i: records[places[i]], SIZE)
        print(f"  numpy gather of the records alone: {plain:>12,.0f} rows/s")
        dense = dense_rate()
        print(f"  torch DataLoader over dense rows:  {dense:>12,.0f} rows/s ({gathered / dense:.0f} times fewer)")
        print(f"  bytes: {DENSE_BYTES:,} a dense row, {DENSE_BYTES / per_row:.0f} times ours")
    shuffling()
    if "--huge" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as name:
            huge(Path(name))


if __name__ == "__main__":
    sys.exit(main())
