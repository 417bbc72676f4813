"""Opens, trains, resumes and evaluates a run.

A run is a folder ``reports/<run>/``: run.json (request, data), config.yaml (resolved), metrics.jsonl, checkpoints/,
summary.json and report.html. One process writes a run at a time.
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
from matrixlib.data.order import RankSlice
from matrixlib.engine import metrics, timing
from matrixlib.engine.folder import newest_complete
from matrixlib.engine.parts import Parts, check_same_parts
from matrixlib.engine.stats import Stats
from matrixlib.files import SHIPPED, read_json
from matrixlib.hardware import backend, machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.runs import autotune, ending
from matrixlib.runs import record as records
from matrixlib.runs.data import RunData, RunError, held_out_loader, shards_in_use
from matrixlib.tasks import changed, get_task, load_config

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from matrixlib.data.loader import Loader
    from matrixlib.engine.distributed import Ranks
    from matrixlib.engine.task import Batch
    from matrixlib.engine.trainer import Trainer
    from matrixlib.runs.backup import Backup
    from matrixlib.runs.start import Start
    from matrixlib.runs.tensorboard import Events
    from matrixlib.tasks.spec import Check


@dataclass
class Run:
    """One run, from `open_run`. config, runtime: resolved; steps: updates of the whole run; processes: above 1, ranks
    that this process starts and follows."""

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
    _backup: Backup | None = None
    _events: Events | None = None

    def __post_init__(self) -> None:
        data = self.data
        self.name, self.config, self.runtime, self.spec = self.folder.name, data.config, data.runtime, data.spec
        self.task, self.catalogue, self.messages = data.task, data.catalogue, data.messages
        assert isinstance(self.config.train.steps, int)
        self.steps = self.config.train.steps

    @property
    def complete(self) -> bool:
        """Whether it reached its last update, or stopped early for a reason that still holds."""
        done = self.summary()
        reached = done.get("steps", 0) >= self.steps
        return bool(done.get("complete") and (reached or (done.get("stopped_early") and self.trainer.stop_reason)))

    @property
    def trainer(self) -> Trainer:
        """The engine's trainer, built on first use (holds the model)."""
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
        """Update index (from 0) -> learning rate, a pure function."""
        return self.trainer.schedule

    def batch(self, i: int = 0) -> Batch:
        """Training batch i on the network's device: the arrays of the task's `prepare`, and the network's inputs
        (chess: `planes`). Does not affect training."""
        from matrixlib.engine.task import to_device

        batch = to_device(self.data.batch(i), self.runtime.torch_device)
        return batch | self.spec.inputs(self.task, batch)

    def show(self, batch: Batch, rows: int = 4) -> Any:
        """The first rows of a batch for display in a notebook; chess: boards with targets."""
        return self.spec.show(self.task, batch, rows)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Mean loss of each active term over a batch, with graph; their sum weighted by `task.weights` is an update's
        loss. The network keeps its mode."""
        from matrixlib.engine.task import active_terms

        counts = self.task.counts({name: tensor.cpu() for name, tensor in batch.items()})
        with self.runtime.autocast():
            sums, _ = self.task.losses(self.model, batch, active_terms(self.task))
        return {term: total / max(1, counts[term]) for term, total in sums.items()}

    def log(self, **values: float) -> None:
        """The caller's own numbers, for the next row of metrics.jsonl and TensorBoard."""
        for name, value in values.items():
            self.trainer.log(name, value)

    def describe(self) -> str:
        """Decisions and reasons as text: run, data, runtime, changes from the preset."""
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

    def train(self, trace: int = 0) -> Generator[Stats]:
        """Train to the last update, from the newest intact checkpoint if there is one; yields after each update.

        trace: record the three updates after this one in trace.json, for chrome://tracing; 0 = none.

        Holds the run's lock while training and releases it however it ends, so the same notebook can resume. Warnings
        are shown once and kept in `messages`.
        """
        with files.writing(self.folder):
            if self.complete:
                return
            if not 0 <= trace < self.steps:
                raise RunError(f"trace is {trace}: give an update before the last one, {self.steps}, or 0")
            if self.processes > 1:
                from matrixlib.runs import elastic

                self.close()  # rank 0 takes the lock and writes
                self._forget()
                backend.empty_cache(self.runtime.torch_device)  # of trials: a rank uses the same GPU
                overrides = configuration.dump(self.requested)
                request = {"preset": self.preset, "run": self.name, "overrides": overrides, "trace": trace}
                yield from elastic.follow(self.folder, self.processes, request, self._say)
            else:
                yield from self._train(trace)

    def _train(self, trace: int) -> Generator[Stats]:
        if self.ranks.first and _hold(self.lock, self.name) and self._trainer is not None and self._trainer.left_behind:
            self._forget()  # another process resumed the run meanwhile
        try:
            if self.ranks.first:
                peak = autotune.measure_peak(self.folder, self.runtime, self.spec.training_flops(self.config))
                self.trainer.peak = peak * self.trainer.ranks.size if peak else None
            for text in self.trainer.messages:
                self._say(text)
            self._begin_backup()
            self._begin_events()
            # close explicitly: interrupts during garbage collection are lost
            with contextlib.closing(self.trainer.train()) as updates:
                for stats in timing.traced(updates, trace, self.folder / "trace.json"):
                    for text in stats.messages:
                        self._say(f"update {stats.step}: {text}")
                    if self._backup is not None and (problem := self._backup.look()):
                        self._say(problem)
                    if self._events is not None:
                        self._events.add(stats.row())
                    yield stats
            model = self.trainer.evaluation_model()
            if model is not None:
                ending.finish(self.folder, self.preset, self.data.of_all_ranks(), self.trainer, model)
        except GeneratorExit:  # the caller left the loop
            raise
        except BaseException as error:
            if self.ranks.first:
                ending.end_early(self.folder, self.preset, self.data.runtime, error)
            raise
        finally:
            if self._backup is not None and (problem := self._backup.end()):
                self._say(problem)
            if self._events is not None:
                self._events.close()
            self._backup = self._events = None
            self.close()

    def _begin_backup(self) -> None:
        if (place := self.config.checkpoint.backup) and self.ranks.first:
            from matrixlib.runs.backup import Backup

            self.catalogue.backup(self.folder / "data_catalogue.sqlite")
            backup = Backup(place, self.folder)
            backup.begin()
            self._backup = backup

    def _begin_events(self) -> None:
        if self.config.train.tensorboard and self.ranks.first:
            from matrixlib.runs.tensorboard import Events

            curriculum = self.spec.curriculum(self.config)
            phases = {phase.number: str(phase) for phase in curriculum.phases} if curriculum is not None else {}
            self._events = Events(self.folder, self.history(), phases)

    def _forget(self) -> None:
        if self._trainer is not None:
            self._trainer.metrics.close()
            self._trainer = None

    def _say(self, text: str) -> None:
        self.messages.append(text)
        if self.ranks.first:
            warnings.warn(text, stacklevel=4)

    def history(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl up to where the run resumes; long runs log every k-th update."""
        if self.processes > 1:  # the ranks truncate it; this process has no model
            log = self.folder / "metrics.jsonl"
            return metrics.read(log) if log.exists() else []
        return metrics.read(self.trainer.metrics.path)  # truncated to the newest checkpoint

    def checks(self) -> list[Check]:
        """What must hold if the network learned anything: name, passed, detail."""
        return self.spec.checks(self.summary()["evaluation"])

    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty before the end."""
        return read_json(self.folder / "summary.json")

    def close(self) -> None:
        """Release the run's lock; idempotent."""
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
    """Open a run: resume the named one, or the newest incomplete one with the same configuration, else start a new one.

    preset: name in params/ or path of a YAML file. device, seed, steps, init: override the preset (``auto``, -1, 0, ""
    leave it). overrides: nested mapping, validated. kind: purpose of the run; others than "train" are part of its name,
    and evaluation does not pick it up by default. task: the caller's; presets of others are rejected. ranks: above 1,
    `train` starts as many processes and follows them. heads, trunk, losses, schedule, optimizer: own parts, see
    `engine.parts.Parts`, possibly from a cell; a run resumes only with the same parts.

    Raises ConfigError, RunError, or ValueError from runtime and data; each says what to do.
    """
    machine.set_waiting_policy()
    from matrixlib.engine import distributed

    requested = records.requested_config(preset, device, seed, steps, overrides or {}, init)
    if task and requested.task != task:
        raise RunError(f"preset '{preset}' is of the task {requested.task}, not {task}: give one with `task: {task}`")
    records.check_ranks(ranks)
    parts = Parts(tuple(heads), trunk, losses or {}, schedule, optimizer)
    if parts and ranks > 1:
        raise RunError(
            f"ranks {ranks} and own parts ({', '.join(parts.named())}): processes are started from a preset "
            "alone; make a task of your own that has these parts (guides/task.md), or take ranks 1"
        )
    own = distributed.join(requested.runtime.rank_timeout)
    name = own.same(records.run_folder(preset, run, requested, kind, parts).name if own.first else "")
    folder = files.reports_root() / name
    if not own.first:
        own.after_first(name)  # others open what rank 0 wrote
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
        if not (folder / "run.json").exists():  # nothing started: leave no empty folder
            (folder / "lock").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
        raise


def _hold(lock: FileLock, name: str) -> bool:
    """Take a run's lock; False if this process holds it already. RunError if another process does."""
    if lock.is_locked:
        return False
    files.exclusive(lock, RunError(f"run '{name}' is being written by another process; wait for it or name another"))
    return True


def finished_run(name: str = "", fits: Callable[[Mapping[str, Any]], bool] = lambda requested: True) -> Path:
    """The named complete run (else RunError), or the newest of a chess network whose request `fits`, or `shipped`."""
    return records.complete_run(name) if name else newest_complete("chess", fits) or SHIPPED


def held_out_data(config: Config) -> Loader:
    """The held-out rows of a configuration's data set. RunError if there are none."""
    spec = get_task(config.task)
    return held_out_loader(spec, config, spec.catalogue(config), spec.task(config))


def held_out_figures(net: Any, sample: int = 0) -> dict[str, Any]:
    """Held-out figures of a network (`tasks.load`) with baselines. sample: rows, 0 = all."""
    config: Config = net.task.config
    spec = get_task(config.task)
    return spec.evaluate(net, held_out_data(config), spec.catalogue(config), sample)


def _open(
    folder: Path, preset: str, requested: Config, lock: FileLock, kind: str, ranks: Ranks, processes: int, parts: Parts
) -> Run:
    from matrixlib.engine import compiler, distributed, memory, optim
    from matrixlib.runs import start as starts
    from matrixlib.runs.strength import StrengthMatch

    spec = get_task(requested.task)
    catalogue = spec.catalogue(requested)
    record = records.stored_record(folder)
    messages: list[str] = []
    if record:
        check_same_parts(parts, record.get("parts", {}), folder.name)
        config, runtime = records.resume_record(folder, requested, record, messages, processes)
        if record["catalogue"] != catalogue.hash():
            messages.append("warning: the data set has changed since this run began; batches will differ")
    else:
        runtime = runtimes.resolve(requested.runtime, requested.train, requested.data, processes)
        config = records.runtime_config(requested, runtime)
    size = max(ranks.size, processes)
    if config.runtime.shard and size > 1:
        distributed.check_shardable(config, runtime, size)
    runtime.apply()
    task = spec.with_parts(spec.task(config), parts)
    if config.train.freeze:  # refuse unknown parts before anything is written
        optim.freeze(memory.fresh_model(task), config.train.freeze)
    start = starts.initial_weights(folder, config, task, record)  # fail on a wrong name first
    before = record.get("teacher", {})
    teacher = spec.teacher(config, runtime, before)
    if teacher is not None:
        name, sha256 = teacher.record["name"], teacher.record["sha256"]
        starts.check_same_weights(f"teacher '{name}'", sha256, before, folder.name)
        messages.append(f"learns from {name} (SHA-256 {sha256[:12]})")
    data = RunData(config, runtime, spec, task, catalogue, messages, teacher, RankSlice(ranks.rank, size), parts)
    if config.validation.strength.every and ranks.first:
        data.strength = StrengthMatch(config, runtime.device, folder, record.get("anchor", {}))
    if not record:
        data = autotune.checked_runtime(data, requested)
        if data.runtime.device != runtime.device:
            data.teacher = spec.teacher(config, data.runtime, {})
            data.strength = data.strength and StrengthMatch(config, data.runtime.device, folder, {})
    # After the self-test: the teacher's cached outputs are permanent.
    data.put_beside(spec.sidecars(config, catalogue.folder, shards_in_use(spec, config, catalogue), data.teacher))
    if data.runtime.compile:
        messages.append(f"compiled code is kept in {compiler.code_cache()}, where the next run finds it")
    if config.train.steps == "auto":
        steps, why = autotune.planned_steps(data)
        data.config = changed(data.config, {"train": {"steps": steps}})
        messages.append(f"train.steps: auto -> {steps}, {why}")
    if start is not None:
        messages += start.messages
    if not record:
        records.write_record(folder, preset, requested, data, kind, start.record if start is not None else {})
    if size > 1:
        sharded = ", and its part of the network" if config.runtime.shard else ""
        messages.append(f"trained by {size} ranks, each with its own rows of every batch{sharded}")
    return Run(folder, preset, data, requested, bool(record), lock, start, ranks, processes)
