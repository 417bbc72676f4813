"""One training by several ranks: what each process of torchrun does, and a launcher for those of a notebook."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from matrixlib.engine.signals import Terminated
from matrixlib.runs import run as runs
from matrixlib.runs.live import LivePlot

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SAVE_SECONDS = 600
"""In which a rank that was told to end saves; torch's launcher would kill it after 30."""
GOES_ON = "the same command goes on from the last checkpoint"


def train(
    preset: str,
    run: str,
    overrides: Mapping[str, Any],
    device: str = "auto",
    steps: int = 0,
    trace: int = 0,
    tensorboard: bool = False,
) -> int:
    """Train as the rank that torchrun has made of this process; the exit code. Rank 0 tells how it goes."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    current: runs.Run | None = None
    try:
        current = runs.open_run(preset, device, run=run, steps=steps, overrides=overrides)
        if current.ranks.first:
            print(current.describe(), flush=True)
        panel = (
            LivePlot(current.steps, title=current.preset, history=current.history()) if current.ranks.first else None
        )
        with panel or nullcontext():
            for stats in current.train(trace, tensorboard):
                if panel is not None:
                    panel.update(stats)
    except ValueError as problem:
        notes = getattr(problem, "__notes__", [])
        print(*[f"{type(problem).__name__}: {problem}", *notes], sep="\n", file=sys.stderr)
        get_error_handler().record_exception(problem)
        return 1
    except (KeyboardInterrupt, Terminated) as told:
        number = signal.SIGTERM if isinstance(told, Terminated) else signal.SIGINT
        if current is not None:
            current.ranks.end_with_first()
        print(f"ended by {number.name}; {GOES_ON}", file=sys.stderr)
        return 128 + number
    except Exception as problem:
        get_error_handler().record_exception(problem)
        raise
    if current.ranks.first:
        summary = current.summary()
        print(f"{summary['positions']:,} positions; held-out: {summary['headline']}")
        print(f"report: {current.folder / 'report.html'}")
    return 0


def _launch(size: int, request: str) -> int:
    """Be the launcher of `size` ranks; the exit code. Of ranks that fail the last line tells."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as folder:
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=SAVE_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(launch, sys.executable)("-m", "matrixlib.runs.ranks", str(size), request)
        except ChildFailedError as error:
            print(_word(error.failures, size), flush=True)
            return 1
        except SignalException as error:
            return 128 + error.sigval
    return 0


def _word(failures: Mapping[int, ProcessFailure], size: int) -> str:
    """Why ranks failed: an error of one's own before that of one that misses another, else what came first."""
    messages: dict[int, Any] = {rank: failure.message for rank, failure in failures.items()}
    own = {rank: message["message"] for rank, message in messages.items() if isinstance(message, dict)}
    for rank, text in own.items():
        if not text.startswith("LostRank"):
            return f"rank {rank} of {size}: {text}"
    rank, failure = next(iter(failures.items()))
    if rank in own:
        return own[rank].removeprefix("LostRank: ")
    if failure.exitcode < 0:
        return f"rank {rank} of {size} was ended by {failure.signal_name()}: by hand, or for want of memory"
    return f"rank {rank} of {size} ended with exit code {failure.exitcode}"


def _end_with_notebook() -> None:
    """End this process when the other end of its standard input is closed."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main(size: str, request: str) -> int:
    """What the launcher and each of its ranks does; the exit code."""
    _end_with_notebook()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _launch(int(size), request)
    return train(**json.loads(request))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
