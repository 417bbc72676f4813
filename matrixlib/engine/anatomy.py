"""Inside a model: gradients and updates of its blocks, and units that are dead."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from matrixlib.engine.optim import unwrap
from matrixlib.engine.task import Batch, Task, rows, to_device
from matrixlib.engine.validation import evaluating

if TYPE_CHECKING:
    from matrixlib.hardware.runtime import Runtime

UPDATE_RATIO = 0.1
"""Size of one update relative to a block's weights above which, after the warm-up, it is too large."""
DEAD_SHARE = 0.05
"""Share of an activation's units that may be dead."""
DEAD_DEVIATION = 1e-4
"""Standard deviation below which a unit behind a smooth activation is dead."""
DEAD_ROWS = 4096
"""Rows that a unit must have been silent for: over fewer, units that are merely rare would count as dead."""
RECTIFIERS = frozenset({"relu", "relu6"})
"""Activations whose units are dead when they are never above 0."""
SMOOTH = frozenset({"silu", "gelu", "mish", "elu", "leaky_relu"})
"""Activations whose units are dead when they do not vary."""


def block_of(model: nn.Module, parameter: str) -> str:
    """The block that a parameter (a name of `named_parameters`) belongs to.

    A block is a module below the root, or below a ModuleList, ModuleDict or Sequential there: "stem",
    "tower.3", "policy_head", "ssl_heads.piece". A parameter of the root itself is its own block.
    """
    *path, _ = parameter.split(".")
    module, parts = model, list[str]()
    for part in path:
        parts.append(part)
        module = module.get_submodule(part)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            break
    return ".".join(parts) or parameter


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trainable parameters by name, to measure an update by; as large as these together."""
    return {name: p.detach().clone() for name, p in _trainable(model)}


def block_statistics(
    model: nn.Module, before: Mapping[str, Tensor] | None = None
) -> dict[str, dict[str, float]]:
    """Euclidean norms by block over its trainable parameters; one host read.

    "gradient": of `.grad` as it stands (after the step: unscaled and clipped), left out where a block has
    none. "weight". With `before`, the `snapshot` before an update that moved weights: "update", and "ratio",
    that of the update to the weights before; a block that was all zero has no ratio.
    """
    blocks: dict[str, list[int]] = {}
    norms: list[Tensor] = []
    present: list[bool] = []
    for name, parameter in _trainable(model):
        blocks.setdefault(block_of(unwrap(model), name), []).append(len(norms))
        weight, gradient = parameter.detach(), parameter.grad
        old = weight if before is None else before[name]
        tensors = (weight, weight if gradient is None else gradient, old, weight - old)
        norms.append(torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]))
        present.append(gradient is not None)
    values = torch.stack(norms).tolist() if norms else []
    table: dict[str, dict[str, float]] = {}
    for block, members in blocks.items():
        weight_norm, _, old_norm, moved = (math.hypot(*(values[i][k] for i in members)) for k in range(4))
        table[block] = {"weight": weight_norm}
        if any(present[i] for i in members):
            table[block]["gradient"] = math.hypot(*(values[i][1] for i in members if present[i]))
        if before is not None:
            table[block]["update"] = moved
            if old_norm > 0:
                table[block]["ratio"] = moved / old_norm
    return table


def block_warnings(table: Mapping[str, Mapping[str, float]], warming_up: bool = False) -> list[str]:
    """Warnings about a `block_statistics` with updates: blocks that stood still, or moved too far."""
    still = [name for name, row in table.items() if row.get("update") == 0 and row.get("gradient", 0.0) > 0]
    far = [
        f"{name} ({row['ratio']:.0%})" for name, row in table.items() if row.get("ratio", 0) > UPDATE_RATIO
    ]
    messages = []
    if still:
        messages.append(
            f"the update did not move {_listed(still)}, though there are gradients: are these weights in the "
            "optimiser, and is the learning rate large enough for their precision?"
        )
    if far and not warming_up:
        messages.append(
            f"one update moved weights by more than {UPDATE_RATIO:.0%} of their size: {_listed(far)}; the "
            "learning rate is probably too high"
        )
    return messages


@dataclass(frozen=True)
class DeadUnits:
    """Dead units by activation, named "<module>.<function>", from the second call on "....2" and so on.

    rows: rows looked at. widths: units. dead: indices of the dead ones.
    """

    rows: int
    widths: dict[str, int]
    dead: dict[str, tuple[int, ...]]

    @property
    def shares(self) -> dict[str, float]:
        """Share of dead units by activation."""
        return {name: len(self.dead[name]) / width for name, width in self.widths.items()}

    @property
    def share(self) -> float:
        """Share of dead units in the whole model; 0 where it has no activation."""
        return sum(map(len, self.dead.values())) / max(1, sum(self.widths.values()))

    def warnings(self) -> list[str]:
        """One line about the activations with too many; none where too few rows were looked at."""
        shares = sorted(self.shares.items(), key=lambda item: -item[1])
        names = [
            f"{name} ({len(self.dead[name])} of {self.widths[name]})"
            for name, share in shares
            if share > DEAD_SHARE
        ]
        if not names or self.rows < DEAD_ROWS:
            return []
        return [f"more than {DEAD_SHARE:.0%} of the units are dead over {self.rows} rows: {_listed(names)}"]


def dead_units(
    task: Task, model: nn.Module, batches: Iterable[Batch], runtime: Runtime, minimum: int = DEAD_ROWS
) -> DeadUnits:
    """Look at every activation function that `task.outputs` runs, over the first `minimum` rows or more.

    A unit is a channel, over rows and places: dimension 1 of a tensor with four or more (B, C, H, W), the
    last one of a smaller tensor (B, C) or (B, tokens, C). It is dead if it is never above 0 (ReLU), or if
    its standard deviation is below 1e-4 (SiLU, GELU, Mish). Functions are seen as the operations they run,
    so they need not be modules. batches: host tensors. Eval mode; one host read; all hooks are gone
    afterwards.
    """
    model, seen = unwrap(model), 0
    units: dict[str, _Units] = {}
    with evaluating(model), _running(model) as path:
        for batch in batches:
            with _Activations(path, units), runtime.autocast():
                task.outputs(model, to_device(batch, runtime.torch_device))
            seen += rows(batch)
            if seen >= minimum:
                break
        flags = iter(torch.cat([unit.dead() for unit in units.values()]).tolist() if units else [])
    widths = {name: unit.width for name, unit in units.items()}
    dead = {name: tuple(i for i in range(width) if next(flags)) for name, width in widths.items()}
    return DeadUnits(seen, widths, dead)


class _Units:
    """Running moments of the units behind one activation; on the device."""

    def __init__(self, function: str, width: int, device: torch.device) -> None:
        self.rectifier, self.width, self.count = function in RECTIFIERS, width, 0
        self.alive = torch.zeros(width, dtype=torch.bool, device=device)
        self.mean = torch.zeros(width, device=device)
        self.squares = torch.zeros(width, device=device)  # of the deviations from the mean

    def add(self, values: Tensor) -> None:
        """values (n, units) of any float type.

        Moments are merged as in Chan, Golub and LeVeque (1979): a difference of mean squares would lose a
        deviation of 1e-4 beside a mean of 1 in fp32.
        """
        values = values.float()
        if self.rectifier:
            self.alive |= (values > 0).any(0)
            return
        variance, mean = torch.var_mean(values, dim=0, correction=0)
        old, new = self.count, len(values)
        self.count = old + new
        delta = mean - self.mean
        self.mean += delta * (new / self.count)
        self.squares += variance * new + delta.square() * (old * new / self.count)

    def dead(self) -> Tensor:
        """(units,) bool."""
        return ~self.alive if self.rectifier else self.squares < self.count * DEAD_DEVIATION**2


class _Activations(TorchDispatchMode):
    """Adds the results of activation functions to `units`, under the name of the module that runs."""

    def __init__(self, path: Sequence[str], units: dict[str, _Units]) -> None:
        super().__init__()
        self.path, self.units = path, units
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        function = func.overloadpacket.__name__.rstrip("_")  # relu_ works in place
        if function in RECTIFIERS | SMOOTH and out.dim() > 1 and out.numel():
            name = ".".join(filter(None, (*self.path[-1:], function)))
            self.calls[name] += 1
            if self.calls[name] > 1:
                name = f"{name}.{self.calls[name]}"
            values = out.movedim(1 if out.dim() > 3 else -1, -1).flatten(0, -2)
            if name not in self.units:
                self.units[name] = _Units(function, values.shape[1], values.device)
            self.units[name].add(values)
        return out


@contextmanager
def _running(model: nn.Module) -> Iterator[list[str]]:
    """A list that holds the names of the modules that are running, outermost first."""
    path: list[str] = []

    def leave(*_: Any) -> None:
        path.pop()

    handles = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)))
            handles.append(module.register_forward_hook(leave))
        yield path
    finally:
        for handle in handles:
            handle.remove()


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in unwrap(model).named_parameters() if p.requires_grad]


def _listed(names: Sequence[str]) -> str:
    """At most five names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
