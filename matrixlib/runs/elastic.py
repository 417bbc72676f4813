"""Ranks that a notebook has started on its own machine: what they write is followed.

A notebook is one process, so it trains nothing itself then. Launcher and ranks end with it, however it ends: each has
the other end of a pipe that nobody writes to.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from matrixlib.engine import rows
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.signals import deferred
from matrixlib.engine.stats import Stats, from_row
from matrixlib.files import utc_now
from matrixlib.runs.data import RunError

LOOK_SECONDS = 0.1
"""Between two looks at what the ranks have written."""
NOT_FOR_RANKS = ("JPY_SESSION_NAME", "MATRIXLIB_LIVE")
"""Variables that say what the notebook shows."""


def follow(folder: Path, ranks: int, request: Mapping[str, Any], say: Callable[[str], None]) -> Generator[Stats]:
    """Start the ranks of the run in `folder` and yield its updates as they come; at the end all have ended. request:
    arguments of `runs.ranks.train`. say: is told messages.

    Ctrl-C and SIGTERM go on to the ranks, which save and end, as they do when the caller leaves the loop. RunError with
    the word of the rank that failed.
    """
    known, log = (utc_now(), 0), folder / "ranks.log"
    with deferred() as signals, _launcher(request, ranks, log) as launcher:
        told = ended = False
        try:
            while not ended:
                ended = launcher.poll() is not None
                for row in rows.newer(folder / "metrics.jsonl", known):
                    known, stats = (row["time"], row["step"]), from_row(row)
                    for text in stats.messages:
                        say(f"update {stats.step}: {text}")
                    yield stats
                number = signal.SIGTERM if signals.terminated is not None else signal.SIGINT
                if not told and (signals.interrupts or signals.terminated is not None):
                    told = True
                    _tell(launcher, number)
                time.sleep(0 if ended else LOOK_SECONDS)
        except GeneratorExit:
            _tell(launcher, signal.SIGINT)
            launcher.wait()
            raise
        try:
            signals.check()
            if launcher.returncode:
                raise RunError(_last_line(log))
        except BaseException as error:
            newest = max(Checkpoints(folder / "checkpoints", 2).steps(), default=-1)
            where = f"from the checkpoint of update {newest}" if newest >= 0 else "from the start"
            error.add_note(f"the same command or notebook goes on {where}; what the ranks printed: {log}")
            raise


@contextlib.contextmanager
def _launcher(request: Mapping[str, Any], ranks: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process of the launcher; what it and the ranks print goes into `log`."""
    command = [sys.executable, "-m", "matrixlib.runs.ranks", str(ranks), json.dumps(request)]
    environment = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RANKS}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # an interrupt of the kernel goes to all of its session
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def _tell(launcher: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """A signal to each rank and not to the launcher, which would give them half a minute and end their loaders too."""
    with contextlib.suppress(psutil.NoSuchProcess):
        ranks = psutil.Process(launcher.pid).children()
        for rank in ranks:
            rank.send_signal(number)
        if not ranks:
            launcher.terminate()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "the ranks ended without a word")
