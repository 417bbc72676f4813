"""A/B dry run: train two configurations alike, or take finished runs, and say what their difference is worth.

Both sides get the same seeds, so the runs are pairs: what a seed does to both drops out of their difference. One pair
is an anecdote; from two pairs on there is an interval, and the conclusion never says more than it.
"""

from __future__ import annotations

import datetime
import gc
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure
from pandas import DataFrame

from matrixlib import files, progress
from matrixlib.config import merge
from matrixlib.engine import history
from matrixlib.engine.folder import read_run_config
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.rows import flatten
from matrixlib.runs import figures
from matrixlib.runs import run as runs
from matrixlib.runs.live import LivePlot
from matrixlib.tasks import get_task, load_config

LOSS = "validation loss"
ORDER = ("task", "data.", "curriculum.", "train.batch_size")
"""Options that change which positions an update sees, but for LOADING."""
LOADING = ("data.source", "data.cache", "data.workers", "data.prefetch")
"""Data sets are compared by the hash of their catalogue."""

# 97.5 % quantiles of Student's t with 1, 2, 3 ... degrees of freedom; the last also stands for more (a bit too wide)
T_QUANTILES = [
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
]


def check_seeds(seed: int, seeds: int) -> None:
    """ValueError for what no comparison can have as its first seed and number of seeds."""
    if seeds < 1 or seed < 0:
        raise ValueError(f"a comparison needs seeds of at least 1 and a seed from 0 on, not {seeds} and {seed}")


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

    overrides: of all arms, under those of each.

    The order is A B, B A, A B ..., so that a machine that slows down does not favour one side. The runs are named
    `<run>-a0`, `<run>-b0` ... by arm and seed, where an empty `run` means `compare-<UTC time>`; under a name that
    exists the comparison goes on where it was interrupted. steps: updates, 0 as the presets say. A run that is
    halted for instability stays as it is: that is a result. log: is told of each run that ended.
    Raises what `run.open_run` raises, for a misspelt option of the last arm before the first is trained.
    """
    check_seeds(seed, seeds)
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


def arms_table(figures: Mapping[str, Sequence[Mapping[str, float]]], base: str) -> DataFrame:
    """A row for each figure of several arms (of each seed its figures, in one order): mean and standard deviation over
    the seeds, and for every arm but `base` the difference to it, with its 95 % interval where there are pairs of seeds.
    """
    rows: dict[str, dict[str, str]] = {name: {} for name in figures[base][0]}
    for name, row in rows.items():
        values = {arm: [of_seed[name] for of_seed in seeds] for arm, seeds in figures.items()}
        row |= {arm: _spread(column, 4) for arm, column in values.items()}
        for arm, column in values.items():
            pairs = [own - other for own, other in zip(column, values[base], strict=True)]
            interval = t_interval(pairs)
            ends = f" ({interval[0]:+.4f} to {interval[1]:+.4f})" if interval else ""
            row |= {f"{arm} - {base}": f"{statistics.fmean(pairs):+.4f}{ends}"} if arm != base else {}
    return pandas.DataFrame.from_dict(rows, orient="index")


def arms_interval(
    arm: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], name: str
) -> tuple[float, float]:
    """95 % interval of a figure's difference between two arms, by pairs of one seed; two of them are needed."""
    interval = t_interval([own[name] - other[name] for own, other in zip(arm, base, strict=True)])
    assert interval is not None, "one seed gives no interval"
    return interval


def finished(run_a: str, run_b: str) -> tuple[list[Path], list[Path]]:
    """Folders of complete runs by name, several separated by commas. RunError for a name without a complete run."""
    a, b = ([name.strip() for name in names.split(",") if name.strip()] for names in (run_a, run_b))
    if not (a and b):
        raise ValueError("name finished runs for both sides, run_a and run_b, or for none to train them")
    return [runs.finished_run(name) for name in a], [runs.finished_run(name) for name in b]


