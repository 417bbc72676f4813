"""What a run's folder records of its beginning, and what may change when it goes on."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import Config
from matrixlib.files import write_json, write_text
from matrixlib.hardware import machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs.data import RunError
from matrixlib.runs.start import Start
from matrixlib.tasks import changed, parse_config

MAY_CHANGE = (
    "train.steps",
    "train.minutes",
    "train.on_time",
    "train.heartbeat_seconds",
    "data.timeout",
    "data.max_lost",
    "validation.",
    "checkpoint.",
    "health.",
    "memory.",
)
"""Options, or sections with a dot at their end, that may be other ones when a run is resumed."""


def resume_config(folder: Path, requested: Config, record: Mapping[str, Any], messages: list[str]) -> Config:
    """The stored resolved configuration with the permitted changes; anything else is refused by name."""
    text, file = (folder / "config.yaml").read_text(encoding="utf-8"), f"{folder.name}/config.yaml"
    stored = parse_config(configuration.read_yaml(text, file), file, requested.task)
    before = parse_config(record["requested"], f"{folder.name}/run.json", requested.task)
    changes = configuration.difference(requested, before)
    fixed = [key for key in changes if not key.startswith(MAY_CHANGE)]
    if fixed:
        text = ", ".join(f"{key} {changes[key][0]} -> {changes[key][1]}" for key in fixed)
        raise RunError(f"run '{folder.name}' was started with other values ({text}); give it another run name")
    data = configuration.dump(stored)
    for key, (old, new) in changes.items():
        section, name = key.split(".")
        if key != "train.steps" or new != "auto":
            data[section][name] = new
            messages.append(f"changed on resume: {key} {old} -> {new}")
    config = parse_config(data, file, requested.task)
    if changes:  # the next one to resume compares with this request
        write_text(folder / "config.yaml", configuration.to_yaml(config))
        write_json(folder / "run.json", {**record, "requested": configuration.dump(requested)})
    return config


def runtime_config(config: Config, runtime: runtimes.Runtime) -> Config:
    """The configuration with every `auto` of runtime, data and micro-batch replaced by what was resolved."""
    resolved = {
        "runtime": runtime_settings(runtime),
        "data": {"workers": runtime.workers, "prefetch": runtime.prefetch},
        "train": {"micro_batch": runtime.micro_batch},
    }
    return changed(config, resolved)


def runtime_settings(runtime: runtimes.Runtime) -> dict[str, Any]:
    """The section `runtime` of a configuration that asks for what was resolved."""
    return {
        "device": runtime.device,
        "precision": runtime.dtype,
        "threads": runtime.threads,
        "channels_last": runtime.channels_last,
        "compile": runtime.compile or False,
    }


def write_record(
    folder: Path,
    preset: str,
    requested: Config,
    config: Config,
    runtime: runtimes.Runtime,
    catalogue: str,
    kind: str,
    update_seconds: float | None,
    start: Start | None = None,
) -> None:
    """Write down a run that begins: config.yaml, resolved; run.json, what was requested, on what, from what weights,
    and what an update took in the trial.
    """
    write_text(folder / "config.yaml", configuration.to_yaml(config))
    write_json(
        folder / "run.json",
        {
            "kind": kind,
            "preset": preset,
            "requested": configuration.dump(requested),
            "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
            "commit": git_commit(),
            "versions": machine.versions(),
            "catalogue": catalogue,
            "runtime": runtime.to_dict(),
            "update_seconds": update_seconds,
            **({"init": start.record()} if start is not None else {}),
        },
    )


def git_commit() -> str:
    """Commit of the checkout that the package runs from, with `+changes` where the tree is not clean; '' elsewhere."""
    if files.CHECKOUT is None:
        return ""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(files.CHECKOUT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else "")
    except FileNotFoundError:
        return ""
