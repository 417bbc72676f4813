"""Optimisers: their groups of parameters, their state by name."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from matrixlib.config import OptimConfig
from matrixlib.engine.distributed import sharded_like
from matrixlib.engine.muon import Muon
from matrixlib.hardware import backend

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

_COUNTERS = ("step", "k", "weight_sum", "lr_max")
_BLOCKS = frozenset({"qmap1", "qmap2", "absmax1", "absmax2"})
"""Entries of 8-bit AdamW's state that are not of the parameter's shape: its code and the scale of each block."""


class SGDParameters(nn.Module):
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


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], what: str = "model") -> None:
    """Copy `tensors` (names as `named_tensors` gives them) into the model in place; ValueError as of `copy_named`."""
    copy_named(named_tensors(model), tensors, what)


@torch.no_grad()
def copy_named(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy `tensors` into those of the same names. Raises ValueError naming what is missing, unknown or of another
    shape, before anything is copied.
    """
    if odd := sorted(set(own) ^ set(tensors)):
        raise ValueError(f"{what}: names differ from this model's in {len(odd)} places: {', '.join(odd[:5])}")
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            shape = tuple(tensors[name].shape)
            raise ValueError(f"{what}: {name} has shape {shape}, the model's {tuple(value.shape)}")
    for name, value in own.items():
        value.copy_(sharded_like(tensors[name], value))


@torch.no_grad()
def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source into the target at its place: on a GPU by a launch for each dtype, not one for each tensor."""
    for dtype in {target.dtype for target in targets}:
        pairs = [(into, of) for into, of in zip(targets, sources, strict=True) if into.dtype == dtype]
        torch._foreach_copy_([into for into, _ in pairs], [of for _, of in pairs])


def parameter_groups(model: nn.Module, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
    """Groups of an optimiser: decayed, and not decayed (weight_decay 0). Frozen parameters are in neither.

    Decayed are the parameters with two or more dimensions that belong to a `DECAYED` module: matrices and
    convolution kernels. Everything else is not: biases, norms, embeddings, and parameters that a module of
    our own holds directly, such as position encodings and attention biases. A parameter shared with one that
    must not decay (tied embeddings) does not decay. Those of a `SGDParameters` are in neither.

    muon: each group also says whether it is `orthogonal`. Those are the decayed ones of hidden layers; the network's
    `edges()` names the layers that take the data or give the outputs, which stay with AdamW as is the field's practice.
    Raises ValueError for a network without that method.
    """
    edges = _edges(unwrap(model)) if muon else frozenset()
    parameters: dict[int, nn.Parameter] = {}
    kinds: dict[int, tuple[bool, bool]] = {}
    for module in unwrap(model).modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not isinstance(module, SGDParameters):
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


def optimiser(
    model: nn.Module,
    config: OptimConfig,
    device: torch.device,
    own: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The optimiser that `config` names over `model`, which must already be on `device`: the fused kernel where there
    is one that serves every network, else foreach. own: makes another one from the parameter groups.

    The step sets the learning rate of each update. Without its library 8-bit AdamW is plain AdamW, with a warning.
    Raises ValueError when no parameter can be trained, or when the library of an optimiser is not installed.
    """
    groups = parameter_groups(model, config.weight_decay, config.optimiser in ("muon", "normuon"))
    if not groups:
        raise ValueError("the model has no trainable parameter; every requires_grad is False")
    if own is not None:
        made = own(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer: it must give a torch.optim.Optimizer, not {type(made).__name__}")
        return made
    fused = device.type in backend.FUSED
    base: dict[str, Any] = {"lr": config.learning_rate, "foreach": True}
    fast: dict[str, Any] = {"lr": config.learning_rate, "fused": fused, "foreach": None if fused else True}
    moments: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": config.eps}
    match optimiser_kind(config):
        case "muon" | "normuon" as kind:
            return Muon(groups, momentum=config.momentum, even_rows=kind == "normuon", **fast, **moments)
        case "adam":
            return torch.optim.Adam(groups, **fast, **moments)
        case "sgd":  # torch 2.13's fused kernel fails at a parameter whose gradients begin after the others'
            return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.momentum > 0, **base)
        case "rmsprop":
            return torch.optim.RMSprop(groups, alpha=config.beta2, eps=config.eps, **base)
        case "radam":
            return torch.optim.RAdam(groups, decoupled_weight_decay=True, **base, **moments)
        case "nadam":
            return torch.optim.NAdam(groups, decoupled_weight_decay=True, **base, **moments)
        case "adafactor":
            return torch.optim.Adafactor(groups, **base)
        case "lamb":
            return _library("pytorch_optimizer", config).Lamb(groups, **base, **moments)
        case "schedule_free":
            free = _library("schedulefree", config).AdamWScheduleFree(groups, **base, **moments)
            free.train()  # before the first update it sets a flag alone
            return cast(torch.optim.Optimizer, free)
        case "adamw_8bit":
            for parameter in (parameter for group in groups for parameter in group["params"]):
                parameter.data = parameter.data.contiguous()  # its updates would, after the average has looked them up
            return cast(
                torch.optim.Optimizer,
                _library("bitsandbytes", config).optim.AdamW8bit(groups, lr=config.learning_rate, **moments),
            )
    if config.optimiser == "adamw_8bit":
        text = "bitsandbytes is not installed, so optim.optimiser adamw_8bit is plain AdamW; pip install bitsandbytes"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return torch.optim.AdamW(groups, **fast, **moments)