def compare(runs_a: Sequence[Path], runs_b: Sequence[Path], presets: Sequence[str] = ()) -> Comparison:
    """Compare the runs of two sides, each side one configuration with any seeds.

    presets: by the user's choice; a task that is somebody's own code is loaded where one of them names it.
    Raises ValueError where a comparison would mislead: no runs, a run without updates, a seed twice on a side, runs of
    a side that differ in more than the seed, sides that were measured on different held-out games.
    """
    a, b = (sorted(map(read_result, side), key=attrgetter("seed")) for side in (runs_a, runs_b))
    for label, side in (("A", a), ("B", b)):
        if not side:
            raise ValueError(f"side {label} has no runs")
        if len({result.seed for result in side}) < len(side):
            raise ValueError(f"side {label} has two runs of one seed; a seed counts once")
        if odd := {key for result in side for key in _difference(result.requested, side[0].requested)}:
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
    spec = get_task(task)
    comparison = Comparison(tuple(a), tuple(b), ("task", *spec.objective_options))
    if other := [key for key in comparison.changes if key.startswith(tuple(spec.measured_on_options))]:
        raise ValueError(
            f"the sides differ in {', '.join(other)}, so they were measured on other held-out rows or puzzles; train "
            "them with the same"
        )
    return comparison


def t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean by Student's t, for independent and roughly normal differences.

    None below two; nan where one of them is not finite.
    """
    n = len(differences)
    if n < 2:
        return None
    if not all(map(math.isfinite, differences)):
        return math.nan, math.nan
    half = T_QUANTILES[min(n - 1, len(T_QUANTILES)) - 1] * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.fmean(differences)
    return mean - half, mean + half


@dataclass(frozen=True)
class RunResult:
    """One run as its folder tells it.

    requested, options: dotted key -> value of the configuration before and after `auto` was resolved. rows: of
    metrics.jsonl. summary: empty where the run did not end well.
    """

    name: str
    preset: str
    requested: dict[str, Any]
    options: dict[str, Any]
    catalogue: str
    rows: tuple[dict[str, Any], ...]
    summary: dict[str, Any]

    @property
    def seed(self) -> int:
        return int(self.options["seed"])

    @property
    def updates(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def complete(self) -> bool:
        """True when it reached its last update, or its validation stopped it early."""
        return bool(self.summary.get("complete"))

    @property
    def events(self) -> dict[str, int]:
        """How often training was disturbed; what the metrics do not count is 0."""
        counts = {name: int(self.rows[-1].get(name, 0)) for name in ("skipped", "overflows", "rollbacks")}
        return counts | {"not finite": sum(map(history.not_finite, self.rows))}

    @property
    def stable(self) -> bool:
        """True when it is complete and nothing disturbed it but the search for a loss scale."""
        return self.complete and not any(self.events[name] for name in ("skipped", "rollbacks"))

    @property
    def losses(self) -> dict[str, float]:
        """The last full validation: weighted total and terms (nats). The total is nan where the run did not end."""
        full = [row["validation"] for row in self.rows if row.get("validation", {}).get("kind") == "full"]
        if not (full and self.complete):
            return {LOSS: math.nan}
        return {LOSS: full[-1]["loss"]} | {f"{term} loss": loss for term, loss in full[-1]["losses"].items()}

    @property
    def held_out(self) -> dict[str, float]:
        """Figures on all held-out positions, which no weight of a loss changes."""
        evaluation = self.summary.get("evaluation", {})
        return {name.replace("_", " "): value for name, value in evaluation.items() if isinstance(value, float)}

    @property
    def speeds(self) -> dict[str, float]:
        """Of the median update: validation and checkpoints left out."""
        rate = 1 / statistics.median(row["seconds"] for row in self.rows)
        return {"updates/s": rate, "positions/s": rate * self.options["train.batch_size"]}


@dataclass(frozen=True)
class Measurement:
    """One figure of every run of both sides. interval: 95 %, of B - A by pairs of one seed; None without two pairs."""

    name: str
    a: tuple[float, ...]
    b: tuple[float, ...]
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float:
        """Mean of B less mean of A."""
        return statistics.fmean(self.b) - statistics.fmean(self.a)


@dataclass(frozen=True)
class Comparison:
    """Two sides, each the runs of one configuration in order of their seeds.

    objective: keys of options (sections with a dot at their end) that change what the losses mean.
    """

    a: tuple[RunResult, ...]
    b: tuple[RunResult, ...]
    objective: tuple[str, ...]

    @property
    def runs(self) -> tuple[RunResult, ...]:
        return self.a + self.b

    @property
    def sides(self) -> dict[str, tuple[RunResult, ...]]:
        return {"A": self.a, "B": self.b}

    @property
    def paired(self) -> bool:
        """Whether both sides have the same seeds."""
        return [result.seed for result in self.a] == [result.seed for result in self.b]

    @cached_property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Options of the resolved configurations that differ, the seed apart: key -> (A's, B's)."""
        changes: dict[str, tuple[Any, Any]] = {}
        for x, y in zip(self.a, self.b, strict=False):
            changes |= _difference(y.options, x.options)
        return changes

    @property
    def same_data(self) -> bool:
        """Whether update by update both sides trained on the same positions in the same order."""
        other = [key for key in self.changes if key.startswith(ORDER) and key not in LOADING]
        return self.paired and not other and not any(result.events["rollbacks"] for result in self.runs)

    @property
    def same_objective(self) -> bool:
        """Whether the losses of both sides mean the same: terms, weights, smoothing."""
        return not any(key.startswith(self.objective) for key in self.changes)

    @cached_property
    def figures(self) -> tuple[Measurement, ...]:
        """What is compared. The first is the headline: the validation loss where it means the same on both sides,
        else the first of the held-out figures."""
        values = [(r.losses if self.same_objective else {}) | r.held_out | r.speeds for r in self.runs]
        measurements = []
        for name in values[0]:
            if all(name in figures for figures in values):
                column = tuple(figures[name] for figures in values)
                a, b = column[: len(self.a)], column[len(self.a) :]
                pairs = [y - x for x, y in zip(a, b, strict=True)] if self.paired else []
                measurements.append(Measurement(name, a, b, t_interval(pairs)))
        return tuple(measurements)

    @property
    def conclusion(self) -> str:
        """What the headline figure shows, in one sentence that claims no more."""
        if bad := [result.name for result in self.runs if not result.complete]:
            return f"No conclusion on the loss: {', '.join(bad)} did not reach the end."
        first = self.figures[0]
        a, b, difference = statistics.fmean(first.a), statistics.fmean(first.b), first.difference
        if not math.isfinite(difference):
            return f"No conclusion: the {first.name} is not finite (A {a:.4f}, B {b:.4f})."
        if first.a == first.b:
            return f"Both sides end with the same {first.name}, {a:.4f}."
        text = f"After {self._updates()} B's {first.name} is {abs(difference):.4f} "
        text += f"{'lower' if difference < 0 else 'higher'} than A's ({b:.4f} against {a:.4f})"
        if first.interval is None:
            why = "one seed gives no interval" if self.paired else "without pairs of seeds there is no interval"
            return f"{text}; {why}, so this may be chance."
        low, high = first.interval
        text += f"; over {len(first.a)} seeds the 95 % interval of B - A is {low:+.4f} to {high:+.4f}"
        if low <= 0 <= high:
            return f"{text}, which includes 0: no difference can be told from chance."
        return f"{text}: more than chance at this length on this data, and nothing is known of longer runs."

    def describe(self) -> str:
        """What was compared: presets, seeds, differences of the resolved configurations, order of the data."""
        lines = []
        for label, side in self.sides.items():
            seeds = ", ".join(str(result.seed) for result in side)
            lines.append(f"{label}: preset {side[0].preset}, seed{'s' if len(side) > 1 else ''} {seeds}")
        lines.append("B differs from A in:" if self.changes else "B is configured exactly as A")
        lines += [f"  {key}: {old} -> {new}" for key, (old, new) in self.changes.items()]
        lines.append(
            "same seed, same data order: every update saw the same positions on both sides"
            if self.same_data
            else "the sides did not see the same positions in the same order"
        )
        if len({result.updates for result in self.runs}) > 1:
            lines.append(f"the runs differ in length: {self._updates()}")
        if not self.same_objective:
            lines.append(f"their losses do not mean the same, so the conclusion is on the {self.figures[0].name}")
        return "\n".join(lines)

    def table(self) -> DataFrame:
        """A row for each figure: mean and standard deviation over the seeds, difference and its interval, as text."""
        rows = {}
        for figure in self.figures:
            digits = 1 if figure.name.endswith("/s") else 4
            row = {"A": _spread(figure.a, digits), "B": _spread(figure.b, digits)}
            row["B - A"] = f"{figure.difference:+.{digits}f}"
            if figure.interval:
                row["95 % interval of B - A"] = " to ".join(f"{end:+.{digits}f}" for end in figure.interval)
            rows[figure.name] = row
        return pandas.DataFrame.from_dict(rows, orient="index")

    def stability(self) -> DataFrame:
        """What disturbed training, a row for each run; the warnings themselves stand in its metrics.jsonl."""
        rows = {}
        for label, side in self.sides.items():
            for result in side:
                rows[f"{label} seed {result.seed}"] = {
                    "updates": result.updates,
                    **result.events,
                    "clipped": f"{result.rows[-1]['clip_share']:.1%}",
                    "worst gradient norm": f"{max(row['grad_norm'] for row in result.rows):.3g}",
                    "warnings": sum(len(row.get("messages", ())) for row in result.rows),
                    "complete": "yes" if result.complete else "no",
                }
        return pandas.DataFrame.from_dict(rows, orient="index")

    def figure(self) -> Figure:
        """Curves of both sides with a band over the seeds, gradient norm, speed."""
        sides = {label: [result.rows for result in side] for label, side in self.sides.items()}
        label = "loss [nat]" if self.same_objective else "loss [nat], not the same on both sides"
        return figures.comparison_figure(sides, label)

    def _updates(self) -> str:
        counts = [result.updates for result in self.runs]
        return f"{' to '.join(f'{n:,}' for n in dict.fromkeys((min(counts), max(counts))))} updates"


