"""Follows ranks that a notebook started on its machine, and their log; it trains nothing itself. Launcher and ranks end
with the notebook, however it ends: each watches a pipe held by it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import psutil

from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.signals import deferred
from matrixlib.engine.stats import Stats, from_row
from matrixlib.files import utc_now
from matrixlib.hardware import machine
from matrixlib.runs.data import RunError

POLL_SECONDS = 0.1
SAVE_SECONDS = 600  # for a rank to save when it is told to end; torchrun's default is 30
FAILURE = re.compile(r"^rank \d+ of \d+: .*$", re.MULTILINE)
NOTEBOOK_VARIABLES = ("JPY_SESSION_NAME", "MATRIXLIB_LIVE")


def follow(folder: Path, ranks: int, request: Mapping[str, Any], say: Callable[[str], None]) -> Generator[Stats]:
    """Start the ranks of the run in `folder` and yield its updates; on return all have ended. request: arguments of
    `runs.ranks.train`. say: called with messages.

    Ctrl-C, SIGTERM and leaving the loop reach the ranks, which save and end. RunError: which rank failed, and why.
    """
    known, log = (utc_now(), 0), folder / "ranks.log"
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} --shutdown-timeout={SAVE_SECONDS}"
    command = [sys.executable, *torchrun.split(), "-m", "matrixlib.runs.ranks", json.dumps(request)]
    environment = {name: value for name, value in os.environ.items() if name not in NOTEBOOK_VARIABLES}
    environment.setdefault("OMP_NUM_THREADS", str(machine.cores()))  # torchrun's default is one thread
    # new session: a kernel interrupt goes to its whole session
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with (
        deferred() as signals,
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, env=environment, **options) as launcher,
    ):
        told = ended = False
        try:
            while not ended:
                ended = launcher.poll() is not None
                for row in metrics.newer(folder / "metrics.jsonl", known):
                    known, stats = (row["time"], row["step"]), from_row(row)
                    for message in stats.messages:
                        say(f"update {stats.step}: {message}")
                    yield stats
                if not told and (signals.interrupts or signals.terminated is not None):
                    told = True
                    _tell(launcher, signal.SIGINT if signals.terminated is None else signal.SIGTERM)
                time.sleep(0 if ended else POLL_SECONDS)
            signals.check()
            if launcher.returncode:
                text = log.read_text(encoding="utf-8", errors="replace").rstrip()
                first = FAILURE.search(text)  # later failures follow from it
                raise RunError(first.group() if first else text.rpartition("\n")[2] or "the ranks ended without output")
        except GeneratorExit:
            _tell(launcher, signal.SIGINT)
            launcher.wait()
            raise
        except BaseException as error:
            newest = max(Checkpoints(folder / "checkpoints", 2).steps(), default=-1)
            where = f"from the checkpoint of update {newest}" if newest >= 0 else "from the start"
            error.add_note(f"rerun the same command or notebook to resume {where}; what the ranks printed: {log}")
            raise


def _tell(launcher: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Signal each rank, not the launcher, which would allow only 30 s and also kill their loaders."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(launcher.pid).children()
        for rank in ranks:
            rank.send_signal(number)
        if not ranks:
            launcher.terminate()
