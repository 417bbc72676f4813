"""Averaged weights, which are evaluated and exported in place of the raw ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from matrixlib.config import OptimConfig
from matrixlib.engine.optim import copy_tensors, load_tensors, named_tensors, unwrap


class Average:
    """What is evaluated and exported in place of a model's weights. averages: updates that it has averaged in."""

    averages: int

    def update(self) -> None:
        """Call once per optimiser step, after it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged tensors under the names of `named_tensors`; `load_tensors` puts them into a model."""
        raise NotImplementedError

    def load_state_dict(self, tensors: Mapping[str, Tensor], averages: int) -> None:
        """Restore; `averages` is the number of averages so far. ValueError when the names differ."""
        raise NotImplementedError

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The averaged weights stand in `model` inside the context; the exact raw ones come back after it."""
        raw = {name: value.clone() for name, value in named_tensors(model).items()}
        try:
            load_tensors(model, self.state_dict(), "average")
            yield
        finally:
            load_tensors(model, raw)


class EMA(Average):
    """Exponential moving average of a model's weights, evaluated and exported in place of them.

    Floating buffers (BatchNorm statistics) are averaged like the weights: the raw statistics belong to the
    raw weights. Integer buffers are copied. The decay is min(decay, (1 + t) / (10 + t)) at the t-th average,
    so that the start does not weigh in for long. Averaged only after updates that moved the weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the model's present weights; `decay` in [0, 1). The model's tensors are changed in place from then
        on, never replaced: they are looked up once, since a large model's state dict takes longer than its average.
        """
        if not 0 <= decay < 1:
            raise ValueError(f"EMA decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.averages = 0
        present = named_tensors(model)
        self._tensors = {name: value.clone() for name, value in present.items()}
        pairs = [(self._tensors[name], value) for name, value in present.items()]
        self._floating = [pair for pair in pairs if pair[1].is_floating_point()]
        self._integer = [pair for pair in pairs if not pair[1].is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Average the model's present weights in; call once per optimiser step."""
        decay = min(self.decay, (1 + self.averages) / (10 + self.averages))
        self.averages += 1
        average, present = zip(*self._floating, strict=True)
        get_ema_multi_avg_fn(decay)(average, present, None)
        if self._integer:
            copy_tensors(*zip(*self._integer, strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged tensors under the names of `named_tensors`; `load_tensors` puts them into a model."""
        return dict(self._tensors)

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], averages: int) -> None:
        """Restore; `averages` is the number of averages so far. ValueError when the names differ."""
        if odd := sorted(set(tensors) ^ set(self._tensors)):
            raise ValueError(f"EMA: {len(odd)} names differ from this model's: {', '.join(odd[:5])}")
        for name, value in self._tensors.items():
            value.copy_(tensors[name])
        self.averages = averages


class FreePoint(Average):
    """The averaged point of schedule-free AdamW, x = y + (1 - 1 / beta1) (z - y): y are the model's weights, at which
    gradients are taken, z the optimiser's (Defazio et al. 2024, https://arxiv.org/abs/2405.15682).

    It is made when it is asked for, beside the weights: putting x in the place of y and y back again, as the library's
    `eval` and `train` do, is not exact, and a run with more validations would be another run.
    """

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
        self.averages = 0
        self._model, self._optimiser = model, optimiser

    def update(self) -> None:
        self.averages += 1

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        tensors = {name: value.clone() for name, value in named_tensors(self._model).items()}
        names = {id(parameter): name for name, parameter in unwrap(self._model).named_parameters()}
        for group in self._optimiser.param_groups:
            for parameter in group["params"]:
                if "z" in self._optimiser.state[parameter]:
                    z = self._optimiser.state[parameter]["z"]
                    tensors[names[id(parameter)]] = parameter.detach().lerp(z, 1 - 1 / group["betas"][0])
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor], averages: int) -> None:
        self.averages = averages  # the rest is in the weights and in the optimiser's state


def average(model: nn.Module, optimiser: torch.optim.Optimizer, config: OptimConfig) -> Average | None:
    """The average that is evaluated; None: the raw weights are."""
    if config.optimiser == "schedule_free":
        return FreePoint(model, optimiser)
    return EMA(model, config.ema_decay) if config.ema_decay else None
