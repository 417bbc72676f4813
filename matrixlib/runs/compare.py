"""Train several configurations (arms) with the same seeds, and put what came of them into DataFrames.

Runs of one seed are a pair: what a seed does to both drops out of their difference. One pair is an anecdote; from two
on there is an interval.

    arms = {"A": ("demo", {}), "B": ("demo", {"optim": {"learning_rate": 0.001}})}
    results = compare.results(compare.train_arms(arms, seeds=3))       # a row a run, numbers
    compare.differences(results, base="A")                             # a row a figure, 95 % intervals
"""

from __future__ import annotations

import datetime
import gc
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
from pandas import DataFrame

from matrixlib import files, progress
from matrixlib.config import merge
from matrixlib.engine import metrics
from matrixlib.engine.folder import read_run_config
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.metrics import flatten
from matrixlib.runs import run as runs
from matrixlib.tasks import get_task, load_config

LOSS = "validation loss"


@dataclass(frozen=True)
class RunResult:
    """A run as its folder tells it.

    requested, options: dotted key -> value of the configuration before and after `auto` was resolved. rows: of
    metrics.jsonl. summary: {} where the run did not end well.
    """

    folder: Path
    preset: str
    requested: dict[str, Any]
    options: dict[str, Any]
    catalogue: str
    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def seed(self) -> int:
        return int(self.options["seed"])

    @property
    def complete(self) -> bool:
        """Whether it reached its last update, or its validation stopped it early."""
        return bool(self.summary.get("complete"))

    def figures(self) -> dict[str, float]:
        """Losses of the last full validation (nats; nan where the run did not end), held-out figures, and speeds of the
        median update, which leaves out validations and checkpoints."""
        full = [row["validation"] for row in self.rows if row.get("validation", {}).get("kind") == "full"]
        values = {LOSS: math.nan}
        if full and self.complete:
            values = {LOSS: full[-1]["loss"]} | {f"{term} loss": loss for term, loss in full[-1]["losses"].items()}
        rate = 1 / statistics.median(row["seconds"] for row in self.rows)
        speeds = {"updates/s": rate, "positions/s": rate * self.options["train.batch_size"]}
        return values | self.held_out | speeds

    @property
    def held_out(self) -> dict[str, float]:
        """Figures on the held-out rows, which no weight of a loss changes."""
        evaluation = self.summary.get("evaluation", {})
        return {name.replace("_", " "): value for name, value in evaluation.items() if isinstance(value, float)}

    def events(self) -> dict[str, Any]:
        """How often training was disturbed. stable: complete, with no update skipped and no rollback."""
        last = self.rows[-1]
        counts = {name: int(last.get(name, 0)) for name in ("skipped", "overflows", "rollbacks")}
        return {
            "run": self.name,
            "updates": int(last["step"]),
            "complete": self.complete,
            "stable": self.complete and not (counts["skipped"] or counts["rollbacks"]),
            **counts,
            "not finite": sum(map(metrics.not_finite, self.rows)),
            "clipped": last["clip_share"],
            "worst gradient norm": max(row["grad_norm"] for row in self.rows),
            "warnings": sum(len(row.get("messages", ())) for row in self.rows),
        }


def train_arms(
    arms: Mapping[str, tuple[str, Mapping[str, Any]]],
    device: str = "auto",
    seed: int = 0,
    seeds: int = 1,
    steps: int = 0,
    run: str = "",
    log: Callable[[str], None] = print,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, list[Path]]:
    """Train every arm (preset, overrides) with the seeds `seed`, `seed` + 1 ...; its run folders in their order.

    overrides: of all arms, under those of each. steps: updates, 0 as the presets say. log: is told of each run that
    ended. run: start of the runs' names, `<run>-a0`, `<run>-b0` ... by arm and seed; a comparison that was interrupted
    goes on under it; empty means `compare-<UTC time>`.

    The order is A B, B A, A B ..., so that a machine that slows down favours no side. A run that is halted for
    instability stays as it is: that is a result. Raises what `run.open_run` raises, for a misspelt option of the last
    arm before the first is trained.
    """
    if seeds < 1 or seed < 0:
        raise ValueError(f"a comparison needs seeds of at least 1 and a seed from 0 on, not {seeds} and {seed}")
    arms = {arm: (preset, merge(overrides or {}, own)) for arm, (preset, own) in arms.items()}
    for preset, changes in arms.values():
        load_config(preset, changes)
    stem = run or f"compare-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    folders: dict[str, list[Path]] = {arm: [] for arm in arms}
    for number in range(seeds):
        for arm in list(arms)[:: -1 if number % 2 else 1]:
            preset, changes = arms[arm]
            name = f"{stem}-{arm.lower()}{seed + number}"
            current = runs.open_run(preset, device, seed + number, name, steps, changes, kind="compare")
            folders[arm].append(current.folder)
            log(f"{arm} seed {seed + number}: run {name}, {_train(current)}")
            del current
            gc.collect()  # run and trainer hold each other: the next one needs the memory of the device
    return folders


