"""How each run stands: training, validating, stalled, or ended and how, by its heartbeat.json and summary.json.

    python -m matrixlib.runs.watch                   the runs that began last
    python -m matrixlib.runs.watch RUN               one run (name or folder), or several
    python -m matrixlib.runs.watch --every 60        the same again every minute, until Ctrl-C

The exit code is 1 where a run is stalled.
"""

import argparse
import contextlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from pydantic import AwareDatetime, BaseModel, NonNegativeFloat

from matrixlib import files
from matrixlib.progress import clock_time, duration

STALL_SECONDS = 300.0
"""Without a heartbeat for so long a run is stalled, unless its updates, or its heartbeats, are further apart."""
STALL_UPDATES = 10.0
"""A run is not stalled for as long as it took for so many of its updates."""
UNDER_WAY = ("training", "validating", "evaluating", "stalled", "gone")
"""Words for runs that have not come to an end of their own."""
SHOWN = 20  # runs at most without names


class Standing(NamedTuple):
    """How a run stands. word: begun, training, validating, evaluating, stalled, gone, stopped, complete, halted, failed
    or interrupted; text: the same with what there is to say about it."""

    word: str
    text: str


class Heartbeat(BaseModel):
    """heartbeat.json, as the trainer writes it. interval: seconds between two of them."""

    time: AwareDatetime
    host: str
    pid: int = 0
    phase: str = "training"
    step: int = 0
    steps: int = 0
    step_seconds: NonNegativeFloat = 0.0
    interval: NonNegativeFloat = 0.0

    @property
    def updates(self) -> str:
        return f"update {self.step:,} of {self.steps:,}" if self.steps else f"{self.step:,} updates"

    def process_lives(self) -> bool:
        """Whether the process that wrote it is there; True where that cannot be known, as it is another machine's."""
        if self.host != platform.node():
            return True
        try:
            process = psutil.Process(self.pid)
            # another one may have been given its number
            return process.create_time() <= self.time.timestamp() + 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.AccessDenied:
            return True
        except psutil.NoSuchProcess:
            return False


def standing(folder: Path, now: datetime | None = None) -> Standing:
    """How the run in `folder` stands, of what its files say that are whole. now: UTC, for tests."""
    now = now or datetime.now(UTC)
    summary, beat = _object(folder / "summary.json"), None
    with contextlib.suppress(ValueError):  # none, or a damaged one
        beat = Heartbeat.model_validate(_object(folder / "heartbeat.json"))
    ended = str(summary.get("ended", ""))
    if beat is not None and beat.phase != "stopped" and (not ended or beat.time > datetime.fromisoformat(ended)):
        return _alive(beat, (now - beat.time).total_seconds())
    updates = f"{summary.get('steps', '?')} updates"
    if summary.get("complete"):
        early = summary.get("stopped_early")
        return Standing("complete", f"ended: {updates}" + (f", stopped early: {early}" if early else ""))
    if isinstance(end := summary.get("end"), str) and end:
        return Standing(end, f"{end} after {updates}: {summary.get('reason', '?')}")
    if beat is not None:
        return Standing("stopped", f"stopped after {beat.updates}; the same command goes on")
    return Standing("begun", "has not made an update yet")


def run_folders(root: Path) -> list[Path]:
    """Folders that hold a run or the verdict of a notebook, the one that began last first."""
    folders = {path.parent for name in ("run.json", "config.yaml", "summary.json") for path in root.glob(f"*/{name}")}
    started = {folder: str(_object(folder / "run.json").get("started", "")) for folder in folders}
    return sorted(folders, key=lambda folder: (started[folder], folder.name), reverse=True)


def _alive(beat: Heartbeat, age: float) -> Standing:
    """Of a run whose last heartbeat, so many seconds ago, is not that of its end."""
    if not beat.process_lives():
        ago = duration(max(age, 0.0))
        text = f"gone without a word {ago} ago after {beat.updates}: killed, or out of memory; the same command goes on"
        return Standing("gone", text)
    doing = {"validation": "validating", "evaluation": "evaluating"}.get(beat.phase, "training")
    # no heartbeats come while the end is evaluated
    patience = max(STALL_SECONDS, STALL_UPDATES * beat.step_seconds, 3 * beat.interval)
    if age > patience and doing != "evaluating":
        return Standing("stalled", f"stalled for {duration(age)} ({doing}) after {beat.updates}")
    if doing != "training" or not beat.step_seconds:
        return Standing(doing, f"{doing}, {beat.updates}")
    left = duration(max(0.0, beat.step_seconds * (beat.steps - beat.step)))
    return Standing(doing, f"{doing}, {beat.updates}, {duration(beat.step_seconds)} an update, about {left} left")


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is none that can be read: a watcher looks at what may be half there."""
    try:
        return files.read_json(path)
    except (ValueError, OSError):  # OSError: a folder that may not be looked into
        return {}


def main(arguments: Sequence[str]) -> int:
    """Command line: a line for each run."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.runs.watch", description="How each run stands.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="name or folder; without any, those that began last")
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS", help="say it again and again")
    options, root = parser.parse_args(arguments), files.reports_root()
    folders = [Path(name) if os.path.isdir(name) else root / name for name in options.runs]
    if absent := [folder for folder in folders if not os.path.isdir(folder)]:
        print(f"no run at {absent[0]}; runs are the folders under {root}", file=sys.stderr)
        return 2
    while True:
        shown = folders or [folder for folder in run_folders(root) if (folder / "run.json").exists()][:SHOWN]
        standings = {folder.name: standing(folder) for folder in shown}
        print(clock_time() if shown else f"no runs under {root}")
        for name, state in standings.items():
            print(f"  {name:{max(map(len, standings))}}  {state.text}", flush=True)
        if options.every <= 0:
            return int(any(state.word == "stalled" for state in standings.values()))
        time.sleep(options.every)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except files.FolderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