def optimiser_kind(config: OptimConfig) -> str:
    """The optimiser that is used: `config`'s, but plain AdamW where the library of 8-bit AdamW is not installed."""
    absent = config.optimiser == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None
    return "adamw" if absent else config.optimiser


def _library(name: str, config: OptimConfig) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.replace("_", "-")
        raise ValueError(
            f"optim.optimiser {config.optimiser} needs {package} ({error}); pip install {package}, or choose another"
        ) from error


def weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters by plain name, but for those of `SGDParameters`."""
    aside = {id(p) for module in _sgd_modules(model).values() for p in module.parameters(recurse=False)}
    return [(name, p) for name, p in unwrap(model).named_parameters() if p.requires_grad and id(p) not in aside]


def own_to_training(model: nn.Module) -> set[str]:
    """Names in the model's state of what no network but this training needs: all `SGDParameters`."""
    return {f"{name}.{own}" for name, module in _sgd_modules(model).items() for own in module.state_dict()}


def side_optimizer(model: nn.Module) -> torch.optim.SGD | None:
    """The optimiser of all `SGDParameters`, which has no state; None where there are none."""
    groups = [{"params": list(m.parameters(recurse=False)), "lr": m.rate} for m in _sgd_modules(model).values()]
    return torch.optim.SGD(groups, lr=0.0) if groups else None


def _sgd_modules(model: nn.Module) -> dict[str, SGDParameters]:
    return {name: module for name, module in unwrap(model).named_modules() if isinstance(module, SGDParameters)}


# State by name. torch's get_optimizer_state_dict asks for the same state of every parameter, which a head that has had
# no gradient yet does not have, and makes a zero-rate update where there is none.


def _names(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in unwrap(model).named_parameters()}


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state by parameter name: "trunk.0.weight/exp_avg" -> tensor; empty before the first
    update.
    """
    names = _names(model)
    return {
        f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
    }


def optimiser_counters(optimiser: torch.optim.Optimizer) -> list[dict[str, float]]:
    """What some optimisers count in their groups, one dict a group."""
    return [{key: group[key] for key in _COUNTERS if key in group} for group in optimiser.param_groups]


def load_optimiser(
    optimiser: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    counters: Sequence[Mapping[str, float]],
) -> None:
    """Restore what `optimiser_tensors` and `optimiser_counters` gave. Raises ValueError when a name is not a trainable
    parameter's.
    """
    names, parameters = _names(model), [p for group in optimiser.param_groups for p in group["params"]]
    places = {names[id(parameter)]: place for place, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor | int]] = {}
    for name, value in tensors.items():
        name, _, key = name.rpartition("/")
        if name not in places:
            raise ValueError(f"optimiser: the checkpoint has state of an unknown parameter, {name}")
        state.setdefault(places[name], {})[key] = _restored(parameters[places[name]], key, value)
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    for group, counted in zip(optimiser.param_groups, counters, strict=True):
        for key in _COUNTERS:
            group.pop(key, None)  # one that begins to count at its first update
        group.update(counted)


def _restored(parameter: Tensor, key: str, value: Tensor) -> Tensor | int:
    """`value` as the optimiser itself would have made it: an integer, or in the memory format of `parameter`."""
    if value.shape == parameter.shape:
        fresh = torch.empty_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
        return fresh.detach().copy_(sharded_like(value, parameter))
    if not value.ndim:
        return value.clone() if value.is_floating_point() else int(value)
    same = value.ndim == parameter.ndim and all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
    if same or key in _BLOCKS:  # Adafactor keeps means over rows and columns
        return value.clone()
    raise ValueError(f"optimiser: state {tuple(value.shape)} for a parameter {tuple(parameter.shape)}")


NOISE = 0x6E6F697365
"""Keeps the stream of the gradient noise apart from the others of a run's seed."""


def noise_variance(config: OptimConfig, update: int) -> float:
    """Variance of the gradient noise of update `update` (0 = first): eta / (1 + t)^gamma (Neelakantan et al. 2015,
    https://arxiv.org/abs/1511.06807)."""
    return config.noise / (1 + update) ** config.noise_decay


@torch.no_grad()
def add_noise(gradients: Iterable[Tensor], variance: float, seed: int, update: int) -> None:
    """Add normal noise in place. Its stream is a function of (seed, update): a run that was resumed or rolled back,
    and every process of one that has several, draws the same, and no other stream moves.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for gradient in gradients:
        device = gradient.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed((seed * 0x9E3779B1 + update + NOISE) % 2**63)
        drawn = torch.randn(gradient.shape, generator=generators[device], device=device, dtype=gradient.dtype)
        gradient.add_(drawn, alpha=variance**0.5)
