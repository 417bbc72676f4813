"""One run with a fault, or a clean one: trained in processes of its own, read from what it left on the disk."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from matrixlib import files
from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.storage import DamagedCheckpoint, read
from matrixlib.runs import run as runs
from matrixlib.runs.faults import FILLER, faults_of, small_disk

CLOCKS = {"time", "seconds", "times", "loader", "slow", "throughput", "share_of_peak", "memory", "messages"}
PRELOAD = [
    "matrixlib.runs.injection_job",
    "matrixlib.engine.trainer",
    "matrixlib.runs.report",
    "torch._dynamo",  # which an optimiser imports
]
KERNEL = "ipykernel.kernelapp"
"""What a process that a notebook starts imports again."""
STARTING = threading.Lock()
"""Starting a process also asks after the exit codes of all others, which the forkserver tells once: a thread that
waits for one at that moment would find 255 in its place, and take a clean end for a crash."""
NOTICES = {
    "without a target": r"no valid target of",
    "blocks replaced": r"its rows are replaced by others",
    "workers restarted": r"workers were started again",
    "micro-batch halved": r"out of memory with a micro-batch",
}
"""Event of a run -> what its message says."""


@dataclass(frozen=True)
class Job:
    """One run in `folder`: its reports root, unless `reports` names another place. at: update before which the fault
    comes. fault: "" for a clean one."""

    name: str
    preset: str
    overrides: Mapping[str, Any]
    folder: Path
    at: int
    fault: str = ""
    reports: Path | None = None

    @property
    def root(self) -> Path:
        return self.reports or self.folder


def work(job: Job) -> None:
    """A process of a run: train it to the end or the fault. Leaves a line in messages.jsonl, unless it is killed."""
    os.environ["MATRIXLIB_REPORTS"] = str(job.root)
    warnings.simplefilter("ignore")  # they are in the run's messages
    sys.stdout = sys.stderr = (job.folder / "log.txt").open("a", encoding="utf-8")
    record: dict[str, Any] = {"messages": []}
    try:
        current = runs.open_run(job.preset, run="run", overrides=job.overrides, kind="faults")
        record["messages"] = current.messages
        if job.fault:
            faults_of(current.spec)[job.fault].plant(current, job.at)
        record["start"] = current.trainer.step
        for _ in current.train():
            pass
    except BaseException as error:
        record["error"] = ": ".join([type(error).__name__, str(error)])
        record["notes"] = getattr(error, "__notes__", [])
        raise
    finally:
        _lift_limit()
        with (job.folder / "messages.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _lift_limit() -> None:
    """Let this process write files again."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def _finish(job: Job) -> list[int]:
    """Run a job; where it ends before its end, once more without the fault. Exit codes of its processes."""
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([*PRELOAD, *([KERNEL] if KERNEL in sys.modules else [])])
    exits: list[int] = []
    while not exits or (exits[-1] and len(exits) < 2):
        process = context.Process(target=work, args=(job,))
        with STARTING:
            process.start()
        multiprocessing.connection.wait([process.sentinel])
        with STARTING:
            process.join()
        exits.append(process.exitcode)
        (job.root / FILLER).unlink(missing_ok=True)
        job = replace(job, fault="")
    return exits


def run_job(job: Job, clean: Future[Outcome] | None) -> Outcome:
    """A whole run, with its fault, in `job.folder`. clean: its twin, which says how large a disk it needs."""
    job.folder.mkdir()
    if job.fault != "full_disk":
        return read_outcome(job, _finish(job))
    assert clean is not None
    needed = sum(file.stat().st_size for file in clean.result().folder.rglob("*") if file.is_file())
    with small_disk(job.folder / "disk", 3 * needed + 2**23) as disk:
        exits = _finish(replace(job, reports=disk))
        if disk:
            shutil.copytree(disk / "run", job.folder / "run")
    return read_outcome(job, exits)


