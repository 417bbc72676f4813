"""What goes on inside a model: gradients and updates by block, outputs, dead units, where a value first went bad."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from matrixlib.engine.distributed import full, local_part
from matrixlib.engine.memory import OomBackoff
from matrixlib.engine.optim import unwrap, weights
from matrixlib.engine.stats import Stats
from matrixlib.engine.task import Batch, Task, rows, slice_batch, to_device
from matrixlib.engine.validation import evaluating
from matrixlib.hardware.runtime import Runtime

INITIAL_TOLERANCE = 0.15
"""Relative difference between the first losses and chance level that is worth a warning."""
DEAD_DEVIATION = 1e-4
"""Standard deviation below which a unit behind a smooth activation is dead."""
DEAD_ROWS = 4096
"""Rows that a unit must have been silent for: over fewer, units that are merely rare would count as dead."""
RECTIFIERS = frozenset({"relu", "relu6"})
"""Activations whose units are dead when they are never above 0."""
SMOOTH = frozenset({"silu", "gelu", "mish", "elu", "leaky_relu"})
"""Activations whose units are dead when they do not vary."""


class GradientReport(NamedTuple):
    """Parameters whose gradient looks wrong, by name.

    missing: no gradient at all (cut off from every active loss). nonfinite: NaN or infinity in it. zero: all zero. Some
    are rightly so: heads of inactive terms are missing, a layer behind one that starts at zero is zero.
    """

    missing: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, at most five names a kind; empty when nothing looks wrong."""
        kinds = zip(("no", "a non-finite", "an all-zero"), self, strict=True)
        return "; ".join(f"{kind} gradient: {_listed(names)}" for kind, names in kinds if names)


def gradient_report(model: nn.Module) -> GradientReport:
    """Look at `.grad` of every trainable parameter; one host read."""
    gradients = {name: p.grad for name, p in weights(model)}
    present = {name: grad for name, grad in gradients.items() if grad is not None}
    tests = [torch.stack((grad.isfinite().all(), (grad != 0).any())) for grad in present.values()]
    flags = dict(zip(present, full(torch.stack(tests)).tolist() if tests else [], strict=True))
    return GradientReport(
        missing=tuple(name for name in gradients if name not in present),
        nonfinite=tuple(name for name, (finite, _) in flags.items() if not finite),
        zero=tuple(name for name, (_, nonzero) in flags.items() if not nonzero),
    )


def without_idle_heads(
    report: GradientReport | None, task: Task, model: nn.Module, batch: Batch, stats: Stats, runtime: Runtime
) -> GradientReport:
    """The report of an update without what a term explains that took no part in it: parameters that got no gradient,
    though an output of the task depends on them. batch: on the host; its first row is looked at.
    """
    if report is None or not report.missing or stats.losses.keys() == task.weights.keys():
        return report or GradientReport()
    parameters = dict(weights(model))
    with evaluating(model), torch.inference_mode(False), torch.enable_grad(), runtime.autocast():
        outputs = task.outputs(model, to_device(slice_batch(batch, 0, 1), runtime.torch_device))
        total = torch.stack([output.float().nansum() for output in outputs.values()]).sum()
    gradients = torch.autograd.grad(total, [parameters[name] for name in report.missing], allow_unused=True)
    cut_off = [name for name, gradient in zip(report.missing, gradients, strict=True) if gradient is None]
    return report._replace(missing=tuple(cut_off))


