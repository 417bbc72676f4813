"""Optimiser, learning-rate schedule and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from matrixlib.config import OptimConfig
from matrixlib.engine.muon import Muon

DECAYED = (
    nn.Linear,
    nn.Bilinear,
    nn.MultiheadAttention,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Module types whose matrices get weight decay: those that multiply activations by them."""
FUSED = frozenset({"cpu", "cuda", "mps"})
"""Devices with a fused AdamW kernel in torch 2.11 and later."""


class PlainDescent(nn.Module):
    """A module whose own parameters are moved by plain gradient descent at `rate`, outside of schedule and decay, their
    gradients clipped by themselves. AdamW divides a gradient by its own size, so that a factor on it would be lost.
    """

    rate: float


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, whose state dict has plain names (no `_orig_mod.`)."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the unwrapped model by plain name, sharing its memory."""
    return dict(unwrap(model).state_dict())


@torch.no_grad()
def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], what: str = "model") -> None:
    """Copy `tensors` (names as `named_tensors` gives them) into the model in place.

    Raises ValueError naming what is missing, unknown or of another shape.
    """
    own = named_tensors(model)
    if odd := sorted(set(own) ^ set(tensors)):
        raise ValueError(f"{what}: names differ from this model's in {len(odd)} places: {', '.join(odd[:5])}")
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            shape = tuple(tensors[name].shape)
            raise ValueError(f"{what}: {name} has shape {shape}, the model's {tuple(value.shape)}")
    for name, value in own.items():
        value.copy_(tensors[name])


@torch.no_grad()
def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source into the target at its place: on a GPU by a launch for each dtype, not one for each tensor."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = kinds.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in kinds.values():
        torch._foreach_copy_(into, out_of)