@dataclass(frozen=True)
class Outcome:
    """A run as its folder tells it.

    exits: exit codes of its processes. rows: of metrics.jsonl. messages: of the run, in order. undone: rows of the
    updates that were rolled back, from the evidence. checkpoints: (update, whole?) of each.
    """

    job: Job
    exits: tuple[int, ...]
    rows: tuple[dict[str, Any], ...]
    messages: tuple[str, ...]
    undone: tuple[dict[str, Any], ...]
    checkpoints: tuple[tuple[int, bool], ...]
    steps: int

    @property
    def folder(self) -> Path:
        return self.job.folder / "run"

    @cached_property
    def events(self) -> dict[str, int]:
        """How often something disturbed the run, by its own counters and messages; empty for an undisturbed one."""
        last = self.rows[-1] if self.rows else {}
        counts = {name: int(last.get(name, 0)) for name in ("skipped", "overflows", "rollbacks")}
        for name, pattern in NOTICES.items():
            counts[name] = sum(bool(re.search(pattern, text)) for text in self.messages)
        counts["run restarted"] = len(self.exits) - 1
        return {name: count for name, count in counts.items() if count}

    @cached_property
    def losses(self) -> tuple[str, ...]:
        """What is missing at the end: updates, rows of the metrics, checkpoints, finite weights."""
        missing = []
        steps = [row["step"] for row in self.rows]
        if gap := self.steps - max(steps, default=0):
            missing.append(f"{gap} updates")
        if steps != list(range(1, max(steps, default=0) + 1)):
            missing.append("rows of the metrics")
        if not all(whole for _, whole in self.checkpoints):
            missing.append("a checkpoint")
        if max((step for step, _ in self.checkpoints), default=0) != self.steps:
            missing.append("the last checkpoint")
        elif not all(bool(t.isfinite().all()) for t in self.tensors.values() if t.is_floating_point()):
            missing.append("finite weights")
        if self.exits[-1]:
            missing.append("the run itself")
        return tuple(missing)

    @property
    def device(self) -> str:
        return str(files.read_json(self.folder / "run.json").get("runtime", {}).get("device", ""))

    @property
    def loss(self) -> float:
        """Validation loss on all held-out positions after the last update; nan where it was not reached."""
        last = self.rows[-1].get("validation", {}) if self.rows else {}
        return float(last["loss"]) if last.get("kind") == "full" else math.nan

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the newest checkpoint: model, averages, optimiser, random streams."""
        newest = Checkpoints(self.folder / "checkpoints", 2).newest()
        groups = newest.tensors if newest else {}
        return {f"{group}/{name}": t for group, members in groups.items() for name, t in members.items()}

    def equals(self, other: Outcome) -> bool:
        """Whether every number of the metrics and every bit of the last checkpoint is the same."""
        return _numbers(self.rows) == _numbers(other.rows) and (
            self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(value, other.tensors[name]) for name, value in self.tensors.items())
        )


def read_outcome(job: Job, exits: Sequence[int]) -> Outcome:
    """The outcome of a job that has ended."""
    folder = job.folder / "run"
    log = job.folder / "messages.jsonl"
    messages: dict[str, None] = {}
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for line in lines:
        texts = [*line["messages"], line.get("error", ""), *line.get("notes", [])]
        texts += [f"went on from update {line['start']}"] if line.get("start") else []
        messages |= dict.fromkeys(_plain(text, job) for text in texts if text)
    path = folder / "metrics.jsonl"
    undone: list[dict[str, Any]] = []
    for file in sorted(folder.glob("evidence/*/evidence.json")):
        record = files.read_json(file)
        undone += [row for row in record["rows"] if row["step"] > record["health"]["onset"]]
    return Outcome(
        job,
        tuple(exits),
        tuple(metrics.read(path)) if path.exists() else (),
        tuple(messages),
        tuple(undone),
        tuple(_checkpoints(folder / "checkpoints")),
        int(job.overrides["train"]["steps"]),
    )


def _checkpoints(folder: Path) -> Iterator[tuple[int, bool]]:
    for path in sorted(folder.glob("step_*")):
        try:
            yield read(path).step, True
        except DamagedCheckpoint:
            yield -1, False


def _plain(text: str, job: Job) -> str:
    """A message without what differs between machines: paths, how a worker died, losses, norms, fractions."""
    text = re.sub(rf"(/proc/\d+/root)?{re.escape(str(job.folder.parent))}/?", "", text)
    text = re.sub(r"at batch \d+, as one was gone \(.*\)", "at batch ~, as one was gone (~)", text)
    return re.sub(r"((?<=loss |norm |bove |dian )|(?<![\w.-])(?=-?\d+\.\d))-?\d[\d.]*(e[+-]?\d+)?", "~", text)


def _numbers(rows: Sequence[Mapping[str, Any]]) -> str:
    def strip(row: Mapping[str, Any]) -> dict[str, Any]:
        return {k: strip(v) if isinstance(v, Mapping) else v for k, v in row.items() if k not in CLOCKS}

    return repr([strip(row) for row in rows])
