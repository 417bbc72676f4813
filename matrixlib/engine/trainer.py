"""The training loop of a run: updates, validation, statistics, checkpoints, rollbacks; it resumes bit for bit."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from matrixlib.config import Config
from matrixlib.engine import diagnostics, evidence, optim
from matrixlib.engine.candidate import Candidate
from matrixlib.engine.checkpoint import Checkpoint, CheckpointError, Checkpoints, Saving
from matrixlib.engine.curriculum import Curriculum
from matrixlib.engine.distributed import LostRank, Ranks, newest
from matrixlib.engine.health import TrainingHalted
from matrixlib.engine.heartbeat import Heartbeat
from matrixlib.engine.inspection import first_update, inspect, tighten
from matrixlib.engine.memory import Chunk, Monitor
from matrixlib.engine.messages import Messages
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.pace import Pace, Plan
from matrixlib.engine.signals import Signals, deferred
from matrixlib.engine.stats import WINDOW, Action, Stats
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, Data, Task, Teacher
from matrixlib.engine.timing import Starvation, Throughput
from matrixlib.engine.validation import Cadence, HeldOut, Validation, refuse_below_floor
from matrixlib.hardware.runtime import Runtime

MEMORY_UPDATES, MEMORY_ROWS = 10, 100
"""Updates between two looks at the memory, and between two that are logged."""
KIND = 20
"""Times at most that a run tells one kind of message, without the counts of the last."""


class Trainer:
    """Trains one model to its last update. Build, `resume`, then iterate over `train`.

    Attributes: model (plain module, raw weights), ema (its averages, or None), step (updates done), initial (the first
    losses beside chance level), messages (warnings so far), peak (rows a second that would take the device's whole
    matrix rate, where that is known), curriculum, pace, skip (ranges of batches that are left out).
    """

    def __init__(
        self,
        *,
        task: Task,
        model: nn.Module,
        runtime: Runtime,
        config: Config,
        data: Data,
        folder: Path,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        steps: int,
        state_extra: Mapping[str, Any] | None = None,
        curriculum: Curriculum | None = None,
        teacher: Teacher | None = None,
        plan: Plan | None = None,
        look: Callable[[int, Batch], None] = lambda step, batch: None,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    ) -> None:
        """Nothing is read or trained yet.

        data: what it trains on and is judged by. folder: gets heartbeat.json and evidence/.
        steps: updates of the whole run, as it was planned. plan: what it is to take. teacher: for losses that need it.
        state_extra: JSON data that every checkpoint also holds (config, ...). look: sees the batch of each update.
        ranks: that train together; the first alone writes.
        """
        self.task, self.runtime, self.config, self.ranks = task, runtime, config, ranks
        self.checkpoints, self.metrics, self.curriculum = checkpoints, metrics, curriculum
        self.state_extra, self._look = state_extra if state_extra is not None else {}, look
        self._data, self._source = data, data.batches()[1]
        self.skip, self._held_out = list[tuple[int, int]](), HeldOut(task, data, runtime, ranks)
        self._folder, self._memory, self._chunk = Path(folder), Monitor(runtime.torch_device, config.memory), Chunk()
        limit = self._memory.apply_limit()
        self.messages: list[str] = [limit] if limit else []
        self._step = Step(task, model, runtime, config, steps, teacher, ranks)
        self.model = optim.unwrap(self._step.model)
        self.ema, self._candidate = self._step.ema, Candidate(self._step)
        self._looks = ranks.first or self._step.sharded  # whether this process has a part in looking at the network
        self.pace = Pace(plan or Plan(), self._step.schedule, runtime)
        self._cadence, self._saving = Cadence(config.validation), Saving(config.checkpoint)
        self._norms, self._throughput = deque[float](maxlen=WINDOW), Throughput()
        self._starvation = Starvation(runtime.workers, runtime.prefetch)
        seconds = config.train.heartbeat_seconds
        self._heartbeat = Heartbeat(self._folder / "heartbeat.json", seconds, runtime.torch_device)
        self.peak: float | None = None
        self.step = self.micro_step = 0
        self.initial: dict[str, dict[str, float]] | None = None
        self._empty: tuple[str, ...] = ()  # terms without a target in the last update
        self._fresh = not config.train.init  # False where training begins with weights of another run
        self._told = Messages(max(config.train.statistics_interval, steps // KIND))
        self._rollback: tuple[str, ...] = ()  # the message of one, for the next row: its own was cut off
        self._seconds = 0.0  # of the last update
        self._whole = True  # False between the moving of the weights and the end of all that hangs on it

    @property
    def gradients(self) -> diagnostics.GradientReport | None:
        """Parameters whose gradient looked wrong at the first update; None in a resumed process."""
        return self._step.gradients

    @property
    def steps(self) -> int:
        """Updates of the whole run, as far as is known now."""
        return self.pace.steps

    @property
    def stop_reason(self) -> str:
        """Why training ends before its last update; "" while it does not."""
        return self._cadence.stop

    @property
    def adapted(self) -> bool:
        """Whether this machine's memory or clock has changed how the run computes: another one gets other bits."""
        clock = self.config.validation.interval == "auto" or (self._saving.by_clock and self._step.health.rollbacks)
        return bool(clock or self._chunk.changes or self._step.micro_batch < self.runtime.micro_batch)

    @property
    def _between_updates(self) -> bool:
        return self._whole and self._step.whole and self._step.update == self.step

    @property
    def left_behind(self) -> bool:
        """Whether there is a checkpoint that this trainer has neither written nor read."""
        return max(self.checkpoints.steps(), default=-1) > self._saving.step

    def resume(self) -> int:
        """Go on from the newest whole checkpoint; returns its update count, 0 where there is none.

        metrics.jsonl is cut back to it. Raises CheckpointError when every checkpoint is damaged or the newest
        whole one is of another model.
        """
        checkpoint = newest(self.ranks, self.checkpoints)
        if checkpoint is None:
            self.metrics.truncate_to(0)
            return 0
        try:
            self._step.load_state_dict(checkpoint)
            self._restore(checkpoint)
            # a rollback keeps the chunk that memory needs now, and the end of the schedule
            self._chunk = Chunk(**checkpoint.state["chunk"])
            self.pace.restore(checkpoint.state["pace"])
            self._step.schedule = self.pace.schedule
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"{checkpoint.path.name} does not fit this run ({error}); give the run another name, or bring "
                "back the configuration it was made with"
            ) from error
        self.task.set_chunk(self.model, self._chunk.rows)
        return checkpoint.step

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with these weights (names of the model's state) instead of random ones, the averaged ones too.

        ValueError where updates have been made already, or where the names are not those of this model.
        """
        if self.step:
            raise ValueError(f"the run has made {self.step} updates; weights are given before the first one")
        optim.load_tensors(self.model, tensors)
        self._fresh = False
        if self.ema is not None:
            self.ema.load_state_dict(optim.named_tensors(self.model), 0)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """The state of a checkpoint but for the step's; metrics.jsonl is cut back to it."""
        state = checkpoint.state
        self._cadence = Cadence.from_dict(self.config.validation, state["cadence"])
        self._norms = deque(state["gradient_norms"], maxlen=WINDOW)
        skip = [(start, stop) for start, stop in state["skip"]]
        if self.curriculum is not None:
            dimensions, config = self.curriculum.dimensions, self.curriculum.config
            self.curriculum = Curriculum.from_dict(config, dimensions, state["curriculum"])
            self._enter_phase()
        self._skip_batches(skip)
        self.micro_step, self.initial = state["micro_step"], state["initial"]
        self._saving.by_clock = max(self._saving.by_clock, state["saves_by_clock"])
        self.step = checkpoint.step
        self._saving.done(self.step)
        self._told = Messages.from_dict(self._told.config, state["messages"])
        self._whole = True
        self.metrics.truncate_to(checkpoint.step)

    def _skip_batches(self, ranges: list[tuple[int, int]]) -> None:
        self.skip, self._source = ranges, self._source.skipping(ranges)

    def _enter_phase(self) -> None:
        """Task, source and held-out batches of the curriculum's phase in force."""
        assert self.curriculum is not None
        phase = self.curriculum.phases[self.curriculum.phase]
        task, source = self._data.batches(phase)
        self._step.train_on(task)
        self._source = source.skipping(self.skip)
        if self.curriculum.config.kind == "adaptive":
            self._held_out.enter(task, phase)

    def _advance(self) -> bool:
        """Go on to the phase of the next update; True where it is another one than before."""
        if self.curriculum is None:
            return False
        place, planned = self.pace.schedule.place(self.step), self.pace.schedule.steps
        changed = self.curriculum.advance(self.step, planned, place)
        if changed:
            self._step.health.forget_band()
        if changed or self.step == 0:
            self._enter_phase()
        return changed

    def train(self, stop: int | None = None) -> Generator[Stats]:
        """Updates up to `stop` (default: the last one); yields after each.

        However it ends, by the last update, an early stop, Ctrl-C, SIGTERM, an error in an update or the caller's
        leaving the loop, the state after the last whole update has been saved; of a network that is cut over ranks
        only where all of them end, by a signal or at the end. TrainingHalted leaves the last good checkpoint, an error
        after the weights moved (in a validation, say) the last one on disk. After a rollback (`action`) the next stats
        are of an earlier update. Raises ValueError at once for a target loss that cannot be reached, CheckpointError
        where the disk has no room, TrainingHalted when the run cannot be kept stable.
        """
        if target := self.config.validation.target_loss:
            active = self._step.active - self._step.aids
            refuse_below_floor(target, self.task, self._held_out.batches("sample"), active, self.ranks)
        size = (3 + (self.ema is not None)) * sum(t.nbytes for t in self.model.state_dict().values())  # moments too
        saves, every = self.steps, self.config.validation.interval
        if every != "auto" and not self.config.checkpoint.minutes:
            saves = self.steps // self.config.checkpoint.interval + self.steps // every + 1  # regular, best, the last
        self.checkpoints.require_room(size, self.steps, saves)
        return self._updates(stop)

    def save(self, best: float | None = None, renew: bool = True) -> Path:
        """Write a checkpoint of the present state, which must lie between two updates, in the background. best: the
        validation loss that makes it the best one. renew: make what belongs to the averaged weights anew. All ranks of
        a sharded network have a part in it.
        """
        assert self._between_updates, "a half-made update cannot be saved"
        if self.ranks.first and renew:
            self._candidate.renew(self._source)
        if self._looks:
            tensors, state = self._step.state_dict()
        if not self.ranks.first:
            self._saving.done(self.step)
            return self.checkpoints.folder
        state |= {
            "micro_step": self.micro_step,
            "chunk": asdict(self._chunk),
            "saves_by_clock": self._saving.by_clock,
            "skip": self.skip,
            "pace": self.pace.to_dict(),
            "curriculum": self.curriculum.to_dict() if self.curriculum is not None else None,
            "cadence": self._cadence.to_dict(),
            "gradient_norms": list(self._norms),
            "initial": self.initial,
            "messages": self._told.to_dict(),
        }
        assert not state.keys() & self.state_extra.keys(), "state_extra uses a name of the trainer's"
        path = self.checkpoints.save(self.step, tensors, {**self.state_extra, **state}, best=best)
        self._saving.done(self.step)
        return path

    def evaluation_model(self) -> nn.Module | None:
        """A copy of the model with the averaged weights (the raw ones without), frozen, in eval mode. All ranks ask for
        it, and rank 0 alone gets it.
        """
        return self._candidate.network(self._source)

    def _updates(self, stop: int | None) -> Generator[Stats]:
        if not self._between_updates and not self.resume() and not self._between_updates:  # broken off half-way
            raise ValueError("an update was broken off half-way and there is no checkpoint yet: open the run anew")
        self.model.train()
        self._memory.begin()
        self.beat("training", force=True)
        self._advance()
        # Around the saving at the end, too; and around what the caller does with the stats: an interrupt that comes
        # while a picture is drawn would else end this generator from outside, and nobody would hear what was saved.
        with deferred() as signals:
            yield from self._loop(stop, signals)

    def _loop(self, stop: int | None, signals: Signals) -> Iterator[Stats]:
        source = self._open(stop)
        self.pace.start()
        try:
            while self.step < self._last(stop) and not self.stop_reason:
                signals.agree(self.ranks)
                planned = self.steps
                with self.ranks.collective(certain=False) if self._step.sharded else nullcontext():
                    stats = self._one(source)
                if self._advance() or stats.action is Action.ROLLBACK or self.steps != planned:
                    source.close()  # with the batches that it has made ahead
                    source = self._open(stop)
                if self.ranks.size == 1:
                    signals.check()
                yield stats
            signals.agree(self.ranks)
            self._save_if_new()
            self.checkpoints.join()
        except BaseException as error:
            if not isinstance(error, TrainingHalted):  # whose state is not worth keeping
                self._rescue(error, signals)
            try:
                self.beat("stopped", force=True)
            except OSError as failed:  # such as a full disk, which may well be what ended the run
                error.add_note(f"heartbeat.json could not be written: {failed}")
            raise
        else:
            self.beat("stopped", force=True)
        finally:
            source.close()  # ends the loader's workers

    def _last(self, stop: int | None) -> int:
        return self.steps if stop is None else min(stop, self.steps)

    def _open(self, stop: int | None) -> Generator[Batch]:
        """Batches from the present update on."""
        last = self._last(stop)
        yield from self._source.batches(self.step, last) if self.step < last else ()

    def _rescue(self, error: BaseException, signals: Signals) -> None:
        """Save what is whole before the run ends early; a failure of that is added to the error, not put over it."""
        try:
            self.checkpoints.join()
        except CheckpointError as failed:  # of an earlier save: the present state is still to be saved
            error.add_note(str(failed))
            self._saving.done(-1)
        try:
            if signals.agreed or not self._step.sharded:  # else the other ranks do not come to give their parts
                self._save_if_new(renew=not isinstance(error, Exception))  # data or device may be what failed
            self.checkpoints.join()
        except (CheckpointError, LostRank, OSError, RuntimeError) as failed:  # RuntimeError: a device that is gone
            error.add_note(str(failed))
        newest = max(self.checkpoints.steps(), default=-1)
        where = f"from the checkpoint of update {newest}" if newest >= 0 else "from the start"
        error.add_note(f"stopped after {self.step} updates; the same command or notebook goes on {where}")

    def _one(self, source: Iterator[Batch]) -> Stats:
        """One update and all that hangs on it; afterwards the state lies between two updates again."""
        started = time.perf_counter()
        with self._step.clock.phase("wait"):
            batch = next(source, None)
        if batch is None:
            raise ValueError(f"the loader ended after {self.step} of {self.steps} updates")
        at_interval = (self.step + 1) % self.config.train.statistics_interval == 0
        weights = diagnostics.snapshot(self.model) if at_interval else None
        stats = self._step(batch, report=self.step == 0)
        self._whole = False
        self._seconds = time.perf_counter() - started
        self.step, self.micro_step = stats.step, self.micro_step + stats.passes
        if math.isfinite(stats.grad_norm):  # health counts the others, and one would poison the quantiles
            self._norms.append(stats.grad_norm)
        messages = [
            *stats.messages,
            *self._step.health.warnings(stats, self._empty),
            *(tighten(self._memory, self._chunk, self._step, self.step) if self.step % MEMORY_UPDATES == 0 else ()),
        ]
        self._empty = stats.empty
        if self.step == 1 and self._looks:
            self.initial, first = first_update(self.task, self._step, batch, stats, self._fresh)
            messages += first
        action, target = self._decide(stats.action)
        ended = action not in (Action.OK, Action.SKIP)
        figures: dict[str, Any] | None = None
        if weights and action is Action.OK and self._looks:
            figures, warnings = inspect(self._step, batch, weights, self._held_out, self._norms)
            messages += warnings
        validation = self._validate(messages) if not ended else None
        messages += self._held_out.passes.take()
        planned = self.steps
        if target is None:
            messages += self.pace.look(self.step, self._seconds)
            self._seconds = self.pace.agree(self.ranks, self._seconds)
            self._step.schedule = self.pace.schedule
        times = self._step.clock.take()
        if late := self._starvation.look(times["wait"], self._seconds):
            messages.append(late)
        self._cadence.updated(self._seconds)
        throughput = self._throughput.add(stats.rows, self._seconds)
        halted = self._step.health.diagnosis(stats.action is not Action.HALT) if action is Action.HALT else ""
        last = self.step == self.steps or bool(self.stop_reason or halted)
        messages = self._told.sift(self.step, messages, last) + ([f"halted: {halted}"] if halted else [])
        self._look(self.step, batch)
        stats = replace(
            stats,
            action=action,
            micro_step=self.micro_step,
            steps=self.steps,
            slow=self.pace.slow or None,
            phase=self.curriculum.phase if self.curriculum is not None else None,
            memory=self._memory.interval() if validation or self.step % MEMORY_ROWS == 0 else None,
            seconds=self._seconds,
            times=times,
            loader=self._source.prefetch_stats() or None,
            throughput=throughput,
            share_of_peak=round(throughput / self.peak, 4) if self.peak else None,
            validation=validation.to_dict() if validation else None,
            statistics=figures,
            initial=self.initial if self.step == 1 else None,
            messages=tuple(messages),
        )
        self.metrics.write(replace(stats, messages=self._rollback + stats.messages).row())
        self._rollback = ()
        if action is Action.HALT:
            raise TrainingHalted(f"{halted} Evidence: {self._keep_evidence(action)}")
        if target is not None:
            self._rollback = (self._roll_back(target),)
            stats = replace(stats, messages=stats.messages + self._rollback)
        self.messages += stats.messages
        self._whole = True
        if target is None:
            self._checkpoint(validation, moved=self.steps != planned)
        self.beat("training")
        return stats

    def _decide(self, action: Action) -> tuple[Action, int | None]:
        """The action in force, and where a rollback goes to; without a good checkpoint the run has to halt.

        Not where the loss is back from a spike and merely worse: then this update is left out.
        """
        if action is not Action.ROLLBACK:
            return action, None
        self.checkpoints.join()
        target = self._step.health.target(self.ranks.same(self.checkpoints.steps()))
        if target is None:
            return (Action.SKIP if self._step.health.steady else Action.HALT), None
        return Action.ROLLBACK, target

    def _roll_back(self, target: int) -> str:
        """Go back to the checkpoint of `target` updates (an older one if it is damaged), past the batches since the
        trouble began and with a smaller learning rate; what happened, in words.
        """
        health = self._step.health
        window = self._source.unskipped_index(health.onset), self._source.unskipped_index(self.step - 1) + 1
        skip = sorted([*self.skip, window])  # also those that a checkpoint from before them does not know
        where = self._keep_evidence(Action.ROLLBACK).relative_to(self._folder)
        checkpoint = newest(self.ranks, self.checkpoints, target)
        assert checkpoint is not None, "newest raises where every checkpoint is damaged"
        self._step.roll_back(checkpoint)
        self._restore(checkpoint)
        self._skip_batches(skip)
        self.ranks.barrier()  # all have read it
        if self.ranks.first:
            self.checkpoints.discard_after(checkpoint.step)
        return (
            f"rolled back to the checkpoint of update {checkpoint.step} ({health.last}); batches {window[0]} to "
            f"{window[1] - 1} are left out, learning rate times {self._step.health.cut:.3g}; evidence: {where}"
        )

    def _keep_evidence(self, action: Action) -> Path:
        """Write down what led to `action`; the folder."""
        if not self.ranks.first:
            return self._folder
        health, log = self._step.health, self.metrics.path
        return evidence.keep(self._folder, action, self.step, health, log, self._source, self._data)

    def _checkpoint(self, validation: Validation | None, moved: bool) -> None:
        """Save at the interval, after so many minutes, at the end, at the best full validation and where the end of the
        schedule was moved.

        In the middle of trouble the interval's checkpoint waits: what is saved is worth going back to.
        """
        best = validation is not None and validation.kind == "full" and self._cadence.best_at == self.step
        due = self._step.health.steady and (moved or self._saving.due(self.step))
        due = self.ranks.same(due) if self._step.sharded else due  # a clock may ask for it, and all have a part in it
        if best or due or self.step == self.steps or self.stop_reason:
            with self._step.clock.phase("checkpoint"):
                self.save(best=self._cadence.best if best else None)

    def _validate(self, messages: list[str]) -> Validation | None:
        """Validation with the averaged weights, if it is due and there is held-out data."""
        kind = self._cadence.due(self.step, self.steps)
        if kind is None:
            return None
        active, beat = self._step.active - self._step.aids, partial(self.beat, "validation")
        with self._step.clock.phase("validation"), self._candidate.applied(self._source):
            validation = self._held_out.measure(kind, self.model, active, beat)
            phase = self._held_out.measure_phase(self.model, active) if validation is not None else None
        if validation is None:
            return None
        if phase is not None and self.curriculum is not None:
            self.curriculum.record({"loss": phase.loss} | phase.losses | phase.metrics)
        if not math.isfinite(validation.loss):
            messages.append(f"{kind} validation loss is {validation.loss} after update {self.step}")
        if self._cadence.clearly_worse(kind, validation.loss) and (off := self._step.switch_off()):
            messages.append(f"the held-out loss has become clearly worse: {', '.join(sorted(off))} is off from now on")
        self._cadence.record(self.step, kind, validation.loss, validation.seconds)
        if kind == "full" and (cut := self._step.plateau.record(validation.loss, self.config.validation.min_delta)):
            messages.append(cut)
        return validation

    def _save_if_new(self, renew: bool = True) -> None:
        if self._between_updates and self.step and self._saving.step != self.step:
            self.save(renew=renew)

    def beat(self, phase: str, force: bool = False) -> None:
        """Write heartbeat.json, unless it was written just now. phase: training, validation, evaluation or stopped."""
        if self.ranks.first:
            self._heartbeat.beat(self.step, self._seconds, phase, force, self.steps)
