"""A sweep: many configurations, each trained with the same seeds for the same number of updates or minutes.

Every trial is an ordinary run folder for each seed, and what a trial is depends on its number and on the results of
the trials before it alone. So a sweep that was killed goes on where it was, to the same table.

    reports/<sweep>/sweep.yaml       the sweep
    reports/<sweep>/trials.json      values and outcome of each trial
    reports/<sweep>/table.csv, .json the report's table; best.yaml, the best configuration as a preset
    reports/<sweep>-000-s0/ ...      the runs, by trial and seed
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from matrixlib import files, progress
from matrixlib.config import ConfigError, merge, read_yaml_file, validated
from matrixlib.hardware import machine
from matrixlib.hardware.runtime import select_device, suggest
from matrixlib.runs import watch
from matrixlib.runs.compare import LOSS, RunResult, read_result
from matrixlib.runs.fleet import Fleet, open_fleet
from matrixlib.runs.proposals import Method, Told, method
from matrixlib.runs.sweep_config import SweepConfig, known_figure, load_sweep, request, to_yaml
from matrixlib.runs.trial import Job, Outcome, in_a_line, outcome_of, train
from matrixlib.tasks import load_config

RIVALS = 4
"""Complete trials from which on there is a median to prune by (Golovin et al. 2017, section 3.2, leave it open)."""
EARLIEST = 1 / 3
"""Share of the updates before which no trial is pruned: losses in the warm-up say little about the end."""
LOOK = 0.5  # seconds between two looks at how far the runs are


class SweepError(ValueError):
    """A sweep that cannot go on; says why and what to do."""


@dataclass(frozen=True)
class Trial:
    """One configuration. values: of each dimension. state: running until it has ended, then as an `Outcome`."""

    number: int
    values: dict[str, Any]
    state: str = "running"
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state != "running"

    def __str__(self) -> str:
        values = ", ".join(f"{key} {value}" for key, value in self.values.items())
        return f"trial {self.number} ({values}): {self.state}" + (f", {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Result:
    """A trial with what its runs left; one that was trained to its end and lacks the measure is a failed one.

    measures: of each seed, only of a complete trial. curve: update -> mean validation loss over the seeds. updates,
    seconds, parameters: of the first run, nan where it has no end.
    """

    trial: Trial
    measures: tuple[float, ...]
    curve: dict[int, float]
    curves: dict[int, dict[int, float]]  # by seed
    updates: int
    seconds: float
    parameters: float
    held_out: dict[str, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.measures) if self.measures else math.nan


def open_sweep(
    preset: str = "demo", device: str = "auto", sweep: str = "", overrides: Mapping[str, Any] | None = None
) -> Sweep:
    """Open a sweep: go on with the named one, or begin it; an empty name is `sweep-<preset>`.

    preset: name in params/sweep/ or path of a YAML file. overrides: options of the sweep, each in place of the
    preset's. Raises ConfigError, and SweepError where it was begun with other options.
    """
    config = load_sweep(preset, overrides)
    if device != "auto":
        config = config.model_copy(update={"overrides": merge(config.overrides, {"runtime": {"device": device}})})
    name = sweep or f"sweep-{Path(preset).stem}"
    if problem := files.name_problem(name):
        raise SweepError(f"sweep name {name!r} {problem}")
    folder = files.reports_root() / name
    path = folder / "sweep.yaml"
    files.make_folder(folder)
    with files.writing(folder):
        if not path.exists():
            files.write_text(path, to_yaml(config))
    stored = validated(SweepConfig, read_yaml_file(path, str(path)), str(path))
    free = {"trials", "fleet"}
    if not (config.prune or config.method == "tpe"):
        free |= {"workers"}
    if config.method != "staged":  # whose arms are what an earlier measure kept
        free |= {"measure", "highest"}
    if stored.model_copy(update={key: getattr(config, key) for key in free}) != config:
        raise SweepError(
            f"sweep '{name}' was begun with other options (see {path}): only {', '.join(sorted(free))} may change; "
            "give the sweep another name"
        )
    return Sweep(folder, config)


class Sweep:
    """One sweep, made by `open_sweep`; `train` yields its trials."""

    def __init__(self, folder: Path, config: SweepConfig) -> None:
        self.folder, self.config = folder, config
        self.propose: Method
        self.propose, self.planned = method(config)
        self._results: dict[int, Result] = {}
        self._lock = FileLock(folder / "lock")
        rows = files.read_json(folder / "trials.json").get("trials", [])
        self.trials = {row["number"]: Trial(**row) for row in rows}

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def adaptive(self) -> bool:
        """Whether a trial depends on those before it."""
        return self.config.prune or self.config.method in ("tpe", "staged")

    @property
    def seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.seeds)

    @property
    def complete(self) -> bool:
        """Whether every trial has ended, one way or another."""
        return sum(trial.ended for trial in self.trials.values()) >= self.planned

    def run_names(self, number: int) -> dict[int, str]:
        """Names of a trial's runs, by seed."""
        return {seed: f"{self.name}-{number:03d}-s{seed}" for seed in self.seeds}

    def train(self, fleet: Fleet | None = None) -> Iterator[Trial]:
        """Every trial, yielded when it has ended; those that had ended before are not trained again.

        fleet: where trials are trained; by default as `fleet` and `workers` say.
        SweepError while another process works on the sweep.
        """
        busy = SweepError(f"sweep '{self.name}' is being worked on by another process; wait for it")
        with (
            files.exclusive(self._lock, busy),
            progress.live_bar(total=self.planned, desc=self.name, unit="trial") as bar,
        ):
            tick = self._ticker(bar)
            place = fleet or self._fleet(tick)
            running: set[int] = set()
            try:
                while True:
                    while len(running) < place.slots and (trial := self._next(running)) is not None:
                        try:
                            job = self._job(trial)
                        # inside the space, whose edges alone were looked at; or what an earlier start left is damaged
                        except (ValueError, KeyError) as error:
                            yield self._end(trial.number, Outcome("failed", in_a_line(error)))
                            continue
                        running.add(trial.number)
                        place.submit(trial.number, partial(train, job))
                    if not running:
                        break
                    for number, result in place.collect():
                        running.discard(number)
                        yield self._end(number, outcome_of(result))
                    tick()
            finally:
                place.close()
            bar.n = self.planned

    def results(self) -> list[Result]:
        """Trials that have ended, by number."""
        return [self.result(trial) for _, trial in sorted(self.trials.items()) if trial.ended]

    def result(self, trial: Trial) -> Result:
        """What a trial's runs left in their folders."""
        if trial.number not in self._results:
            read = [self._read(name) for name in self.run_names(trial.number).values()]
            self._results[trial.number] = self._summarise(trial, dict(zip(self.seeds, read, strict=True)))
        return self._results[trial.number]

    def better(self, value: float) -> float:
        """A measure as a loss: less is better."""
        return -value if self.config.highest else value

    def best(self) -> Result | None:
        """The complete trial with the best mean; None where none is complete."""
        complete = [result for result in self.results() if result.measures]
        return min(complete, key=lambda result: self.better(result.mean)) if complete else None

    def told(self, numbers: Sequence[int]) -> list[Told]:
        """These trials as a method is told of them."""
        rows = [self.result(self.trials[number]) for number in numbers]
        return [
            Told(row.trial.values, row.trial.state, tuple(map(self.better, row.measures)), row.curve) for row in rows
        ]

    def steps(self, trial: Trial) -> int:
        """Updates that a trial makes, of a sweep that prunes. ConfigError where its values make no configuration."""
        return int(load_config(*request(self.config, trial.values)).train.steps)

    # State

    def _fleet(self, tick: Callable[[], None]) -> Fleet:
        device = self.config.overrides.get("runtime", {}).get("device", "auto")
        log = self.folder / "log.txt"
        return open_fleet(self.config.fleet, self.config.workers, device == "cuda", log, tick=tick)

    def _write(self, trial: Trial) -> Trial:
        self.trials[trial.number] = trial
        rows = [asdict(row) for _, row in sorted(self.trials.items())]
        with files.writing(self.folder):
            files.write_json(self.folder / "trials.json", {"trials": rows})
        return trial

    def _next(self, running: set[int]) -> Trial | None:
        """The next trial that may begin now, with its values; None where there is none, or it waits for others."""
        for number in range(self.planned):
            trial = self.trials.get(number)
            if number in running or (trial is not None and trial.ended):
                continue
            before = self._before(number)
            if number and self.config.method == "staged" and not (base := self.result(self.trials[0])).measures:
                raise SweepError(
                    f"the base of sweep '{self.name}' failed, so no change can help: {base.trial.reason}. Mend it, and "
                    "give the sweep another name"
                )
            if not all(k in self.trials and self.trials[k].ended for k in before):
                return None
            return trial or self._write(Trial(number, self.propose(number, self.told(before))))
        return None

    def _before(self, number: int) -> range:
        """Trials that a trial may depend on. With several workers not the last ones, which train beside it: so it is
        the same whichever of them is faster."""
        return range(max(0, number + 1 - self.config.workers)) if self.adaptive else range(0)

    def _job(self, trial: Trial) -> Job:
        preset, overrides = request(self.config, trial.values)
        names = self.run_names(trial.number)
        overrides = merge(overrides, self._part(names.values(), preset, overrides))
        limits = {seed: self._limits(trial, seed) for seed in names} if self.config.prune else {}
        return Job(trial.number, names, preset, overrides, limits)

    def _part(self, names: Iterable[str], preset: str, overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Threads and loader processes of each run of a trial: what its first one that has begun was asked to take,
        which it has to keep, else its part of what the configuration leaves to the machine.
        """
        for name in names:
            if record := files.read_json(files.reports_root() / name / "run.json"):
                requested = record["requested"]
                return {key: {of: requested[key][of]} for key, of in (("runtime", "threads"), ("data", "workers"))}
        workers = self.config.workers if self.config.fleet == "local" else 1  # a cluster's nodes divide their own
        if workers == 1:
            return {}
        facts, config = machine.facts(), load_config(preset, overrides)
        threads, loaders = config.runtime.threads, config.data.workers
        if threads == "auto":
            threads = max(1, facts.threads // workers)
        if loaders == "auto":
            loaders = suggest(facts, select_device(facts, config.runtime.device)[0])["workers"][0] // workers
        return {"runtime": {"threads": threads}, "data": {"workers": loaders}}

    def _limits(self, trial: Trial, seed: int) -> dict[int, float]:
        """Update -> median validation loss, with this seed, of the complete trials that this one may know of."""
        steps = self.steps(trial)
        rows = [self.result(self.trials[number]) for number in self._before(trial.number)]
        curves = [row.curves[seed] for row in rows if row.measures]
        if len(curves) < RIVALS:
            return {}
        shared = [step for step in curves[0] if all(step in curve for curve in curves)]
        medians = {
            step: statistics.median(curve[step] if math.isfinite(curve[step]) else math.inf for curve in curves)
            for step in shared
            if EARLIEST * steps <= step < steps
        }
        return {step: median for step, median in medians.items() if math.isfinite(median)}

    def _end(self, number: int, outcome: Outcome) -> Trial:
        trial = self._write(replace(self.trials[number], state=outcome.state, reason=outcome.reason))
        return self.result(trial).trial

    def _read(self, name: str) -> RunResult | str:
        """A run that has made an update; of another, as a trial that failed may have, why there is none."""
        folder = files.reports_root() / name
        try:
            return read_result(folder)
        except (ValueError, OSError) as error:
            return in_a_line(error) if folder.exists() else "its run is gone"

    def _summarise(self, trial: Trial, read: Mapping[int, RunResult | str]) -> Result:
        runs = {seed: run for seed, run in read.items() if not isinstance(run, str)}
        curves = {
            seed: {row["step"]: float(row["validation"]["loss"]) for row in run.rows if "validation" in row}
            for seed, run in runs.items()
        }
        shared = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
        first = runs.get(self.seeds[0])
        summary = first.summary if first is not None else {}
        measures: tuple[float, ...] = ()
        if trial.state == "complete":
            unread = [run for run in read.values() if isinstance(run, str)]
            measures, problem = ((), unread[0]) if unread else self._measures(runs)
            trial = replace(trial, state="failed", reason=problem) if problem else trial
        return Result(
            trial,
            measures,
            {step: statistics.fmean(curve[step] for curve in curves.values()) for step in shared},
            curves,
            first.updates if first is not None else 0,
            float(summary.get("seconds", math.nan)),
            float(summary.get("parameters", math.nan)),
            first.held_out if first is not None else {},
        )

    def _measures(self, runs: Mapping[int, RunResult]) -> tuple[tuple[float, ...], str]:
        """(the measure of each run of a trial that was trained to its end, ""), or ((), why there is none)."""
        name = self.config.measure
        try:
            values = [run.losses[LOSS] if name == "loss" else known_figure(name, run.held_out) for run in runs.values()]
        except ConfigError as error:
            return (), in_a_line(error)
        return (tuple(values), "") if all(map(math.isfinite, values)) else ((), f"its {name} is not finite")

    # Progress

    def _ticker(self, bar: Any) -> Callable[[], None]:
        """Brings the bar to how far the trials are, every now and then."""
        last = -math.inf

        def tick() -> None:
            nonlocal last
            if time.monotonic() - last < LOOK:
                return
            last = time.monotonic()
            ended = sum(trial.ended for trial in self.trials.values())
            parts = [self._share(number) for number, trial in self.trials.items() if not trial.ended]
            if not bar.n and ended + sum(parts):
                bar.initial = ended  # the pace is that of this process
            bar.n = round(ended + sum(parts), 2)
            if (best := self.best()) is not None:
                bar.set_postfix_str(f"best {best.mean:.4g} of trial {best.trial.number}", refresh=False)
            bar.refresh()

        return tick

    def _share(self, number: int) -> float:
        """How much of a trial has been trained."""
        beats = [watch.read_beat(files.reports_root() / name) for name in self.run_names(number).values()]
        return sum(beat.get("step", 0) / max(1, beat.get("steps", 1)) for beat in beats) / len(beats)


def describe(sweep: Sweep) -> str:
    """What is tried and how, as text."""
    config = sweep.config
    seeds = ", ".join(map(str, sweep.seeds))
    lines = [f"{sweep.planned} trials ({config.method}), each with seed {seeds}, of preset {config.preset}"]
    lines += [f"  arm {name}: {changes}" for name, changes in config.arms.items()]
    lines += [f"  {key}: {values}" for key, values in config.space.items()]
    lines += [f"  compute: {', '.join(f'{one:.3g}' for one in config.compute)} FLOP"] if config.compute else []
    order = "greatest" if config.highest else "least"
    lines.append(f"the best trial has the {order} {'validation loss' if config.measure == 'loss' else config.measure}")
    return "\n".join(lines)
