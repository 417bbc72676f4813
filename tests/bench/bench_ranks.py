"""What several ranks cost: measured on the CPU for two, calculated for 8 to 1,024 GPUs.

Run from the repository root: ``python tests/bench/bench_ranks.py [--preset quick] [--updates 40] [--turns 5]`` measures
one process with two threads and two ranks with one thread each, in turns, and one decision of two ranks;
``python tests/bench/bench_ranks.py --table`` prints the calculation, which the guide of clusters shows.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SETTLE = 10
"""Updates before those that are timed."""
QUIET = {"validation": {"interval": 1_000_000, "sample": 256, "limit": 1024}, "checkpoint": {"interval": 1_000_000}}

PRESETS, GPUS, NODE = ("small", "matrix0_53m"), (8, 64, 1024), 8
RATE = 0.4 * 989e12
"""FLOP/s of an H100 in training: the most that is published for small networks, of its dense bf16 rate. A slower GPU
needs fewer rows."""
NVLINK = 370e9
"""Bytes a second of NCCL's ring on NVLink of 450 GB/s: https://github.com/NVIDIA/nccl-tests/issues/212"""
ADAPTER = 46e9
"""Bytes a second of one adapter of 400 Gbit/s, one a GPU: https://github.com/NVIDIA/nccl-tests/issues/290"""
LATENCY = 47e-6
"""Seconds of the smallest all-reduce over two nodes: https://github.com/NVIDIA/nccl/issues/1244; here for each doubling
of the nodes."""
DECISIONS = 5
"""Sums over ranks that an update waits for on the host: counts, problems, losses, pace, signals."""
HOP = 30e-6
"""Seconds of a message between hosts by TCP, an assumption; gloo sends 2 (n - 1) of them in a ring for one sum."""
PAGES = 2 * 4096
"""Bytes read for a row of another place: a page of the records, one of the policy."""


@dataclass(frozen=True)
class Cost:
    """One update of `gpus` ranks. gradients: bytes; reduce, decide: seconds that its sums take; rows: of a rank so that
    nine tenths of the time are computation where nothing overlaps; alone: the same without the decisions; reads: bytes
    a second of all ranks.
    """

    gpus: int
    gradients: int
    reduce: float
    decide: float
    rows: int
    alone: int
    reads: float

    @property
    def breaks_first(self) -> str:
        """What takes the largest part of the tenth that is not computation."""
        return "decisions over gloo" if self.decide > self.reduce else "the gradients' sum"


def cost(gpus: int, parameters: int, flops: float) -> Cost:
    """flops: of one row, forward and backward. Gradients are summed in fp32, at once, by a ring."""
    nodes = max(1, gpus // NODE)
    gradients = 4 * parameters
    bandwidth = NVLINK if nodes == 1 else min(NVLINK, NODE * ADAPTER)
    latency = LATENCY * max(1.0, math.log2(nodes))
    reduce = latency + 2 * (gpus - 1) / gpus * gradients / bandwidth
    decide = DECISIONS * 2 * (gpus - 1) * (HOP if nodes > 1 else HOP / 3)
    rows, alone = (math.ceil(9 * seconds * RATE / flops) for seconds in (reduce + decide, reduce))
    return Cost(gpus, gradients, reduce, decide, rows, alone, 0.9 * gpus * RATE / flops * PAGES)


def table() -> str:
    """The calculation as a table."""
    from matrixlib.tasks import get_task, load_config

    lines = [
        "| Preset | GPUs | Gradients | Their sum | Decisions | Rows | Rows without | Batch | Reads | Breaks first |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for preset in PRESETS:
        config = load_config(preset)
        spec = get_task(config.task)
        parameters = sum(p.numel() for p in spec.task(config).build_model().parameters())
        flops = spec.training_flops(config)
        assert flops is not None
        for gpus in GPUS:
            at = cost(gpus, parameters, flops)
            cells = (
                f"`{preset}`",
                f"{gpus:,}",
                f"{at.gradients / 1e6:,.0f} MB",
                f"{1e3 * at.reduce:.1f} ms",
                f"{1e3 * at.decide:.1f} ms",
                f"{at.rows:,}",
                f"{at.alone:,}",
                f"{at.rows * gpus:,}",
                f"{at.reads / 1e9:,.1f} GB/s",
                at.breaks_first,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--decide", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table())
    elif options.decide:
        decide()
    else:
        measure(options.preset, options.updates, options.turns)
