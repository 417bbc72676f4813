"""One update: micro-batches to the device, backward, one host read, verdict, optimiser step."""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from matrixlib.config import Config
from matrixlib.engine import rng
from matrixlib.engine.gating import Gate
from matrixlib.engine.health import Health, Measured, Verdict
from matrixlib.engine.hooks import first_nonfinite
from matrixlib.engine.memory import out_of_memory
from matrixlib.engine.optim import EMA, Schedule, unwrap
from matrixlib.engine.optim import optimiser as build_optimiser
from matrixlib.engine.task import Batch, Task, active_terms, rows, slice_batch, to_device
from matrixlib.engine.timing import Clock
from matrixlib.files import cache_root

if TYPE_CHECKING:
    from matrixlib.hardware.runtime import Runtime


def place(model: nn.Module, runtime: Runtime) -> tuple[nn.Module, nn.Module]:
    """(plain module, module to train with): on the device, in its memory format, compiled where it pays.

    Evaluation and state dicts use the plain one: no `_orig_mod.` in names, no recompiling in eval mode.
    """
    plain = unwrap(model).to(runtime.torch_device)
    if runtime.channels_last:
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plain is not model:
        return plain, model
    if not runtime.compile:
        return plain, plain
    return plain, compiled(plain)


def compiled(model: nn.Module, dynamic: bool | None = None) -> nn.Module:
    """torch.compile; what it makes is kept with our other files: torch alone keeps it under /tmp, which a restart of
    the machine empties.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_root() / "compiled"))
    forward: Any = torch.compile(model, dynamic=dynamic)
    return forward


@dataclass(frozen=True)
class GradientReport:
    """Parameters whose gradient looks wrong, by name; asked for at the first update.

    missing: no gradient at all (cut off from every active loss). nonfinite: NaN or infinity in it. zero: all
    zero. Some are rightly so: heads of inactive terms are missing, a layer behind one that starts at zero is
    zero.
    """

    missing: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, at most five names a kind; empty when nothing looks wrong."""
        parts = []
        for kind, names in (
            ("no", self.missing),
            ("a non-finite", self.nonfinite),
            ("an all-zero", self.zero),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                parts.append(f"{kind} gradient: {', '.join(names[:5])}{more}")
        return "; ".join(parts)


def gradient_report(model: nn.Module) -> GradientReport:
    """Look at `.grad` of every trainable parameter; one host read."""
    named = [(name, p.grad) for name, p in unwrap(model).named_parameters() if p.requires_grad]
    present = [(name, grad) for name, grad in named if grad is not None]
    flags: list[list[bool]] = []
    if present:
        tests = [torch.stack((grad.isfinite().all(), (grad != 0).any())) for _, grad in present]
        flags = torch.stack(tests).tolist()
    names = [name for name, _ in present]
    return GradientReport(
        missing=tuple(name for name, grad in named if grad is None),
        nonfinite=tuple(name for name, (finite, _) in zip(names, flags, strict=True) if not finite),
        zero=tuple(name for name, (_, any_) in zip(names, flags, strict=True) if not any_),
    )


@dataclass(frozen=True)
class StepStats:
    """Numbers of one update, all on the host.

    update: its index, from 0. loss: weighted total of `losses`, the means over items by term. metrics: means
    by "term/name". counts: items by term; a term without items is in `empty` and not in `losses`; one that is
    gated out is in neither. grad_norm: global norm before clipping (unscaled). overflow: skipped because the
    loss scale was too large. micro_batches: forward passes made. gate: factor on the weights of the
    self-supervised terms. messages: what a person should know.
    """

    update: int
    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    counts: dict[str, int]
    empty: tuple[str, ...]
    grad_norm: float
    clipped: bool
    learning_rate: float
    verdict: Verdict
    overflow: bool
    micro_batches: int
    gate: float = 1.0
    report: GradientReport | None = None
    messages: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """What an update computes. weights: factor of each term's mean. counts: its items. until: rows with the gated
    terms; the others get the terms of `main` alone.
    """

    weights: dict[str, float]
    counts: dict[str, int]
    main: frozenset[str]
    until: int


class Step:
    """Makes one update from one batch.

    State: `update` (index of the next one), `micro_batch` (halved when memory runs out), scaler, health, gate.
    `moving` is True while weights and counters are being changed: an error then leaves them half-changed.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimiser: torch.optim.AdamW,
        schedule: Schedule,
        runtime: Runtime,
        config: Config,
        micro_batch: int,
        ema: EMA | None,
        health: Health,
        gate: Gate,
    ) -> None:
        """model: on the device, may be compiled. micro_batch: rows of one forward pass."""
        if micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
        self.model, self.task, self.optimiser, self.schedule = model, task, optimiser, schedule
        self.runtime, self.config, self.micro_batch, self.ema = runtime, config, micro_batch, ema
        self.health, self.gate = health, gate
        self.active = active_terms(task)
        if not self.active:
            raise ValueError("every loss weight is 0, so there is nothing to train; set one above 0")
        # where there are no other terms, an update without them would be none
        self.gated = task.gated & self.active if self.active - task.gated else frozenset()
        self.scaler = runtime.grad_scaler()
        self.clock = Clock(runtime.torch_device)
        self.update = 0
        self.moving = self._unscaled = False
        self._untried = True  # until an update has gone through the model, which may fail to compile
        self._parameters = [p for group in optimiser.param_groups for p in group["params"]]
        self._buffers = [b for b in unwrap(model).buffers() if b is not None]

    def __call__(self, batch: Batch, report: bool = False) -> StepStats:
        """One update from `batch` (host tensors, B rows). No weight or buffer moves if it is not finite.

        Each term's sum is divided by its count in the whole batch, so the micro-batch size does not change
        the gradient. Where memory runs out, the update is repeated with half the micro-batch, from the same
        random state and buffers. report: also look at every gradient (a second host read). Raises ValueError
        when no parameter receives a gradient. After any error but one while `moving` the state is as before.
        """
        streams, before = rng.capture(self.runtime.torch_device), [b.clone() for b in self._buffers]
        messages: list[str] = []
        try:
            plan, sums = self._sums(batch, streams, before, messages)
            self._untried = False
            return self._judged(batch, plan, sums, streams, before, messages, report)
        except BaseException:
            if not self.moving:
                with contextlib.suppress(RuntimeError):  # a device that is gone; the error says so
                    self._restore(before)
            self._keep_scale()
            raise

    def _plan(self, batch: Batch) -> _Plan:
        factor = self.gate.factor(self.update)
        gated = self.gated
        active = self.active if factor else self.active - gated
        size, counts = rows(batch), self.task.counts(batch)
        until = self.gate.rows(size, self.micro_batch) if gated & active else size
        if until < size:
            counts |= {t: n for t, n in self.task.counts(slice_batch(batch, 0, until)).items() if t in gated}
        weights = {t: self.task.weights[t] * (factor if t in gated else 1.0) for t in active}
        return _Plan(weights, {t: counts[t] for t in active}, active - gated, until)

    def _sums(
        self, batch: Batch, streams: rng.Streams, before: list[Tensor], messages: list[str]
    ) -> tuple[_Plan, dict[str, Tensor]]:
        """Gradients of the whole batch in `.grad`; what was computed, sums of losses and metrics on the device."""
        while True:
            self.optimiser.zero_grad(set_to_none=True)
            plan = self._plan(batch)
            try:
                return plan, self._accumulate(batch, plan)
            except (RuntimeError, MemoryError) as error:
                short, said = out_of_memory(error), str(error).splitlines()[0] if str(error) else repr(error)
                untried = not short and self._untried and unwrap(self.model) is not self.model
                if not untried and (self.micro_batch == 1 or not short):
                    raise
            # Outside of the except block: the traceback would keep the activations alive.
            if untried:  # an error of the model's own comes back without the compiler
                self.model = unwrap(self.model)
                messages.append(f"torch.compile failed, going on without it: {said[:200]}")
                self._restore(before)
                rng.restore(streams, self.runtime.torch_device)
                continue
            size = min(self.micro_batch, rows(batch))
            self.micro_batch = -(-size // 2)
            messages.append(
                f"out of memory with a micro-batch of {size} ({said}); the update is repeated with "
                f"{self.micro_batch}, which the run keeps from now on"
            )
            self._restore(before)
            rng.restore(streams, self.runtime.torch_device)

    def _judged(
        self,
        batch: Batch,
        plan: _Plan,
        sums: dict[str, Tensor],
        streams: rng.Streams,
        before: list[Tensor],
        messages: list[str],
        report: bool,
    ) -> StepStats:
        """Read the numbers, decide, and move the weights or put the buffers back."""
        if self.scaler is not None:
            self._unscaled = True
            self.scaler.unscale_(self.optimiser)
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        with self.clock.phase("read"):
            values = _read({"": norm, **sums})

        grad_norm, counts = values.pop(""), plan.counts
        losses = {t: values[t] / counts[t] for t in sorted(counts) if counts[t]}
        finite = all(math.isfinite(values[term]) for term in counts)
        healthy = finite and math.isfinite(grad_norm)
        overflow = not healthy and finite and self.scaler is not None and self.scaler.get_scale() > 1
        found = gradient_report(self.model) if report or not healthy else None
        detail = ""
        if not healthy:
            detail = _culprits({t: values[t] for t in counts}, found)
            if self.config.health.hooks and not overflow and self.health.nonfinite == 0:
                detail += self._first_nonfinite(batch, plan, streams, before)
        clipped = grad_norm > self.config.optim.clip_norm
        rate = self.schedule(self.update) * self.health.rate_scale(self.update)
        self.moving = True  # from here on counters and weights change together
        verdict = self.health.judge(
            Measured(
                self.update,
                sum(plan.weights[t] * loss for t, loss in losses.items() if t in plan.main),
                grad_norm,
                healthy,
                overflow,
                clipped,
                self.update < self.schedule.warmup,
                detail,
            )
        )
        if verdict is Verdict.OK:
            if clipped:
                clip_grads_with_norm_(self._parameters, self.config.optim.clip_norm, norm)
            with self.clock.phase("optimiser"):
                self._move(rate)
        else:
            self._restore(before)
            unstable = not overflow and self.gated
            if unstable and self.gate.freeze(self.update):
                messages.append(
                    f"self-supervised terms are left out for {self.gate.config.freeze_steps} updates"
                )
        if self.scaler is not None and (verdict is Verdict.OK or overflow):
            self.scaler.update()
            self._unscaled = False
        self._keep_scale()
        self.update += 1
        self.moving = False
        return StepStats(
            update=self.update - 1,
            loss=sum(plan.weights[t] * loss for t, loss in losses.items()),
            losses=losses,
            metrics=_means({k: v for k, v in values.items() if k not in counts}, counts),
            counts=counts,
            empty=tuple(term for term in sorted(counts) if not counts[term]),
            grad_norm=grad_norm,
            clipped=clipped,
            learning_rate=rate,
            verdict=verdict,
            overflow=overflow,
            micro_batches=-(-rows(batch) // self.micro_batch),
            gate=self.gate.factor(self.update - 1),
            report=found,
            messages=tuple(messages),
        )

    def _keep_scale(self) -> None:
        """Close an update whose gradients were unscaled and not used, with the loss scale as it is: a bad batch says
        nothing about it.
        """
        if self.scaler is not None and self._unscaled:
            self.scaler.update(self.scaler.get_scale())
            self._unscaled = False

    def _accumulate(self, batch: Batch, plan: _Plan, timed: bool = True) -> dict[str, Tensor]:
        """Forward and backward of every micro-batch; sums of losses and metrics on the device."""
        sums: dict[str, Tensor] = {}
        size, started = rows(batch), time.monotonic()
        for start in range(0, size, self.micro_batch):
            part = slice_batch(batch, start, min(start + self.micro_batch, size))
            active = frozenset(plan.weights) if start < plan.until else plan.main
            with self.clock.phase("copy"):
                part = to_device(part, self.runtime.torch_device)
            with self.clock.phase("forward"):
                total, found = self._forward(part, plan, active)
            if not total.requires_grad:
                raise ValueError("no parameter receives a gradient: the losses do not depend on the model")
            with self.clock.phase("backward"):
                (total if self.scaler is None else self.scaler.scale(total)).backward()
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
            stop = start + self.micro_batch
            if timed and self.gate.config.seconds and start < plan.until <= stop and plan.main != active:
                if self.runtime.device != "cpu":
                    torch.accelerator.synchronize()  # else the clock would see launches alone
                self.gate.took(time.monotonic() - started, plan.until)
        return sums

    def _forward(self, part: Batch, plan: _Plan, active: frozenset[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted loss of one micro-batch on the device, its share of the update's, and detached sums by name."""
        with self.runtime.autocast():
            losses, metrics = self.task.losses(self.model, part, active)
        assert losses.keys() == active, f"task gave {sorted(losses)}, asked for {sorted(active)}"
        # A term without items is a zero that keeps its graph: multiplied by 0, not left out.
        total = torch.stack(
            [
                losses[t] * (plan.weights[t] / plan.counts[t] if plan.counts[t] else 0.0)
                for t in sorted(losses)
            ]
        ).sum()
        return total, {name: value.detach() for name, value in (losses | metrics).items()}

    def _first_nonfinite(self, batch: Batch, plan: _Plan, streams: rng.Streams, before: list[Tensor]) -> str:
        """Replay the update with a check on every module; the first that went bad, in words. Gradients and buffers
        are left as the replay makes them: the update moves nothing.
        """
        compiled, self.model = self.model, unwrap(self.model)  # a compiled graph has no hooks
        self._restore(before)
        after = rng.capture(self.runtime.torch_device)
        rng.restore(streams, self.runtime.torch_device)
        try:
            name = first_nonfinite(lambda: self._accumulate(batch, plan, timed=False), self.model)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            name = "not named, as the replay ran out of memory"
        finally:
            self.model = compiled
            rng.restore(after, self.runtime.torch_device)
        return f"; first: {name}" if name else ""

    def _restore(self, before: list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, old in zip(self._buffers, before, strict=True):
                buffer.copy_(old)

    def _move(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if self.scaler is None:
            self.optimiser.step()
        else:
            self.scaler.step(self.optimiser)
        if self.ema is not None:
            self.ema.update(self.model)


def make_step(task: Task, model: nn.Module, runtime: Runtime, config: Config, steps: int) -> Step:
    """The step of a run of `steps` updates: model on the device in training mode, optimiser, averages."""
    plain, forward = place(model, runtime)
    plain.train()
    adamw = build_optimiser(plain, config.optim, runtime.torch_device)
    schedule = Schedule.of(config.optim, steps)
    ema = EMA(plain, config.optim.ema_decay) if config.optim.ema_decay else None
    health, gate = Health(config.health), Gate(config.gating)
    return Step(forward, task, adamw, schedule, runtime, config, runtime.micro_batch, ema, health, gate)


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """All values in one transfer from the device."""
    wide = any(value.dtype == torch.float64 for value in values.values())
    dtype = torch.float64 if wide else torch.float32
    stacked = torch.stack([value.detach().to(dtype) for value in values.values()])
    return dict(zip(values, stacked.tolist(), strict=True))


def _means(sums: dict[str, float], counts: dict[str, int]) -> dict[str, float]:
    """Metric sums "term/name" divided by the counts of their terms; those without items are left out."""
    terms = {name: name.split("/")[0] for name in sums}
    return {name: value / counts[terms[name]] for name, value in sums.items() if counts[terms[name]]}


def _culprits(sums: dict[str, float], found: GradientReport | None) -> str:
    terms = sorted(term for term, value in sums.items() if not math.isfinite(value))
    parts = [f"not finite: loss of {', '.join(terms)}"] if terms else []
    return "; ".join([*parts, str(found)] if found and str(found) else parts)
