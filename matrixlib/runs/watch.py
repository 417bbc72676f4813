"""Status of each run: training, validating, stalled, or how it ended, from heartbeat.json and summary.json.

`python -m matrixlib.runs.watch --help`. Exit code 1 if a run is stalled.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from matrixlib import files
from matrixlib.engine.heartbeat import FILE, Heartbeat
from matrixlib.progress import clock_time, duration

STALL_SECONDS = 300.0  # without a heartbeat until a run counts as stalled, unless its updates or heartbeats are slower
STALL_UPDATES = 10.0  # updates within whose time a run is not stalled
UNDER_WAY = ("training", "validating", "evaluating", "stalled", "gone")  # statuses of unfinished runs
RUN_FILES = ("run.json", "config.yaml", "metrics.jsonl", "summary.json")
SHOWN = 20  # most runs without names


class RunStatus(NamedTuple):
    """Status of a run. word: begun, training, validating, evaluating, stalled, gone, stopped, complete, halted, failed
    or interrupted; text: with details."""

    word: str
    text: str


def run_status(folder: Path, now: datetime | None = None) -> RunStatus:
    """Status of the run in `folder` by its readable files. now: UTC, for tests."""
    now = now or datetime.now(UTC)
    summary, beat = _object(folder / "summary.json"), None
    with contextlib.suppress(ValueError):  # missing or damaged
        beat = Heartbeat.model_validate(_object(folder / FILE))
    ended = str(summary.get("ended", ""))
    if beat is not None and beat.phase != "stopped" and (not ended or beat.time > datetime.fromisoformat(ended)):
        return _alive(beat, (now - beat.time).total_seconds())
    updates = f"{summary.get('steps', '?')} updates"
    if summary.get("complete"):
        early = summary.get("stopped_early")
        return RunStatus("complete", f"ended: {updates}" + (f", stopped early: {early}" if early else ""))
    if isinstance(end := summary.get("end"), str) and end:
        return RunStatus(end, f"{end} after {updates}: {summary.get('reason', '?')}")
    if beat is not None:
        return RunStatus("stopped", f"stopped after {beat.updates}; rerun the same command to resume")
    return RunStatus("begun", "has not made an update yet")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run or of a notebook's verdict."""
    return any(os.path.isfile(folder / name) for name in RUN_FILES)


def run_folders(root: Path) -> list[Path]:
    """Folders of runs and of notebooks' verdicts, newest first."""
    folders = {path.parent for name in RUN_FILES for path in root.glob(f"*/{name}")}
    started = {folder: str(_object(folder / "run.json").get("started", "")) for folder in folders}
    return sorted(folders, key=lambda folder: (started[folder], folder.name), reverse=True)


def _alive(beat: Heartbeat, age: float) -> RunStatus:
    """Status of a run whose last heartbeat, `age` seconds ago, is not its end."""
    if not beat.process_lives():
        ago = duration(max(age, 0.0))
        text = f"died {ago} ago after {beat.updates}: killed, or out of memory; rerun the same command to resume"
        return RunStatus("gone", text)
    doing = {"validation": "validating", "evaluation": "evaluating"}.get(beat.phase, "training")
    # no heartbeats during the final evaluation
    patience = max(STALL_SECONDS, STALL_UPDATES * beat.step_seconds, 3 * beat.interval)
    if age > patience and doing != "evaluating":
        return RunStatus("stalled", f"stalled for {duration(age)} ({doing}) after {beat.updates}")
    if doing != "training" or not beat.step_seconds:
        return RunStatus(doing, f"{doing}, {beat.updates}")
    left = duration(max(0.0, beat.step_seconds * (beat.steps - beat.step)))
    return RunStatus(doing, f"{doing}, {beat.updates}, {duration(beat.step_seconds)} an update, about {left} left")


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; {} if unreadable, as files may be half-written."""
    try:
        return files.read_json(path)
    except (ValueError, OSError):  # OSError: no permission
        return {}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m matrixlib.runs.watch", description="How each run stands.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="name or folder; without any, those that began last")
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS", help="say it again and again")
    options, root = parser.parse_args(arguments), files.reports_root()
    folders = [Path(name) if os.path.isdir(name) else root / name for name in options.runs]
    if absent := [folder for folder in folders if not is_run(folder)]:
        print(f"no run at {absent[0]}; runs are the folders under {root}", file=sys.stderr)
        return 2
    while True:
        shown = folders or [folder for folder in run_folders(root) if (folder / "run.json").exists()][:SHOWN]
        statuses = {folder.name: run_status(folder) for folder in shown}
        print(clock_time() if shown else f"no runs under {root}")
        for name, state in statuses.items():
            print(f"  {name:{max(map(len, statuses))}}  {state.text}", flush=True)
        if options.every <= 0:
            return int(any(state.word == "stalled" for state in statuses.values()))
        time.sleep(options.every)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except files.FolderError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
