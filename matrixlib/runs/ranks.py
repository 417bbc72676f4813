"""One training by several ranks: what each process of torchrun does, and torchrun itself for those of a notebook."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from matrixlib.engine.signals import Terminated
from matrixlib.hardware import machine
from matrixlib.runs import run as runs
from matrixlib.runs.live import LivePlot

SAVE_SECONDS = 600
"""In which a rank that was told to end saves; torchrun would kill it after 30."""


def train(
    preset: str,
    run: str,
    overrides: Mapping[str, Any],
    device: str = "auto",
    steps: int = 0,
    trace: int = 0,
    tensorboard: bool = False,
) -> int:
    """Train as the rank that torchrun has made of this process; the exit code. Rank 0 prints how it goes."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    current: runs.Run | None = None
    try:
        current = runs.open_run(preset, device, run=run, steps=steps, overrides=overrides)
        updates = current.train(trace, tensorboard)
        if current.ranks.first:
            print(current.describe(), flush=True)
            with LivePlot(current.steps, title=current.preset, history=current.history()) as panel:
                for stats in updates:
                    panel.update(stats)
        else:
            for _ in updates:
                pass
    except (KeyboardInterrupt, Terminated) as told:
        number = signal.SIGTERM if isinstance(told, Terminated) else signal.SIGINT
        if current is not None:  # torchrun ends all as soon as one has ended, and rank 0 may still save
            with suppress(RuntimeError):  # the store is gone
                current.ranks.after_first("the end")
        print(f"ended by {number.name}; the same command goes on from the last checkpoint", file=sys.stderr)
        return 128 + number
    except Exception as problem:
        get_error_handler().record_exception(problem)
        if not isinstance(problem, ValueError):
            raise
        notes = getattr(problem, "__notes__", [])
        print(*[f"{type(problem).__name__}: {problem}", *notes], sep="\n", file=sys.stderr)
        return 1
    if current.ranks.first:
        summary = current.summary()
        print(f"{summary['positions']:,} positions; held-out: {summary['headline']}")
        print(f"report: {current.folder / 'report.html'}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def launch(size: int, request: str) -> int:
    """Be torchrun for `size` ranks on this machine; the exit code. The last line says which rank failed, and why."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(machine.cores()))  # else torchrun gives each rank one thread
    options = ["--standalone", f"--nproc-per-node={size}", f"--shutdown-timeout={SAVE_SECONDS}"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "matrixlib.runs.ranks", str(size), request]))
    except ChildFailedError as error:
        told = {rank: failure.message for rank, failure in error.failures.items()}
        texts = {rank: text if isinstance(text, str) else text["message"] for rank, text in told.items()}
        rank = min(texts, key=lambda rank: texts[rank].startswith("LostRank"))  # which misses one that failed
        print(f"rank {rank} of {size}: {texts[rank]}", flush=True)
        return 1
    except SignalException as error:
        return 128 + error.sigval
    return 0


def main(size: str, request: str) -> int:
    """What the launcher and each of its ranks does; the exit code. They end with the other end of standard input."""
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return launch(int(size), request)
    return train(**json.loads(request))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