def compare_with_chance(task: Task, batch: Batch, stats: Stats) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Losses of the first update beside chance level and floor, by term; and warnings for those far off."""
    bounds, counts = task.bounds(batch), task.counts(batch)  # of several ranks, stats counts the items of all
    table: dict[str, dict[str, float]] = {}
    messages: list[str] = []
    for term, loss in stats.losses.items():
        if term not in bounds or not counts[term]:
            continue
        chance, floor = (value / counts[term] for value in bounds[term])
        table[term] = {"loss": loss, "chance": chance, "floor": floor}
        if not abs(loss - chance) <= INITIAL_TOLERANCE * abs(chance):
            messages.append(
                f"first {term} loss is {loss:.4f}, but chance level is {chance:.4f}: a fresh network should "
                "start near it; look at its last layer's initialisation, the targets or the loss"
            )
    return table, messages


def output_statistics(task: Task, model: nn.Module, batch: Batch, runtime: Runtime) -> dict[str, dict[str, float]]:
    """mean, std (population), max (magnitude), share of infinities and `across` by output; one host read.

    across: root mean square of what sets a row apart from the mean of the rows; 0 where all rows are alike.

    batch: host tensors of one micro-batch. NaN marks entries that the task has masked out: they count nowhere. An
    output with no entry left is left out. Eval mode, so BatchNorm and random streams stay as they are.
    """
    names, rows = [], []
    with evaluating(model):
        with runtime.autocast():
            outputs = task.outputs(model, to_device(batch, runtime.torch_device))
        for name, output in outputs.items():
            if output.numel():
                names.append(name)
                rows.append(_statistics(output.float()))
        table = dict(zip(names, torch.stack(rows).tolist() if rows else [], strict=True))
    keys = ("mean", "std", "max", "infinite", "across")
    return {name: dict(zip(keys, row, strict=True)) for name, row in table.items() if not math.isnan(row[3])}


def _statistics(value: Tensor) -> Tensor:
    """(5,) mean, std, max, infinite, across; see `output_statistics`."""
    finite, known = value.isfinite(), ~value.isnan()
    count, present = finite.sum(), torch.where(finite, value, 0.0)

    def spread(center: Tensor) -> Tensor:
        return (torch.where(finite, value - center, 0.0).square().sum() / count).sqrt()

    mean, row_mean = present.sum() / count, present.sum(0) / finite.sum(0).clamp(min=1)
    infinite = (known & ~finite).sum() / known.sum()
    return torch.stack((mean, spread(mean), present.abs().max(), infinite, spread(row_mean)))


@contextmanager
def hooked(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    """Inside the context every module calls enter(name, module, args, kwargs) before it runs, and
    leave(name, module, args, output) after it, also after an exception.
    """
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, name), always_call=True).remove)
        yield


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
    return {name: p.detach().clone() for name, p in weights(model)}


def block_statistics(model: nn.Module, before: Mapping[str, Tensor] | None = None) -> dict[str, dict[str, float]]:
    """Euclidean norms by block over its trainable parameters; one host read.

    "gradient": of `.grad` as it stands (after the step: unscaled and clipped), left out where a block has
    none. "weight". With `before`, the `snapshot` before an update that moved weights: "update", and "ratio",
    that of the update to the weights before; a block that was all zero has no ratio.
    """
    blocks: dict[str, list[int]] = {}
    norms: list[Tensor] = []
    present: list[bool] = []
    for name, parameter in weights(model):
        blocks.setdefault(block_of(unwrap(model), name), []).append(len(norms))
        weight, gradient = parameter.detach(), parameter.grad
        old = weight if before is None else before[name]
        tensors = (weight, weight if gradient is None else gradient, old, weight - old)
        norms.append(torch.stack([torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]))
        present.append(gradient is not None)
    values = full(torch.stack(norms)).tolist() if norms else []
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


def block_warnings(table: Mapping[str, Mapping[str, float]], limit: float) -> list[str]:
    """Warnings about a `block_statistics` with updates: blocks that stood still, or moved by more than `limit`."""
    still = [name for name, row in table.items() if row.get("update") == 0 and row.get("gradient", 0.0) > 0]
    far = [f"{name} ({row['ratio']:.0%})" for name, row in table.items() if row.get("ratio", 0) > limit]
    messages = []
    if still:
        messages.append(
            f"the update did not move {_listed(still)}, though there are gradients: are these weights in the "
            "optimiser, and is the learning rate large enough for their precision?"
        )
    if far:
        messages.append(
            f"one update moved weights by more than {limit:.0%} of their size (health.update_warning): "
            f"{_listed(far)}; the learning rate is probably too high"
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

    def warnings(self, limit: float) -> list[str]:
        """One line about the activations with a larger share; none where too few rows were looked at."""
        shares = sorted(self.shares.items(), key=lambda item: -item[1])
        names = [f"{name} ({len(self.dead[name])} of {self.widths[name]})" for name, share in shares if share > limit]
        if not names or self.rows < DEAD_ROWS:
            return []
        share = f"{limit:.0%} of the units (health.dead_warning)"
        return [f"more than {share} are dead over {self.rows} rows: {_listed(names)}"]


def dead_units(
    task: Task,
    model: nn.Module,
    batches: Iterable[Batch],
    runtime: Runtime,
    minimum: int = DEAD_ROWS,
    passes: OomBackoff | None = None,
) -> DeadUnits:
    """Look at every activation function that `task.outputs` runs, over the first `minimum` rows or more.

    A unit is a channel, over rows and places: dimension 1 of a tensor with four or more (B, C, H, W), the last one of a
    smaller tensor (B, C) or (B, tokens, C). It is dead if it is never above 0 (ReLU), or if its standard deviation is
    below 1e-4 (SiLU, GELU, Mish). Functions are known by the operations they run, so they need not be modules. batches:
    host tensors. Eval mode; one host read; all hooks are gone afterwards. passes: as in `validate`.
    """
    model, passes = unwrap(model), passes or OomBackoff()
    seen, moments = 0, dict[str, list[Tensor]]()
    path: list[str] = []  # the modules that are running, outermost first

    def leave(*_: Any) -> None:
        path.pop()

    def look(part: Batch) -> dict[str, Tensor]:
        activations = _Activations(path)
        with activations, runtime.autocast():
            task.outputs(model, to_device(part, runtime.torch_device))
        return activations.moments

    with evaluating(model), hooked(model, lambda name, *_: path.append(name), leave):
        for batch in batches:
            for found in passes.over(batch, look):
                for name, of_pass in found.items():
                    moments.setdefault(name, []).append(of_pass)
            seen += rows(batch)
            if seen >= minimum:
                break
    units = {name: _dead(name, torch.stack(parts).cpu().double()) for name, parts in moments.items()}
    dead = {name: tuple(flags.nonzero().flatten().tolist()) for name, flags in units.items()}
    return DeadUnits(seen, {name: len(flags) for name, flags in units.items()}, dead)


def _dead(name: str, moments: Tensor) -> Tensor:
    """(units,) bool, of an activation's moments (passes, 4, units) as `_Activations` has them."""
    function = next(part for part in reversed(name.split(".")) if part in RECTIFIERS | SMOOTH)
    counts, means, variances, largest = moments.unbind(1)
    if function in RECTIFIERS:
        return largest.amax(0) <= 0
    share = counts / counts.sum(0)
    mean = (share * means).sum(0)
    return (share * (variances + (means - mean).square())).sum(0) < DEAD_DEVIATION**2


