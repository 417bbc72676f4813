"""What a sweep has shown: its table, which dimension matters how much, and the best configuration as a preset."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import yaml
from pandas import DataFrame

from matrixlib import files
from matrixlib.config import difference
from matrixlib.runs import report
from matrixlib.runs.compare import t_interval
from matrixlib.runs.proposals import write_journal
from matrixlib.runs.sweep import EARLIEST, Result, Sweep
from matrixlib.runs.sweep_config import dimensions, nest, request
from matrixlib.tasks import load_config, validate_config
from matrixlib.tasks.spec import Check

GROUPS = 4
"""Groups of equal size that the values of a range are put into."""
LEFT = "difference to the best"
LEAST, MOST = 0.5, 1.1
"""Shares of its minutes that the updates of a trial take: validations and checkpoints, which are not among them, count
too; a machine that becomes slower at the end is late."""


def table(sweep: Sweep) -> DataFrame:
    """A row for each trial that has ended, best first: values, outcome, measure (mean over the seeds), and with two
    seeds and more its deviation and the difference to the best trial with its 95 % interval, by pairs of one seed.

    Nothing in it depends on the clock, unless the trials' minutes are equal.
    """
    best, name = sweep.best(), sweep.config.measure
    rows = []
    for result in _in_order(sweep):
        row: dict[str, Any] = {"trial": result.trial.number, **{k: _cell(v) for k, v in result.trial.values.items()}}
        row |= {"outcome": result.trial.state, "updates": result.updates, name: result.mean}
        if sweep.config.seeds > 1:
            row |= {"deviation": np.nan, LEFT: np.nan, "from": np.nan, "to": np.nan}
            if result.measures and best is not None:
                pairs = [a - b for a, b in zip(result.measures, best.measures, strict=True)]
                low, high = t_interval(pairs) or (math.nan, math.nan)
                deviation = float(np.std(result.measures, ddof=1))
                row |= {"deviation": deviation, LEFT: float(np.mean(pairs)), "from": low, "to": high}
        rows.append(row | {"reason": result.trial.reason})
    columns = ["trial", *(d.key for d in dimensions(sweep.config)), "outcome", "updates", name]
    return pandas.DataFrame(rows) if rows else pandas.DataFrame(columns=columns)


def _in_order(sweep: Sweep) -> list[Result]:
    """Results from the best to the worst; then those without a measure, by number."""
    return sorted(
        sweep.results(), key=lambda result: (not result.measures, sweep.better(result.mean) if result.measures else 0.0)
    )


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float, str, bool)) else json.dumps(value)


def shown(sweep: Sweep) -> DataFrame:
    """The table for people: numbers of four digits, no empty column."""
    frame = table(sweep).set_index("trial")
    if not frame["reason"].any():
        frame = frame.drop(columns="reason")
    return frame.map(lambda value: f"{value:.4g}" if isinstance(value, float) else value)


def importance(sweep: Sweep) -> DataFrame:
    """How much of the differences between trials goes with each dimension, alone: a row a dimension, largest first.

    share: of the variance of the ranks between the groups of a dimension's values, corrected for the number of groups
    (epsilon squared, Kelley 1935, https://doi.org/10.1073/pnas.21.9.554; on ranks as Kruskal and Wallis 1952), from 0
    to 1. Ranks, so that a diverged trial counts as the last and no more. Pruned trials share the last rank, failed ones
    are left out. A range is put into groups of equal size. What only two dimensions together do is in neither.
    """
    results = [result for result in sweep.results() if result.trial.state != "failed"]
    losses = pandas.Series([sweep.better(result.mean) if result.measures else math.inf for result in results])
    ranks = losses.rank().to_numpy()
    rows = {}
    for dimension in dimensions(sweep.config):
        values = [result.trial.values.get(dimension.key) for result in results]
        groups = _groups(values, bool(dimension.choices))
        rows[dimension.key] = {"share": epsilon_squared(ranks, groups), "groups": len(set(groups))}
    return pandas.DataFrame.from_dict(rows, orient="index").sort_values("share", ascending=False)


def epsilon_squared(ranks: np.ndarray, groups: Sequence[Any]) -> float:
    """1 - (within / (n - k)) / (total / (n - 1)) of sums of squares of n ranks (N,) in k groups; not below 0, nan where
    there are too few."""
    parts = [ranks[[group == other for other in groups]] for group in dict.fromkeys(groups)]
    total = float(((ranks - ranks.mean()) ** 2).sum()) if len(ranks) else 0.0
    if len(parts) < 2 or len(ranks) <= len(parts) or not total:
        return math.nan
    within = sum(float(((part - part.mean()) ** 2).sum()) for part in parts)
    return max(0.0, 1 - within / (len(ranks) - len(parts)) * (len(ranks) - 1) / total)


def _groups(values: Sequence[Any], choices: bool) -> list[Any]:
    """Choices are groups; numbers of a range go into `GROUPS` of equal size, or as many as hold three each."""
    if choices or len(set(values)) <= GROUPS:
        return [_cell(value) for value in values]
    count = max(2, min(GROUPS, len(values) // 3))
    edges = np.quantile(np.array(values, float), np.linspace(0, 1, count + 1)[1:-1])
    return [int(group) for group in np.searchsorted(edges, np.array(values, float), side="right")]


def best_preset(sweep: Sweep) -> Path:
    """Write the best configuration as a preset, with what differs from the defaults alone; its path.

    `train.ipynb` takes it as `-p preset PATH`. ValueError where no trial is complete.
    """
    best = sweep.best()
    if best is None:
        raise ValueError(f"no trial of sweep '{sweep.name}' is complete: there is no best one")
    config = load_config(*request(sweep.config, best.trial.values))
    plain = validate_config({"task": config.task}, "the defaults")
    data = {"task": config.task} | nest({key: value for key, (_, value) in difference(config, plain).items()})
    measure = f"{sweep.config.measure} {best.mean:.4g}"
    text = f"# The best of {len(sweep.results())} trials of {sweep.name}: trial {best.trial.number}, {measure}.\n"
    out = sweep.folder / "best.yaml"
    files.write_text(out, text + yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    return out


def checks(sweep: Sweep) -> list[Check]:
    """What must hold of a sweep that says something: name, whether, what it says."""
    results = sweep.results()
    complete = [result for result in results if result.measures]
    failed = [result for result in results if result.trial.state == "failed"]
    updates = {result.updates for result in complete}
    other = [result.trial.number for result in complete if not _in_budget(sweep, result)]
    spent = f"updates: {sorted(updates)}" + (f"; not of trial {', '.join(map(str, other))}" if other else "")
    pruned = [result for result in results if result.trial.state == "pruned"]
    late = all(max(result.curve, default=0) >= EARLIEST * sweep.steps(result.trial) for result in pruned)
    best = sweep.best()
    return [
        ("every trial has ended", sweep.complete, f"{len(results)} of {sweep.planned}"),
        ("most trials are no failures", 2 * len(failed) < max(1, len(results)), f"{len(failed)} failed"),
        ("every complete trial has the same budget", bool(complete) and not other, spent),
        ("no trial was pruned before a third of the updates", late, f"{len(pruned)} pruned"),
        ("there is a best one", best is not None, f"trial {best.trial.number}: {best.mean:.4g}" if best else "none"),
    ]


def _in_budget(sweep: Sweep, result: Result) -> bool:
    """Whether a complete trial was trained for what it was to have: updates, or minutes."""
    train = load_config(*request(sweep.config, result.trial.values)).train
    if train.steps == "auto":
        return LEAST <= result.seconds / (60 * train.minutes) <= MOST
    return result.updates == train.steps


def write_report(sweep: Sweep) -> Path:
    """Write table.csv and table.json, best.yaml where a trial is complete, and Optuna's journal of a `tpe` sweep beside
    each other; the folder. Pages: those of the best trial's runs, and the index of all."""
    frame = table(sweep)
    with files.writing(sweep.folder):
        files.write_text(sweep.folder / "table.csv", frame.to_csv(index=False))
        files.write_text(sweep.folder / "table.json", frame.to_json(orient="records", indent=1, double_precision=15))
        if (best := sweep.best()) is not None:
            best_preset(sweep)
            for name in sweep.run_names(best.trial.number).values():
                report.write_report(files.reports_root() / name)
        if sweep.config.method == "tpe":
            numbers = [number for number, trial in sorted(sweep.trials.items()) if trial.ended]
            write_journal(sweep.folder / "optuna.log", sweep.config, sweep.told(numbers))
        report.write_index()
    return sweep.folder
