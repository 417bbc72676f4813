"""What the curricula of Latin squares are worth, and how far the network of `latin_full` comes on a CPU.

    python tests/bench/bench_latin.py [--steps 800] [--seeds 2]
    python tests/bench/bench_latin.py --full 10

The first trains `latin_quick` with and without the curriculum of modes and that of fills, at equal updates, and prints
for each seed what the specification claims of them: NEGATIVE puzzles (right cells, and valid in one pass, at 50 to 70 %
fill), and valid completions of the empty grid (cell by cell; without a network beside it). The second trains
the network of `latin_full` on sizes 3 to 9 for so many minutes, in smaller updates, and prints the rates by size.
"""

import argparse
import os
import tempfile
from typing import Any

import numpy as np
import pandas as pd

NEVER = 10**6
QUIET: dict[str, Any] = {"validation": {"interval": NEVER}, "checkpoint": {"interval": NEVER}}
ARMS: dict[str, dict[str, Any]] = {
    "latin_quick": {},
    "all modes from the start": {"mode": {"enabled": False}},
    "all fills from the start": {"fill": {"enabled": False}},
}
FULL: dict[str, Any] = {
    "train": {"steps": "auto", "batch_size": 32, "statistics_interval": NEVER},
    "optim": {"warmup_steps": 100, "rate_batch": 256},
    "runtime": {"compile": False},
    "data": {"squares": 4000},
    "validation": {"sample": 80},  # sixteen puzzles of each kind, the least: of size 9 they take minutes to fill
    "curriculum": {
        "size": {"stages": [[3, 5], [3, 7], [3, 9]], "fractions": [0.3, 0.3, 0.4]},
        "mode": {"enabled": False, "stages": [["standard"]], "fractions": [1.0]},
        "fill": {"stages": [[0.5, 0.7], [0.3, 0.7], [0.0, 0.7]], "fractions": [0.3, 0.3, 0.4]},
    },
}


def trained(preset: str, overrides: dict[str, Any], seed: int = 0, steps: int = 0) -> pd.DataFrame:
    """Rates of a run, a row for each kind of puzzle."""
    from matrixlib.config import merge
    from matrixlib.runs import run as runs

    run = runs.open_run(preset, "cpu", seed, steps=steps, overrides=merge(QUIET, overrides))
    for _ in run.train():
        pass
    summary = run.summary()
    print(f"{preset}, seed {seed}: {summary['steps']:,} updates in {summary['seconds']:.0f} s", flush=True)
    frame = pd.DataFrame(summary["evaluation"]["rates"])
    return frame.assign(low=[fill[0] for fill in frame["fill"]])


def claims(steps: int, seeds: int) -> pd.DataFrame:
    """A row for each arm and seed."""
    rows = {}
    for seed in range(seeds):
        for name, curriculum in ARMS.items():
            rates = trained("latin_quick", {"curriculum": curriculum}, seed, steps)
            negative = rates[(rates["mode"] == "negative") & (rates["low"] == 0.5)]
            empty = rates[rates["low"] == 0.0]
            rows[name, seed] = {
                "NEGATIVE, right cells": negative["accuracy"].mean(),
                "NEGATIVE, valid in one pass": negative["valid"].mean(),
                "empty grid, one after the other": empty["iterative"].mean(),
                "without a network": empty["iterative_baseline"].mean(),
            }
    return pd.DataFrame.from_dict(rows, orient="index")


def full(minutes: float) -> pd.DataFrame:
    """A row for each size and range of fill of the network of latin_full."""
    rates = trained("latin_full", FULL | {"train": {**FULL["train"], "minutes": minutes}})
    columns = ["valid", "accuracy", "iterative", "iterative_baseline", "beam", "beam_baseline"]
    fill = ["empty" if high == 0 else f"{low:.0%} to {high:.0%}" for low, high in rates["fill"]]
    return rates.assign(fill=fill).set_index(["size", "fill"])[columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--full", type=float, default=0.0, help="minutes; in place of the curricula")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MATRIXLIB_REPORTS"] = folder
        table = full(options.full) if options.full else claims(options.steps, options.seeds)
    with pd.option_context("display.width", 200, "display.max_columns", 20, "display.max_rows", 100):
        print(table.map(lambda share: f"{share:.1%}" if np.isfinite(share) else "").to_string())


if __name__ == "__main__":
    main()
