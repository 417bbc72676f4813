"""What a run records when it starts, and what may change when it resumes."""

import datetime
import functools
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import Config
from matrixlib.engine.folder import DAMAGED, RunFolder, intact_runs, name_conflict, read_run, read_run_config
from matrixlib.engine.parts import Parts
from matrixlib.files import write_json, write_text
from matrixlib.hardware import machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs.data import RunData, RunError
from matrixlib.tasks import changed, load_config, parse_config

ORPHAN_SECONDS = 3.0  # ipykernel checks for its parent once a second
MAY_CHANGE = (  # options that may change on resume; sections end with a dot
    *("train.steps", "train.minutes", "train.heartbeat_seconds", "train.tensorboard", "train.micro_batch"),
    *("data.cache", "data.timeout", "data.max_lost"),
    *("validation.", "checkpoint.", "health.", "memory."),
    *("runtime.compile", "runtime.rank_timeout", "runtime.shard"),
    "teacher.network",  # its path: identity is checked by SHA-256
)
SETTLED = ("train.steps", "train.micro_batch", "runtime.compile")  # `auto`: as settled when the run began


def requested_config(
    preset: str, device: str, seed: int, steps: int, overrides: Mapping[str, Any], init: str = ""
) -> Config:
    """A preset with a notebook's parameters applied; explicit ones override `overrides`."""
    args = [("runtime.device", device, "auto"), ("seed", seed, -1), ("train.steps", steps, 0), ("train.init", init, "")]
    arguments = configuration.nest({key: value for key, value, unset in args if value != unset})
    return load_config(preset, configuration.merge(overrides, arguments))


def check_ranks(ranks: int) -> None:
    """RunError for less than one process."""
    if ranks < 1:
        raise RunError(f"ranks is {ranks}: give the number of processes that are to train together, 1 or more")


def run_folder(preset: str, run: str, requested: Config, kind: str = "train", parts: Parts | None = None) -> Path:
    """Folder of the named run, of the newest incomplete run with equal configuration and parts, or of a new one (not
    created), with a warning if another incomplete run can be resumed with this configuration."""
    root = files.reports_root()
    if run:
        if problem := name_conflict(run, "run.json"):
            raise RunError(f"run name {run!r} {problem}")
        return root / run
    same: dict[str, Any] = {"kind": kind, "preset": preset, "parts": parts.record() if parts is not None else {}}
    known = [(run, {"parts": {}, **run.record}) for run in intact_runs(root) if not run.complete]
    unfinished = [run for run, record in known if same.items() <= record.items()]
    for stored in unfinished:
        if stored.record["requested"] == configuration.dump(requested) and not locked(stored.path):
            return stored.path
    _mention(unfinished, requested)
    prefix = "" if kind == "train" else f"{kind}-"
    stem = f"{prefix}{Path(preset).stem}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    if problem := files.name_problem(stem):
        raise RunError(f"the name {stem!r}, which preset and time make, {problem}; give `run` a name")
    names = [stem, *(f"{stem}-{k}" for k in range(2, 100))]
    return next(root / name for name in names if not (root / name).exists())


def _mention(unfinished: Sequence[RunFolder], requested: Config) -> None:
    """Warn of the newest run that has made updates and would resume with this configuration, if it were named."""
    for stored in unfinished:
        with suppress(ValueError):  # it would not
            changes = ", ".join(changes_on_resume(stored.path, requested, stored.record))
            if (made := _updates(stored.path)) and not locked(stored.path):
                text = f"a new run begins; '{stored.name}' of this preset is unfinished, at update {made:,}"
                warnings.warn(f"{text}, with other {changes}: name it as `run` to resume it", stacklevel=3)
                return


