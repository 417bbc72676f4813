"""Train several configurations (arms) with equal seeds; results as DataFrames.

Runs with equal seeds are pairs: the seed's effect cancels in their difference. Two pairs or more give an interval.

    arms = {"A": ("demo", {}), "B": ("demo", {"optim": {"learning_rate": 0.001}})}
    results = compare.results(compare.train_arms(arms, seeds=3))       # a row a run, numbers
    compare.differences(results, base="A")                             # a row a figure, 95 % intervals
"""

import datetime
import gc
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas
from pandas import DataFrame

from matrixlib import files, progress
from matrixlib.config import dotted, merge
from matrixlib.engine import metrics
from matrixlib.engine.folder import name_conflict, read_run_config
from matrixlib.engine.health import TrainingHalted
from matrixlib.runs import run as runs
from matrixlib.tasks import load_config

LOSS = "validation loss"


@dataclass(frozen=True)
class RunResult:
    """A run as stored in its folder.

    record: run.json. options: dotted key -> value, `auto` resolved. rows: of metrics.jsonl. summary: {} before the end.
    """

    folder: Path
    record: dict[str, Any]
    options: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.options["seed"])

    @property
    def complete(self) -> bool:
        """Whether it reached its last update, or stopped early by validation."""
        return bool(self.summary.get("complete"))

    def figures(self) -> dict[str, float]:
        """Losses of the last full validation (nats; NaN if incomplete), held-out figures, and speeds of the median
        update (without validation and checkpoints)."""
        full = [row["validation"] for row in self.rows if row.get("validation", {}).get("kind") == "full"]
        values = {LOSS: math.nan}
        if full and self.complete:
            values = {LOSS: full[-1]["loss"]} | {f"{term} loss": loss for term, loss in full[-1]["losses"].items()}
        held_out = self.summary.get("evaluation", {}).items()
        values |= {name.replace("_", " "): value for name, value in held_out if isinstance(value, float)}
        rate = 1 / statistics.median(row["seconds"] for row in self.rows)
        return values | {"updates/s": rate, "positions/s": rate * self.options["train.batch_size"]}


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
    """Train every arm (preset, overrides) with seeds `seed`, `seed` + 1 ...; returns run folders in order.

    overrides: for all arms, below their own. steps: updates, 0 = as the presets say. log: called for each finished run.
    run: prefix of run names, `<run>-a0`, `<run>-b0` ... by arm and seed, under which an interrupted comparison resumes;
    default `compare-<UTC time>`.

    The order is A B, B A, A B ..., so that a machine that slows down favours no arm. A run halted for instability is a
    result. Raises like `run.open_run`, for all arms before training any.
    """
    from matrixlib.runs.live import LivePlot

    if seeds < 1 or seed < 0:
        raise ValueError(f"a comparison needs seeds of at least 1 and a seed from 0 on, not {seeds} and {seed}")
    arms = {arm: (preset, merge(overrides or {}, own)) for arm, (preset, own) in arms.items()}
    for preset, changes in arms.values():
        load_config(preset, changes)
    stem = run or f"compare-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%SZ}"
    folders: dict[str, list[Path]] = {arm: [] for arm in arms}
    names = {(arm, number): f"{stem}-{arm.lower()}{seed + number}" for arm in arms for number in range(seeds)}
    for name in names.values():
        if problem := name_conflict(name, "run.json"):
            raise runs.RunError(f"run name {name!r} {problem}")
    for number in range(seeds):
        for arm in list(arms)[:: -1 if number % 2 else 1]:
            preset, changes = arms[arm]
            name = names[arm, number]
            current = runs.open_run(preset, device, seed + number, name, steps, changes, kind="compare")
            folders[arm].append(current.folder)
            ended = "already complete" if current.complete else f"{current.steps} updates"
            panel = LivePlot(current.steps, title=name) if progress.interactive() else nullcontext()
            with closing(current), panel, warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"update \d+: ")  # already in the metrics
                try:
                    for stats in current.train():
                        if isinstance(panel, LivePlot):
                            panel.update(stats)
                except TrainingHalted as error:
                    ended = f"halted: {error}"
            log(f"{arm} seed {seed + number}: run {name}, {ended}")
            del current
            gc.collect()  # run and trainer are a reference cycle; free device memory
    return folders


def read_result(folder: Path) -> RunResult:
    """A run as stored in its folder; ValueError if it is none."""
    record, path = files.read_json(folder / "run.json"), folder / "metrics.jsonl"
    rows = metrics.read(path) if path.exists() else []
    if not (record and rows):
        raise ValueError(f"'{folder.name}' is not a run, or has no updates yet")
    options = dotted(read_run_config(folder)[0])
    return RunResult(folder, record, options, rows, files.read_json(folder / "summary.json"))


def results(arms: Mapping[str, Sequence[Path]]) -> DataFrame:
    """Figures of all runs: a row for each (arm, seed), a column for each figure, NaN where missing."""
    read = [(arm, read_result(folder)) for arm, folders in arms.items() for folder in folders]
    index = pandas.MultiIndex.from_tuples([(arm, run.seed) for arm, run in read], names=["arm", "seed"])
    return DataFrame([run.figures() for _, run in read], index=index)


def interval(a: Any, b: Any) -> tuple[Any, Any]:
    """95 % interval of the mean paired difference b - a (Student's t, Gosset 1908): of sequences (N,) two numbers, of
    frames with N rows arrays by column; NaN below two pairs, if all differences are equal, or any is not finite."""
    from scipy.stats import ttest_rel

    if len(a) < 2:
        return math.nan, math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # zero variance
        low, high = ttest_rel(b, a).confidence_interval(0.95)
    return low, high


def differences(values: DataFrame, base: str) -> DataFrame:
    """Arms against `base`: a row for each figure. values: from `results`, rows (arm, seed), columns figures.

    Columns: mean and standard deviation over seeds (NaN for one) of every arm; for every arm but `base` its difference
    with 95 % interval over pairs of equal seeds, NaN if seeds differ.
    """
    own = {str(arm): rows.droplevel(0) for arm, rows in values.groupby(level=0, sort=False)}
    parts = {
        arm: DataFrame({"mean": rows.mean(skipna=False), "std": rows.std(skipna=False)}) for arm, rows in own.items()
    }
    for arm in [arm for arm in own if arm != base]:
        paired = own[arm].index.equals(own[base].index)
        low, high = interval(own[base], own[arm]) if paired else (math.nan, math.nan)
        difference = parts[arm]["mean"] - parts[base]["mean"]
        parts[f"{arm} - {base}"] = DataFrame({"difference": difference, "from": low, "to": high})
    return pandas.concat(parts, axis=1)
