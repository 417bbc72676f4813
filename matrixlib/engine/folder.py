"""Run folders: which are intact, and what is wrong with the others."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matrixlib import files
from matrixlib.config import ConfigError, read_yaml_file

KINDS = {"run.json": "a training", "cycle.yaml": "a cycle", "sweep.yaml": "a sweep", "catalogue.sqlite": "a data set"}
"""File that a folder below the reports root has from its start on -> what it is."""
DAMAGED = ("metrics.jsonl", "checkpoints", "summary.json")  # without run.json: a damaged run, see `runs.record`


@dataclass(frozen=True)
class RunFolder:
    """An intact run. record: run.json; summary: summary.json, {} before the end. started: UTC, sortable as text.
    complete: reached the number of updates that it was asked for at its end."""

    path: Path
    name: str
    task: str
    started: str
    complete: bool
    record: Mapping[str, Any]
    summary: Mapping[str, Any]


def name_conflict(name: str, file: str) -> str:
    """Why no folder of the kind that has this file (of `KINDS`) can have this name below the reports root, or ""."""
    if problem := files.name_problem(name):
        return problem
    folder = files.folder_of(name)
    if folder == files.SHIPPED:
        return "is that of the network that comes with the package: take another"
    others = [kind for other, kind in KINDS.items() if other != file and (folder / other).exists()]
    if others:
        return f"is that of {others[0]}: take another"
    marks = (file, *DAMAGED) if file == "run.json" else (file,)
    found = files.foreign_entry(folder, marks, ["config.yaml"] if file == "run.json" else [])
    return f"is that of a folder with other files, such as {found!r}: take another" if found else ""


def read_run(folder: Path) -> RunFolder:
    """The run in a folder. ValueError names the missing or corrupt file and what to do."""
    record, summary = (files.read_json(folder / name) for name in ("run.json", "summary.json"))
    if not isinstance(requested := record.get("requested"), dict):
        problem = "does not say what was asked for" if (folder / "run.json").exists() else "is missing"
        raise ValueError(f"{folder / 'run.json'} {problem}: restore it from a backup, or give another run name")
    task, started, complete = str(requested.get("task", "")), str(record.get("started", "")), summary.get("complete")
    return RunFolder(folder, folder.name, task, started, bool(complete), record, summary)


def read_run_config(folder: Path) -> tuple[dict[str, Any], str]:
    """(nested data, name for messages) of a run's config.yaml; ConfigError says what to do."""
    name = f"{folder.name}/config.yaml"
    try:
        return read_yaml_file(folder / "config.yaml", name), name
    except ConfigError as error:
        raise ConfigError(f"{error}; restore it from a backup, or take another run name") from error


def intact_runs(root: Path | None = None) -> list[RunFolder]:
    """Intact runs below the reports root, newest first; each other folder is named in one warning a process."""
    runs = []
    for path in sorted((root or files.reports_root()).glob("*/run.json")):
        try:
            runs.append(read_run(path.parent))
        except (ValueError, OSError) as error:
            _warn(f"run '{path.parent.name}' is left out: {error}")
    return sorted(runs, key=lambda run: (run.started, run.name), reverse=True)


def newest_complete(task: str, fits: Callable[[Mapping[str, Any]], bool] = lambda requested: True) -> Path | None:
    """Folder of the task's run that finished last; None if there is none. fits: filter on the requested overrides."""
    trained = [run for run in intact_runs() if run.complete and run.record.get("kind") == "train" and run.task == task]
    ended = [run for run in trained if fits(run.record["requested"])]
    return max(ended, key=lambda run: str(run.summary.get("ended", run.started))).path if ended else None


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
