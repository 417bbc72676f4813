"""What an update does on the host while a GPU would wait: counts, averaged weights, health, random streams, buffers.

Run from the repository root: ``python tests/bench/bench_host.py``. Medians of calls in turn, one thread, 1,024 rows of
`small` with all self-supervised heads; the averages are of as many tensors as `matrix0_53m` has, narrow ones, so that
the arithmetic hardly counts.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from matrixlib.engine import averages, rng
from matrixlib.engine.health import Health
from matrixlib.engine.stats import Stats
from matrixlib.hardware.speed import turns
from matrixlib.runs.run import held_out_data
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.task import ChessTask

ROWS, SECONDS = 1024, 8.0
HEADS = ["piece", "threat", "pin", "fork", "control"]


def judge(config: ChessConfig) -> Callable[[], object]:
    """One judgement of a run in which windows are full."""
    health, step = Health(config.health), itertools.count(1)
    noise = np.random.default_rng(0)
    update = Stats(step=0, loss=0.0, grad_norm=1.0)

    def one() -> None:
        loss, norm = (abs(float(value)) + 1 for value in noise.normal(0, 0.1, 2))
        health.judge(replace(update, step=next(step), loss=loss, main_loss=loss, grad_norm=norm))
        assert math.isfinite(health.clip_share)

    for _ in range(config.health.window):
        one()
    return one


def streams() -> None:
    device = torch.device("cpu")
    rng.restore(rng.capture(device), device)


def main() -> None:
    torch.set_num_threads(1)
    config = load_config("small", {"model": {"ssl": HEADS}, "validation": {"batch_size": ROWS}})
    assert isinstance(config, ChessConfig)
    task = ChessTask(config)
    batch = next(iter(held_out_data(config).sequential(ROWS)))
    narrow = load_config("matrix0_53m", {"model": {"channels": 16, "attention": {"heads": 1}, "policy": {"rank": 1}}})
    assert isinstance(narrow, ChessConfig)
    average = averages.EMA(PolicyValueNet(narrow.model), 0.999)
    works = {
        "counts": lambda: task.counts(batch),
        "averaged weights": average.update,
        "health": judge(config),
        "random streams": streams,
    }
    times = turns(works, SECONDS)
    for name, seconds in times.items():
        print(f"{name:18}{1e3 * seconds:6.2f} ms")
    print(f"{'together':18}{1e3 * sum(times.values()):6.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