def parameter_groups(model: nn.Module, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
    """Groups of an optimiser: decayed, and not decayed (weight_decay 0). Frozen parameters are in neither.

    Decayed are the parameters with two or more dimensions that belong to a `DECAYED` module: matrices and
    convolution kernels. Everything else is not: biases, norms, embeddings, and parameters that a module of
    our own holds directly, such as position encodings and attention biases. A parameter shared with one that
    must not decay (tied embeddings) does not decay. Those of a `PlainDescent` are in neither.

    muon: each group also says whether it is `orthogonal`. Those are the decayed ones of hidden layers; the network's
    `edges()` names the layers that take the data or give the outputs, which stay with AdamW as is the field's practice.
    Raises ValueError for a network without that method.
    """
    edges = _edges(unwrap(model)) if muon else frozenset()
    parameters: dict[int, nn.Parameter] = {}
    kinds: dict[int, tuple[bool, bool]] = {}
    for module in unwrap(model).modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not isinstance(module, PlainDescent):
                key, allowed = id(parameter), isinstance(module, DECAYED) and parameter.ndim >= 2
                decays, hidden = kinds.get(key, (True, muon))
                parameters[key] = parameter
                kinds[key] = allowed and decays, allowed and hidden and module not in edges
    groups: list[dict[str, Any]] = []
    for decayed, orthogonal in (True, True), (True, False), (False, False):
        members = [parameter for key, parameter in parameters.items() if kinds[key] == (decayed, orthogonal)]
        if members:
            groups.append(
                {"params": members, "weight_decay": weight_decay if decayed else 0.0, "orthogonal": orthogonal}
            )
    return groups


def _edges(network: nn.Module) -> frozenset[nn.Module]:
    edges = getattr(network, "edges", None)
    if edges is None:
        raise ValueError(
            f"muon moves the matrices of hidden layers alone: give {type(network).__name__} a method `edges()` that "
            "returns its first and last layers (of an own task), or choose another optim.optimiser"
        )
    return frozenset(inner for layer in edges() for inner in layer.modules())


def optimiser(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser that `config` names over `model`, which must already be on `device`: the fused kernel where there
    is one, else foreach.

    The step sets the learning rate of each update.
    Raises ValueError when no parameter can be trained.
    """
    muon = config.optimiser == "muon"
    groups = parameter_groups(model, config.weight_decay, muon)
    if not groups:
        raise ValueError("the model has no trainable parameter; every requires_grad is False")
    fused = device.type in FUSED
    options: dict[str, Any] = {"lr": config.learning_rate, "fused": fused, "foreach": None if fused else True}
    adam = options | {"betas": (config.beta1, config.beta2), "eps": config.eps}
    return Muon(groups, momentum=config.momentum, **adam) if muon else torch.optim.AdamW(groups, **adam)


def weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters by plain name, but for those of a `PlainDescent`."""
    own = {id(p) for module in _plain_descents(model) for p in module.parameters(recurse=False)}
    return [(name, p) for name, p in unwrap(model).named_parameters() if p.requires_grad and id(p) not in own]


def own_to_training(model: nn.Module) -> set[str]:
    """Names in the model's state of what no network but this training needs: every `PlainDescent`."""
    named = unwrap(model).named_modules()
    descents = [(name, module) for name, module in named if isinstance(module, PlainDescent)]
    return {f"{name}.{own}" for name, module in descents for own in module.state_dict()}


def descent(model: nn.Module) -> torch.optim.SGD | None:
    """The optimiser of every `PlainDescent`, which has no state; None where there is none."""
    groups = [{"params": list(m.parameters(recurse=False)), "lr": m.rate} for m in _plain_descents(model)]
    return torch.optim.SGD(groups, lr=0.0) if groups else None


def _plain_descents(model: nn.Module) -> list[PlainDescent]:
    return [module for module in unwrap(model).modules() if isinstance(module, PlainDescent)]


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state by parameter name: "trunk.0.weight/exp_avg" -> tensor; empty before the first
    update.
    """
    names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for group in optimiser.param_groups
        for parameter in group["params"]
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def load_optimiser(optimiser: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Restore what `optimiser_tensors` gave. Raises ValueError when a name is not a trainable parameter's."""
    names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        by_name.setdefault(name, {})[entry] = value
    state: dict[int, dict[str, Tensor]] = {}
    index = 0
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            entries = by_name.pop(names[id(parameter)], {})
            if entries:
                state[index] = {k: _like(parameter, v) if v.ndim else v.clone() for k, v in entries.items()}
            index += 1
    if by_name:
        raise ValueError(f"optimiser: the checkpoint has state of unknown parameters: {', '.join(sorted(by_name)[:5])}")
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value` in the memory format of `parameter`, as the optimiser itself would have made it."""
    if value.shape != parameter.shape:
        raise ValueError(f"optimiser: state {tuple(value.shape)} for a parameter {tuple(parameter.shape)}")
    return torch.empty_like(parameter, memory_format=torch.preserve_format).detach().copy_(value)


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a pure function of the update index.

    Update i (from 0) of `warmup`: peak * (i + 1) / warmup, so the first is peak / warmup and never 0. Then
    `kind` runs from peak to exactly peak * final_fraction at the last update (`constant` stays at peak).
    Skipped updates count: rate and data stay aligned. A warm-up longer than half the run is cut to half of it
    (smoke runs).

    bends: (update, end) of each change of plan: from that update on what is left of the curve is gone through faster or
    slower, so that it ends at update `end` - 1. The rate makes no jump, and its last value stays what it was to be.
    """

    peak: float
    kind: str
    final_fraction: float
    warmup: int
    steps: int
    bends: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, config: OptimConfig, steps: int, batch_size: int = 0) -> Schedule:
        """The schedule of a run of `steps` updates of `batch_size` rows.

        Where the rate is for batches of another size it grows with the root of the size: the noise of Adam's updates
        then stays the same (Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
        """
        if steps < 1:
            raise ValueError(f"a run needs at least one update, got {steps}")
        warmup = min(config.warmup_steps, steps // 2)
        scale = (batch_size / config.rate_batch) ** 0.5 if config.rate_batch and batch_size else 1.0
        return cls(config.learning_rate * scale, config.schedule, config.final_fraction, warmup, steps)

    @property
    def end(self) -> int:
        """Updates of the run: `steps`, unless it was bent."""
        return self.bends[-1][1] if self.bends else self.steps

    def bend(self, update: int, end: int) -> Schedule:
        """This schedule up to update `update`, and from there on to its end within `end` updates in all.

        Bends from `update` on are dropped: a rollback to before them has undone them.
        """
        assert update < end, "at least one update is left to end with"
        return replace(self, bends=(*(bend for bend in self.bends if bend[0] < update), (update, end)))

    def place(self, update: int) -> float:
        """Where an update stands in the run as it was planned: the update itself, unless the schedule was bent."""
        place: float = update
        start, last, reached = 0, self.steps - 1, 0.0
        for bend, end in self.bends:
            if update < bend:
                break
            reached = _between(reached, self.steps - 1, bend - start, last - start)
            start, last = bend, end - 1
            place = _between(reached, self.steps - 1, update - start, last - start)
        return place

    def __call__(self, update: int) -> float:
        """Learning rate of update `update` (0 = first); beyond the end it stays at the last value."""
        place = self.place(update)
        if place < self.warmup:
            return self.peak * ((place + 1) / self.warmup)
        if self.kind == "constant":
            return self.peak
        first = max(self.warmup - 1, 0)
        span = self.steps - 1 - first
        progress = min((place - first) / span, 1.0) if span > 0 else 0.0
        shape = 1 - progress if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * shape)


def _between(low: float, high: float, part: int, whole: int) -> float:
    """`part` of `whole` of the way from low to high, which is where it ends."""
    return high if part >= whole else low + (high - low) * part / whole


class EMA:
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

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The averaged weights stand in `model` inside the context; the exact raw ones come back after it."""
        raw = {name: value.clone() for name, value in named_tensors(model).items()}
        try:
            load_tensors(model, self._tensors, "EMA")
            yield
        finally:
            load_tensors(model, raw)

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