def _train(current: runs.Run) -> str:
    """Train to the end, with a live panel in JupyterLab; how it ended."""
    from matrixlib.runs.live import LivePlot

    if current.complete:
        return "already complete"
    panel = LivePlot(current.steps, title=current.name) if progress.interactive() else None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"update \d+: ")  # they are in the metrics, and `stability` counts them
            for stats in current.train():
                if panel:
                    panel.update(stats)
    except TrainingHalted as error:
        return f"halted: {error}"
    finally:
        if panel:
            panel.close()
        current.close()
    return f"{current.trainer.step} updates"


def read_result(folder: Path) -> RunResult:
    """A run as its folder tells it; ValueError where it is none."""
    record = files.read_json(folder / "run.json")
    path = folder / "metrics.jsonl"
    rows = metrics.read(path) if path.exists() else []
    if not (record and rows):
        raise ValueError(f"'{folder.name}' is no run, or has made no update yet")
    config, _ = read_run_config(folder)
    requested, options = (
        {key.replace("/", "."): value for key, value in flatten(one)} for one in (record["requested"], config)
    )
    summary = files.read_json(folder / "summary.json")
    return RunResult(folder, record["preset"], requested, options, record["catalogue"], rows, summary)


def results(arms: Mapping[str, Sequence[Path]]) -> DataFrame:
    """The figures of all runs: a row for each (arm, seed), a column for each figure, nan where a run has it not."""
    return _table(arms, RunResult.figures)


def stability(arms: Mapping[str, Sequence[Path]]) -> DataFrame:
    """What disturbed training: a row for each (arm, seed); the warnings themselves stand in its metrics.jsonl."""
    return _table(arms, RunResult.events)


def _table(arms: Mapping[str, Sequence[Path]], row: Callable[[RunResult], dict[str, Any]]) -> DataFrame:
    read = [(arm, read_result(folder)) for arm, folders in arms.items() for folder in folders]
    index = pandas.MultiIndex.from_tuples([(arm, run.seed) for arm, run in read], names=["arm", "seed"])
    return DataFrame([row(run) for _, run in read], index=index)


def interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of b - a by pairs (Student's t, Gosset 1908); nan below two pairs, and where all
    differences are equal or one is not finite."""
    from scipy.stats import ttest_rel

    if len(a) < 2:
        return math.nan, math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of differences that are all alike
        low, high = ttest_rel(b, a).confidence_interval(0.95)
    return float(low), float(high)


def differences(values: DataFrame, base: str) -> DataFrame:
    """Arms beside `base`: a row for each figure. values: as `results` gives them, rows (arm, seed), columns figures.

    Columns: mean and standard deviation (over the seeds, nan of one) of every arm, and of every arm but `base` its
    difference to it with the ends of its 95 % interval, by pairs of one seed; nan where the seeds are others.
    """
    parts = {}
    own = {str(arm): rows.droplevel(0) for arm, rows in values.groupby(level=0, sort=False)}
    for arm, rows in own.items():
        parts[arm] = DataFrame({"mean": rows.mean(skipna=False), "std": rows.std(skipna=False)})
    for arm, rows in own.items():
        if arm == base:
            continue
        paired = list(rows.index) == list(own[base].index)
        ends = [interval([*own[base][name]], [*rows[name]]) if paired else (math.nan,) * 2 for name in values.columns]
        column = DataFrame(ends, index=values.columns, columns=["from", "to"])
        column.insert(0, "difference", parts[arm]["mean"] - parts[base]["mean"])
        parts[f"{arm} - {base}"] = column
    return pandas.concat(parts, axis=1)


def check_sides(a: Sequence[RunResult], b: Sequence[RunResult], presets: Sequence[str] = ()) -> dict[str, Any]:
    """Options in which side B differs from side A, each one configuration with any seeds: key -> (A's, B's).

    presets: by the user's choice; a task that is somebody's own code is loaded where one of them names it.
    Raises ValueError where a comparison would mislead: no runs, a seed twice on a side, runs of a side that differ in
    more than the seed, sides that were measured on different held-out games.
    """
    for label, side in (("A", a), ("B", b)):
        if not side:
            raise ValueError(f"side {label} has no runs")
        if len({result.seed for result in side}) < len(side):
            raise ValueError(f"side {label} has two runs of one seed; a seed counts once")
        if odd := {key for result in side for key in _changes(side[0].requested, result.requested)}:
            raise ValueError(f"runs of side {label} differ in more than the seed: {', '.join(sorted(odd))}")
    if len({result.catalogue for result in (*a, *b)}) > 1:
        raise ValueError(
            "the runs were trained on different data sets, so their held-out games differ; "
            "measure them on one set with the eval notebook"
        )
    task = a[0].options["task"]
    if ":" in task and task not in {load_config(preset).task for preset in presets}:
        raise ValueError(
            f"run '{a[0].name}' is of the task '{task}', somebody's own code: name a preset of it, if you trust it"
        )
    changes = {key: pair for x, y in zip(a, b, strict=False) for key, pair in _changes(x.options, y.options).items()}
    if other := [key for key in changes if key.startswith(tuple(get_task(task).measured_on_options))]:
        raise ValueError(
            f"the sides differ in {', '.join(other)}, so they were measured on other held-out rows or puzzles; train "
            "them with the same"
        )
    return changes


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ, the seed apart: key -> (old, new); None where one has no such key."""
    keys = [key for key in dict.fromkeys((*old, *new)) if key != "seed"]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}
