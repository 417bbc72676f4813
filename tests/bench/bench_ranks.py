"""What two ranks cost on a CPU.

Run from the repository root: ``python tests/bench/bench_ranks.py [--preset quick] [--updates 40] [--turns 5]`` measures
one process with two threads and two ranks with one thread each, in turns, and one decision of two ranks.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SETTLE = 10
"""Updates before those that are timed."""
QUIET = {"validation": {"interval": 1_000_000, "sample": 256, "limit": 1024}, "checkpoint": {"interval": 1_000_000}}


def update_seconds(preset: str, ranks: int, updates: int) -> float:
    """Median of an update, in a run of its own with all cores."""
    from matrixlib.runs import run as runs

    train = runs.open_run(preset, "cpu", steps=100_000, overrides=QUIET, ranks=ranks).train()
    seconds = [next(train).seconds for _ in range(SETTLE + updates)]
    train.close()
    return statistics.median(seconds[SETTLE:])


def decide(count: int = 2000) -> None:
    """As one of torchrun's processes: the median of one sum, printed by the first."""
    from matrixlib.engine import distributed

    ranks, seconds = distributed.join(60.0), []
    for _ in range(count):
        began = time.perf_counter()
        ranks.total({str(i): i for i in range(20)})
        seconds.append(time.perf_counter() - began)
    if ranks.first:
        print(f"one decision of {ranks.size} ranks: {1e6 * statistics.median(seconds):,.0f} us")


def measure(preset: str, updates: int, turns: int) -> None:
    """Print the medians of turns and their ratio."""
    os.environ.pop("OMP_NUM_THREADS", None)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, "--decide"]
    subprocess.run([sys.executable, *words], check=True)
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns):
        for ranks, each in times.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["MATRIXLIB_REPORTS"] = folder
                each.append(update_seconds(preset, ranks, updates))
            print(f"{ranks} process{'es' * (ranks > 1)}: {1e3 * each[-1]:.1f} ms", flush=True)
    one, two = (statistics.median(each) for each in times.values())
    print(f"{preset}: one process {1e3 * one:.1f} ms, two ranks {1e3 * two:.1f} ms, {two / one - 1:+.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--decide", action="store_true")
    options = parser.parse_args()
    if options.decide:
        decide()
    else:
        measure(options.preset, options.updates, options.turns)
