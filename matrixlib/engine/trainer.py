"""The training loop of a run: updates, validation, statistics, checkpoints; it resumes bit for bit."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from matrixlib.config import Config
from matrixlib.engine import interrupt, optim, rng, statistics
from matrixlib.engine.checkpoint import CheckpointError, Checkpoints
from matrixlib.engine.health import Health, TrainingHalted, Verdict
from matrixlib.engine.heartbeat import Heartbeat
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.statistics import Stats
from matrixlib.engine.step import GradientReport, Step, StepStats, make_step
from matrixlib.engine.task import Batch, Task, rows, slice_batch
from matrixlib.engine.validation import Cadence, Validation, refuse_below_floor, validate
from matrixlib.runtime import Runtime


def trial_step(task: Task, model: nn.Module, runtime: Runtime, config: Config) -> Step:
    """A step as the trainer would make it, for timing updates of a throwaway model."""
    return make_step(task, model, runtime, config, 1000)


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
        batches: Callable[[int, int], Iterator[Batch]],
        validation: Callable[[str], Iterable[Batch]],
        folder: Path,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        steps: int,
        state_extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is read or trained yet.

        batches(start, stop): host batches of updates start..stop-1. validation(kind): host batches of the
        fixed "sample" or the "full" set; empty where there is none. folder: gets heartbeat.json. steps:
        updates of the whole run. state_extra: JSON data that every checkpoint also holds (config, ...).
        """
        self.task, self.runtime, self.config, self.steps = task, runtime, config, steps
        self.checkpoints, self.metrics = checkpoints, metrics
        self.state_extra = state_extra if state_extra is not None else {}
        self._batches, self._validation = batches, validation
        self._device = runtime.torch_device
        self._step = make_step(task, model, runtime, config, steps)
        self.model = optim.unwrap(self._step.model)
        self.ema = self._step.ema
        self._cadence = Cadence(config.validation)
        self._norms, self._throughput = statistics.GradientNorms(), statistics.Throughput()
        seconds = config.train.heartbeat_seconds
        self._heartbeat = Heartbeat(Path(folder) / "heartbeat.json", seconds, self._device)
        self._streams = rng.seeded(config.seed, self._device)
        self._sample: list[Batch] | None = None
        self.step = self.micro_step = 0
        self.gradients: GradientReport | None = None
        self.initial: dict[str, dict[str, float]] | None = None
        self.messages: list[str] = []
        self._saved = -1  # update count of the newest checkpoint
        self._whole = True  # False while an update is being made
        self._seconds = 0.0

    @property
    def stop_reason(self) -> str:
        """Why training ends before its last update; "" while it does not."""
        return self._cadence.stop

    def resume(self) -> int:
        """Go on from the newest whole checkpoint; returns its update count, 0 where there is none.

        metrics.jsonl is cut back to it. Raises CheckpointError when every checkpoint is damaged or the newest
        whole one is of another model.
        """
        found = self.checkpoints.newest()
        if found is None:
            self.metrics.truncate_to(0)
            return 0
        tensors, state, step = found.tensors, found.state, self._step
        try:
            optim.load_tensors(self.model, tensors["model"])
            optim.load_optimiser(step.optimiser, self.model, tensors["optimiser"])
            if self.ema is not None:
                self.ema.load_state_dict(tensors["ema"], state["ema_averages"])
            if step.scaler is not None:
                step.scaler.load_state_dict(state["scaler"])
            step.health = Health.from_dict(state["health"])
            self._cadence = Cadence.from_dict(self.config.validation, state["cadence"])
            self._streams = rng.from_saved(tensors["rng"], state["rng"])
            self._norms = statistics.GradientNorms(state["gradient_norms"])
            self.micro_step, self.initial = state["micro_step"], state["initial"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{found.path.name} does not fit this run ({error}); give the run another name, or bring "
                "back the configuration it was made with"
            ) from error
        self.step = step.update = self._saved = found.step
        self.metrics.truncate_to(found.step)
        return found.step

    def train(self, stop: int | None = None) -> Iterator[Stats]:
        """Updates up to `stop` (default: the last one); yields after each.

        However it ends, by the last update, an early stop, Ctrl-C or the caller's leaving the loop, the
        state has been saved; only after an error it has not. Raises ValueError at once for a target loss
        that cannot be reached, and TrainingHalted (with a diagnosis) when updates stay non-finite.
        """
        if target := self.config.validation.target_loss:
            refuse_below_floor(target, self.task, self._held_out("sample"), self._step.active)
        return self._updates(self.steps if stop is None else min(stop, self.steps))

    def save(self) -> Path:
        """Write a checkpoint of the present state, which must lie between two updates."""
        assert self._whole, "a half-made update cannot be saved"
        tensors = {
            "model": optim.named_tensors(self.model),
            "optimiser": optim.optimiser_tensors(self._step.optimiser, self.model),
            "rng": self._streams.tensors(),
        }
        state: dict[str, Any] = {
            "micro_step": self.micro_step,
            "health": self._step.health.to_dict(),
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
        path = self.checkpoints.save(self.step, tensors, {**self.state_extra, **state})
        self._saved = self.step
        return path

    def evaluation_model(self) -> nn.Module:
        """A copy of the model with the averaged weights (the raw ones without EMA), frozen, in eval mode."""
        model = copy.deepcopy(self.model)
        if self.ema is not None:
            optim.load_tensors(model, self.ema.state_dict(), "EMA")
        return model.requires_grad_(False).eval()

    def _updates(self, stop: int) -> Iterator[Stats]:
        self.model.train()
        source = iter(self._batches(self.step, stop)) if self.step < stop else iter(())
        self._beat("training", force=True)
        try:
            while self.step < stop and not self.stop_reason:
                with interrupt.deferred():
                    stats = self._one(source)
                yield stats
            self._save_if_new()
        except GeneratorExit:  # the caller has left the loop
            self._save_if_new()
            raise
        except KeyboardInterrupt as error:
            self._save_if_new()
            where = f"from the checkpoint of update {self._saved}" if self._saved >= 0 else "from the start"
            error.add_note(f"stopped after {self.step} updates; the same command goes on {where}")
            raise
        finally:
            if close := getattr(source, "close", None):
                close()  # ends the loader's workers
            self._beat("stopped", force=True)

    def _one(self, source: Iterator[Batch]) -> Stats:
        """One update and all that hangs on it; afterwards the state lies between two updates again."""
        started = time.perf_counter()
        batch = next(source, None)
        if batch is None:
            raise ValueError(f"the loader ended after {self.step} of {self.steps} updates")
        # The step's random streams are its own: whatever the loader, validation or the caller draw in between
        # changes nothing here, and a resumed run goes on with the same bits.
        rng.restore(self._streams, self._device)
        self._whole = False
        done = self._step(batch, report=self.step == 0)
        self._streams = rng.capture(self._device)
        self._seconds = time.perf_counter() - started
        self.step += 1
        self.micro_step += done.micro_batches
        self._norms.add(done.grad_norm)
        messages = statistics.unusual(done)
        if self.step == 1:
            messages += self._first(batch, done)
        halted = done.verdict is Verdict.HALT
        at_interval = self.step % self.config.train.statistics_interval == 0
        figures = self._statistics(batch, messages) if at_interval and not halted else None
        validation = None if halted else self._validate(messages)
        stats = Stats(
            step=self.step,
            micro_step=self.micro_step,
            loss=done.loss,
            losses=done.losses,
            metrics=done.metrics,
            learning_rate=done.learning_rate,
            grad_norm=done.grad_norm,
            clip_share=self._step.health.clip_share,
            verdict=str(done.verdict),
            skipped=self._step.health.skipped,
            overflows=self._step.health.overflows,
            seconds=self._seconds,
            throughput=self._throughput.add(rows(batch), self._seconds),
            validation=validation.to_dict() if validation else None,
            statistics=figures,
            initial=self.initial if self.step == 1 else None,
            messages=tuple(messages),
        )
        self.messages += messages
        self.metrics.write(stats.row())
        if halted:
            raise TrainingHalted(self._step.health.diagnosis())
        self._whole = True
        self._checkpoint(validation)
        self._beat("training")
        return stats

    def _checkpoint(self, validation: Validation | None) -> None:
        """Save at the interval, at the end and at the best full validation."""
        cadence = self._cadence
        best = validation is not None and validation.kind == "full" and cadence.best_at == self.step
        at_interval = self.step % self.config.checkpoint.interval == 0
        if best or at_interval or self.step == self.steps or self.stop_reason:
            self.save()
        if best:
            assert cadence.best is not None
            self.checkpoints.mark_best(self.step, cadence.best)

    def _validate(self, messages: list[str]) -> Validation | None:
        """Validation with the averaged weights, if it is due and there is held-out data."""
        kind = self._cadence.due(self.step, self.steps)
        if kind is None:
            return None
        with self.ema.applied(self.model) if self.ema is not None else nullcontext():
            batches, beat = self._held_out(kind), partial(self._beat, "validation")
            found = validate(self.task, self.model, batches, self.runtime, self._step.active, kind, beat)
        if found is None:
            return None
        if not math.isfinite(found.loss):
            messages.append(f"{kind} validation loss is {found.loss} after update {self.step}")
        self._cadence.record(self.step, kind, found.loss)
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
        return [f"first update: {done.report}", *messages] if str(done.report or "") else messages

    def _statistics(self, batch: Batch, messages: list[str]) -> dict[str, Any]:
        part = slice_batch(batch, 0, min(rows(batch), self.runtime.micro_batch))
        found: dict[str, Any] = {
            "outputs": statistics.output_statistics(self.task, self.model, part, self.runtime),
            "gradient_norm": self._norms.quantiles(),
        }
        if self._step.scaler is not None:
            found["loss_scale"] = self._step.scaler.get_scale()
        messages += statistics.clip_warning(self._step.health)
        return found

    def _save_if_new(self) -> None:
        if self._whole and self.step and self._saved != self.step:
            self.save()

    def _beat(self, phase: str, force: bool = False) -> None:
        self._heartbeat.beat(self.step, self._seconds, phase, force)
