"""The training loop of a run: updates, validation, statistics, checkpoints, rollbacks; it resumes bit for bit."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from matrixlib.config import Config
from matrixlib.engine import anatomy, optim, rng, statistics
from matrixlib.engine import metrics as metrics_log
from matrixlib.engine import signals as interrupt
from matrixlib.engine.checkpoint import Checkpoint, CheckpointError, Checkpoints
from matrixlib.engine.curriculum import Curriculum, Phase
from matrixlib.engine.gating import Gate
from matrixlib.engine.health import Health, TrainingHalted, Verdict
from matrixlib.engine.heartbeat import Heartbeat
from matrixlib.engine.memory import Chunk, Monitor
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.statistics import Stats
from matrixlib.engine.step import GradientReport, StepStats, make_step
from matrixlib.engine.task import Batch, Source, Task, rows, slice_batch
from matrixlib.engine.timing import Starvation
from matrixlib.engine.validation import Cadence, Validation, refuse_below_floor, validate
from matrixlib.files import write_json
from matrixlib.hardware.runtime import Runtime

MEMORY_UPDATES = 10
"""Updates between two looks at the memory."""
EVIDENCE = 16
"""Updates at most whose records are kept after a blow-up, and rows of metrics from before it."""


class Trainer:
    """Trains one model to its last update. Build, `resume`, then iterate over `train`.

    Attributes: model (plain module, raw weights), step (updates done), stop_reason ("" or why training
    ended early), gradients (report of the first update, None in a resumed process), initial (the first
    losses beside chance level), messages (warnings so far).
    """

    def __init__(
        self,
        *,
        task: Task,
        model: nn.Module,
        runtime: Runtime,
        config: Config,
        source: Source,
        validation: Callable[[str], Iterable[Batch]],
        folder: Path,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        steps: int,
        state_extra: Mapping[str, Any] | None = None,
        curriculum: Curriculum | None = None,
        enter: Callable[[Phase], tuple[Task, Source, Iterable[Batch]]] | None = None,
        evidence: Callable[[Source, Sequence[int], Path], None] = lambda source, batches, folder: None,
        on_micro_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Nothing is read or trained yet.

        source: where the batches of the updates come from. validation(kind): host batches of the fixed
        "sample" or the "full" set; empty where there is none. folder: gets heartbeat.json and evidence/.
        steps: updates of the whole run. state_extra: JSON data that every checkpoint also holds (config, ...).
        curriculum, enter: where training goes through phases, enter(phase) gives the task, the source and the
        held-out batches of one; `task`, `source` and `validation` then are those of the whole.
        evidence(source, batches, folder): keeps the records of these raw batch numbers, after a blow-up.
        on_micro_batch(size): called when memory ran out and a smaller micro-batch is used from now on.
        """
        self.task, self.runtime, self.config, self.steps = task, runtime, config, steps
        self.checkpoints, self.metrics = checkpoints, metrics
        self.state_extra = state_extra if state_extra is not None else {}
        self._source, self._validation, self._skip = source, validation, list[tuple[int, int]]()
        self.curriculum, self._enter, self._phase_held_out = curriculum, enter, list[Batch]()
        self._evidence, self._on_micro_batch = evidence, on_micro_batch
        self._device, self._folder = runtime.torch_device, Path(folder)
        self._memory = Monitor(self._device, config.memory)
        self._chunk = Chunk()
        said = self._memory.apply_limit()
        self.messages: list[str] = [said] if said else []
        self._step = make_step(task, model, runtime, config, steps)
        self.model = optim.unwrap(self._step.model)
        self.ema = self._step.ema
        self._cadence = Cadence(config.validation)
        self._norms, self._throughput = statistics.GradientNorms(), statistics.Throughput()
        self._starvation = Starvation(runtime.workers, runtime.prefetch)
        seconds = config.train.heartbeat_seconds
        self._heartbeat = Heartbeat(self._folder / "heartbeat.json", seconds, self._device)
        self.peak: float | None = None  # rows a second that would take the device's whole matrix rate
        self._streams = rng.seeded(config.seed, self._device)
        self._sample: list[Batch] | None = None
        self.step = self.micro_step = 0
        self.gradients: GradientReport | None = None
        self.initial: dict[str, dict[str, float]] | None = None
        self._empty: tuple[str, ...] = ()  # terms without a target in the last update
        self._fresh = True  # False where the weights were given
        self._clipped = 0.0  # share of clipped gradients that was last warned about
        self._saved = -1  # update count of the newest checkpoint
        self._whole = True  # False between the moving of the weights and the end of all that hangs on it
        self._seconds = 0.0

    @property
    def stop_reason(self) -> str:
        """Why training ends before its last update; "" while it does not."""
        return self._cadence.stop

    @property
    def _between_updates(self) -> bool:
        return self._whole and not self._step.moving and self._step.update == self.step

    @property
    def left_behind(self) -> bool:
        """Whether there is a checkpoint that this trainer has neither written nor read."""
        return max(self.checkpoints.steps(), default=-1) > self._saved

    def resume(self) -> int:
        """Go on from the newest whole checkpoint; returns its update count, 0 where there is none.

        metrics.jsonl is cut back to it. Raises CheckpointError when every checkpoint is damaged or the newest
        whole one is of another model.
        """
        found = self.checkpoints.newest()
        if found is None:
            self.metrics.truncate_to(0)
            return 0
        try:
            self._restore(found)
            self._chunk = Chunk(**found.state["chunk"])  # a rollback keeps the one that memory needs now
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.path.name} does not fit this run ({error}); give the run another name, or bring "
                "back the configuration it was made with"
            ) from error
        self.task.set_chunk(self.model, self._chunk.rows)
        return found.step

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

    def _restore(self, found: Checkpoint) -> None:
        """The whole state of a checkpoint; metrics.jsonl is cut back to it."""
        tensors, state, step = found.tensors, found.state, self._step
        optim.load_tensors(self.model, tensors["model"])
        optim.load_optimiser(step.optimiser, self.model, tensors["optimiser"])
        if self.ema is not None:
            self.ema.load_state_dict(tensors["ema"], state["ema_averages"])
        if step.scaler is not None:
            step.scaler.load_state_dict(state["scaler"])
        step.health = Health.from_dict(self.config.health, state["health"])
        step.gate = Gate.from_dict(self.config.gating, state["gate"])
        self._cadence = Cadence.from_dict(self.config.validation, state["cadence"])
        self._streams = rng.from_saved(tensors["rng"], state["rng"])
        self._norms = statistics.GradientNorms(state["gradient_norms"])
        self._skip = [(start, stop) for start, stop in state["skip"]]
        if self.curriculum is not None:
            curriculum = self.curriculum
            self.curriculum = Curriculum.from_dict(
                curriculum.config, curriculum.dimensions, state["curriculum"]
            )
            self._enter_phase()
        self._skip_batches(self._skip)
        self.micro_step, self.initial = state["micro_step"], state["initial"]
        self.step = step.update = self._saved = found.step
        self.metrics.truncate_to(found.step)

    def _skip_batches(self, ranges: list[tuple[int, int]]) -> None:
        self._skip, self._source = ranges, self._source.skipping(ranges)

    def _enter_phase(self) -> None:
        """Task, source and held-out batches of the curriculum's phase in force."""
        assert self.curriculum is not None and self._enter is not None  # noqa: PT018
        phase = self.curriculum.phases[self.curriculum.phase]
        self._step.task, source, held_out = self._enter(phase)
        self._source = source.skipping(self._skip)
        self._phase_held_out = list(held_out) if self.curriculum.config.kind == "adaptive" else []

    def _advance(self) -> bool:
        """Go on to the phase of the next update; True where it is another one than before."""
        if self.curriculum is None:
            return False
        changed = self.curriculum.advance(self.step, self.steps)
        if changed:
            self._step.health.forget_band()
        if changed or self.step == 0:
            self._enter_phase()
        return changed

    def train(self, stop: int | None = None) -> Generator[Stats]:
        """Updates up to `stop` (default: the last one); yields after each.

        However it ends, by the last update, an early stop, Ctrl-C, SIGTERM, an error in an update or the caller's
        leaving the loop, the state after the last whole update has been saved. TrainingHalted leaves the last good
        checkpoint, an error after the weights moved (in a validation, say) the last one on disk. After a rollback
        (`verdict`) the next stats are of an earlier update. Raises ValueError at once for a target loss that cannot
        be reached, and TrainingHalted (with a diagnosis) when the run cannot be kept stable.
        """
        if target := self.config.validation.target_loss:
            refuse_below_floor(target, self.task, self._held_out("sample"), self._step.active)
        return self._updates(self.steps if stop is None else min(stop, self.steps))

    def save(self, best: float | None = None) -> Path:
        """Write a checkpoint of the present state, which must lie between two updates, in the background.

        best: the validation loss that makes it the best one.
        """
        assert self._between_updates, "a half-made update cannot be saved"
        tensors = {
            "model": optim.named_tensors(self.model),
            "optimiser": optim.optimiser_tensors(self._step.optimiser, self.model),
            "rng": self._streams.tensors(),
        }
        state: dict[str, Any] = {
            "micro_step": self.micro_step,
            "health": self._step.health.to_dict(),
            "gate": self._step.gate.to_dict(),
            "chunk": asdict(self._chunk),
            "skip": self._skip,
            "curriculum": self.curriculum.to_dict() if self.curriculum is not None else None,
            "cadence": self._cadence.to_dict(),
            "rng": self._streams.plain(),
            "gradient_norms": self._norms.to_list(),
            "initial": self.initial,
        }
        if self.ema is not None:
            tensors["ema"] = self.ema.state_dict()
            state["ema_averages"] = self.ema.averages
        if self._step.scaler is not None:
            state["scaler"] = self._step.scaler.state_dict()
        assert not state.keys() & self.state_extra.keys(), "state_extra uses a name of the trainer's"
        path = self.checkpoints.save(self.step, tensors, {**self.state_extra, **state}, best=best)
        self._saved = self.step
        return path

    def evaluation_model(self) -> nn.Module:
        """A copy of the model with the averaged weights (the raw ones without EMA), frozen, in eval mode."""
        model = copy.deepcopy(self.model)
        if self.ema is not None:
            optim.load_tensors(model, self.ema.state_dict(), "EMA")
        return model.requires_grad_(False).eval()

    def _updates(self, stop: int) -> Generator[Stats]:
        if not self._between_updates:  # an earlier call was broken off half-way
            self._step.moving, self._whole = False, True
            if not self.resume():
                raise ValueError(
                    "an update was broken off half-way and there is no checkpoint yet: open the run anew"
                )
        self.model.train()
        self._beat("training", force=True)
        self._advance()
        # Around the saving at the end, too; and around what the caller does with the stats: an interrupt that comes
        # while a picture is drawn would else end this generator from outside, and nobody would hear what was saved.
        with interrupt.termination() as termination, interrupt.deferred() as interruption:
            yield from self._loop(stop, termination, interruption)

    def _loop(
        self, stop: int, termination: interrupt.Termination, interruption: interrupt.Interruption
    ) -> Iterator[Stats]:
        source = self._open(stop)
        try:
            while self.step < stop and not self.stop_reason:
                termination.check()
                interruption.check()
                stats = self._one(source)
                if self._advance() or stats.verdict == Verdict.ROLLBACK:
                    source.close()  # with the batches that it has made ahead
                    source = self._open(stop)
                termination.check()
                interruption.check()
                yield stats
            self._save_if_new()
            self.checkpoints.join()
        except BaseException as error:
            if not isinstance(
                error, TrainingHalted
            ):  # its state is not worth keeping: the last good one is there
                self._rescue(error)
            try:
                self._beat("stopped", force=True)
            except OSError as failed:  # such as a full disk, which may well be what ended the run
                error.add_note(f"heartbeat.json could not be written: {failed}")
            raise
        else:
            self._beat("stopped", force=True)
        finally:
            source.close()  # ends the loader's workers

    def _open(self, stop: int) -> Generator[Batch]:
        """Batches from the present update on."""
        yield from self._source.batches(self.step, stop) if self.step < stop else ()

    def _rescue(self, error: BaseException) -> None:
        """Save what is whole before the run ends early; a failure of that is added to the error, not put over it."""
        try:
            self.checkpoints.join()
        except CheckpointError as failed:  # of an earlier save: the present state is still to be saved
            error.add_note(str(failed))
            self._saved = -1
        try:
            self._save_if_new()
            self.checkpoints.join()
        except (CheckpointError, OSError, RuntimeError) as failed:  # RuntimeError: a device that is gone
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
        # The step's random streams are its own: whatever the loader, validation or the caller draw in between
        # changes nothing here, and a resumed run goes on with the same bits.
        rng.restore(self._streams, self._device)
        micro_batch = self._step.micro_batch
        at_interval = (self.step + 1) % self.config.train.statistics_interval == 0
        weights = anatomy.snapshot(self.model) if at_interval else None
        done = self._step(batch, report=self.step == 0)
        self._whole = False
        self._streams = rng.capture(self._device)
        self._seconds = time.perf_counter() - started
        self.step += 1
        self.micro_step += done.micro_batches
        self._norms.add(done.grad_norm)
        messages = [
            *done.messages,
            *statistics.unusual(done, self._step.health, self._empty),
            *(self._watch_memory() if self.step % MEMORY_UPDATES == 0 else ()),
        ]
        self._empty = done.empty
        if self._step.micro_batch != micro_batch:
            self._on_micro_batch(self._step.micro_batch)
        if self.step == 1:
            messages += self._first(batch, done)
        verdict, target = self._verdict(done)
        moved = verdict in (Verdict.OK, Verdict.SKIP)
        figures = self._statistics(batch, weights, messages) if weights and verdict is Verdict.OK else None
        validation = self._validate(messages) if moved else None
        times = self._step.clock.take()
        if late := self._starvation.look(times["wait"], self._seconds):
            messages.append(late)
        throughput = self._throughput.add(rows(batch), self._seconds)
        stats = Stats(
            step=self.step,
            micro_step=self.micro_step,
            loss=done.loss,
            losses=done.losses,
            metrics=done.metrics,
            learning_rate=done.learning_rate,
            grad_norm=done.grad_norm,
            clip_share=self._step.health.clip_share,
            verdict=str(verdict),
            gate=done.gate if self._step.gated else None,
            phase=self.curriculum.phase if self.curriculum is not None else None,
            skipped=self._step.health.skipped,
            overflows=self._step.health.overflows,
            rollbacks=self._step.health.rollbacks,
            memory=self._memory.interval() if validation else None,
            seconds=self._seconds,
            times=times,
            throughput=throughput,
            share_of_peak=round(throughput / self.peak, 4) if self.peak else None,
            validation=validation.to_dict() if validation else None,
            statistics=figures,
            initial=self.initial if self.step == 1 else None,
            messages=tuple(messages),
        )
        self.metrics.write(stats.row())
        if verdict is Verdict.HALT:
            diagnosis = self._step.health.diagnosis(nothing_to_return_to=done.verdict is not Verdict.HALT)
            raise TrainingHalted(f"{diagnosis} Evidence: {self._keep(verdict)}")
        if target is not None:
            stats = replace(stats, messages=(*stats.messages, self._roll_back(target)))
        self.messages += stats.messages
        self._whole = True
        if target is None:
            self._checkpoint(validation)
        self._beat("training")
        return stats

    def _watch_memory(self) -> list[str]:
        """Look at the memory; where it is tight, the self-supervised terms work on fewer rows at once."""
        messages = self._memory.check(self.step)
        size, needed = self._step.micro_batch, self._memory.needed
        if self.task.gated and self._chunk.look(needed, self.config.memory.warn, size):
            chunk = self.task.set_chunk(self.model, self._chunk.rows)
            if chunk or not self._chunk.rows:
                messages.append(
                    f"memory: the self-supervised heads work on {chunk or size} of {size} rows at once after "
                    f"update {self.step}"
                )
        return messages

    def _verdict(self, done: StepStats) -> tuple[Verdict, int | None]:
        """The verdict, and where a rollback goes to; without a good checkpoint the run has to halt.

        Not where the loss is back from a spike and merely worse: then this update is left out.
        """
        if done.verdict is not Verdict.ROLLBACK:
            return done.verdict, None
        self.checkpoints.join()
        target = self._step.health.target(self.checkpoints.steps())
        if target is None:
            return (Verdict.SKIP if self._step.health.steady else Verdict.HALT), None
        return Verdict.ROLLBACK, target

    def _roll_back(self, target: int) -> str:
        """Go back to the checkpoint of `target` updates (an older one if it is damaged), past the batches since the
        trouble began and with a smaller learning rate; what happened, in words.
        """
        health = self._step.health
        window = self._source.raw(health.onset), self._source.raw(self.step - 1) + 1
        skip = sorted([*self._skip, window])  # also those that a checkpoint from before them does not know
        where = self._keep(Verdict.ROLLBACK)
        found = self.checkpoints.newest(before=target)
        assert found is not None, "newest raises where every checkpoint is damaged"
        self._restore(found)
        self._skip_batches(skip)
        self._step.health = health.rolled_back(found.step, self._step.health)
        if self.task.gated:
            self._step.gate.freeze(found.step - 1)
        self.checkpoints.discard_after(found.step)
        return (
            f"rolled back to the checkpoint of update {found.step} ({health.last}); batches {window[0]} to "
            f"{window[1] - 1} are left out, learning rate times {self._step.health.cut:.3g}; evidence: {where}"
        )

    def _keep(self, verdict: Verdict) -> Path:
        """Write down what led to `verdict`: the rows of the updates in question, the batch numbers, their records."""
        health = self._step.health
        folder = self._folder / "evidence" / f"{verdict}_{health.rollbacks + 1}_update_{self.step:08d}"
        batches = [self._source.raw(i) for i in range(max(health.onset, self.step - EVIDENCE), self.step)]
        folder.mkdir(parents=True, exist_ok=True)
        rows = [row for row in metrics_log.read(self.metrics.path) if row["step"] > health.onset - EVIDENCE]
        record = {
            "verdict": str(verdict),
            "last": health.last,
            "batches": batches,
            "health": health.to_dict(),
        }
        write_json(folder / "evidence.json", record | {"rows": rows})
        self._evidence(self._source, batches, folder)
        return folder

    def _checkpoint(self, validation: Validation | None) -> None:
        """Save at the interval, at the end and at the best full validation.

        In the middle of trouble the interval's checkpoint waits: what is saved is worth going back to.
        """
        cadence, interval = self._cadence, self.config.checkpoint.interval
        best = validation is not None and validation.kind == "full" and cadence.best_at == self.step
        due = self.step // interval > max(self._saved, 0) // interval and self._step.health.steady
        if best or due or self.step == self.steps or self.stop_reason:
            with self._step.clock.phase("checkpoint"):
                self.save(best=cadence.best if best else None)

    def _validate(self, messages: list[str]) -> Validation | None:
        """Validation with the averaged weights, if it is due and there is held-out data."""
        kind = self._cadence.due(self.step, self.steps)
        if kind is None:
            return None
        with self._step.clock.phase("validation"):
            return self._measure(kind, messages)

    def _measure(self, kind: str, messages: list[str]) -> Validation | None:
        with self.ema.applied(self.model) if self.ema is not None else nullcontext():
            batches, beat = self._held_out(kind), partial(self._beat, "validation")
            found = validate(self.task, self.model, batches, self.runtime, self._step.active, kind, beat)
        if found is None:
            return None
        if not math.isfinite(found.loss):
            messages.append(f"{kind} validation loss is {found.loss} after update {self.step}")
        self._cadence.record(self.step, kind, found.loss)
        if self._phase_held_out and self.curriculum is not None:
            task, active = self._step.task, self._step.active
            with self.ema.applied(self.model) if self.ema is not None else nullcontext():
                measured = validate(task, self.model, self._phase_held_out, self.runtime, active, "phase")
            assert measured is not None
            self.curriculum.record(measured.metrics)
        return found

    def _held_out(self, kind: str) -> Iterable[Batch]:
        """Validation batches; the sample is made once and kept on the host."""
        if kind == "full":
            return self._validation(kind)
        if self._sample is None:
            self._sample = list(self._validation(kind))
        return self._sample

    def _first(self, batch: Batch, done: StepStats) -> list[str]:
        """At the first update: gradients that look wrong, losses far from chance level."""
        self.gradients = done.report
        self.initial, messages = statistics.compare_with_chance(self.task, batch, done)
        messages = messages if self._fresh else []  # weights that were given have learned something
        return [f"first update: {done.report}", *messages] if str(done.report or "") else messages

    def _statistics(self, batch: Batch, before: Mapping[str, Tensor], messages: list[str]) -> dict[str, Any]:
        """Outputs, gradient norms, blocks and dead units after an update; `before`: the weights before it."""
        blocks = anatomy.block_statistics(self.model, before)
        dead = anatomy.dead_units(self.task, self.model, self._held_out("sample"), self.runtime)
        part = slice_batch(batch, 0, min(rows(batch), self._step.micro_batch))
        found: dict[str, Any] = {
            "outputs": statistics.output_statistics(self.task, self.model, part, self.runtime),
            "gradient_norm": self._norms.quantiles(),
            "blocks": blocks,
            "dead_units": dead.shares,
        }
        messages += anatomy.block_warnings(blocks, warming_up=self.step <= self._step.schedule.warmup)
        messages += dead.warnings()
        if self._step.scaler is not None:
            found["loss_scale"] = self._step.scaler.get_scale()
        if clipped := statistics.clip_warning(self._step.health, self._clipped):
            self._clipped = self._step.health.clip_share
            messages += clipped
        return found

    def _save_if_new(self) -> None:
        if self._between_updates and self.step and self._saved != self.step:
            self.save()

    def _beat(self, phase: str, force: bool = False) -> None:
        self._heartbeat.beat(self.step, self._seconds, phase, force)
