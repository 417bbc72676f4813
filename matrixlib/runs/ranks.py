"""Training by several ranks: what each torchrun process does."""

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from matrixlib.engine.signals import Terminated
from matrixlib.runs import run as runs
from matrixlib.runs.live import LivePlot


def train(
    preset: str, run: str, overrides: Mapping[str, Any], device: str = "auto", steps: int = 0, trace: int = 0
) -> int:
    """Train as this torchrun process's rank; returns the exit code. Rank 0 prints progress."""
    import torch.distributed as dist

    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    current: runs.Run | None = None
    try:
        current = runs.open_run(preset, device, run=run, steps=steps, overrides=overrides)
        panel = None
        if current.ranks.first:
            print(current.describe(), flush=True)
            panel = LivePlot(current.steps, title=current.preset, history=current.history())
        with panel or nullcontext():
            for stats in current.train(trace):
                if panel is not None:
                    panel.update(stats)
    except (KeyboardInterrupt, Terminated) as told:
        number = signal.SIGTERM if isinstance(told, Terminated) else signal.SIGINT
        if current is not None:  # torchrun kills all when one ends, and rank 0 may still save
            with suppress(RuntimeError):  # rank 0's store is gone
                current.ranks.after_first("the end")
        print(f"ended by {number.name}; rerun the same command to resume from the last checkpoint", file=sys.stderr)
        return 128 + number
    except Exception as problem:
        which, notes = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE")), getattr(problem, "__notes__", [])
        text = f"rank {' of '.join(which)}: {type(problem).__name__}: {problem}"
        print(text, *notes, sep="\n", file=sys.stderr, flush=True)
        if isinstance(problem, ValueError):
            return 1
        raise
    if current.ranks.first:
        summary = current.summary()
        print(f"{summary['positions']:,} positions; held-out: {summary['headline']}")
        print(f"report: {current.folder / 'report.html'}")
    with suppress(RuntimeError):  # a process that ends while gloo still holds a tensor aborts (pytorch issue 190489)
        current.ranks.after_first("the end")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":  # started by a notebook; ends when its stdin closes
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    sys.exit(train(**json.loads(sys.argv[1])))
