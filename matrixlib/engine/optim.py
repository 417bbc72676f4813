"""Optimizers: parameter groups, state by parameter name, Muon."""

import importlib
import importlib.util
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from matrixlib.config import OptimConfig
from matrixlib.engine.distributed import sharded_like
from matrixlib.hardware import backend

DECAYED = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, _ConvNd)  # modules whose matrices decay

NOISE = 0x6E6F697365  # domain of the gradient noise among a seed's random streams
NEWTON_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # as torch has them: https://kellerjordan.github.io/posts/muon/
RMS = 0.2  # of an update of AdamW in units of its rate (Liu et al. 2025, https://arxiv.org/abs/2502.16982)
ROWS_DECAY = 0.95  # of the mean squares of rows (Li et al. 2025, https://arxiv.org/abs/2510.05491)
_COUNTERS = ("step", "k", "weight_sum", "lr_max")
_BLOCKS = frozenset({"qmap1", "qmap2", "absmax1", "absmax2"})  # of 8-bit AdamW's state, not of the parameter's shape


class SGDParameters(nn.Module):
    """Module whose own parameters are trained by plain SGD at `rate`, outside schedule and decay and clipped
    separately: AdamW would cancel a factor on their gradient."""

    rate: float


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper, whose state dict has no `_orig_mod.` prefix."""
    return cast(nn.Module, getattr(model, "_orig_mod", model))


def freeze(model: nn.Module, names: Sequence[str]) -> None:
    """Freeze these parts of a network in training mode, with norms' statistics. ValueError for an unknown part, or if
    nothing is left."""
    for name in names:
        try:
            unwrap(model).get_submodule(name).requires_grad_(False).eval()
        except AttributeError as error:
            parts = ", ".join(part for part, _ in unwrap(model).named_children())
            raise ValueError(f"train.freeze: the network has no part '{name}'; its parts are {parts}") from error
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("train.freeze leaves no trainable parameter: name fewer parts")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the unwrapped model by name, sharing memory."""
    return dict(unwrap(model).state_dict())


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], what: str = "model") -> None:
    """Copy `tensors` (named as by `named_tensors`) into the model in place; ValueError as `copy_named`."""
    copy_named(named_tensors(model), tensors, what)


@torch.no_grad()
def copy_named(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str) -> None:
    """Copy by name, after checking all: ValueError names what is missing, unknown or of another shape."""
    if odd := sorted(set(own) ^ set(tensors)):
        raise ValueError(f"{what}: names differ from this model's in {len(odd)} places: {', '.join(odd[:5])}")
    for name, value in own.items():
        if (shape := tensors[name].shape) != value.shape:
            raise ValueError(f"{what}: {name} has shape {tuple(shape)}, the model's {tuple(value.shape)}")
    for name, value in own.items():
        value.copy_(sharded_like(tensors[name], value))


