"""How each run stands: training, validating, stalled, or ended and how, by its heartbeat.json and summary.json.

    python -m matrixlib.runs.watch                   the runs that began last
    python -m matrixlib.runs.watch RUN               one run (name or folder), or several
    python -m matrixlib.runs.watch --every 60        the same again every minute, until Ctrl-C

The exit code is 1 where a run is stalled.
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from matrixlib import files
from matrixlib.progress import clock_time, duration

STALL_SECONDS = 300.0
"""Without a heartbeat for so long a run is stalled, unless its updates, or its heartbeats, are further apart."""
STALL_UPDATES = 10.0
"""A run is not stalled for as long as it took for so many of its updates."""
UNDER_WAY = ("training", "validating", "evaluating", "stalled", "gone")
"""Words for runs that have not come to an end of their own."""
SHOWN = 20  # runs at most without names


@dataclass(frozen=True)
class Standing:
    """How a run stands. word: begun, training, validating, evaluating, stalled, gone, stopped, complete, halted, failed
    or interrupted; text: the same with what there is to say about it."""

    word: str
    text: str


def standing(folder: Path, now: datetime | None = None) -> Standing:
    """How the run in `folder` stands, of what its files say that are whole. now: UTC, for tests."""
    now = now or datetime.now(UTC)
    summary, beat = _object(folder / "summary.json"), read_beat(folder)
    when = _time(beat.get("time"))
    ended = _time(summary.get("ended"))
    if when is not None and beat.get("phase") != "stopped" and (ended is None or when > ended):
        return _alive(beat, (now - when).total_seconds())
    if summary.get("complete"):
        early = summary.get("stopped_early")
        text = f"ended: {summary.get('steps', '?')} updates" + (f", stopped early: {early}" if early else "")
        return Standing("complete", text)
    if isinstance(end := summary.get("end"), str) and end:
        return Standing(end, f"{end} after {_updates(summary)}: {summary.get('reason', '?')}")
    if when is not None:
        return Standing("stopped", f"stopped after {_updates(beat, 'step')}; the same command goes on")
    return Standing("begun", "has not made an update yet")


def read_beat(folder: Path) -> dict[str, Any]:
    """The heartbeat of the run in `folder`; {} where there is none."""
    return _object(folder / "heartbeat.json")


def run_folders(root: Path) -> list[Path]:
    """Folders that hold a run or the verdict of a notebook, the one that began last first."""
    folders = {path.parent for name in ("run.json", "config.yaml", "summary.json") for path in root.glob(f"*/{name}")}
    started = {folder: str(_object(folder / "run.json").get("started", "")) for folder in folders}
    return sorted(folders, key=lambda folder: (started[folder], folder.name), reverse=True)


def _alive(beat: Mapping[str, Any], age: float) -> Standing:
    """Of a run whose last heartbeat, so many seconds ago, is not that of its end."""
    updates = _updates(beat, "step")
    if not _process_lives(beat):
        ago = duration(max(age, 0.0))
        text = f"gone without a word {ago} ago after {updates}: killed, or out of memory; the same command goes on"
        return Standing("gone", text)
    doing = {"training": "training", "validation": "validating", "evaluation": "evaluating"}.get(
        str(beat.get("phase")), "training"
    )
    # no heartbeats come while the end is evaluated
    patience = max(STALL_SECONDS, STALL_UPDATES * _number(beat, "step_seconds"), 3 * _number(beat, "interval"))
    if age > patience and doing != "evaluating":
        return Standing("stalled", f"stalled for {duration(age)} ({doing}) after {updates}")
    if doing != "training" or (each := _number(beat, "step_seconds")) <= 0:
        return Standing(doing, f"{doing}, {updates}")
    left = each * (_number(beat, "steps") - _number(beat, "step"))
    more = f", about {duration(left)} left" if left > 0 else ""
    return Standing(doing, f"{doing}, {updates}, {duration(each)} an update{more}")


def _process_lives(beat: Mapping[str, Any]) -> bool:
    """Whether the process that wrote it is there; True where that cannot be known, as it is another machine's."""
    if beat.get("host") != platform.node():
        return True
    when = _time(beat.get("time"))
    try:
        process = psutil.Process(beat["pid"])
        # another one may have been given its number
        is_writer = when is None or process.create_time() <= when.timestamp() + 1
        return is_writer and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
    except psutil.AccessDenied:
        return True


def _updates(data: Mapping[str, Any], key: str = "steps") -> str:
    done = _number(data, key)
    total = _number(data, "steps")
    return f"update {done:,.0f} of {total:,.0f}" if key == "step" and total else f"{done:,.0f} updates"


def _number(data: Mapping[str, Any], key: str) -> float:
    value = data.get(key)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
    except OverflowError:
        return 0.0


def _time(text: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


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
    options = parser.parse_args(arguments)
    if not 0 <= options.every < math.inf:
        parser.error(f"--every {options.every:g}: give seconds, from 0")
    root = files.reports_root()
    folders = [Path(name) if os.path.isdir(name) else root / name for name in options.runs]
    if absent := [folder for folder in folders if not os.path.isdir(folder)]:
        print(f"no run at {absent[0]}; runs are the folders under {root}", file=sys.stderr)
        return 2
    while True:
        shown = folders or [folder for folder in run_folders(root) if (folder / "run.json").exists()][:SHOWN]
        standings = {folder: standing(folder) for folder in shown}
        width = max((len(folder.name) for folder in shown), default=0)
        print(clock_time() if shown else f"no runs under {root}")
        for folder, state in standings.items():
            print(f"  {folder.name:{width}}  {state.text}", flush=True)
        if not options.every:
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