def _train(current: runs.Run) -> str:
    """Train to the end; returns how it ended. A live panel is shown in JupyterLab."""
    if current.complete:
        return "already complete"
    panel = LivePlot(current.steps, title=current.name) if progress.interactive() else None
    try:
        with warnings.catch_warnings():
            # they are in the metrics, and `stability` counts them
            warnings.filterwarnings("ignore", r"update \d+: ")
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
    rows = history.read(path) if path.exists() else []
    if not (record and rows):
        raise ValueError(f"'{folder.name}' is no run, or has made no update yet")
    config, _ = read_run_config(folder)
    return RunResult(
        folder.name,
        record["preset"],
        _options(record["requested"]),
        _options(config),
        record["catalogue"],
        tuple(rows),
        files.read_json(folder / "summary.json"),
    )


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value; the configuration is not validated, so that runs of older versions can be compared."""
    return {key.replace("/", "."): value for key, value in flatten(config)}


def _difference(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options that differ, the seed apart: key -> (old, new); None where one has no such key."""
    keys = [key for key in dict.fromkeys((*old, *new)) if key != "seed"]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _spread(values: Sequence[float], digits: int) -> str:
    text = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2 or not all(map(math.isfinite, values)):  # the deviation of nan is an error
        return text
    return f"{text} ± {statistics.stdev(values):.{digits}f}"
