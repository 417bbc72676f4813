"""The trunks of Melee's network at equal parameters and equal minutes: log-loss, onsets, time of a decision.

Run from the repository root: ``python tests/bench/bench_melee_trunks.py [--minutes 3] [--seeds 3] [--parameters 400000]
[--trunks gru transformer]``. Each run trains `melee_quick` with another trunk for the same minutes on the same games;
its width is the one that comes nearest to so many parameters. The minutes are counted in updates, which are timed
first, in turns: that minute wants a quiet machine, the trainings do not mind a busy one. Runs go to the reports folder
(MATRIXLIB_REPORTS) and are resumed where they were stopped; the table is printed after each.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYERS = {"mlp": 3, "residual": 2, "gru": 1, "lstm": 1, "transformer": 2}
STEP = 16  # widths are multiples of it
PRESET = "melee_quick"


def model(trunk: str, parameters: int) -> tuple[dict[str, Any], int]:
    """(section `model`, weights) of the trunk with the number of weights nearest to `parameters`."""
    from matrixlib.tasks import load_config
    from matrixlib.tasks.melee.task import MeleeTask

    tries = []
    for width in range(STEP, 1024, STEP):
        section = {"trunk": trunk, "layers": LAYERS[trunk], "width": width}
        config: Any = load_config(PRESET, {"model": section})
        count = sum(p.numel() for p in MeleeTask(config).build_model().parameters())
        tries.append((abs(count - parameters), section, count))
        if count > 2 * parameters:
            break
    _, section, count = min(tries, key=lambda one: one[0])
    return section, count


def update_seconds(models: dict[str, dict[str, Any]], seconds: float = 60.0) -> dict[str, float]:
    """Median of an update by trunk; the updates take turns for `seconds` in all."""
    from matrixlib.bench.workloads import Update
    from matrixlib.hardware.benchmark import make_plan
    from matrixlib.hardware.speed import turns

    plan = make_plan("cpu")
    return turns({trunk: Update(plan, PRESET, {"model": model}) for trunk, model in models.items()}, seconds)


def decision_seconds(model: dict[str, Any]) -> float:
    """Median of `act` on one core. model: what a fresh network has other than the preset's."""
    import numpy as np
    import torch

    from matrixlib.data.shards import Shard
    from matrixlib.hardware.speed import turns
    from matrixlib.tasks import get_task, load_config
    from matrixlib.tasks.melee.columns import LAYOUT
    from matrixlib.tasks.melee.windows import cut
    from matrixlib.tasks.spec import runtime_for_use

    config = load_config(PRESET, {"model": model, "runtime": {"device": "cpu"}})
    spec: Any = get_task("melee")
    net = spec.network(spec.task(config).build_model(), config, runtime_for_use(config, "cpu"))
    torch.set_num_threads(1)
    row = Shard(spec.folder(config) / "sample_validation.npz", LAYOUT).gather(np.array([100]))
    window, _ = cut(row, np.zeros(1, int), np.zeros(1, int), 60)
    frames = itertools.cycle(window.at(number) for number in range(60))
    return turns({"act": lambda: net.act(next(frames))}, 1.0)["act"]


def main() -> None:
    import pandas as pd
    from matrixlib.tasks.melee.tables import onset_recall

    from matrixlib.runs import run as runs

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parameters", type=int, default=400_000)
    parser.add_argument("--trunks", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    options = parser.parse_args()
    models, counts = {}, {}
    for trunk in options.trunks:
        models[trunk], counts[trunk] = model(trunk, options.parameters)
    updates = update_seconds(models)
    decisions = {trunk: decision_seconds(section) for trunk, section in models.items()}
    rows = []
    for seed in range(options.seeds):
        for trunk, section in models.items():
            steps = round(60 * options.minutes / updates[trunk])
            name = f"melee-{trunk}-{steps}-seed{seed}"
            run = runs.open_run(PRESET, seed=seed, steps=steps, run=name, overrides={"model": section}, kind="bench")
            for _ in run.train():
                pass
            figures = run.summary()["evaluation"]
            run.close()
            recall, false = onset_recall(figures, "sampled")
            rows.append(
                {
                    "trunk": trunk,
                    "width": section["width"],
                    "parameters": counts[trunk],
                    "ms an update": 1000 * updates[trunk],
                    "updates": steps,
                    "nats": figures["total"]["nll"],
                    "at changes": figures["total"]["change_nll"],
                    "onsets %": 100 * recall,
                    "false %": 100 * false,
                    "ms of act": 1000 * decisions[trunk],
                }
            )
            table = pd.DataFrame(rows).groupby("trunk", sort=False)
            print(table.mean().join(table["nats"].std().rename("nats, deviation")).round(3).to_string(), flush=True)


if __name__ == "__main__":
    main()
