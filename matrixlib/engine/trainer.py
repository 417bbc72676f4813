"""The training loop: updates, validation, diagnostics, checkpoints, rollbacks; resuming is bit-exact."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from matrixlib.config import Config
from matrixlib.engine import diagnostics, optim
from matrixlib.engine.averages import EvalWeights
from matrixlib.engine.checkpoint import Checkpoint, CheckpointError, Checkpoints, CheckpointSchedule
from matrixlib.engine.curriculum import Curriculum
from matrixlib.engine.diagnostics import first_update, inspect, silent, write_evidence
from matrixlib.engine.distributed import LostRank, Ranks, newest
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.heartbeat import Heartbeat
from matrixlib.engine.memory import Chunk, Monitor, first_line
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.parts import Parts
from matrixlib.engine.signals import Terminated, deferred
from matrixlib.engine.stats import WINDOW, Action, Event, Message, RateLimiter, Stats
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, Data, Task, Teacher
from matrixlib.engine.timing import Throughput
from matrixlib.engine.validation import HeldOut, Validation, ValidationSchedule, check_target_loss
from matrixlib.hardware.runtime import Runtime

MEMORY_UPDATES, MEMORY_LOG_UPDATES = 10, 100  # between memory checks, and between logged ones
MESSAGES_OF_A_KIND = 20  # rate limit, in a run
Hook = Callable[[Stats, Batch], None]
Match = Callable[[nn.Module, int, Callable[[], None]], dict[str, float] | None]


@dataclass(frozen=True)
class Context:
    """What a trainer works with. folder: for heartbeat.json and evidence/. steps: updates of the whole run; epoch: of a
    pass over the training positions, 0 = unknown. state_extra: JSON data stored in every checkpoint. hooks: (function,
    every), called with stats and host batch every `every` updates; 0 = never. strength: (evaluation network, update,
    beat to call now and then) -> elo, low, high, score, games of a match; at update 0 it gets the first weights.
    ranks: rank 0 writes files."""

    task: Task
    model: nn.Module
    runtime: Runtime
    config: Config
    data: Data
    folder: Path
    checkpoints: Checkpoints
    metrics: MetricsLog
    steps: int
    epoch: float = 0.0
    state_extra: Mapping[str, Any] = field(default_factory=dict)
    curriculum: Curriculum | None = None
    teacher: Teacher | None = None
    hooks: Sequence[tuple[Hook, int]] = ()
    strength: Match | None = None
    parts: Parts = Parts()
    ranks: Ranks = Ranks()


class Trainer:
    """Trains one model to its last update. Construct, `resume`, then iterate over `train`.

    Attributes: model (plain module, raw weights), optimizer, schedule (update -> rate, before cuts by rollbacks and
    plateaus), ema (average, or None), step (updates done), initial (first losses against chance), gradients (report of
    the first update; None in a resumed process), messages (warnings so far), peak (rows/s at the device's matrix rate,
    if known), curriculum, skip (skipped ranges of batches).
    """

    def __init__(self, context: Context) -> None:
        self.context, self.task, self.config, self.runtime = context, context.task, context.config, context.runtime
        self.checkpoints, self.metrics, self.curriculum = context.checkpoints, context.metrics, context.curriculum
        self.steps, self.ranks, self._folder = context.steps, context.ranks, context.folder
        config, runtime, ranks = self.config, self.runtime, self.ranks
        self._source, self.skip = context.data.batches()[1], list[tuple[int, int]]()
        self._held_out = HeldOut(self.task, context.data, runtime, ranks)
        self._memory, self._chunk = Monitor(runtime.torch_device, config.memory), Chunk()
        self.messages: list[str] = list(filter(None, [self._memory.apply_limit()]))
        self._step = Step(self.task, context.model, runtime, config, self.steps, context.teacher, ranks, context.parts)
        self.model = optim.unwrap(self._step.model)
        self.optimizer, self.schedule = self._step.optimiser, self._step.schedule
        self.ema, self._eval_weights = self._step.ema, EvalWeights(self._step)
        self._is_reporter = ranks.first or self._step.sharded  # whether this process takes part in validation
        self._cadence, self._saving = ValidationSchedule(config.validation), CheckpointSchedule(config.checkpoint)
        self._norms, self._silent = deque[float](maxlen=WINDOW), tuple[str, ...]()  # for `silent`
        self._pace = Throughput(runtime.workers, runtime.prefetch, config.health.waiting_warning)
        self.peak: float | None = None
        self.step = self.micro_step = 0
        self.initial: dict[str, dict[str, float]] | None = None
        self.gradients: diagnostics.GradientReport | None = None
        self._fresh = not config.train.init  # False for pretrained weights
        self._limiter = RateLimiter(max(config.train.statistics_interval, self.steps // MESSAGES_OF_A_KIND))
        self._rollback: tuple[Message, ...] = ()  # for the next row: its own was truncated
        self._extra, self._seconds, self._heartbeat_at = dict[str, float](), 0.0, -math.inf  # seconds of an update
        self._consistent = True  # False between applying an update and finishing its bookkeeping

    @property
    def stop_reason(self) -> str:
        """Why training ends early; "" while it does not."""
        return self._cadence.stop

    @property
    def adapted(self) -> bool:
        """Whether this machine's memory or clock changed how the run computes."""
        clock = self.config.validation.interval == "auto" or (self._saving.by_clock and self._step.health.rollbacks)
        return bool(clock or self._chunk.changes or self._step.micro_batch < self.runtime.micro_batch)

    @property
    def _between_updates(self) -> bool:
        return self._consistent and self._step.consistent and self._step.update == self.step

    @property
    def _unsaved(self) -> bool:
        return self._between_updates and self.step > 0 and self._saving.step != self.step

    @property
    def left_behind(self) -> bool:
        """Whether a checkpoint exists that this trainer neither wrote nor read."""
        return max(self.checkpoints.steps(), default=-1) > self._saving.step

    def log(self, name: str, value: float) -> None:
        """Add the user's own number to the next row of metrics.jsonl, as `extra/<name>`."""
        self._extra[name] = float(value)

    def resume(self) -> int:
        """Resume from the newest intact checkpoint and truncate metrics.jsonl to it; returns its update count, 0
        without one. CheckpointError if every checkpoint is corrupt, or the newest intact one is of another model."""
        checkpoint = newest(self.ranks, self.checkpoints)
        if checkpoint is None:
            self.metrics.truncate_to(0)
            return 0
        try:
            self._step.load_state_dict(checkpoint)
            self._restore(checkpoint)
            self._chunk = Chunk(**checkpoint.state["chunk"])  # a rollback keeps the current chunk
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            text = f"{checkpoint.path.name} does not fit this run ({error}); give the run another name, or bring back"
            raise CheckpointError(f"{text} the configuration it was made with") from error
        self.task.set_chunk(self.model, self._chunk.rows)
        return checkpoint.step

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from these weights (names of the model's state), averages too; ValueError after an update."""
        if self.step:
            raise ValueError(f"the run has made {self.step} updates; weights are given before the first one")
        optim.load_tensors(self.model, tensors)
        self._fresh = False
        if self.ema is not None:
            self.ema.load_state_dict(optim.named_tensors(self.model), 0)

    def carry_on(self, checkpoint: Checkpoint) -> None:
        """Before the first update: take raw weights, averages and optimizer state of another run of this network.
        Updates, schedule and random streams are this run's. ValueError for another optimizer's state."""
        self._step.carry_on(checkpoint)
        self._fresh = False

    def train(self, stop: int | None = None) -> Generator[Stats]:
        """Train up to `stop` (default: the last update); yields after each update.

        However it ends (Ctrl-C, SIGTERM, an error, leaving the loop), the state after the last complete update is
        saved; sharded networks only if all ranks end. TrainingHalted, and an error after weights moved, keep the last
        checkpoint. After a rollback the next stats are of an earlier update. Raises at once ValueError for an
        unreachable target loss, CheckpointError if the disk is too small; TrainingHalted if the run cannot be kept
        stable.
        """
        if target := self.config.validation.target_loss:
            batches, active = self._held_out.batches("sample"), self._step.active - self._step.auxiliary_terms
            check_target_loss(target, self.task, batches, active, self.ranks)
        size = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        self.checkpoints.require_room((3 + (self.ema is not None)) * size, self.steps)  # with optimizer state
        return self._updates(stop)

    def _updates(self, stop: int | None) -> Generator[Stats]:
        if not self._between_updates and not self.resume() and not self._between_updates:  # interrupted half-way
            raise ValueError("an update was broken off half-way and there is no checkpoint yet: reopen the run")
        optim.freeze(self.model.train(), self.config.train.freeze)
        self._memory.begin()
        self.write_heartbeat("training", force=True)
        self._advance()
        # also around the caller's code: an interrupt there would close this generator before it is handled
        with deferred() as self._signals:
            yield from self._loop(self.steps if stop is None else min(stop, self.steps))

    def _loop(self, last: int) -> Iterator[Stats]:
        source, signals = self._open(last), self._signals
        try:
            while self.step < last and not self.stop_reason:
                signals.agree(self.ranks)
                with self.ranks.collective(certain=False) if self._step.sharded else nullcontext():
                    stats = self._update(source)
                if self._advance() or stats.action is Action.ROLLBACK:
                    source.close()  # drops prefetched batches
                    source = self._open(last)
                if self.ranks.size == 1:
                    signals.check()
                yield stats
            signals.agree(self.ranks)
            if self._unsaved:
                self.save()
            self.checkpoints.join()
            if self._extra:  # logged after the last update: add to its row
                self.metrics.write({"step": self.step, "micro_step": self.micro_step, "extra": dict(self._extra)})
        except BaseException as error:
            if not isinstance(error, TrainingHalted):  # its state is useless
                self._rescue(error)
            try:
                self.write_heartbeat("stopped", force=True)
            except OSError as failed:  # a full disk, say, which may have ended the run
                error.add_note(f"heartbeat.json could not be written: {failed}")
            raise
        else:
            self.write_heartbeat("stopped", force=True)
        finally:
            source.close()  # stops loader workers

    def _open(self, last: int) -> Generator[Batch]:
        yield from self._source.batches(self.step, last) if self.step < last else ()

    # One update

    def _update(self, source: Iterator[Batch]) -> Stats:
        """One update and everything that follows it."""
        if self.step == 0:
            self._measure_strength([])
        started = time.perf_counter()
        with self._step.clock.phase("wait"):
            batch = next(source, None)
        if batch is None:
            raise ValueError(f"the loader ended after {self.step} of {self.steps} updates")
        at_interval = (self.step + 1) % self.config.train.statistics_interval == 0
        before = diagnostics.snapshot(self.model) if at_interval else None
        stats = self._step(batch)
        self._consistent = False
        seconds, auto = time.perf_counter() - started, self.config.validation.interval == "auto"
        self._seconds = self.ranks.same(seconds) if auto else seconds  # timed, to schedule the next validation
        self.step, self.micro_step = stats.step, self.micro_step + stats.passes
        if math.isfinite(stats.grad_norm):  # non-finite ones would poison the quantiles
            self._norms.append(stats.grad_norm)
        stats, target = self._decide(stats)
        health, messages = self._step.health, list(stats.messages)
        halted = health.diagnosis() if stats.action is Action.HALT else ""
        messages += [*health.warnings(stats), *self._check_memory()]
        if self.step == 1 and self._is_reporter:
            self.gradients, self.initial, first = first_update(self.task, self._step, batch, stats, self._fresh)
            stats, messages, self._silent = replace(stats, initial=self.initial), messages + first, self.gradients.zero
        elif self._silent and stats.action is Action.OK:
            self._silent, found = silent(self.model, self._silent, self.step * self.config.train.batch_size)
            messages += found
        if before and stats.action is Action.OK and self._is_reporter:
            figures, warnings = inspect(self._step, batch, before, self._held_out, self._norms)
            stats, messages = replace(stats, statistics=figures), messages + warnings
        validation = self._validate(messages) if stats.action in (Action.OK, Action.SKIP) else None
        if stats.action in (Action.OK, Action.SKIP):
            stats = replace(stats, strength=self._measure_strength(messages))
        messages += self._held_out.passes.take()
        stats = self._complete(stats, messages, validation, halted)
        for hook, every in self.context.hooks:
            if every and self.step % every == 0:
                hook(stats, batch)  # may call `log`
        row = replace(stats, extra=dict(self._extra) or None, messages=self._rollback + stats.messages)
        self._rollback, self._extra = (), {}
        measured = row.validation or row.strength or row.statistics or row.extra
        happened = row.action is not Action.OK or row.messages or self.step in (1, self.steps) or self.stop_reason
        self.metrics.write(row.row(), always=bool(happened or measured))
        if halted:
            raise TrainingHalted(f"{halted} Evidence: {self._keep_evidence(Action.HALT)}")
        if target is not None:
            self._rollback = (self._roll_back(target),)
            stats = replace(stats, messages=stats.messages + self._rollback)
        self.messages += stats.messages
        self._consistent = True
        if target is None:
            self._checkpoint(validation)
        self.write_heartbeat("training")
        return stats

    def _decide(self, stats: Stats) -> tuple[Stats, int | None]:
        """The stats with the action in force (HALT, or SKIP without a good checkpoint), and a rollback's target."""
        if stats.action is not Action.ROLLBACK:
            return stats, None
        self.checkpoints.join()
        health = self._step.health
        target = health.target(self.ranks.same(self.checkpoints.steps()))
        if target is not None or not health.steady:
            return stats if target is not None else replace(stats, action=Action.HALT), target
        health.skipped += 1
        return replace(stats, action=Action.SKIP, skipped=health.skipped), None

    def _complete(self, stats: Stats, messages: list[Message], validation: Validation | None, halted: str) -> Stats:
        """The stats with the trainer's fields. halted: why the run ends here, "" if not."""
        times = self._step.clock.take()
        throughput, late = self._pace.add(stats.rows, self._seconds, times["wait"])
        messages += [Message(Event.WAITING_FOR_DATA, late)] if late else []
        self._cadence.updated(self._seconds)
        messages = self._limiter.filter(self.step, messages)
        messages += [Message(Event.HALT, f"halted: {halted}")] if halted else []
        return replace(
            stats,
            micro_step=self.micro_step,
            steps=self.steps,
            epoch=round(self.step / self.context.epoch, 4) if self.context.epoch else None,
            phase=self.curriculum.phase if self.curriculum is not None else None,
            memory=self._memory.interval() if validation or self.step % MEMORY_LOG_UPDATES == 0 else None,
            seconds=self._seconds,
            times=times,
            loader=self._source.prefetch_stats() or None,
            throughput=throughput,
            share_of_peak=round(throughput / self.peak, 4) if self.peak else None,
            validation=asdict(validation) if validation else None,
            messages=tuple(messages),
        )

    def _check_memory(self) -> list[Message]:
        """Check memory; under pressure SSL terms process fewer rows at once."""
        if self.step % MEMORY_UPDATES:
            return []
        messages = self._memory.check(self.step)
        needed, size = max(self.ranks.gather(self._memory.needed)), self._step.micro_batch
        if self._step.task.gated and self._chunk.check(needed, self.config.memory.warn, size):
            present = self._step.task.set_chunk(self.model, self._chunk.rows)
            if present or not self._chunk.rows:
                messages.append(self._memory.chunked(self.step, present, size))
        return messages

    def _validate(self, messages: list[Message]) -> Validation | None:
        """Validate with the evaluation weights, if due and there is held-out data."""
        if (kind := self._cadence.due(self.step, self.steps)) is None:
            return None
        active, alive = self._step.active - self._step.auxiliary_terms, partial(self.write_heartbeat, "validation")
        with self._step.clock.phase("validation"), self._eval_weights.applied(self._source):
            validation = self._held_out.measure(kind, self.model, active, alive)
            phase = self._held_out.measure("phase", self.model, active) if validation is not None else None
        if validation is None:
            return None
        if phase is not None and self.curriculum is not None:
            self.curriculum.record({"loss": phase.loss} | phase.losses | phase.metrics)
        if not math.isfinite(validation.loss):
            messages += [Message(Event.VALIDATION, f"{kind} validation loss is {validation.loss}")]
        if self._cadence.clearly_worse(kind, validation.loss) and (off := self._step.switch_off()):
            text = f"the held-out loss has become clearly worse: {', '.join(sorted(off))} is off from now on"
            messages.append(Message(Event.AUXILIARY_OFF, text))
        self._cadence.record(self.step, kind, validation.loss, validation.seconds)
        if kind == "full" and (cut := self._step.plateau.record(validation.loss, self.config.validation.min_delta)):
            messages.append(Message(Event.PLATEAU, cut))
        return validation

    def _measure_strength(self, messages: list[Message]) -> dict[str, float] | None:
        """Play the match of `validation.strength`, if due, on rank 0; an error or interrupt costs the match alone."""

        def beat() -> None:
            self.write_heartbeat("validation")
            self._signals.check()

        every, match, model = self.config.validation.strength.every, self.context.strength, None
        if not every or (self.step % every and self.step < self.steps and not self.stop_reason):
            return None
        with self._step.clock.phase("strength"):
            try:
                if (model := self.evaluation_model()) is not None and match is not None:
                    return match(model, self.step, beat)
            except (Exception, KeyboardInterrupt, Terminated) as error:
                if not self.step or (self._step.sharded and model is None):  # no first weights; ranks that wait
                    raise
                self._signals.interrupts = self._signals.interrupts or isinstance(error, KeyboardInterrupt)  # for later
                messages.append(Message(Event.MATCH, f"no match: {type(error).__name__}: {first_line(error)}"))
        return None

    # Phases, rollbacks and checkpoints

    def _advance(self, restored: bool = False) -> bool:
        """Enter the phase of the next update (restored: from a checkpoint); True if it changed."""
        if self.curriculum is None:
            return False
        changed = not restored and self.curriculum.advance(self.step, self.steps)
        if changed:
            self._step.health.forget_band()
        if changed or restored or self.step == 0:
            phase = self.curriculum.phases[self.curriculum.phase]
            self._step.task, source = self.context.data.batches(phase)
            self._source = source.skipping(self.skip)
            if self.curriculum.config.kind == "adaptive":
                self._held_out.enter(self._step.task, phase)
        return changed

    def _roll_back(self, target: int) -> Message:
        """Roll back to the checkpoint of `target` or older, skipping the bad batches; returns the message."""
        health = self._step.health
        start, stop = self._source.unskipped_index(health.onset), self._source.unskipped_index(self.step - 1) + 1
        skip = sorted([*self.skip, (start, stop)])  # the checkpoint may predate some
        where = self._keep_evidence(Action.ROLLBACK).relative_to(self._folder)
        checkpoint = newest(self.ranks, self.checkpoints, target)
        assert checkpoint is not None, "newest raises where every checkpoint is damaged"
        self._step.roll_back(checkpoint)
        self._restore(checkpoint)
        self.skip, self._source = skip, self._source.skipping(skip)
        self.ranks.gather(None)  # barrier: all have read it
        if self.ranks.first:
            self.checkpoints.discard_after(checkpoint.step)
        text = f"rolled back to the checkpoint of update {checkpoint.step} ({health.last}); batches {start} to "
        text += f"{stop - 1} are left out, learning rate times {self._step.health.cut:.3g}; evidence: {where}"
        return Message(Event.ROLLBACK, text)

    def _keep_evidence(self, action: Action) -> Path:
        if not self.ranks.first:
            return self._folder
        rows, health = self.metrics.recent, self._step.health
        return write_evidence(self._folder, action, self.step, health, rows, self._source, self.context.data)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint except for the step's state; truncates metrics.jsonl."""
        state = checkpoint.state
        self._cadence = ValidationSchedule.from_dict(self.config.validation, state["cadence"])
        self._norms, self._silent = deque(state["gradient_norms"], maxlen=WINDOW), tuple(state.get("silent", ()))
        self.skip = [(start, stop) for start, stop in state["skip"]]
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])
            self._advance(restored=True)
        self._source = self._source.skipping(self.skip)
        self.micro_step, self.initial = state["micro_step"], state["initial"]
        self._saving.by_clock = max(self._saving.by_clock, state["saves_by_clock"])
        self.step = checkpoint.step
        self._saving.done(self.step)
        self._limiter = RateLimiter.from_dict(self._limiter.config, state["messages"])
        self._consistent = True
        self.metrics.truncate_to(checkpoint.step)

    def save(self, best: float | None = None, renew: bool = True) -> Path:
        """Write a checkpoint in the background, between updates; collective if sharded. best: loss that makes it the
        best. renew: recompute BatchNorm statistics of the average."""
        assert self._between_updates, "a half-made update cannot be saved"
        if self.ranks.first and renew:
            self._eval_weights.renew(self._source)
        if self._is_reporter:
            tensors, state = self._step.state_dict()
        if not self.ranks.first:
            self._saving.done(self.step)
            return self.checkpoints.folder
        state |= {
            "micro_step": self.micro_step,
            "chunk": asdict(self._chunk),
            "saves_by_clock": self._saving.by_clock,
            "skip": self.skip,
            "curriculum": self.curriculum.state_dict() if self.curriculum is not None else None,
            "cadence": self._cadence.to_dict(),
            "gradient_norms": list(self._norms),
            "silent": self._silent,
            "initial": self.initial,
            "messages": self._limiter.to_dict(),
        }
        assert not state.keys() & self.context.state_extra.keys(), "state_extra uses a name of the trainer's"
        self.metrics.sync()  # the log must not end before the checkpoint after a power loss
        spare = None if self._step.health.steady else self._step.health.target(self.checkpoints.steps())
        path = self.checkpoints.save(self.step, tensors, {**self.context.state_extra, **state}, best=best, spare=spare)
        self._saving.done(self.step)
        return path

    def evaluation_model(self) -> nn.Module | None:
        """A frozen copy with the averaged weights in eval mode. Collective; rank 0 gets it."""
        return self._eval_weights.network(self._source)

    def _checkpoint(self, validation: Validation | None) -> None:
        """Save if due; during instability interval saves wait, as checkpoints must be worth rolling back to."""
        best = validation is not None and validation.kind == "full" and self._cadence.best_at == self.step
        due = self._step.health.steady and self._saving.due(self.step)
        due = self.ranks.same(due) if self._step.sharded else due  # clocks differ between ranks
        if best or due or self.step == self.steps or self.stop_reason:
            with self._step.clock.phase("checkpoint"):
                self.save(best=self._cadence.best if best else None)

    def _rescue(self, error: BaseException) -> None:
        """Save the consistent state before an early end; a failure to do so is added to the error."""
        try:
            self.checkpoints.join()
        except CheckpointError as failed:  # an earlier save failed
            error.add_note(str(failed))
            self._saving.done(-1)
        try:
            if self._unsaved and (self._signals.agreed or not self._step.sharded):  # else other ranks take no part
                self.save(renew=not isinstance(error, Exception))  # data or device may have failed
            self.checkpoints.join()
        except (CheckpointError, LostRank, OSError, RuntimeError) as failed:  # RuntimeError: a lost device
            error.add_note(str(failed))
        last = max(self.checkpoints.steps(), default=-1)
        where = f"from the checkpoint of update {last}" if last >= 0 else "from the start"
        error.add_note(f"stopped after {self.step} updates; rerun the same command or notebook to resume {where}")

    def write_heartbeat(self, phase: str, force: bool = False) -> None:
        """heartbeat.json, every `train.heartbeat_seconds`, by the main loop (no thread): proof of progress."""
        now, interval = time.monotonic(), self.config.train.heartbeat_seconds
        if self.ranks.first and (force or now - self._heartbeat_at >= interval):
            self._heartbeat_at = now
            progress = {"step": self.step, "steps": self.steps, "step_seconds": self._seconds, "interval": interval}
            Heartbeat.write(self._folder, self._memory.current(), phase=phase, **progress)