def _updates(folder: Path) -> int:
    """Updates of a run's newest checkpoint, 0 without one."""
    saved = [path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*")]
    return max((int(step) for step in saved if step.isdecimal()), default=0)


def newest_unfinished() -> RunFolder:
    """The newest incomplete training of any preset that no process writes; RunError if there is none."""
    for stored in intact_runs():
        own = stored.record.get("kind") == "train" and not stored.record.get("parts")  # parts need their notebook
        if own and not stored.complete and not locked(stored.path):
            return stored
    raise RunError("no unfinished training to resume; `make train` starts one")


def locked(folder: Path) -> bool:
    """Whether another process writes the run, or nobody can; a killed notebook's kernel needs a second to end."""
    lock = FileLock(folder / "lock")
    try:
        with lock.acquire(timeout=ORPHAN_SECONDS):
            return False
    except (Timeout, OSError):
        return True


def complete_run(name: str) -> Path:
    """Folder of a complete run, or of the network `shipped`; ValueError if absent or damaged."""
    folder = files.folder_of(name)
    if not files.name_problem(name) and (folder / "run.json").exists() and read_run(folder).complete:
        return folder
    known = ", ".join(sorted(run.name for run in intact_runs() if run.complete)) or "none yet"
    raise RunError(f"no complete run '{name}'; complete runs: {known}")


def stored_record(folder: Path) -> dict[str, Any]:
    """run.json of a run to resume, {} of a new one. ValueError if damaged, or missing beside checkpoints."""
    if (folder / "run.json").exists():
        record = dict(read_run(folder).record)
        if lacking := {"runtime", "catalogue"} - record.keys():
            what = " and no ".join(sorted(lacking))
            raise RunError(f"{folder / 'run.json'} has no {what}: restore it from a backup, or give another run name")
        return record
    if kept := [name for name in DAMAGED if (folder / name).exists()]:
        raise RunError(
            f"run '{folder.name}' has no run.json, but {' and '.join(kept)}: restore it from a backup, or give "
            "another run name"
        )
    return {}


def changes_on_resume(folder: Path, requested: Config, record: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Changed options: key -> (old, new). RunError for those that may not change, and for fewer updates than made."""
    before = parse_config(record["requested"], f"{folder.name}/run.json", requested.task)
    changes = configuration.difference(requested, before)
    if fixed := [f"{key} {old} -> {new}" for key, (old, new) in changes.items() if not key.startswith(MAY_CHANGE)]:
        text = ", ".join(fixed)
        raise RunError(f"run '{folder.name}' was started with other values ({text}); give it another run name")
    made, steps = max(read_run(folder).summary.get("steps", 0), _updates(folder)), requested.train.steps
    if "train.steps" in changes and steps != "auto" and steps < made:
        raise RunError(f"run '{folder.name}' has made {made} updates, more than train.steps: {steps}; name another run")
    return changes


def resume_record(
    folder: Path, requested: Config, record: Mapping[str, Any], messages: list[str], processes: int
) -> tuple[Config, runtimes.Runtime]:
    """Resolved configuration and runtime of a resumed run with permitted changes; others are rejected by name."""
    data, file = read_run_config(folder)
    data = configuration.dump(parse_config(data, file, requested.task))
    changes = changes_on_resume(folder, requested, record)
    for key, (old, new) in changes.items():
        if key not in SETTLED or new != "auto":
            data = configuration.merge(data, configuration.nest({key: new}))
            messages.append(f"changed on resume: {key} {old} -> {new}")
    config = parse_config(data, file, requested.task)
    if changes:  # the next resume compares with this
        write_text(folder / "config.yaml", configuration.to_yaml(config))
        write_json(folder / "run.json", {**record, "requested": configuration.dump(requested)})
    runtime = runtimes.reuse(record["runtime"], ranks=processes)
    compiled, _ = runtimes.compile_mode(runtime.device, config.runtime.compile)
    for name, value in (("micro_batch", config.train.micro_batch), ("compile", compiled)):
        if value != getattr(runtime, name):
            runtime = runtime.with_choice(name, value, "changed on resume")
    return config, runtime


def runtime_config(config: Config, runtime: runtimes.Runtime) -> Config:
    """The configuration with every `auto` of runtime, data and micro-batch resolved."""
    same = {name: getattr(runtime, name) for name in ("device", "threads", "channels_last")}
    resolved = {
        "runtime": same | {"precision": runtime.dtype, "compile": runtime.compile or False},
        "data": {"workers": runtime.workers, "prefetch": runtime.prefetch},
        "train": {"micro_batch": runtime.micro_batch},
    }
    return changed(config, resolved)


def write_record(folder: Path, preset: str, requested: Config, data: RunData, kind: str, init: dict[str, Any]) -> None:
    """Write config.yaml (resolved) and run.json (request, data, initial weights `init`) of a new run."""
    write_text(folder / "config.yaml", configuration.to_yaml(data.config))
    record = {
        "kind": kind,
        "preset": preset,
        "requested": configuration.dump(requested),
        "changes": {key: new for key, (_, new) in configuration.difference(requested, load_config(preset)).items()},
        "started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
        "commit": git_commit(),
        "versions": machine.versions(),
        "catalogue": data.catalogue.hash(),
        "runtime": data.runtime.to_dict(),
    }
    teacher = dict(data.teacher.record) if data.teacher is not None else {}
    anchor = data.strength.record if data.strength is not None else {}
    sources = {"parts": data.parts.record(), "init": init, "teacher": teacher, "anchor": anchor}
    write_json(folder / "run.json", record | {name: value for name, value in sources.items() if value})


@functools.cache
def git_commit() -> str:
    """Commit of the package's checkout, with `+changes` if dirty; '' outside a checkout."""
    if files.CHECKOUT is None:
        return ""
    words = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        done = subprocess.run(["git", "-C", str(files.CHECKOUT), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return "" if done.returncode else done.stdout.strip()
