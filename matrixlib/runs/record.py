"""What a run's folder records of its beginning, and what may change when it goes on."""

import datetime
import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import Config
from matrixlib.engine.folder import read_run, read_run_config, whole_runs
from matrixlib.engine.parts import Parts
from matrixlib.files import write_json, write_text
from matrixlib.hardware import machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs.data import RunData, RunError
from matrixlib.runs.start import Start
from matrixlib.tasks import changed, parse_config

ORPHAN_SECONDS = 3.0  # ipykernel looks for its parent once a second
MAY_CHANGE = (
    "train.steps",
    "train.minutes",
    "train.heartbeat_seconds",
    "train.micro_batch",
    "data.cache",
    "data.timeout",
    "data.max_lost",
    "validation.",
    "checkpoint.",
    "health.",
    "memory.",
    "runtime.compile",
    "runtime.rank_timeout",
    "runtime.shard",
    "teacher.network",  # where it lies: by its SHA-256 it is the same
)
"""Options, or sections with a dot at their end, that may be other ones when a run is resumed."""
SETTLED = ("train.steps", "train.micro_batch", "runtime.compile")
"""Those whose `auto` stands for what was settled as the run began."""


def run_folder(
    preset: str,
    run: str,
    requested: Config,
    kind: str = "train",
    parts: Parts = Parts(),  # noqa: B008 - frozen
) -> Path:
    """Folder of the named run, of the newest incomplete one with the same configuration and parts, or of a new one."""
    root = files.reports_root()
    if run:
        if problem := files.name_problem(run):
            raise RunError(f"run name {run!r} {problem}")
        return root / run
    request = configuration.dump(requested)
    wanted, own = {"kind": kind, "preset": preset, "requested": request}.items(), parts.record()
    for stored in whole_runs(root):
        same = wanted <= stored.record.items() and own == stored.record.get("parts", {})
        if same and not stored.complete and not locked(stored.path):
            return stored.path
    prefix = "" if kind == "train" else f"{kind}-"
    stem = f"{prefix}{Path(preset).stem}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    if problem := files.name_problem(stem):
        raise RunError(f"the name {stem!r}, which preset and time make, {problem}; give `run` a name")
    names = [stem, *(f"{stem}-{k}" for k in range(2, 100))]
    return next(root / name for name in names if not (root / name).exists())


def locked(folder: Path) -> bool:
    """Whether another process writes the run. A killed notebook's kernel needs a second or two to notice.

    A run that may not be written, such as somebody else's, is no other one's to go on with either.
    """
    lock = FileLock(folder / "lock")
    try:
        with lock.acquire(timeout=ORPHAN_SECONDS):
            return False
    except (Timeout, OSError):
        return True


def complete_run(name: str) -> Path:
    """The folder of a complete run; RunError where there is none of this name, or it is damaged."""
    folder = files.reports_root() / name
    if not files.name_problem(name) and (folder / "run.json").exists():
        try:
            if read_run(folder).complete:
                return folder
        except ValueError as error:
            raise RunError(f"run '{name}': {error}") from error
    known = ", ".join(sorted(run.name for run in whole_runs() if run.complete)) or "none yet"
    raise RunError(f"no complete run '{name}'; complete runs: {known}")


def stored_record(folder: Path) -> dict[str, Any]:
    """The run.json of a run that goes on; {} of one that begins. RunError where it is damaged, or gone from a run that
    has been trained: another configuration would go on from its checkpoints."""
    if (folder / "run.json").exists():
        try:
            record = dict(read_run(folder).record)
        except ValueError as error:
            raise RunError(f"run '{folder.name}': {error}") from error
        if lacking := {"runtime", "catalogue"} - record.keys():
            raise RunError(
                f"run '{folder.name}': its run.json has no {' and no '.join(sorted(lacking))}: bring it back from a "
                "copy, or give another run name"
            )
        return record
    if (folder / "cycle.yaml").exists():
        raise RunError(f"'{folder.name}' is the folder of a cycle: give the run another name")
    if kept := [name for name in ("metrics.jsonl", "checkpoints", "summary.json") if (folder / name).exists()]:
        raise RunError(
            f"run '{folder.name}' has no run.json, but {' and '.join(kept)}: bring it back from a copy, or give "
            "another run name"
        )
    return {}


def resume_record(
    folder: Path, requested: Config, record: Mapping[str, Any], messages: list[str], processes: int
) -> tuple[Config, runtimes.Runtime]:
    """The resolved configuration and the runtime of a run that goes on, with the permitted changes; anything else is
    refused by name. processes: that this one is to start.
    """
    config = _resume_config(folder, requested, record, messages)
    runtime = runtimes.reuse(record["runtime"], ranks=processes)
    compiled, _ = runtimes.compile_mode(runtime.device, config.runtime.compile)
    for name, value in (("micro_batch", config.train.micro_batch), ("compile", compiled)):
        if value != getattr(runtime, name):
            runtime = runtime.with_choice(name, value, "changed on resume")
    return config, runtime


def _resume_config(folder: Path, requested: Config, record: Mapping[str, Any], messages: list[str]) -> Config:
    data, file = read_run_config(folder)
    stored = parse_config(data, file, requested.task)
    before = parse_config(record["requested"], f"{folder.name}/run.json", requested.task)
    changes = configuration.difference(requested, before)
    fixed = [key for key in changes if not key.startswith(MAY_CHANGE)]
    if fixed:
        text = ", ".join(f"{key} {changes[key][0]} -> {changes[key][1]}" for key in fixed)
        raise RunError(f"run '{folder.name}' was started with other values ({text}); give it another run name")
    data = configuration.dump(stored)
    for key, (old, new) in changes.items():
        section, name = key.split(".")
        if key not in SETTLED or new != "auto":
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
    data: RunData,
    kind: str,
    start: Start | None,
) -> None:
    """Write down a run that begins: config.yaml, resolved; run.json, what was requested, on what, from what weights
    and teacher.
    """
    write_text(folder / "config.yaml", configuration.to_yaml(data.config))
    write_json(
        folder / "run.json",
        {
            "kind": kind,
            "preset": preset,
            "requested": configuration.dump(requested),
            "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
            "commit": git_commit(),
            "versions": machine.versions(),
            "catalogue": data.catalogue.hash(),
            "runtime": data.runtime.to_dict(),
            **({"parts": data.parts.record()} if data.parts else {}),
            **({"init": start.record()} if start is not None else {}),
            **({"teacher": dict(data.teacher.record)} if data.teacher is not None else {}),
        },
    )


@functools.cache
def git_commit() -> str:
    """Commit of the checkout that the package runs from, with `+changes` where the tree is not clean; '' elsewhere. As
    this process was first asked: it goes on with the code that it began with."""
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
