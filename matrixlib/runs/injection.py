"""Fault injection: does training notice a fault, lose nothing, and end where the clean runs end?

Each fault of faults.py is injected into a real run of its own, in a process of its own. What happened is read from
what the run left: messages, counters, exit codes, metrics, checkpoints.
"""

import datetime
import shutil
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import Config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.reader import kept_rows
from matrixlib.data.remote import local_path
from matrixlib.data.shards import BLOCK, Shard, concat, write_shard
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs import figures
from matrixlib.runs.faults import Fault, faults_of, flip_bytes, parse_names
from matrixlib.runs.injection_job import Job, Outcome, run_job
from matrixlib.runs.record import runtime_config
from matrixlib.tasks import changed, get_task, load_config
from matrixlib.tasks.spec import Check

STEPS = 24
SEEDS = 3
DEVIATIONS = 2.0
"""Standard deviations of the clean runs' final validation losses that a run with a fault may be off."""
FLOAT_ERROR = 1e-4
"""Relative difference of losses that the order of a sum may make over a run."""


def overrides_of(steps: int) -> dict[str, Any]:
    """What turns a preset into a trial of `steps` updates: the data set, a warm-up, when it validates and saves."""
    fifth = max(1, steps // 5)
    return {
        "data": {"limit": 8 * BLOCK, "workers": 0},
        "optim": {"warmup_steps": max(1, steps // 8)},
        "train": {"steps": steps},
        "validation": {
            "interval": fifth,
            "sample": 512,
            "full_every": 1,
            "patience": 0,
            "plateau": 0,
            "target_loss": 0.0,
        },
        "checkpoint": {"interval": fifth},
    }


@dataclass(frozen=True)
class Row:
    """A run with a fault beside the clean ones. allowed: difference of the final losses. usual: messages of clean
    runs."""

    fault: Fault
    outcome: Outcome
    clean: Outcome
    allowed: float
    usual: frozenset[str]

    @property
    def noticed(self) -> bool:
        """Whether the run itself says that it happened."""
        return self.fault.notice in self.outcome.events

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
    def messages(self) -> list[str]:
        """What this run reports and no clean one does; other programs on the machine are no fault of it."""
        return [text for text in self.outcome.messages if text not in self.usual and "machine is busy" not in text]

    @property
    def problems(self) -> list[str]:
        """Why the row is not green."""
        problems = [] if self.noticed else ["the run did not notice the fault"]
        problems += [f"lost: {', '.join(self.outcome.losses)}"] if self.outcome.losses else []
        if not self.near:
            problems.append(f"validation loss {self.difference:+.4f} off, allowed {self.allowed:.4f}")
        if not self.alike:
            problems.append(f"not equal to the clean run within {self.like}")
        return problems


@dataclass(frozen=True)
class Trials:
    """Clean runs, the first with the seed of those with a fault, and a row for each fault."""

    folder: Path
    clean: tuple[Outcome, ...]
    rows: tuple[Row, ...]

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the clean runs' final validation losses; with three, a rough one."""
        return statistics.stdev(outcome.loss for outcome in self.clean)

    def checks(self) -> list[Check]:
        """The clean runs are a measure; each fault was noticed, lost nothing, and ended where the clean runs end."""
        problems = [f"{run.job.name}: {run.events} ({'; '.join(run.messages)})" for run in self.clean if run.events]
        problems += [f"{run.job.name} lost {', '.join(run.losses)}" for run in self.clean if run.losses]
        rows: list[Check] = [("clean runs are undisturbed", not problems, "; ".join(problems))]
        return rows + [(row.fault.title, not row.problems, "; ".join(row.problems)) for row in self.rows]

    def table(self) -> pd.DataFrame:
        """A row for each fault: what the run counted, what was lost, how it ended."""
        likeness = {"": "-", "bits": "equal bits", "float error": "equal within float error"}
        rows = {
            row.fault.title: {
                "what happened": ", ".join(f"{n} {name}" for name, n in row.outcome.events.items())
                or "nothing noticed",
                "lost": ", ".join(row.outcome.losses) or "nothing",
                "loss": "within" if row.near else "OUTSIDE",
                "against the clean run": likeness[row.like] if row.alike else "DIFFERENT",
            }
            for row in self.rows
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    def messages(self) -> str:
        """What each run reports of its fault, and exit codes where it took several processes."""
        lines = []
        for row in self.rows:
            lines += [f"{row.fault.title}:", *(f"  {text}" for text in row.messages)]
            if len(row.outcome.exits) > 1:
                lines.append(f"  exit codes of its processes: {', '.join(map(str, row.outcome.exits))}")
        return "\n".join(lines)

    def figure(self) -> Figure:
        """Both curves for each fault; in the title, the difference of the final validation losses."""
        runs_with_fault = {
            f"{row.fault.title}: {row.difference:+.4f}": (row.outcome.rows, row.outcome.undone) for row in self.rows
        }
        return figures.faults_figure([run.rows for run in self.clean], runs_with_fault)


def inject(
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
    report: Callable[[str], None] = lambda name: None,
) -> Trials:
    """Train `seeds` clean runs and one for each of `faults` ("all", or names with commas between).

    All lie in one new folder below the reports. The network, its data and every setting are the preset's with
    `overrides` over it, but for `overrides_of`. The data set is `data.limit` training positions (0: all)
    and `validation.sample` held-out ones; faults come in the middle. deviations: how far a final loss may be from
    the clean run with the same seed, in standard deviations of the clean runs. parallel: runs at the same time.
    report(name) is called after each run.
    Raises ValueError for an unknown fault or too few seeds or updates, and what `run.open_run` raises.
    """
    steps = steps or STEPS
    if seeds < 2 or steps < 20 or parallel < 1:
        raise ValueError("it takes 2 seeds (a standard deviation), 20 updates (a middle) and 1 run at a time at least")
    spec = get_task(load_config(preset).task)
    known = faults_of(spec)
    names = parse_names(faults, known)
    base = configuration.merge(overrides_of(steps), spec.small if preset == spec.demo else {})
    requested = load_config(preset, configuration.merge(base, overrides or {}))
    if device != "auto":
        requested = changed(requested, {"runtime": {"device": device}})
    if seed >= 0:
        requested = changed(requested, {"seed": seed})
    # Resolved once, as a measurement decides some of it: every run has the same.
    resolved = runtime_config(requested, runtimes.resolve(requested.runtime, requested.train, requested.data))
    stem = f"faults-{Path(preset).stem}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    folder = files.reports_root().resolve() / stem
    folder.mkdir(parents=True)
    copy_data(resolved, folder / "data")
    sources = dict.fromkeys(names, folder / "data")
    if "corrupt_records" in names:
        sources["corrupt_records"] = folder / "damaged"
        shutil.copytree(folder / "data", folder / "damaged")
        flip_bytes(folder / "damaged", spec.layout)

    def job(name: str, source: Path, fault: str, changes: Mapping[str, Any]) -> Job:
        data = {"data": {"source": str(source), "limit": 0}}
        settings = configuration.merge(configuration.merge(configuration.dump(resolved), data), changes)
        return Job(name, preset, settings, folder / name, steps // 2, fault)

    jobs = [job(f"clean_{i}", folder / "data", "", {"seed": resolved.seed + i}) for i in range(seeds)]
    jobs += [job(name, sources[name], name, known[name].overrides) for name in names]
    with ThreadPoolExecutor(parallel) as pool:
        first = pool.submit(run_job, jobs[0], None)
        futures = [first, *(pool.submit(run_job, one, first) for one in jobs[1:])]
        try:
            outcomes = []
            for future in futures:
                outcomes.append(future.result())
                report(outcomes[-1].job.name)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    clean = tuple(outcomes[:seeds])
    allowed = deviations * statistics.stdev(outcome.loss for outcome in clean)
    usual = frozenset(text for outcome in clean for text in outcome.messages)
    rows = [
        Row(known[name], outcome, clean[0], allowed, usual)
        for name, outcome in zip(names, outcomes[seeds:], strict=True)
    ]
    return Trials(folder, clean, tuple(rows))


def copy_data(config: Config, folder: Path) -> None:
    """A data set in `folder`: `data.limit` training and `validation.sample` held-out rows, as training takes them.

    A shard for each split and, where a curriculum chooses among them, for each source.
    """
    folder.mkdir()
    spec = get_task(config.task)
    catalogue, by_source = Catalogue(spec.folder(config)), spec.curriculum(config) is not None
    for split, limit in (("train", config.data.limit), ("validation", config.validation.sample)):
        rows = catalogue.shards(split)
        counts = kept_rows([row.count for row in rows], [row.source for row in rows], limit)
        parts: dict[str, list[Any]] = {}
        for row, count in zip(rows, counts, strict=True):
            if count:
                source = row.source if by_source else "first rows of another set"
                parts.setdefault(source, []).append(Shard(local_path(row), spec.layout).gather(np.arange(count)))
        for number, (source, batches) in enumerate(parts.items()):
            meta = {"source": source, "generator": "faults", "seed": 0, "split": split}
            name = f"{split}_{number}.npz" if number else f"{split}.npz"
            write_shard(folder / name, spec.layout, concat(batches, spec.layout), meta)
    Catalogue(folder)