@torch.no_grad()
def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy sources to targets: on a GPU one launch per dtype, not per tensor."""
    for dtype in {target.dtype for target in targets}:
        pairs = [(into, of) for into, of in zip(targets, sources, strict=True) if into.dtype == dtype]
        torch._foreach_copy_([into for into, _ in pairs], [of for _, of in pairs])


def parameter_groups(model: nn.Module, weight_decay: float, muon: bool = False) -> list[dict[str, Any]]:
    """Optimizer groups, decayed and not decayed, without frozen parameters and `SGDParameters`.

    Decayed: parameters with two or more dimensions of a `DECAYED` module, not shared with another kind. muon: each
    group also has `orthogonal`: decayed and not in the network's `edges()` (first, last layers). ValueError without it.
    """
    network: Any = unwrap(model)
    if muon and not hasattr(network, "edges"):
        raise ValueError(
            f"muon moves the matrices of hidden layers alone: give {type(network).__name__} a method `edges()` that "
            "returns its first and last layers (of an own task), or choose another optim.optimiser"
        )
    edges = {inner for layer in network.edges() for inner in layer.modules()} if muon else set()
    kinds: dict[nn.Parameter, tuple[bool, bool]] = {}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and not isinstance(module, SGDParameters):
                allowed = isinstance(module, DECAYED) and parameter.ndim >= 2
                decays, hidden = kinds.get(parameter, (True, muon))
                kinds[parameter] = allowed and decays, allowed and hidden and module not in edges
    groups: list[dict[str, Any]] = []
    for decayed, orthogonal in (True, True), (True, False), (False, False):
        members = [parameter for parameter, kind in kinds.items() if kind == (decayed, orthogonal)]
        decay = weight_decay if decayed else 0.0
        groups += [{"params": members, "weight_decay": decay, "orthogonal": orthogonal}] if members else []
    return groups


def optimiser(
    model: nn.Module,
    config: OptimConfig,
    device: torch.device,
    own: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """The configured optimizer over `model`, already on `device`, or `own(groups)`; the step sets learning rates.

    8-bit AdamW without its library becomes AdamW. ValueError if nothing is trainable, or another library is missing.
    """
    groups = parameter_groups(model, config.weight_decay, config.optimiser in ("muon", "normuon"))
    if not groups:
        raise ValueError("the model has no trainable parameter; every requires_grad is False")
    if own is not None:
        made: Any = own(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(f"optimizer: it must give a torch.optim.Optimizer, not {type(made).__name__}")
        return made
    fused = device.type in backend.FUSED
    rate: dict[str, Any] = {"lr": config.learning_rate}
    base, moments = rate | {"foreach": True}, {"betas": (config.beta1, config.beta2), "eps": config.eps}
    fast = rate | moments | {"fused": fused, "foreach": None if fused else True}
    package, name, options = {
        "adamw": (__name__, "AdamW", fast),
        "muon": (__name__, "Muon", fast | {"momentum": config.momentum}),
        "normuon": (__name__, "Muon", fast | {"momentum": config.momentum, "even_rows": True}),
        "adam": ("torch.optim", "Adam", fast),
        # torch 2.13's fused SGD fails if a parameter's first gradient comes later than others'
        "sgd": ("torch.optim", "SGD", base | {"momentum": config.momentum, "nesterov": config.momentum > 0}),
        "rmsprop": ("torch.optim", "RMSprop", base | {"alpha": config.beta2, "eps": config.eps}),
        "radam": ("torch.optim", "RAdam", base | moments | {"decoupled_weight_decay": True}),
        "nadam": ("torch.optim", "NAdam", base | moments | {"decoupled_weight_decay": True}),
        "adafactor": ("torch.optim", "Adafactor", base),
        "lamb": ("pytorch_optimizer", "Lamb", base | moments),
        "schedule_free": ("schedulefree", "AdamWScheduleFree", base | moments),
        "adamw_8bit": ("bitsandbytes.optim", "AdamW8bit", rate | moments),
    }[kind := optimiser_kind(config)]
    if kind != config.optimiser:
        text = "bitsandbytes is not installed, so optim.optimiser adamw_8bit is plain AdamW"
        warnings.warn(f"{text}; pip install bitsandbytes", RuntimeWarning, stacklevel=2)
    for parameter in (parameter for group in groups for parameter in group["params"] if kind == "adamw_8bit"):
        parameter.data = parameter.data.contiguous()  # its updates would, after the average has looked them up
    try:
        made = getattr(importlib.import_module(package), name)(groups, **options)
    except ImportError as error:
        install = package.partition(".")[0].replace("_", "-")
        text = f"optim.optimiser {kind} needs {install} ({error}); pip install {install}, or choose another"
        raise ValueError(text) from error
    if kind == "schedule_free":
        made.train()  # only sets a flag before the first update
    return cast(torch.optim.Optimizer, made)


def optimiser_kind(config: OptimConfig) -> str:
    """The optimizer in use: `config`'s, or AdamW where the library of 8-bit AdamW is missing."""
    absent = config.optimiser == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None
    return "adamw" if absent else config.optimiser


def weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Trainable parameters by name, without `SGDParameters`."""
    aside = {id(p) for module in _sgd_modules(model).values() for p in module.parameters(recurse=False)}
    return [(name, p) for name, p in unwrap(model).named_parameters() if p.requires_grad and id(p) not in aside]


def training_only(model: nn.Module) -> set[str]:
    """Names in the model's state that only training needs: all `SGDParameters`."""
    return {f"{name}.{own}" for name, module in _sgd_modules(model).items() for own in module.state_dict()}


def side_optimizer(model: nn.Module) -> torch.optim.SGD | None:
    """The stateless optimizer of all `SGDParameters`; None if there are none."""
    groups = [{"params": list(m.parameters(recurse=False)), "lr": m.rate} for m in _sgd_modules(model).values()]
    return torch.optim.SGD(groups, lr=0.0) if groups else None


def _sgd_modules(model: nn.Module) -> dict[str, SGDParameters]:
    return {name: module for name, module in unwrap(model).named_modules() if isinstance(module, SGDParameters)}


# State by name. torch's get_optimizer_state_dict needs equal state for every parameter, which a head without gradients
# so far lacks, and makes a zero-rate update if there is none.


def optimiser_tensors(optimiser: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Optimizer state by parameter name: "trunk.0.weight/exp_avg" -> tensor; empty before the first update."""
    names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for parameter, state in optimiser.state.items()
        for key, value in state.items()
    }


def optimiser_counters(optimiser: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Group-level counters of some optimizers, one dict a group."""
    return [{key: group[key] for key in _COUNTERS if key in group} for group in optimiser.param_groups]


def load_optimiser(
    optimiser: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    counters: Sequence[Mapping[str, float]],
) -> None:
    """Restore `optimiser_tensors` and `optimiser_counters`. ValueError for an unknown parameter."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    numbers = {id(parameter): place for place, parameter in enumerate(parameters)}
    places = {name: numbers[id(p)] for name, p in unwrap(model).named_parameters() if id(p) in numbers}
    state: dict[int, dict[str, Tensor | int]] = {}
    for name, value in tensors.items():
        name, _, key = name.rpartition("/")
        if name not in places:
            raise ValueError(f"optimiser: the checkpoint has state of an unknown parameter, {name}")
        state.setdefault(places[name], {})[key] = _restored(parameters[places[name]], key, value)
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    for group, counted in zip(optimiser.param_groups, counters, strict=True):
        for key in _COUNTERS:
            group.pop(key, None)  # counted from the first update
        group.update(counted)


def _restored(parameter: Tensor, key: str, value: Tensor) -> Tensor | int:
    """`value` as the optimizer itself would hold it: an integer, or in the memory format of `parameter`."""
    if value.shape == parameter.shape:
        fresh = torch.empty_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
        return fresh.detach().copy_(sharded_like(value, parameter))
    if not value.ndim:
        return value.clone() if value.is_floating_point() else int(value)
    same = value.ndim == parameter.ndim and all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
    if same or key in _BLOCKS:  # Adafactor's row and column means
        return value.clone()
    raise ValueError(f"optimiser: state {tuple(value.shape)} for a parameter {tuple(parameter.shape)}")


def noise_variance(config: OptimConfig, update: int) -> float:
    """Variance of the gradient noise at `update` (from 0): eta / (1 + t)^gamma (Neelakantan et al. 2015,
    https://arxiv.org/abs/1511.06807)."""
    return config.noise / (1 + update) ** config.noise_decay


@torch.no_grad()
def add_noise(gradients: Sequence[Tensor], variance: float, seed: int, update: int) -> None:
    """Add normal noise in place, a function of (seed, update), so equal on every rank and after resuming."""
    device = gradients[0].device
    generator = torch.Generator(device).manual_seed((seed * 0x9E3779B1 + update + NOISE) % 2**63)
    for gradient in gradients:
        drawn = torch.randn(gradient.shape, generator=generator, device=device, dtype=gradient.dtype)
        gradient.add_(drawn, alpha=variance**0.5)


class AdamW(torch.optim.AdamW):
    """torch's, whose methods import torch's compiler when they are first called, which takes as long as torch."""

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(AdamW):
    """Muon for groups with `orthogonal: True`, AdamW for the others, with one learning rate.

    A kernel (O, I, h, w) is a matrix (O, I * h * w); those of equal shape are orthogonalised in one batch (torch's
    takes single ones). Updates have AdamW's RMS. momentum: Nesterov. even_rows: NorMuon's neuron-wise normalisation.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, momentum: float, even_rows: bool = False, **options: Any
    ) -> None:
        super().__init__(groups, **options)
        self.momentum, self.even_rows = momentum, even_rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["orthogonal"]]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            if group["orthogonal"]:
                self._move(group)
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not moved:
            return
        for parameter in moved:
            if not self.state[parameter]:  # AdamW's loading looks for a step in every state
                self.state[parameter] |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(parameter)}
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in moved]
        gradients = [parameter.grad for parameter in moved]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        directions = torch._foreach_lerp(gradients, buffers, self.momentum)
        torch._foreach_mul_(moved, 1 - group["lr"] * group["weight_decay"])
        by_shape = defaultdict[torch.Size, list[int]](list)
        for place, direction in enumerate(directions):
            by_shape[direction.flatten(1).shape].append(place)
        for places in by_shape.values():
            matrices = torch.stack([directions[place].flatten(1) for place in places])
            size = RMS * max(matrices.shape[1:]) ** 0.5
            updates = orthogonal(matrices)
            if self.even_rows:
                updates = self._evened([moved[place] for place in places], updates)
            for place, update in zip(places, updates, strict=True):
                moved[place].add_(update.view(moved[place].shape), alpha=-group["lr"] * size)

    def _evened(self, parameters: Sequence[Tensor], updates: Tensor) -> Tensor:
        """Updates (N, R, C) with rows divided by the root of their running mean squares, at equal total norm."""
        squares = updates.square().mean(2)
        for parameter, square in zip(parameters, squares, strict=True):
            state = self.state[parameter]
            if "row_squares" not in state:  # same number of dimensions as the parameter, for checkpoints
                state["row_squares"] = parameter.new_zeros(len(parameter), *[1] * (parameter.ndim - 1))
            late = state["row_squares"].view(-1)
            late.lerp_(square, 1 - ROWS_DECAY)
            square.copy_(late)
        even = updates / (squares.sqrt() + 1e-8).unsqueeze(2)
        return even * (updates.square().mean((1, 2), True) / even.square().mean((1, 2), True).clamp(min=1e-30)).sqrt()


def orthogonal(matrices: Tensor) -> Tensor:
    """(N, R, C) to about the nearest matrices with orthogonal rows or columns: singular values mostly in 0.7..1.2."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).float()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    x = _by_squares(x) if x.is_cpu else _by_steps(x.bfloat16())
    return (x.mT if tall else x).to(matrices.dtype).contiguous()


def _by_steps(x: Tensor) -> Tensor:
    """Newton-Schulz iteration in bf16, for GPUs."""
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def _by_squares(x: Tensor) -> Tensor:
    """The same in a third of the time on a CPU: each step multiplies x by a polynomial of x x', and these commute. Not
    in TF32 or bf16: an eigenvalue that rounding makes negative grows tenfold a step."""
    a, b, c = COEFFICIENTS
    square = x @ x.mT
    one = torch.eye(square.shape[1], dtype=square.dtype)
    whole = one.expand_as(square)
    for number in range(NEWTON_STEPS):
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c).add_(one, alpha=a)
        whole = factor @ whole
        if number < NEWTON_STEPS - 1:
            square = factor @ square @ factor
    return whole @ x
