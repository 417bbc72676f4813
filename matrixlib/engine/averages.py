"""Averaged weights (EMA, SWA, schedule-free) for evaluation and export, with matching BatchNorm statistics."""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from matrixlib.config import OptimConfig
from matrixlib.engine import rng
from matrixlib.engine.distributed import batch_norms, gather_full, is_sharded, unsharded
from matrixlib.engine.optim import copy_named, copy_tensors, load_tensors, named_tensors, unwrap
from matrixlib.engine.task import Source, rows, slice_batch, to_device

BATCHES = 16  # training batches for BatchNorm statistics; costs about five updates


class Average:
    """Weights that are evaluated and exported instead of the model's.

    averages: number of updates averaged. lacks_statistics: BatchNorm statistics are not averaged with the weights.
    statistics: BatchNorm buffers recomputed by `EvalWeights`, by `named_tensors` names; empty until then.
    """

    lacks_statistics = True

    def __init__(self, model: nn.Module) -> None:
        self._model, self.averages = model, 0
        self.statistics: Mapping[str, Tensor] = {}

    def update(self) -> None:
        self.averages, self.statistics = self.averages + 1, {}

    def after(self, steps: int, update: int, moved: bool) -> None:
        """Call after each update with its index. moved: the update changed the weights."""
        if moved:
            self.update()

    def _averaged(self) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Averaged tensors by `named_tensors` names; `load_tensors` copies them into a model."""
        return {**named_tensors(self._model), **self._averaged(), **self.statistics}

    def load_state_dict(self, tensors: Mapping[str, Tensor], averages: int) -> None:
        """Restore. ValueError if the names differ."""
        self.averages, self.statistics = averages, {}


class EMA(Average):
    """Exponential moving average of a model's weights over updates that changed them.

    Floating-point buffers (BatchNorm statistics) are averaged, integer ones copied. Decay at the t-th average:
    min(decay, (1 + t) / (10 + t)). Tensors are looked up once, so the model's must not be replaced.
    """

    lacks_statistics = False

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self.decay = decay
        present = named_tensors(model)
        self._tensors = {name: value.clone() for name, value in present.items()}
        pairs = [(self._tensors[name], value) for name, value in present.items()]
        floating = [pair for pair in pairs if pair[1].is_floating_point()]
        kinds = ([pair for pair in floating if is_sharded(pair[1]) is cut] for cut in (False, True))
        self._floating = [kind for kind in kinds if kind]  # no operation takes both
        self._integer = [pair for pair in pairs if not pair[1].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.averages) / (10 + self.averages))
        super().update()
        for pairs in self._floating:
            average, present = zip(*pairs, strict=True)
            get_ema_multi_avg_fn(decay)(average, present, None)
        if self._integer:
            copy_tensors(*zip(*self._integer, strict=True))

    def _averaged(self) -> Mapping[str, Tensor]:
        return self._tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor], averages: int) -> None:
        copy_named(self._tensors, tensors, "EMA")
        super().load_state_dict(tensors, averages)


class SWA(Average):
    """Stochastic weight averaging: the mean of the weights at every `interval`-th update of the last `share` of the
    run, its last included (Izmailov et al. 2018, https://arxiv.org/abs/1803.05407); before, the raw weights."""

    def __init__(self, model: nn.Module, share: float, interval: int) -> None:
        super().__init__(model)
        self.share, self.interval = share, interval
        names = {name for name, _ in unwrap(model).named_parameters(remove_duplicate=False)}
        self._means = {name: value.clone() for name, value in named_tensors(model).items() if name in names}

    def after(self, steps: int, update: int, moved: bool) -> None:
        left, before = steps - 1 - update, steps - update
        if left >= self.share * steps:
            self.averages = 0  # a finished run is being extended
        elif math.ceil(left / self.interval) < math.ceil(before / self.interval):
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        present = named_tensors(self._model)
        new = [present[name] for name in self._means]
        get_swa_multi_avg_fn()(list(self._means.values()), new, self.averages)  # the first is copied
        super().update()

    def _averaged(self) -> Mapping[str, Tensor]:
        return self._means if self.averages else {}

    def load_state_dict(self, tensors: Mapping[str, Tensor], averages: int) -> None:
        buffers = named_tensors(self._model).keys() - self._means.keys()
        copy_named(self._means, {name: value for name, value in tensors.items() if name not in buffers}, "SWA")
        super().load_state_dict(tensors, averages)


class ScheduleFreeAverage(Average):
    """The averaged point of schedule-free AdamW, x = y + (1 - 1 / beta1) (z - y): y are the model's weights, z the
    optimizer's (Defazio et al. 2024, https://arxiv.org/abs/2405.15682). Computed in a copy: the library's `eval` and
    `train` do not restore y exactly."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        super().__init__(model)
        self._optimiser = optimiser

    @torch.no_grad()
    def _averaged(self) -> Mapping[str, Tensor]:
        tensors, (beta, _) = dict[str, Tensor](), self._optimiser.param_groups[0]["betas"]
        for name, parameter in unwrap(self._model).named_parameters():
            if "z" in (state := self._optimiser.state.get(parameter, {})):
                tensors[name] = parameter.detach().lerp(state["z"], 1 - 1 / beta)
        return tensors


def average(model: nn.Module, optimiser: torch.optim.Optimizer, config: OptimConfig) -> Average | None:
    """The configured average; None to evaluate the raw weights."""
    if config.optimiser == "schedule_free":
        return ScheduleFreeAverage(model, optimiser)
    if config.swa:
        return SWA(model, config.swa, config.swa_interval)
    return EMA(model, config.ema_decay) if config.ema_decay else None


class EvalWeights:
    """Swaps a `Step`'s evaluation weights in and out. source: the phase's batches, for BatchNorm statistics."""

    def __init__(self, step: Any) -> None:
        self._step, self._model = step, unwrap(step.model)
        self._source: Source | None = None

    @contextmanager
    def applied(self, source: Source) -> Iterator[None]:
        """Context in which the step's model holds the evaluation weights, on every rank; then the raw ones again."""
        average, raw = self._step.ema, dict[str, Tensor]()
        self.renew(source)
        try:
            if average is not None:
                raw = {name: value.clone() for name, value in named_tensors(self._model).items()}
                load_tensors(self._model, average.state_dict(), "average")
            with unsharded(self._model):
                if average is not None and average.lacks_statistics:
                    self._step.ranks.broadcast(_statistics(self._model).values())
                yield
        finally:
            if raw:
                load_tensors(self._model, raw)

    def network(self, source: Source) -> nn.Module | None:
        """A frozen copy of the model with the evaluation weights in eval mode on rank 0, None on others. Collective."""
        self.renew(source)
        average, step = self._step.ema, self._step
        tensors = average.state_dict() if average is not None else {}
        if step.sharded:
            tensors = gather_full({"": tensors or named_tensors(self._model)}, step.ranks)[""]
        if not step.ranks.first:
            return None
        model = step.task.build_model().to(step.runtime.torch_device) if step.sharded else copy.deepcopy(self._model)
        if tensors:
            load_tensors(model, tensors, "average")
        return model.requires_grad_(False).eval()

    def renew(self, source: Source) -> None:
        """Recompute BatchNorm statistics on rank 0 if the average or `source` changed (`applied` broadcasts them). No
        weight, gradient, random stream or training batch changes."""
        average = self._step.ema
        if average is None or not (average.lacks_statistics and average.averages and _statistics(self._model)):
            return
        if not self._step.ranks.first or (source is self._source and average.statistics):
            return
        batches, self._source = list(source.batches(0, BATCHES)), source
        step, model = self._step, copy.deepcopy(self._model).eval()
        load_tensors(model, average.state_dict(), "average")
        for norm in batch_norms(model):  # means over passes as in training, without dropout
            norm.reset_running_stats()
            norm.momentum, norm.training = None, True
        made = _statistics(model)
        size, device, buffers = step.micro_batch, step.runtime.torch_device, list(made.values())
        streams = rng.capture(device)
        try:
            rng.restore(rng.seeded(step.config.seed, device), device)  # a task may draw in its losses
            for part in (slice_batch(b, start, start + size) for b in batches for start in range(0, rows(b), size)):
                before = [buffer.clone() for buffer in buffers]
                with torch.inference_mode(), step.runtime.autocast():
                    step.task.losses(model, step.taught(to_device(part, device)), step.active)
                if not torch.stack([buffer.isfinite().all() for buffer in buffers]).all():  # a bad batch
                    copy_tensors(buffers, before)
        finally:
            rng.restore(streams, device)
        average.statistics = made


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """BatchNorm buffers by name."""
    inner = {id(buffer) for norm in batch_norms(model) for buffer in norm.buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) in inner}
