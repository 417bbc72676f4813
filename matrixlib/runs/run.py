"""Composition of a run: opens, trains, resumes and evaluates it.

A run is a folder ``reports/<run>/``: run.json (what was asked for, on what), config.yaml (what was resolved from it),
metrics.jsonl, checkpoints/, summary.json and report.html. One process writes a run at a time.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.config import Config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.order import RankSlice
from matrixlib.engine import metrics, timing
from matrixlib.engine.folder import newest_complete
from matrixlib.engine.parts import Parts, refuse_other
from matrixlib.engine.stats import Stats
from matrixlib.files import read_json
from matrixlib.hardware import backend, machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs import autotune, ending
from matrixlib.runs.data import RunData, RunError, held_out_loader, shards_in_use
from matrixlib.runs.record import (
    complete_run,
    requested_config,
    resume_record,
    run_folder,
    runtime_config,
    stored_record,
    write_record,
)
from matrixlib.tasks import changed, get_task, load_config

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from matrixlib.data.loader import Loader
    from matrixlib.engine.distributed import Ranks
    from matrixlib.engine.task import Batch
    from matrixlib.engine.trainer import Trainer
    from matrixlib.runs.start import Start
    from matrixlib.runs.tensorboard import Events
    from matrixlib.tasks.spec import Check


@dataclass
class Run:
    """One run, made by `open_run`. config, runtime: as resolved; steps: updates of the whole run; processes: above 1:
    ranks that train in processes of their own, which this one starts and follows."""

    folder: Path
    preset: str
    data: RunData
    requested: Config
    resumed: bool
    lock: FileLock
    start: Start | None
    ranks: Ranks
    processes: int = 1
    _trainer: Trainer | None = None

    def __post_init__(self) -> None:
        data = self.data
        self.name, self.config, self.runtime, self.spec = self.folder.name, data.config, data.runtime, data.spec
        self.task, self.catalogue, self.messages = data.task, data.catalogue, data.messages
        assert isinstance(self.config.train.steps, int)
        self.steps = self.config.train.steps

    @property
    def complete(self) -> bool:
        """True when the run has reached its last update, or was stopped early by what would still stop it."""
        done = self.summary()
        reached = done.get("steps", 0) >= self.steps
        return bool(done.get("complete") and (reached or (done.get("stopped_early") and self.trainer.stop_reason)))

    @property
    def trainer(self) -> Trainer:
        """The engine's trainer, built at first use (it holds the model)."""
        if self._trainer is None:
            from matrixlib.runs.start import build_trainer

            self._trainer = build_trainer(self.data, self.folder, self.ranks, self.start)
            self.start = None
        return self._trainer

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizer

    @property
    def schedule(self) -> Callable[[int], float]:
        """Update index (0 = first) -> learning rate, a pure function."""
        return self.trainer.schedule

    def batch(self, i: int = 0) -> Batch:
        """Training batch i on the device of the network: the arrays of the task's `prepare`, and what the network takes
        (for chess `planes`). The run's place in the data and its random streams stay as they are."""
        from matrixlib.engine.task import to_device

        batch = to_device(self.data.batch(i), self.runtime.torch_device)
        return batch | self.spec.inputs(self.task, batch)

    def show(self, batch: Batch, rows: int = 4) -> Any:
        """The first rows of a batch as a notebook displays them: for chess boards with their targets."""
        return self.spec.show(self.task, batch, rows)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Mean loss of each active term over a batch, with its graph; an update's loss is their sum by `task.weights`.
        The network stays in its mode."""
        from matrixlib.engine.task import active_terms

        counts = self.task.counts({name: tensor.cpu() for name, tensor in batch.items()})
        with self.runtime.autocast():
            sums, _ = self.task.losses(self.model, batch, active_terms(self.task))
        return {term: total / max(1, counts[term]) for term, total in sums.items()}

    def log(self, **values: float) -> None:
        """Numbers of the caller's own, for metrics.jsonl and TensorBoard: they go into the row of the next update."""
        for name, value in values.items():
            self.trainer.log(name, value)

    def describe(self) -> str:
        """What was decided and why, as text: run, data, runtime, differences from the preset."""
        counts = {split: sum(s.count for s in self.catalogue.shards(split)) for split in ("train", "validation")}
        lines = [
            f"run          {self.name} ({'resumed' if self.resumed else 'new'}), {self.steps} updates of "
            f"{self.config.train.batch_size} positions",
            f"data         {counts['train']} training and {counts['validation']} held-out positions, "
            f"catalogue {self.catalogue.hash()[:12]}",
            self.runtime.table(),
        ]
        changes = configuration.difference(self.requested, load_config(self.preset))
        lines.append("differences from the preset:" if changes else f"no differences from preset '{self.preset}'")
        lines += [f"  {key}: {old} -> {new}" for key, (old, new) in changes.items()]
        return "\n".join(lines + self.messages)

    def train(self, trace: int = 0, tensorboard: bool = False) -> Generator[Stats]:
        """Train to the last update, from the newest whole checkpoint if there is one; yields after each update.

        trace: the three updates after this one are recorded in trace.json, for chrome://tracing; 0 = none.
        tensorboard: also write TensorBoard events, to the run's folder `events`.

        The run's lock is held while it trains and given back however it ends, so that the same notebook can go on
        with it. What the trainer warns about is shown once and kept in `messages`.
        """
        with files.writing(self.folder):
            if self.complete:
                return
            if not 0 <= trace < self.steps:
                raise RunError(f"trace is {trace}: give an update before the last one, {self.steps}, or 0")
            if self.processes > 1:
                from matrixlib.runs import elastic

                self.close()  # the first of the ranks holds the lock and writes
                self._forget()
                backend.empty_cache(self.runtime.torch_device)  # of the trials: that rank has the same GPU
                options = {"overrides": configuration.dump(self.requested), "trace": trace, "tensorboard": tensorboard}
                request = {"preset": self.preset, "run": self.name, **options}
                yield from elastic.follow(self.folder, self.processes, request, self._say)
            else:
                yield from self._train(trace, tensorboard)

    def _train(self, trace: int, tensorboard: bool) -> Generator[Stats]:
        events: Events | None = None
        if self.ranks.first and _hold(self.lock, self.name) and self._trainer is not None and self._trainer.left_behind:
            self._forget()  # another process has gone on with the run meanwhile: so do we, from there
        try:
            if self.ranks.first:
                peak = autotune.measure_peak(self.folder, self.runtime, self.spec.training_flops(self.config))
                self.trainer.peak = peak * self.trainer.ranks.size if peak else None
            for text in self.trainer.messages:
                self._say(text)
            # closed here: where the last reference goes an interrupt would reach nobody
            with contextlib.closing(self.trainer.train()) as updates:
                for stats in timing.traced(updates, trace, self.folder / "trace.json"):
                    for text in stats.messages:
                        self._say(f"update {stats.step}: {text}")
                    if tensorboard and self.ranks.first:
                        events = self._log_events(events, stats)
                    yield stats
            model = self.trainer.evaluation_model()
            if model is not None:
                ending.finish(self.folder, self.preset, self.data.of_all_ranks(), self.trainer, model)
        except GeneratorExit:  # the caller has left the loop: nothing has failed
            raise
        except BaseException as error:
            if self.ranks.first:
                ending.end_early(self.folder, self.preset, self.data.runtime, error)
            raise
        finally:
            if events is not None:
                events.close()
            self.close()

    def _forget(self) -> None:
        if self._trainer is not None:
            self._trainer.metrics.close()
            self._trainer = None

    def _log_events(self, events: Events | None, stats: Stats) -> Events:
        """The events with an update more; begun anew at the first, and where the metrics were cut."""
        from matrixlib.runs.tensorboard import Events

        cut = stats.action == "rollback"
        if events is None or cut:
            if events is not None:
                events.close()
            curriculum = self.trainer.curriculum
            phases = {phase.number: str(phase) for phase in curriculum.phases} if curriculum is not None else {}
            events = Events(self.folder, [row for row in self.history() if row["step"] != stats.step or cut], phases)
        if not cut:
            events.add(stats.row())
        return events

    def _say(self, text: str) -> None:
        self.messages.append(text)
        if self.ranks.first:
            warnings.warn(text, stacklevel=4)

    def history(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl up to where the run goes on; a long run logs every k-th update."""
        if self.processes > 1:  # the ranks cut it back, and this process has no model
            log = self.folder / "metrics.jsonl"
            return metrics.read(log) if log.exists() else []
        return metrics.read(self.trainer.metrics.path)  # the trainer has cut the file back to the newest checkpoint

    def checks(self) -> list[Check]:
        """What must hold of the result, if the network has learned anything: name, whether, what it says."""
        return self.spec.checks(self.summary()["evaluation"])

    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty before the run has ended."""
        return read_json(self.folder / "summary.json")

    def close(self) -> None:
        """Give the run's lock back; twice does no harm."""
        self.lock.release()


def open_run(
    preset: str = "demo",
    device: str = "auto",
    seed: int = -1,
    run: str = "",
    steps: int = 0,
    overrides: Mapping[str, Any] | None = None,
    kind: str = "train",
    init: str = "",
    task: str = "",
    ranks: int = 1,
    *,
    heads: Sequence[Any] = (),
    trunk: Callable[[Any], nn.Module] | None = None,
    losses: Mapping[str, Callable[..., Any]] | None = None,
    schedule: Callable[[int], float] | None = None,
    optimizer: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
) -> Run:
    """Open a run: resume a named or the newest incomplete one with the same configuration, else start a new one.

    preset: name in params/ or path of a YAML file. device, seed, steps: stand over the preset where given
    (``auto``, -1, 0 leave it). overrides: nested mapping, checked by the schema. init: stands over `train.init` where
    given. kind: what the run is for; another kind than "train" stands in its name, and evaluation does not pick it up
    by itself. task: the one that the caller is for; a preset of another is refused. ranks: above 1, `train` starts so
    many processes, which train together, and follows them.
    heads, trunk, losses, schedule, optimizer: parts of one's own, see `engine.parts.Parts`; they may be defined in a
    cell. A run is resumed only with the parts that it was begun with.
    Raises ConfigError, RunError, or ValueError from runtime and data; each says what to do.
    """
    machine.set_waiting_policy()
    from matrixlib.engine import distributed

    requested = requested_config(preset, device, seed, steps, overrides or {}, init)
    if task and requested.task != task:
        raise RunError(f"preset '{preset}' is of the task {requested.task}, not {task}: give one with `task: {task}`")
    if ranks < 1:
        raise RunError(f"ranks is {ranks}: give the number of processes that are to train together, 1 or more")
    parts = Parts(tuple(heads), trunk, losses or {}, schedule, optimizer)
    if parts and ranks > 1:
        raise RunError(
            f"ranks {ranks} and parts of one's own ({', '.join(parts.named())}): processes are started from a preset "
            "alone; make a task of your own that has these parts (guides/task.md), or take ranks 1"
        )
    own = distributed.join(requested.runtime.rank_timeout)
    name = own.same(run_folder(preset, run, requested, kind, parts).name if own.first else "")
    folder = files.reports_root() / name
    if not own.first:
        own.after_first(name)  # the others open what it has written down
    lock = FileLock(folder / "lock")
    files.make_folder(folder)
    if own.first:
        with files.writing(folder.parent):
            _hold(lock, folder.name)
    try:
        with files.writing(folder):
            opened = _open(folder, preset, requested, lock, kind, own, ranks, parts)
        if own.first:
            own.after_first(name)
        return opened
    except BaseException:
        lock.release()
        if not (folder / "run.json").exists():  # nothing was begun: leave no empty folder behind
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another program has put something there
                folder.rmdir()
        raise


def _hold(lock: FileLock, name: str) -> bool:
    """Take a run's lock; False where this process has it already. RunError where another process has."""
    if lock.is_locked:
        return False
    files.exclusive(lock, RunError(f"run '{name}' is being written by another process; wait for it or name another"))
    return True


def finished_run(
    name: str = "",
    preset: str = "demo",
    overrides: Mapping[str, Any] | None = None,
    fits: Callable[[Mapping[str, Any]], bool] = lambda requested: True,
) -> Path:
    """Folder of a complete run: the named one, else the newest of the task of `preset` whose requested configuration
    `fits`; where there is none, one is trained with `overrides`. Raises RunError for a name without a complete run.
    """
    if name:
        return complete_run(name)
    if folder := newest_complete(load_config(preset).task, fits):
        return folder
    fresh = open_run(preset, overrides=overrides)
    for _ in fresh.train():
        pass
    return fresh.folder


def held_out_data(config: Config) -> Loader:
    """The held-out rows of the data set that a configuration names. RunError where it has none."""
    spec = get_task(config.task)
    return held_out_loader(spec, config, Catalogue(spec.folder(config)), spec.task(config))


def held_out_figures(net: Any, sample: int = 0) -> dict[str, Any]:
    """The held-out figures of a network (`tasks.load`) with their baselines; sample: on so many rows, 0 = all."""
    config: Config = net.task.config
    spec = get_task(config.task)
    return spec.evaluate(net, held_out_data(config), Catalogue(spec.folder(config)), sample)


def _open(
    folder: Path, preset: str, requested: Config, lock: FileLock, kind: str, ranks: Ranks, processes: int, parts: Parts
) -> Run:
    from matrixlib.engine import compiler, distributed
    from matrixlib.runs import start as starts

    spec = get_task(requested.task)
    catalogue = Catalogue(spec.folder(requested))
    record = stored_record(folder)
    messages: list[str] = []
    if record:
        refuse_other(parts, record.get("parts", {}), folder.name)
        config, runtime = resume_record(folder, requested, record, messages, processes)
        if record["catalogue"] != catalogue.hash():
            messages.append("warning: the data set has changed since this run began; batches will differ")
    else:
        runtime = runtimes.resolve(requested.runtime, requested.train, requested.data, processes)
        config = runtime_config(requested, runtime)
    size = max(ranks.size, processes)
    if config.runtime.shard and size > 1:
        distributed.check_shardable(config, runtime, size)
    runtime.apply()
    task = spec.with_parts(spec.task(config), parts)
    start = starts.start_of(folder, config, task, record)  # a name that is none is told before anything is tried
    before = record.get("teacher", {})
    teacher = spec.teacher(config, runtime, before)
    if teacher is not None:
        name, sha256 = teacher.record["name"], teacher.record["sha256"]
        starts.refuse_other_weights(f"teacher '{name}'", sha256, before, folder.name)
        messages.append(f"learns from {name} (SHA-256 {sha256[:12]})")
    data = RunData(config, runtime, spec, task, catalogue, messages, teacher, RankSlice(ranks.rank, size), parts)
    if not record:
        data = autotune.settle(data, requested)
        if data.runtime.device != runtime.device:
            data.teacher = spec.teacher(config, data.runtime, {})
    # A device that computes nonsense has been left by now: what is kept of a teacher is kept for good.
    data.put_beside(spec.sidecars(config, catalogue.folder, shards_in_use(spec, config, catalogue), data.teacher))
    if data.runtime.compile:
        messages.append(f"compiled code is kept in {compiler.keep_code()}, where the next run finds it")
    if config.train.steps == "auto":
        steps = autotune.fit_steps(data)
        data.config = changed(data.config, {"train": {"steps": steps}})
        messages.append(f"train.steps: auto -> {steps}, to fit {config.train.minutes:g} minutes")
    if start is not None:
        messages += start.messages
    if not record:
        write_record(folder, preset, requested, data, kind, start.record if start is not None else {})
    if size > 1:
        sharded = ", and its part of the network" if config.runtime.shard else ""
        messages.append(f"trained by {size} ranks, each with its own rows of every batch{sharded}")
    return Run(folder, preset, data, requested, bool(record), lock, start, ranks, processes)
