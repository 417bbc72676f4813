"""One update: micro-batches to the device, backward, one host read, verdict, optimiser step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from matrixlib.config import Config, OptimConfig
from matrixlib.engine.health import Health, Verdict
from matrixlib.engine.optim import EMA, Schedule, unwrap
from matrixlib.engine.optim import optimiser as build_optimiser
from matrixlib.engine.task import Batch, Task, active_terms, rows, slice_batch, to_device

if TYPE_CHECKING:
    from matrixlib.runtime import Runtime


def place(model: nn.Module, runtime: Runtime) -> tuple[nn.Module, nn.Module]:
    """(plain module, module to train with): on the device, in its memory format, compiled where it pays.

    Evaluation and state dicts use the plain one: no `_orig_mod.` in names, no recompiling in eval mode.
    """
    plain = unwrap(model).to(runtime.torch_device)
    if runtime.channels_last:
        plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if plain is not model:
        return plain, model
    forward: Any = torch.compile(plain) if runtime.compile else plain
    return plain, forward


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
    by "term/name". counts: items by term; a term without items is in `empty` and not in `losses`. grad_norm:
    global norm before clipping (unscaled). overflow: skipped because the loss scale was too large.
    loss_scale: the scale used, None without a scaler. micro_batches: forward passes made.
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
    report: GradientReport | None = None


class Step:
    """Makes one update from one batch. State: `update` (index of the next one), scaler, health."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimiser: torch.optim.AdamW,
        schedule: Schedule,
        runtime: Runtime,
        config: OptimConfig,
        micro_batch: int,
        ema: EMA | None = None,
        health: Health | None = None,
    ) -> None:
        """model: on the device, may be compiled. micro_batch: rows of one forward pass."""
        if micro_batch < 1:
            raise ValueError(f"micro_batch must be at least 1, got {micro_batch}")
        self.model, self.task, self.optimiser, self.schedule = model, task, optimiser, schedule
        self.runtime, self.config, self.micro_batch, self.ema = runtime, config, micro_batch, ema
        self.health = health or Health()
        self.active = active_terms(task)
        if not self.active:
            raise ValueError("every loss weight is 0, so there is nothing to train; set one above 0")
        self.scaler = runtime.grad_scaler()
        self.update = 0
        self._parameters = [p for group in optimiser.param_groups for p in group["params"]]
        self._buffers = [b for b in unwrap(model).buffers() if b is not None]

    def __call__(self, batch: Batch, report: bool = False) -> StepStats:
        """One update from `batch` (host tensors, B rows). No weight or buffer moves if it is not finite.

        Each term's sum is divided by its count in the whole batch, so the micro-batch size does not change
        the gradient. report: also look at every gradient (a second host read). Raises ValueError when no
        parameter receives a gradient.
        """
        counts = self.task.counts(batch)
        before = [buffer.clone() for buffer in self._buffers]  # BatchNorm moves in the forward pass
        self.optimiser.zero_grad(set_to_none=True)
        sums, size = self._accumulate(batch, counts)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimiser)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = get_total_norm(gradients)
        values = _read({"": norm, **sums})

        grad_norm = values.pop("")
        losses = {t: values[t] / counts[t] for t in sorted(self.active) if counts[t]}
        loss = math.fsum(self.task.weights[term] * value for term, value in losses.items())
        finite = all(math.isfinite(values[term]) for term in self.active)
        healthy = finite and math.isfinite(grad_norm)
        clipped = grad_norm > self.config.clip_norm
        rate = self.schedule(self.update)
        overflow = False
        if not healthy and self.scaler is not None:
            overflow = finite and self.scaler.get_scale() > 1
        found = gradient_report(self.model) if report or not healthy else None
        verdict = self.health.judge(
            loss,
            grad_norm,
            finite,
            overflow=overflow,
            clipped=clipped,
            warming_up=self.update < self.schedule.warmup,
            detail="" if healthy else _culprits({t: values[t] for t in self.active}, found),
        )
        if verdict is Verdict.OK:
            if clipped:
                clip_grads_with_norm_(self._parameters, self.config.clip_norm, norm)
            self._move(rate)
        else:
            with torch.no_grad():
                for buffer, old in zip(self._buffers, before, strict=True):
                    buffer.copy_(old)
        if self.scaler is not None:
            self.scaler.update()
        self.update += 1
        return StepStats(
            update=self.update - 1,
            loss=loss,
            losses=losses,
            metrics=_means({k: v for k, v in values.items() if k not in self.active}, counts),
            counts=counts,
            empty=tuple(term for term in sorted(self.active) if not counts[term]),
            grad_norm=grad_norm,
            clipped=clipped,
            learning_rate=rate,
            verdict=verdict,
            overflow=overflow,
            micro_batches=-(-size // self.micro_batch),
            report=found,
        )

    def _accumulate(self, batch: Batch, counts: dict[str, int]) -> tuple[dict[str, Tensor], int]:
        """Forward and backward of every micro-batch; sums of losses and metrics on the device, and rows."""
        sums: dict[str, Tensor] = {}
        size = rows(batch)
        for start in range(0, size, self.micro_batch):
            part = slice_batch(batch, start, min(start + self.micro_batch, size))
            part = to_device(part, self.runtime.torch_device)
            with self.runtime.autocast():
                losses, metrics = self.task.losses(self.model, part, self.active)
            assert losses.keys() == self.active, (
                f"task gave {sorted(losses)}, asked for {sorted(self.active)}"
            )
            weights = self.task.weights
            # A term without items is a zero that keeps its graph: multiplied by 0, not left out.
            total = torch.stack(
                [losses[t] * (weights[t] / counts[t] if counts[t] else 0.0) for t in sorted(losses)]
            ).sum()
            if not total.requires_grad:
                raise ValueError("no parameter receives a gradient: the losses do not depend on the model")
            (total if self.scaler is None else self.scaler.scale(total)).backward()
            for name, value in (losses | metrics).items():
                value = value.detach()
                sums[name] = sums[name] + value if name in sums else value
        return sums, size

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
    return Step(forward, task, adamw, schedule, runtime, config.optim, runtime.micro_batch, ema)


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
