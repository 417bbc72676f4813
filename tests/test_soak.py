"""Ten thousand updates in a row, with everything in the loop: validation, checkpoints, statistics, SSL heads. A million
to look at."""

import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.runs import run as runs

TINY: dict[str, Any] = {
    "model": {"channels": 16, "blocks": 1, "ssl": ["piece", "threat", "pin", "fork", "control"]},
    "train": {"batch_size": 32, "statistics_interval": 100},
    "gating": {"warmup_steps": 100},
    "validation": {"sample": 512, "full_every": 10},
    "checkpoint": {"keep": 2},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}


@pytest.mark.parametrize(
    ("steps", "interval"), [(60, 10), pytest.param(10_000, 250, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_a_long_run_stays_finite_and_its_memory_flat(reports: Path, steps: int, interval: int) -> None:
    more = {"validation": {"interval": interval}, "checkpoint": {"interval": interval}}
    current = runs.open_run(run="soak", steps=steps, overrides=runs.configuration.merge(TINY, more))
    for _ in current.train():
        pass
    rows = metrics.read(current.folder / "metrics.jsonl")
    every = metrics.interval(steps)
    assert {1, *range(every, steps + 1, every)} <= {row["step"] for row in rows}
    assert sum(row.get("updates", 1) for row in rows) == steps
    values = [value for row in rows for name, value in metrics.flatten(row) if isinstance(value, float)]
    assert all(math.isfinite(value) for value in values)
    assert (rows[-1]["skipped"], rows[-1]["rollbacks"]) == (0, 0)
    memory = [row["memory"] for row in rows if "memory" in row]
    resident = [usage["rss_mib"] for usage in memory]
    quarter = len(resident) // 4
    growth = statistics.median(resident[-quarter:]) - statistics.median(resident[quarter : 2 * quarter])
    print(f"{len(values):,} values, RSS {resident[0]:.0f} ... {resident[-1]:.0f} MiB, growth {growth:.1f} MiB")
    if quarter > 1:  # a single value says little where the kernel takes back pages that lie idle
        assert growth < 16
    assert Checkpoints(current.folder / "checkpoints", 2).steps()[-1] == steps