class _Activations(TorchDispatchMode):
    """Moments of the results of activation functions, by the module that runs and the function's name.

    moments: (4, units) count, mean, variance and largest value, on the device.
    """

    def __init__(self, path: Sequence[str]) -> None:
        super().__init__()
        self.path, self.moments = path, dict[str, Tensor]()
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        function = func.overloadpacket.__name__.rstrip("_")  # relu_ works in place
        if function in RECTIFIERS | SMOOTH and out.dim() > 1 and out.numel():
            name = ".".join(filter(None, (*self.path[-1:], function)))
            self._calls[name] += 1
            if self._calls[name] > 1:
                name = f"{name}.{self._calls[name]}"
            values = out.movedim(1 if out.dim() > 3 else -1, -1).flatten(0, -2).float()
            variance, mean = torch.var_mean(values, dim=0, correction=0)
            count = torch.full_like(mean, len(values))
            self.moments[name] = torch.stack((count, mean, variance, values.amax(0)))
        return out


def _listed(names: Sequence[str]) -> str:
    """At most five names."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


class _Event(NamedTuple):
    """One module or backward operation that ran; flags (0-d bool, on the device): were its values finite?"""

    module: str
    what: str  # "input", "output", or the backward operation's name
    before: Tensor
    after: Tensor


class FiniteChecks:
    """What ran since the checks began, in order of execution; flags stay on the device until `first`.

    Modules are checked by forward hooks, backward operations by hooks in the autograd graph: full backward hooks of
    modules see no dict of outputs, no parameter's gradient, and forbid operations in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.events: list[_Event] = []
        self._inside: list[tuple[Tensor, set[Node]]] = []  # of the modules that are running, outermost first

    def first(self) -> str | None:
        """The first that made a non-finite value of finite ones; None if none did. One host read.

        "value_head.fc2 (forward output)", with "its weight is not finite" where that is so; "value_head (gradient,
        SqrtBackward0)": a backward operation of the innermost module that ran it; "the input ..."; "the loss ...": it
        gave the network a non-finite gradient. None says that all is finite up to the loss and back from it. A module
        that makes infinities on purpose is named, too. Raises ValueError when the model was not called.
        """
        if not self.events:
            raise ValueError("the model that is checked was never called; call the plain module, not torch.compile's")
        flags = torch.stack([flag for event in self.events for flag in (event.before, event.after)]).tolist()
        for event, before, after in zip(self.events, flags[::2], flags[1::2], strict=True):
            forward = event.what in ("input", "output")
            if before and not after:
                return self._module(event)
            # A module within another may get bad values that the outer one made between the two; a backward
            # operation can't, as all are watched: the first to get a bad gradient gets it from outside.
            if not before and not forward:
                return f"the loss (the gradient that it gives {event.module or 'the network'})"
        return None

    def _module(self, event: _Event) -> str:
        name = event.module or "the network"
        if event.what == "input":
            return f"the input{event.module and f' of {event.module}'} is already not finite"
        if event.what != "output":
            return f"{name} (gradient, {event.what})"
        own = self._model.get_submodule(event.module).named_parameters(recurse=False)
        bad = [f"; its {key} is not finite" for key, p in own if not bool(local_part(p).isfinite().all())]
        return f"{name} (forward output{''.join(bad)})"

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Inputs are looked at before the module runs, as it may change them in place."""
        inputs = _tensors((args, kwargs))
        finite = self._finite(inputs)
        if not self._inside:
            self.events.append(_Event(name, "input", torch.ones_like(finite), finite))
        self._inside.append((finite, {t.grad_fn for t in inputs if t.grad_fn is not None}))

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Also called after an exception, with no output: checkpointing ends a second pass by one."""
        before, sources = self._inside.pop()
        if outputs := _tensors(output):
            self.events.append(_Event(name, "output", before, self._finite(outputs)))
            self._watch(name, outputs, sources)

    def _watch(self, name: str, outputs: list[Tensor], sources: set[Node]) -> None:
        """Hook the backward operations from `outputs` back to `sources` that no inner module has hooked.

        The mark is kept in the node itself: nodes that were held here would hold their saved tensors.
        """
        todo = [t.grad_fn for t in outputs if t.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node in sources or not node.next_functions:  # the latter: a parameter's gradient
                continue
            sources.add(node)
            marks: Any = node.metadata  # torch's type stub has a method here
            if self not in marks:
                marks[self] = name
                node.register_hook(partial(self._backward, name, node.name()))
            todo += [behind for behind, _ in node.next_functions if behind is not None]

    def _backward(self, name: str, operation: str, outgoing: Any, incoming: Any) -> None:
        self.events.append(_Event(name, operation, self._finite(_tensors(incoming)), self._finite(_tensors(outgoing))))

    @torch.no_grad()
    def _finite(self, tensors: list[Tensor]) -> Tensor:
        """0-d bool. 0 times infinity or NaN is NaN; on the CPU that is ten times as fast as `isfinite`."""
        if not tensors:
            return torch.ones((), dtype=torch.bool, device=next(self._model.parameters()).device)
        return torch.stack([(tensor * 0).sum() == 0 for tensor in tensors]).all()


def first_nonfinite(replay: Callable[[], object], model: nn.Module) -> str | None:
    """What goes bad first in `replay`, which runs forward and backward passes; see `FiniteChecks.first`.

    replay: makes the failed passes again with the plain `model` and the same random numbers. Gradients and buffers that
    it leaves behind are the caller's to reset. Raises ValueError for a compiled model, which would run without hooks.
    """
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError(
            "finite checks need a model that is not compiled; give and run the plain module, or set "
            "runtime.compile: false"
        )
    checks = FiniteChecks(model)
    with hooked(model, checks.enter, checks.leave):
        replay()
    return checks.first()


def _tensors(values: Any) -> list[Tensor]:
    """All floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(values, Tensor):
        return [values] if values.is_floating_point() or values.is_complex() else []
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
