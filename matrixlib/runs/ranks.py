"""One training by several ranks: what each process of torchrun does."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from matrixlib.engine.signals import Terminated
from matrixlib.runs import run as runs
from matrixlib.runs.live import LivePlot

GOES_ON = "the same command goes on from the last checkpoint"


def train(preset: str, device: str, run: str, steps: int, overrides: Mapping[str, Any]) -> int:
    """Train as the rank that torchrun has made of this process; the exit code. Rank 0 tells how it goes."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        current = runs.open_run(preset, device, run=run, steps=steps, overrides=overrides)
        if current.first:
            print(current.describe(), flush=True)
        panel = LivePlot(current.steps, title=current.preset, history=current.history()) if current.first else None
        with panel or nullcontext():
            for stats in current.train():
                if panel is not None:
                    panel.update(stats)
    except ValueError as problem:
        notes = getattr(problem, "__notes__", [])
        print(*[f"{type(problem).__name__}: {problem}", *notes], sep="\n", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {GOES_ON}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Terminated:
        print(f"ended by SIGTERM; {GOES_ON}", file=sys.stderr)
        return 128 + signal.SIGTERM
    if current.first:
        summary = current.summary()
        print(f"{summary['positions']:,} positions; held-out: {summary['headline']}")
        print(f"report: {current.folder / 'report.html'}")
    return 0
