"""One update: forward and backward over micro-batches, one host read to judge it, then apply or skip."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from matrixlib.config import Config
from matrixlib.engine import averages, compiler, optim, rng
from matrixlib.engine.checkpoint import Checkpoint
from matrixlib.engine.diagnostics import first_nonfinite, gradient_report
from matrixlib.engine.distributed import Ranks, Reducer, batch_norms, full, gather_full
from matrixlib.engine.health import Health
from matrixlib.engine.memory import first_line, fresh_model, out_of_memory
from matrixlib.engine.optim import unwrap
from matrixlib.engine.parts import Parts
from matrixlib.engine.schedule import Dropout, Gate, Plateau, learning_rate, warmup_updates
from matrixlib.engine.stats import Action, Event, Message, Stats
from matrixlib.engine.task import Batch, Task, Teacher, active_terms, rows, slice_batch, to_device
from matrixlib.engine.timing import Clock
from matrixlib.hardware.backend import synchronize
from matrixlib.hardware.runtime import Runtime


@dataclass(frozen=True)
class UpdatePlan:
    """What one update computes. main: ungated terms, the only ones for rows after `until`."""

    task: Task
    batch: Batch
    weights: dict[str, float]
    main: frozenset[str]
    until: int
    ranks: Ranks

    @cached_property
    def totals(self) -> dict[str, int]:
        """Items of each term over all ranks; "" for rows. Computed on the host while a GPU runs the first pass."""
        counts = self.task.counts(self.batch)
        if self.until < rows(self.batch):
            part = self.task.counts(slice_batch(self.batch, 0, self.until))
            counts |= {term: count for term, count in part.items() if term not in self.main}
        return self.ranks.total({"": rows(self.batch), **{term: counts[term] for term in self.weights}})


class Step:
    """Makes one update from one batch.

    Attributes: model (on the device, maybe compiled), update (index of the next one), micro_batch (rows of a forward
    pass, halved on OOM), active (terms computed), gated (terms that may be left out temporarily), auxiliary_terms
    (terms without a held-out loss), off (terms switched off for good), schedule (update -> learning rate), consistent
    (False while weights and counters change: an error then leaves them inconsistent until `load_state_dict`). It has
    its own random streams.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        runtime: Runtime,
        config: Config,
        steps: int,
        teacher: Teacher | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008 - frozen
        parts: Parts = Parts(),  # noqa: B008 - frozen
    ) -> None:
        """A step of a run of `steps` updates; moves the model to the device and into training mode."""
        self.sharded = config.runtime.shard and ranks.size > 1
        plain, self.model = (model, model) if self.sharded else compiler.place(model, runtime)
        optim.freeze(plain.train(), config.train.freeze)
        for name, tensor in optim.named_tensors(plain).items():
            if tensor.dtype in (torch.float16, torch.bfloat16):
                raise ValueError(f"{name} is in half precision; build networks in fp32, of which autocast takes care")
        self.ranks = ranks
        self.side_optimizer = optim.side_optimizer(plain)
        if self.sharded and self.side_optimizer is not None:
            raise ValueError("runtime.shard does not go with teacher.schedule learned: take fixed or linear")
        self.reducer = Reducer(ranks, plain, config, runtime)
        self.task, self.runtime, self.config, self.micro_batch = task, runtime, config, runtime.micro_batch
        self.teacher = teacher
        self.optimiser = optim.optimiser(plain, config.optim, runtime.torch_device, parts.optimizer)
        self.steps, self.warmup = steps, warmup_updates(config.optim, steps)
        self.schedule = parts.schedule or learning_rate(config.optim, steps, config.train.batch_size)
        self.ema = averages.average(plain, self.optimiser, config.optim)
        self.health, self.gate = Health(config.health), Gate(config.gating)
        self.plateau, self.dropout = Plateau(config.optim), Dropout(plain.modules(), config.train.dropout_stages)
        self.active = active_terms(task)
        if not self.active:
            raise ValueError("every loss weight is 0, so there is nothing to train; set one above 0")
        # where there are no other terms, an update without them would be none
        self.gated = task.gated & self.active if self.active - task.gated else frozenset()
        self.auxiliary_terms = teacher.auxiliary_terms & self.active if teacher is not None else frozenset[str]()
        self.off = frozenset[str]()
        self.scaler = runtime.grad_scaler() or torch.amp.GradScaler("cpu", enabled=False)
        self.clock = Clock(runtime.torch_device)
        self.update = 0
        self.consistent, self._unscaled, self._untried = True, False, True  # the model may fail to compile
        self._streams = rng.seeded(config.seed, runtime.torch_device)
        self._parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
        aside = self.side_optimizer.param_groups if self.side_optimizer is not None else []
        self._side_parameters = [p for group in aside for p in group["params"]]
        self._buffers = [b for b in plain.buffers() if b is not None]
        self._before = [b.clone() for b in self._buffers]
        self._statistics = [b for norm in batch_norms(plain) for b in norm.buffers()]

    def __call__(self, batch: Batch) -> Stats:
        """One update from `batch` (host tensors, B rows). No weight or buffer changes if it is not finite, nor on an
        error while `consistent`. ValueError if no parameter receives a gradient."""
        if self.dropout.enter(self.update / self.steps) and self.runtime.compile:
            torch.compiler.reset()  # rates are constants in graphs, of which torch keeps eight
            self._untried = self.model is not unwrap(self.model)
        optim.copy_tensors(self._before, self._buffers)
        try:
            plan, sums, messages = self._forward_backward(batch)
            stats, norm = self._judge(batch, plan, sums)
            messages += self._apply_or_skip(stats, norm)
            if text := self.gate.leave_out(stats.left_out or 0):
                messages.append(Message(Event.GATED, text, "rows"))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # a lost device; the original error says so
                if self.consistent:
                    optim.copy_tensors(self._buffers, self._before)
                self._close_scale(keep=True)
            raise
        return replace(stats, messages=tuple(messages))

    def taught(self, batch: Batch) -> Batch:
        """The batch (or part of it) with the teacher's outputs, if there is a teacher."""
        return batch if self.teacher is None else self.teacher(batch, self.update / max(1, self.steps - 1))

    def switch_off(self) -> frozenset[str]:
        """Disable the auxiliary terms for good; returns those that were on."""
        before, self.off = self.off, self.auxiliary_terms
        return self.auxiliary_terms - before

    def state_dict(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors by group, plain data) for a checkpoint. Sharded: collective, rank 0 gets the tensors."""
        tensors = {
            "model": optim.named_tensors(self.model),
            "optimiser": optim.optimiser_tensors(self.optimiser, self.model),
            "rng": self._streams.tensors(),
        }
        state: dict[str, Any] = {
            "optimiser": optim.optimiser_kind(self.config.optim),
            "optimiser_counters": optim.optimiser_counters(self.optimiser),
            "micro_batch": self.micro_batch if self.micro_batch < self.runtime.micro_batch else None,
            "health": self.health.to_dict(),
            "gate": self.gate.to_dict(),
            "plateau": self.plateau.to_dict(),
            "rng": self._streams.plain(),
            "off": sorted(self.off),
            "scaler": self.scaler.state_dict(),
        }
        if self.ema is not None:
            tensors["ema"] = self.ema.state_dict()
            state["ema_averages"] = self.ema.averages
        return gather_full(tensors, self.ranks) if self.sharded else tensors, state

    def load_state_dict(self, checkpoint: Checkpoint) -> None:
        """Inverse of `state_dict`, except that a halved micro-batch stays. ValueError for another optimizer's state."""
        self.carry_on(checkpoint)
        state = checkpoint.state
        self.micro_batch = min(self.micro_batch, state["micro_batch"] or self.micro_batch)
        self.scaler.load_state_dict(state.get("scaler", {}))
        self.health = Health.from_dict(self.config.health, state["health"])
        self.gate = Gate.from_dict(self.config.gating, state["gate"])
        self.plateau = Plateau.from_dict(self.config.optim, state["plateau"])
        self._streams = rng.from_saved(checkpoint.tensors["rng"], state["rng"])
        self.off = frozenset(state["off"])
        self.update, self.consistent = checkpoint.step, True

    def carry_on(self, checkpoint: Checkpoint) -> None:
        """Load weights, averages and optimizer state alone. ValueError for another optimizer's."""
        tensors, state = checkpoint.tensors, checkpoint.state
        own, other = optim.optimiser_kind(self.config.optim), state["optimiser"]
        if own != other:
            way = f"set optim.optimiser to {other} (adamw_8bit without bitsandbytes is adamw)"
            raise ValueError(f"its optimiser is {other}, and {own} cannot resume with that state; {way}")
        optim.load_tensors(self.model, tensors["model"])
        optim.load_optimiser(self.optimiser, self.model, tensors["optimiser"], state["optimiser_counters"])
        if self.ema is not None:
            self.ema.load_state_dict(tensors["ema"], state["ema_averages"])

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Load an earlier state with a smaller learning rate, keeping the run's counters."""
        health, off = self.health, self.off
        self.load_state_dict(checkpoint)
        self.off = off
        self.health = health.rolled_back(checkpoint.step, self.health)
        if self.task.gated:
            self.gate.freeze(checkpoint.step - 1)

    def _plan(self, batch: Batch) -> UpdatePlan:
        factor, gated = self.gate.factor(self.update), self.gated
        active = (self.active if factor else self.active - gated) - self.off
        until = self.gate.rows(rows(batch), self.micro_batch) if gated & active else rows(batch)
        weights = {t: self.task.weights[t] * (factor if t in gated else 1.0) for t in active}
        return UpdatePlan(self.task, batch, weights, active - gated, until, self.ranks)

    def _forward_backward(self, batch: Batch) -> tuple[UpdatePlan, dict[str, Tensor], list[Message]]:
        """Gradients in `.grad`; returns plan, sums on the device, messages. Repeated on OOM or compiler failure."""
        messages: list[Message] = []
        if not self.ranks.first:  # not kept: checkpoints are independent of ranks
            self._streams = rng.of_rank(self.config.seed, self.ranks.rank, self.update, self.runtime.torch_device)
        while True:
            rng.restore(self._streams, self.runtime.torch_device)
            for optimiser in self._optimisers():
                optimiser.zero_grad(set_to_none=True)
            plan, problem, text = self._plan(batch), "", "on another rank"
            try:
                sums = self._accumulate(batch, plan)
            except (RuntimeError, MemoryError) as error:
                untried = self._untried and unwrap(self.model) is not self.model and not out_of_memory(error)
                short, text = out_of_memory(error, self.runtime.torch_device), first_line(error)
                if not untried and (not short or (self.micro_batch == 1 and not self.sharded)):
                    raise
                problem = "compiler" if untried else "memory"
            if not (problem := self.reducer.finish(problem)):
                if self._untried and self.model is not unwrap(self.model) and (why := compiler.graph_breaks()):
                    text = f"torch.compile broke the network's graph, which makes it slower: {why}"
                    messages.append(Message(Event.COMPILER, text))
                self._untried = False
                return plan, sums, messages
            # Outside of the except block: the traceback would keep the activations alive.
            optim.copy_tensors(self._buffers, self._before)
            if problem == "compiler":  # a real error of the model returns uncompiled
                self.model = unwrap(self.model)
                messages.append(Message(Event.COMPILER, f"torch.compile failed, continuing without it: {text[:200]}"))
                continue
            size = self.ranks.same(min(self.micro_batch, rows(batch)))
            self.micro_batch = -(-size // 2)
            text = f"out of memory with a micro-batch of {size} ({text}); the update is repeated with"
            text = f"{text} {self.micro_batch}, which the run keeps from now on"
            messages.append(Message(Event.OUT_OF_MEMORY, text))

    def _judge(self, batch: Batch, plan: UpdatePlan, sums: dict[str, Tensor]) -> tuple[Stats, Tensor]:
        """Read the numbers and decide: stats and gradient norm."""
        self._unscaled = self.scaler.is_enabled()
        for optimiser in self._optimisers():
            self.scaler.unscale_(optimiser)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if variance := optim.noise_variance(self.config.optim, self.update):
            optim.add_noise(gradients, variance, self.config.seed, self.update)
        norm = full(get_total_norm(gradients))
        aside = [p.grad for p in self._side_parameters if p.grad is not None]
        with self.clock.phase("read"):
            found = {"": norm, **({"aside": get_total_norm(aside)} if aside else {}), **sums}
            wide = torch.float64 if any(value.dtype == torch.float64 for value in found.values()) else torch.float32
            read = torch.stack([value.detach().to(wide) for value in found.values()]).tolist()  # one transfer
            values = dict(zip(found, read, strict=True))
        norms = {name: values[name] if self.ranks.first else 0.0 for name in ("", "aside") if name in values}
        values = self.ranks.total(values | norms)
        grad_norm, counts = values.pop(""), {term: plan.totals[term] for term in plan.weights}
        moves = math.isfinite(values.pop("aside", 0.0))
        means = {k: v / counts[k.split("/")[0]] for k, v in values.items() if counts[k.split("/")[0]]}
        losses = {t: means[t] for t in sorted(counts) if t in means}
        finite = all(math.isfinite(values[term]) for term in counts)
        healthy = finite and math.isfinite(grad_norm) and moves
        overflow = not healthy and finite and self.scaler.get_scale() > 1
        detail = ""
        if not healthy:
            terms = [term for term in sorted(counts) if not math.isfinite(values[term])]
            detail = f"not finite: loss of {', '.join(terms)}" if terms else ""
            detail = "; ".join(filter(None, [detail, str(gradient_report(self.model))]))
            if self.config.health.hooks and not overflow and self.health.nonfinite == 0:
                # Only the rank holding that part of a sharded weight knows whether it is finite.
                detail += max(self.ranks.gather(self._first_nonfinite(batch, plan)), key=len)
        stats = Stats(
            step=self.update + 1,
            loss=sum(plan.weights[t] * loss for t, loss in losses.items()),
            main_loss=sum(plan.weights[t] * loss for t, loss in losses.items() if t in plan.main),
            losses=losses,
            metrics={name: mean for name, mean in means.items() if name not in counts},
            counts=counts,
            empty=tuple(term for term in sorted(counts) if not counts[term]),
            grad_norm=grad_norm,
            finite=healthy,
            overflow=overflow,
            detail=detail,
            clipped=grad_norm > self.config.optim.clip_norm,
            warming_up=self.update < self.warmup,
            learning_rate=self.schedule(self.update) * self.plateau.factor * self.health.rate_scale(self.update),
            passes=-(-rows(batch) // self.micro_batch),
            rows=plan.totals[""],
            gate=self.gate.factor(self.update) if self.gated else None,
            dropout=self.dropout.factor if self.config.train.dropout_stages else None,
            left_out=rows(batch) - plan.until if self.gated and self.gate.config.seconds else None,
        )
        self.consistent = False
        action, health = self.health.judge(stats), self.health
        counts_of_run = {name: getattr(health, name) for name in ("clip_share", "skipped", "overflows", "rollbacks")}
        return replace(stats, action=action, **counts_of_run), norm

    def _apply_or_skip(self, stats: Stats, norm: Tensor) -> list[Message]:
        """Apply the update, or restore buffers; messages."""
        messages, moved = list[Message](), stats.action is Action.OK
        with self.clock.phase("optimiser"):
            if moved:
                if stats.clipped:
                    clip_grads_with_norm_(self._parameters, self.config.optim.clip_norm, norm)
                if self._side_parameters:
                    clip_grad_norm_(self._side_parameters, self.config.optim.clip_norm)
                self.ranks.broadcast(self._statistics)
                for group in self.optimiser.param_groups:
                    group["lr"] = stats.learning_rate
                for optimiser in self._optimisers():
                    self.scaler.step(optimiser)
            else:
                optim.copy_tensors(self._buffers, self._before)
            if self.ema is not None:
                self.ema.after(self.steps, self.update, moved=moved)
        if not moved and not stats.overflow and self.gated and self.gate.freeze(self.update):
            text = f"self-supervised terms are left out for {self.gate.config.freeze_steps} updates"
            messages.append(Message(Event.GATED, text, "frozen"))
        self._close_scale(keep=not moved and not stats.overflow)
        self._streams = rng.capture(self.runtime.torch_device)
        self.update += 1
        self.consistent = True
        return messages

    def _close_scale(self, keep: bool) -> None:
        """Finish the loss scaler's part of an update. keep: leave the scale, as a bad batch says nothing about it."""
        if self._unscaled:
            self.scaler.update(self.scaler.get_scale() if keep else None)
            self._unscaled = False

    def _accumulate(self, batch: Batch, plan: UpdatePlan, timed: bool = True) -> dict[str, Tensor]:
        """Forward and backward of every micro-batch; sums of losses and metrics on the device."""
        sums, size, started = dict[str, Tensor](), rows(batch), time.monotonic()
        # collective, so before any rank may run out of memory
        total = plan.totals[""] if self.ranks.size > 1 else size
        for start, stop in self.reducer.passes(size, total, self.micro_batch):
            part = slice_batch(batch, start, stop)
            active = frozenset(plan.weights) if start < plan.until else plan.main
            for name, value in self._pass(part, plan, active).items():
                sums[name] = sums[name] + value if name in sums else value
            if stop < size:
                compiler.keep_gradients(self.runtime.compile, self._parameters)
            if timed and self.gate.config.seconds and start < plan.until <= stop and plan.main != active:
                synchronize(self.runtime.device)  # else only launches would be timed
                self.gate.row_seconds = (time.monotonic() - started) / plan.until
        return sums

    def _pass(self, part: Batch, plan: UpdatePlan, active: frozenset[str]) -> dict[str, Tensor]:
        """Forward and backward of one micro-batch's share of the weighted loss; detached sums by name."""
        with self.clock.phase("copy"):
            part = to_device(part, self.runtime.torch_device)
        if self.teacher is not None:
            with self.clock.phase("teacher"):
                part = self.taught(part)
        with self.clock.phase("forward"):
            if self.runtime.compile in compiler.GRAPHS:  # they may now overwrite the previous outputs
                torch.compiler.cudagraph_mark_step_begin()
            with self.runtime.autocast():
                losses, metrics = self.task.losses(self.model, part, active)
            assert losses.keys() == active, f"task gave {sorted(losses)}, not {sorted(active)}"
            # A term without items is multiplied by 0, not left out, to keep its graph.
            factors = {t: plan.weights[t] / plan.totals[t] if plan.totals[t] else 0.0 for t in sorted(losses)}
            total = torch.stack([losses[t] * factor for t, factor in factors.items()]).sum()
        if not total.requires_grad:
            raise ValueError("no parameter receives a gradient: the losses do not depend on the model")
        with self.clock.phase("backward"):
            self.scaler.scale(total).backward()
        return {name: value.detach() for name, value in (losses | metrics).items()}

    def _first_nonfinite(self, batch: Batch, plan: UpdatePlan) -> str:
        """Replay the update with a check on every module; what first became non-finite, as text."""
        compiled, self.model = self.model, unwrap(self.model)  # a compiled graph has no hooks
        optim.copy_tensors(self._buffers, self._before)
        after = rng.capture(self.runtime.torch_device)
        rng.restore(self._streams, self.runtime.torch_device)
        try:
            name = first_nonfinite(lambda: self._accumulate(batch, plan, timed=False), self.model)
        except (RuntimeError, MemoryError) as error:
            if self.sharded or not out_of_memory(error):  # other ranks of a sharded network wait inside a pass
                raise
            name = "not named, as the replay ran out of memory"
        finally:
            self.model = compiled
            rng.restore(after, self.runtime.torch_device)
        return f"; first: {name}" if name else ""

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        """Those that have gradients: the side optimizer's parameters may not be in the loss."""
        idle = all(parameter.grad is None for parameter in self._side_parameters)
        return [self.optimiser] if self.side_optimizer is None or idle else [self.optimiser, self.side_optimizer]


@contextlib.contextmanager
def trial_step(task: Task, runtime: Runtime, config: Config) -> Iterator[Step]:
    """A step with a fresh network for trial updates before a run; random streams are restored."""
    streams = rng.capture(runtime.torch_device)
    try:
        yield Step(task, fresh_model(task), runtime, config, steps=1000)
    finally:
        rng.restore(streams, runtime.torch_device)
