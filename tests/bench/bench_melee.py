"""Frames a second of Melee: rows gathered, windows made of them, beside copying the same bytes and beside an update;
milliseconds of a decision in play.

Run from the repository root: ``python tests/bench/bench_melee.py``. Medians after a warm-up, one thread, the sample
set; the update is that of the preset `melee_demo`, decisions are those of fresh networks of width 256.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader, to_tensors
from matrixlib.data.shards import Batch, Shard
from matrixlib.tasks import get_task, load_config
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.windows import augment, cut, plain
from matrixlib.tasks.spec import runtime_for_use

WINDOWS, REPEATS = 64, 40


def seconds(work: Callable[[int], object], repeats: int = REPEATS) -> float:
    """Median of one call of work(i)."""
    for i in range(repeats // 4):
        work(i)
    taken = []
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def rows(batch: Batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A `prepare` that does next to nothing: what is left is reading."""
    return {"own": batch["records"]["own"]}


def decision(model: dict[str, Any]) -> float:
    """Seconds of `act` on one core, the median. model: what a fresh network has other than `melee_quick`'s."""
    config = load_config("melee_quick", {"model": model, "runtime": {"device": "cpu"}})
    spec = get_task("melee")
    net = spec.network(spec.task(config).build_model(), config, runtime_for_use(config, "cpu"))
    torch.set_num_threads(1)
    row = Shard(spec.folder(config) / "sample_validation.npz", LAYOUT).gather(np.array([100]))
    window, _ = cut(row, np.zeros(1, int), np.zeros(1, int), 60)
    frames = [window.at(number) for number in range(60)]
    return seconds(lambda i: net.act(frames[i % 60]), 6 * len(frames))


def main() -> None:
    torch.set_num_threads(1)
    config = load_config("melee_demo", {"data": {"window": 60}})
    spec = get_task("melee")
    shards = Catalogue(spec.folder(config)).shards("train")
    frames = WINDOWS * config.data.window
    reading = Loader(shards, LAYOUT, WINDOWS, 0, rows)
    gathered = [reading.records(i) for i in range(REPEATS)]
    stored = [sum(array.nbytes for array in batch.values()) for batch in gathered]
    source = np.zeros(int(statistics.mean(stored)), np.uint8)
    rng = np.random.default_rng(0)
    task = spec.task(config)
    model = task.build_model()
    prepared = to_tensors(augment(gathered[0], config.data, rng))

    def update(i: int) -> None:
        model.zero_grad()
        torch.stack(list(task.losses(model, prepared, frozenset(task.weights))[0].values())).sum().backward()

    lines = {
        f"copy of the same bytes ({len(source) / WINDOWS:,.0f} a window)": seconds(lambda i: source.copy()),
        "gathered from shards": seconds(reading.batch),
        "made into windows, nothing at random": seconds(lambda i: plain(gathered[i], config.data)),
        "made into windows, mirrored, with noise": seconds(lambda i: augment(gathered[i], config.data, rng)),
        "forward and backward of melee_demo": seconds(update),
    }
    for name, taken in lines.items():
        print(f"{name:<46}{frames / taken:>14,.0f} frames/s{1000 * taken:>10.2f} ms for {WINDOWS} windows")
    for trunk in ("mlp", "residual", "gru", "lstm", "transformer"):
        print(f"{'decision in play, ' + trunk:<46}{1000 * decision({'trunk': trunk, 'width': 256}):>34.2f} ms")
    made = lines["gathered from shards"] + lines["made into windows, mirrored, with noise"]
    print(
        f"making a batch is {made / (made + lines['forward and backward of melee_demo']):.1%} of an update on one core"
    )


if __name__ == "__main__":
    main()
