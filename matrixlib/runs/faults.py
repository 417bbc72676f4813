"""Faults planted on purpose: does training notice them, lose nothing, and end where the clean runs end?

Each fault of faults.py is planted in a real run of its own, in a process of its own. What happened is read from what
the run left: messages, counters, exit codes, metrics, checkpoints.
"""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import kept_rows
from matrixlib.data.shards import BLOCK, Shard, concat, write_shard
from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.storage import DamagedCheckpoint
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs import figures
from matrixlib.runs import run as runs
from matrixlib.runs.planting import FILLER, Fault, chosen, faults_of, flip_bytes, small_disk
from matrixlib.tasks import changed, get_task, load_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 40
SEEDS = 3
DEVIATIONS = 2.0
"""Standard deviations of the clean runs' final validation losses that a planted run may be off."""
FLOAT_ERROR = 1e-4
"""Relative difference of losses that the order of a sum may make over a run."""
CLOCKS = {"time", "seconds", "times", "throughput", "share_of_peak", "memory", "messages"}
PRELOAD = [
    "matrixlib.runs.faults",
    "matrixlib.engine.trainer",
    "matrixlib.tasks.chess.evaluate.held_out",
    "matrixlib.runs.report",
    "torch._dynamo",  # which an optimiser imports
]
KERNEL = "ipykernel.kernelapp"
"""What a process that a notebook starts imports again."""
STARTING = threading.Lock()
"""Starting a process also asks after the exit codes of all others, which the forkserver tells once: a thread that
waits for one at that moment would find 255 in its place, and take a clean end for a crash."""

SMALLER: dict[str, dict[str, Any]] = {
    "demo": {
        "model": {
            "channels": 8,
            "blocks": 1,
            "policy": {"channels": 8},
            "value": {"channels": 8, "hidden": 16},
        },
        "optim": {"learning_rate": 0.01},
        "train": {"batch_size": 64},
        "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
    },
    "latin_demo": {
        "data": {"squares": 5 * BLOCK},
        "model": {"width": 16, "layers": 1, "heads": 2, "feedforward": 2},
        "curriculum": {  # a phase long enough before the fault that its band is known, and one after it
            "size": {"fractions": [0.2, 0.8]},
            "mode": {"fractions": [0.8, 0.2]},
            "fill": {"fractions": [0.2, 0.6, 0.2]},
        },
        "optim": {"learning_rate": 0.01},
        "train": {"batch_size": 64},
        "health": {"window": 32},
        "validation": {"sample": 256},  # sixteen puzzles of each kind to decode, not a hundred
        "runtime": {"precision": "fp32", "threads": 1},
    },
}
"""Over the demo presets alone, which are made smaller still, as more than a dozen runs are trained."""


