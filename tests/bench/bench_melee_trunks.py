"""The trunks of Melee's network at equal parameters and equal minutes: log-loss, onsets, time of a decision.

Run from the repository root: ``python tests/bench/bench_melee_trunks.py [--minutes 3] [--seeds 3] [--parameters 400000]
[--trunks gru transformer]``. Each run trains `melee_quick` with another trunk for the same minutes on the same games;
its width is the one that comes nearest to so many parameters. Runs go to the reports folder (MATRIXLIB_REPORTS) and are
resumed where they were stopped; the table is printed after each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYERS = {"mlp": 3, "residual": 2, "gru": 1, "lstm": 1, "transformer": 2}
STEP = 16  # widths are multiples of it


def model(trunk: str, parameters: int) -> tuple[dict[str, Any], int]:
    """(section `model`, weights) of the trunk with the number of weights nearest to `parameters`."""
    from matrixlib.tasks import load_config
    from matrixlib.tasks.melee.task import MeleeTask

    tries = []
    for width in range(STEP, 1024, STEP):
        section = {"trunk": trunk, "layers": LAYERS[trunk], "width": width}
        config: Any = load_config("melee_quick", {"model": section})
        count = sum(p.numel() for p in MeleeTask(config).build_model().parameters())
        tries.append((abs(count - parameters), section, count))
        if count > 2 * parameters:
            break
    _, section, count = min(tries, key=lambda one: one[0])
    return section, count


def decision(folder: Path) -> float:
    """Milliseconds of `act` on one core, the median."""
    import numpy as np
    import torch

    import matrixlib
    from matrixlib.data.shards import Shard, select
    from matrixlib.tasks.melee import windows
    from matrixlib.tasks.melee.columns import LAYOUT
    from matrixlib.tasks.melee.sample_set import unpack_sample

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    net = matrixlib.load(folder, device="cpu")
    path = min(unpack_sample().glob("*validation*.npz"))
    row = select(Shard(path, LAYOUT).arrays, np.array([100]), LAYOUT)
    window, _ = windows.cut(row, np.zeros(1, int), np.zeros(1, int), 60)
    frames = [window.at(number) for number in range(60)]
    seconds = []
    for frame in [*frames, *frames, *frames]:
        start = time.perf_counter()
        net.act(frame)
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    return 1000 * statistics.median(seconds)


def main() -> None:
    import pandas as pd

    from matrixlib.runs import run as runs
    from matrixlib.tasks.melee.tables import onset_recall

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=400_000)
    parser.add_argument("--trunks", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    options = parser.parse_args()
    rows = []
    for seed in range(options.seeds):
        for trunk in options.trunks:
            section, count = model(trunk, options.parameters)
            name = f"melee-{trunk}-{options.minutes:g}min-seed{seed}"
            overrides = {"model": section, "train": {"steps": "auto", "minutes": options.minutes, "on_time": True}}
            run = runs.open_run("melee_quick", seed=seed, run=name, overrides=overrides, kind="bench")
            for _ in run.train():
                pass
            summary = run.summary()
            run.close()
            figures = summary["evaluation"]
            recall, false = onset_recall(figures, "sampled")
            rows.append(
                {
                    "trunk": trunk,
                    "width": section["width"],
                    "parameters": count,
                    "updates": summary["steps"],
                    "nats": figures["total"]["nll"],
                    "at changes": figures["total"]["change_nll"],
                    "onsets %": 100 * recall,
                    "false %": 100 * false,
                    "ms a frame": decision(run.folder),
                }
            )
            table = pd.DataFrame(rows).groupby("trunk", sort=False)
            print(table.mean().join(table["nats"].std().rename("nats, deviation")).round(3).to_string(), flush=True)


if __name__ == "__main__":
    main()