def overrides_of(steps: int) -> dict[str, Any]:
    """What turns a preset into its proof of `steps` updates: the data set, a warm-up, when it validates and saves."""
    fifth = max(1, steps // 5)
    return {
        "data": {"limit": 8 * BLOCK, "workers": 0},
        "optim": {"warmup_steps": max(1, steps // 8)},
        "train": {"steps": steps},
        "validation": {
            "interval": fifth,
            "sample": 1024,
            "full_every": 1,
            "patience": 0,
            "plateau": 0,
            "target_loss": 0.0,
        },
        "checkpoint": {"interval": fifth},
    }


# One run


@dataclass(frozen=True)
class Job:
    """One run in `folder`: its reports root, unless `reports` names another place. fault: "" for a clean one."""

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
    """A process of a run: train it to the end or the fault. Leaves a line in said.jsonl, unless it is killed."""
    os.environ["MATRIXLIB_REPORTS"] = str(job.root)
    warnings.simplefilter("ignore")  # they are in the run's messages
    sys.stdout = sys.stderr = (job.folder / "log.txt").open("a", encoding="utf-8")
    said: dict[str, Any] = {"messages": []}
    try:
        current = runs.open_run(job.preset, run="run", overrides=job.overrides, kind="faults")
        said["messages"] = current.messages
        if job.fault:
            faults_of(current.config.task)[job.fault].plant(current, job.at)
        said["start"] = current.trainer.step
        for _ in current.train():
            pass
    except BaseException as error:
        said["error"] = ": ".join([type(error).__name__, str(error)])
        said["notes"] = getattr(error, "__notes__", [])
        raise
    finally:
        _lift_limit()
        with (job.folder / "said.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(said) + "\n")


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
        return read(job, _finish(job))
    assert clean is not None
    needed = sum(file.stat().st_size for file in clean.result().folder.rglob("*") if file.is_file())
    with small_disk(job.folder / "disk", 3 * needed + 2**23) as disk:
        exits = _finish(replace(job, reports=disk))
        if disk:
            shutil.copytree(disk / "run", job.folder / "run")
    return read(job, exits)


# What happened

SAID = {
    "without a target": r"no valid target of",
    "blocks replaced": r"its rows are replaced by others",
    "workers restarted": r"workers were started again",
    "micro-batch halved": r"out of memory with a micro-batch",
}
"""What a run may count as having happened -> what it says then."""


@dataclass(frozen=True)
class Outcome:
    """A run as its folder tells it.

    exits: exit codes of its processes. rows: of metrics.jsonl. words: what it said, in order. left: rows of the
    updates that were rolled back, from the evidence. checkpoints: (update, whole?) of each.
    """

    job: Job
    exits: tuple[int, ...]
    rows: tuple[dict[str, Any], ...]
    words: tuple[str, ...]
    left: tuple[dict[str, Any], ...]
    checkpoints: tuple[tuple[int, bool], ...]
    steps: int

    @property
    def folder(self) -> Path:
        return self.job.folder / "run"

    @cached_property
    def happened(self) -> dict[str, int]:
        """How often something disturbed the run, by its own counters and words; empty for an undisturbed one."""
        last = self.rows[-1] if self.rows else {}
        found = {name: int(last.get(name, 0)) for name in ("skipped", "overflows", "rollbacks")}
        found |= {name: sum(bool(re.search(p, text)) for text in self.words) for name, p in SAID.items()}
        found["run restarted"] = len(self.exits) - 1
        return {name: count for name, count in found.items() if count}

    @cached_property
    def lost(self) -> tuple[str, ...]:
        """What is missing at the end: updates, rows of the metrics, checkpoints, finite weights."""
        found = []
        made = [row["step"] for row in self.rows]
        if missing := self.steps - max(made, default=0):
            found.append(f"{missing} updates")
        if made != list(range(1, max(made, default=0) + 1)):
            found.append("rows of the metrics")
        if not all(whole for _, whole in self.checkpoints):
            found.append("a checkpoint")
        if max((step for step, _ in self.checkpoints), default=0) != self.steps:
            found.append("the last checkpoint")
        elif not all(bool(t.isfinite().all()) for t in self.tensors.values() if t.is_floating_point()):
            found.append("finite weights")
        if self.exits[-1]:
            found.append("the run itself")
        return tuple(found)

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
        found = Checkpoints(self.folder / "checkpoints", 2).newest()
        groups = found.tensors if found else {}
        return {f"{group}/{name}": t for group, members in groups.items() for name, t in members.items()}

    def equals(self, other: Outcome) -> bool:
        """Whether every number of the metrics and every bit of the last checkpoint is the same."""
        return _numbers(self.rows) == _numbers(other.rows) and (
            self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(value, other.tensors[name]) for name, value in self.tensors.items())
        )


def read(job: Job, exits: Sequence[int]) -> Outcome:
    """The outcome of a job that has ended."""
    folder = job.folder / "run"
    said = job.folder / "said.jsonl"
    words: dict[str, None] = {}
    lines = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    for line in lines:
        texts = [*line["messages"], line.get("error", ""), *line.get("notes", [])]
        texts += [f"went on from update {line['start']}"] if line.get("start") else []
        words |= dict.fromkeys(_plain(text, job) for text in texts if text)
    path = folder / "metrics.jsonl"
    left: list[dict[str, Any]] = []
    for file in sorted(folder.glob("evidence/*/evidence.json")):
        record = files.read_json(file)
        left += [row for row in record["rows"] if row["step"] > record["health"]["onset"]]
    return Outcome(
        job,
        tuple(exits),
        tuple(metrics.read(path)) if path.exists() else (),
        tuple(words),
        tuple(left),
        tuple(_checkpoints(folder / "checkpoints")),
        int(job.overrides["train"]["steps"]),
    )


def _checkpoints(folder: Path) -> Iterator[tuple[int, bool]]:
    store = Checkpoints(folder, 2)
    for path in sorted(folder.glob("step_*")):
        try:
            yield store.load(path).step, True
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


# The proof


@dataclass(frozen=True)
class Row:
    """A planted run beside the clean ones."""

    title: str
    fault: Fault
    outcome: Outcome
    clean: Outcome
    allowed: float
    usual: frozenset[str]

    @property
    def noticed(self) -> bool:
        """Whether the run itself says that it happened."""
        return self.fault.notice in self.outcome.happened

    @property
    def difference(self) -> float:
        """Final validation loss less that of the clean run with the same seed."""
        return self.outcome.loss - self.clean.loss

    @property
    def near(self) -> bool:
        return abs(self.difference) <= self.allowed

    @property
    def like(self) -> str:
        """What is claimed of the end: `Fault.like`, but no equal bits elsewhere than on the CPU."""
        return "" if self.fault.like == "bits" and self.outcome.device != "cpu" else self.fault.like

    @cached_property
    def alike(self) -> bool:
        """Whether the end is as close to the clean run's as is claimed."""
        if self.like == "bits":
            return self.outcome.equals(self.clean)
        return not self.like or abs(self.difference) <= FLOAT_ERROR * abs(self.clean.loss)

    @property
    def words(self) -> list[str]:
        """What this run said and the clean one did not."""
        return [text for text in self.outcome.words if text not in self.usual]

    @property
    def problems(self) -> list[str]:
        """Why the row is not green."""
        found = [] if self.noticed else ["the run did not notice the fault"]
        found += [f"lost: {', '.join(self.outcome.lost)}"] if self.outcome.lost else []
        if not self.near:
            found.append(f"validation loss {self.difference:+.4f} off, allowed {self.allowed:.4f}")
        if not self.alike:
            found.append(f"not equal to the clean run within {self.like}")
        return found


@dataclass(frozen=True)
class Proof:
    """Clean runs, the first with the planted runs' seed, and a row for each fault."""

    folder: Path
    clean: tuple[Outcome, ...]
    rows: tuple[Row, ...]

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the clean runs' final validation losses; with three, a rough one."""
        return statistics.stdev(outcome.loss for outcome in self.clean)

    @property
    def clean_problems(self) -> list[str]:
        """Why the clean runs are no measure."""
        found = [f"{o.job.name}: {o.happened} ({'; '.join(o.words)})" for o in self.clean if o.happened]
        return found + [f"{o.job.name} lost {', '.join(o.lost)}" for o in self.clean if o.lost]

    def table(self) -> str:
        """A line for each fault: what the run counted, what was lost, how it ended."""
        cells = [("fault", "what happened", "lost", "loss", "against the clean run")]
        for row in self.rows:
            happened = ", ".join(f"{count} {name}" for name, count in row.outcome.happened.items())
            like = {"": "-", "bits": "equal bits", "float error": "equal within float error"}[row.like]
            cells.append(
                (
                    row.title,
                    happened or "nothing noticed",
                    ", ".join(row.outcome.lost) or "nothing",
                    "within" if row.near else "OUTSIDE",
                    like if row.alike else "DIFFERENT",
                )
            )
        widths = [max(len(line[i]) for line in cells) for i in range(5)]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        )

    def losses(self) -> str:
        """Final validation losses: the clean runs, their standard deviation, each fault's difference."""
        values = ", ".join(f"{outcome.loss:.4f}" for outcome in self.clean)
        lines = [f"clean runs {values}; standard deviation {self.deviation:.4f}"]
        lines += [f"{row.title:22} {row.outcome.loss:.4f}  {row.difference:+.4f}" for row in self.rows]
        return "\n".join(lines)

    def words(self) -> str:
        """What each run said of it, and exit codes where it took several processes."""
        lines = []
        for row in self.rows:
            lines += [f"{row.title}:", *(f"  {text}" for text in row.words)]
            if len(row.outcome.exits) > 1:
                lines.append(f"  exit codes of its processes: {', '.join(map(str, row.outcome.exits))}")
        return "\n".join(lines)

    def figure(self) -> Figure:
        """Both curves for each fault; in the title, the difference of the final validation losses."""

        planted = {
            f"{row.title}: {row.difference:+.4f}": (row.outcome.rows, row.outcome.left) for row in self.rows
        }
        return figures.faults_figure([outcome.rows for outcome in self.clean], planted)


def prove(
    preset: str = "demo",
    device: str = "auto",
    seed: int = -1,
    steps: int = 0,
    overrides: Mapping[str, Any] | None = None,
    *,
    faults: str = "all",
    seeds: int = SEEDS,
    deviations: float = DEVIATIONS,
    parallel: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> Proof:
    """Train `seeds` clean runs and one for each of `faults` ("all", or names with commas between).

    All lie in one new folder below the reports. The network, its data and every setting are the preset's with
    `overrides` over it, but for `overrides_of`. The data set is `data.limit` training positions (0: all)
    and `validation.sample` held-out ones; faults come in the middle. deviations: how far a final loss may be from
    the clean run with the same seed, in standard deviations of the clean runs. parallel: runs at the same time.
    Raises ValueError for an unknown fault or too few seeds or updates, and what `run.open_run` raises.
    """
    names = chosen(faults)
    steps = steps or STEPS
    if seeds < 2 or steps < 20 or parallel < 1:
        raise ValueError(
            "a proof needs 2 seeds (a standard deviation), 20 updates (a middle) and 1 run at a time at least"
        )
    base = configuration.merge(overrides_of(steps), SMALLER.get(preset, {}))
    asked = load_config(preset, configuration.merge(base, overrides or {}))
    planted_faults = faults_of(asked.task)
    if device != "auto":
        asked = changed(asked, {"runtime": {"device": device}})
    if seed >= 0:
        asked = changed(asked, {"seed": seed})
    # Decided once, as a measurement decides some of it: every run has the same.
    decided = runs.runtime_config(asked, runtimes.resolve(asked.runtime, asked.train, asked.data))
    stem = f"faults-{Path(preset).stem}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    folder = files.reports_root().resolve() / stem
    folder.mkdir(parents=True)
    take_data(decided, folder / "data")
    if "corrupt_records" in names:
        shutil.copytree(folder / "data", folder / "damaged")
        flip_bytes(folder / "damaged", get_task(decided.task).layout)
    settings = configuration.merge(
        configuration.dump(decided), {"data": {"source": str(folder / "data"), "limit": 0}}
    )
    job = Job("", preset, settings, folder, steps // 2)
    with ThreadPoolExecutor(parallel) as pool:
        clean = [
            pool.submit(run_job, _job(job, f"clean_{i}", {"seed": decided.seed + i}), None)
            for i in range(seeds)
        ]
        planted = {}
        for name in names:
            changes = dict(planted_faults[name].overrides)
            if name == "corrupt_records":
                changes = {"data": {"source": str(folder / "damaged")}}
            planted[name] = pool.submit(run_job, _job(job, name, changes), clean[0])
        try:
            outcomes = {}
            for title, future in {**{f"clean run {i}": f for i, f in enumerate(clean)}, **planted}.items():
                outcomes[title] = future.result()
                say(title)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    measures = tuple(future.result() for future in clean)
    allowed = deviations * statistics.stdev(outcome.loss for outcome in measures)
    usual = frozenset(text for outcome in measures for text in outcome.words)
    rows = [
        Row(fault.title, fault, outcomes[name], measures[0], allowed, usual)
        for name, fault in ((name, planted_faults[name]) for name in names)
    ]
    return Proof(folder, measures, tuple(rows))


def take_data(config: configuration.Config, folder: Path) -> None:
    """A data set in `folder`: `data.limit` training and `validation.sample` held-out rows, as training takes them.

    A shard for each split and, where a curriculum chooses among them, for each source.
    """
    folder.mkdir()
    chosen = get_task(config.task)
    catalogue, staged = Catalogue(chosen.folder(config)), chosen.curriculum(config) is not None
    for split, limit in (("train", config.data.limit), ("validation", config.validation.sample)):
        rows = catalogue.shards(split)
        counts = kept_rows([row.count for row in rows], [row.source for row in rows], limit)
        parts: dict[str, list[Any]] = {}
        for row, count in zip(rows, counts, strict=True):
            if count:
                source = row.source if staged else "first rows of another set"
                parts.setdefault(source, []).append(Shard(row.path, chosen.layout).gather(np.arange(count)))
        for number, (source, batches) in enumerate(parts.items()):
            meta = {"source": source, "generator": "faults", "seed": 0, "split": split}
            name = f"{split}_{number}.npz" if number else f"{split}.npz"
            write_shard(folder / name, chosen.layout, concat(batches, chosen.layout), meta)
    Catalogue(folder)


def _job(job: Job, name: str, changes: Mapping[str, Any]) -> Job:
    overrides = configuration.merge(job.overrides, changes)
    fault = "" if name.startswith("clean") else name
    return replace(job, name=name, overrides=overrides, folder=job.folder / name, fault=fault)
