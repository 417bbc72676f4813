"""Where a value first stops being finite: checks on every module, forward and backward, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node


class _Event(NamedTuple):
    """One module or backward operation that ran; flags (0-d bool, on the device): were its values finite?"""

    module: str
    what: str  # "input", "output", or the backward operation's name
    before: Tensor
    after: Tensor


class FiniteChecks:
    """What was seen since the checks began, in order of execution; flags stay on the device until `first`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._events: list[_Event] = []
        self._inside: list[tuple[Tensor, set[Node]]] = []  # of the modules that are running, outermost first

    def first(self) -> str | None:
        """The first that made a non-finite value of finite ones; None if none did. One host read.

        "value_head.fc2 (forward output)", with "its weight is not finite" where that is so;
        "value_head (gradient, SqrtBackward0)": a backward operation of the innermost module that ran it;
        "the input ..."; "the loss ...": it gave the network a non-finite gradient. None says that all is
        finite up to the loss and back from it. A module that makes infinities on purpose is named, too. Raises
        ValueError when the model was not called.
        """
        if not self._events:
            raise ValueError(
                "the model that is checked was never called; call the plain module, not torch.compile's"
            )
        flags = torch.stack([flag for event in self._events for flag in (event.before, event.after)]).tolist()
        for event, before, after in zip(self._events, flags[::2], flags[1::2], strict=True):
            forward = event.what in ("input", "output")
            if before and not after:
                return self._input(event) if event.what == "input" else self._module(event)
            # A module within another may get bad values that the outer one made between the two; a backward
            # operation can't, as all are watched: the first to get a bad gradient gets it from outside.
            if not before and not forward:
                return f"the loss (the gradient that it gives {event.module or 'the network'})"
        return None

    def _input(self, event: _Event) -> str:
        return f"the input{event.module and f' of {event.module}'} is already not finite"

    def _module(self, event: _Event) -> str:
        name = event.module or "the network"
        if event.what != "output":
            return f"{name} (gradient, {event.what})"
        own = self._model.get_submodule(event.module).named_parameters(recurse=False)
        bad = [f"; its {key} is not finite" for key, p in own if not bool(p.isfinite().all())]
        return f"{name} (forward output{''.join(bad)})"

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Inputs are looked at before the module runs, as it may change them in place."""
        given = _tensors((args, kwargs))
        finite = self._finite(given)
        if not self._inside:
            self._events.append(_Event(name, "input", torch.ones_like(finite), finite))
        self._inside.append((finite, {t.grad_fn for t in given if t.grad_fn is not None}))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Also called after an exception, with no output: checkpointing ends a second pass by one."""
        before, sources = self._inside.pop()
        if not (made := _tensors(output)):
            return
        self._events.append(_Event(name, "output", before, self._finite(made)))
        self._watch(name, made, sources)

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
        self._events.append(
            _Event(name, operation, self._finite(_tensors(incoming)), self._finite(_tensors(outgoing)))
        )

    @torch.no_grad()
    def _finite(self, tensors: list[Tensor]) -> Tensor:
        """0-d bool. 0 times infinity or NaN is NaN; on the CPU that is ten times as fast as `isfinite`."""
        if not tensors:
            return torch.ones((), dtype=torch.bool, device=next(self._model.parameters()).device)
        return torch.stack([(tensor * 0).sum() == 0 for tensor in tensors]).all()


@contextmanager
def finite_checks(model: nn.Module) -> Iterator[FiniteChecks]:
    """Check every module of `model`, and every backward operation of theirs, while the context is open.

    Ask the yielded object for `first()` when something has gone wrong; nothing waits for the device before.
    Modules are checked by forward hooks, backward operations by hooks in the autograd graph: full backward
    hooks of modules see no dict of outputs, no parameter's gradient, and forbid operations in place. Raises
    ValueError for a compiled model, which would run without the hooks or be compiled anew for them.
    """
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        raise ValueError(
            "finite checks need a model that is not compiled; give and run the plain module, or set "
            "runtime.compile: false"
        )
    checks = FiniteChecks(model)
    handles = []
    try:
        for name, module in model.named_modules():
            enter, leave = partial(checks._enter, name), partial(checks._leave, name)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield checks
    finally:
        for handle in handles:
            handle.remove()


def first_nonfinite(replay: Callable[[], object], model: nn.Module) -> str | None:
    """What goes bad first in `replay`, which runs forward and backward passes; see `FiniteChecks.first`.

    replay: makes the failed passes again with the plain `model` and the same random numbers. Gradients and
    buffers that it leaves behind are the caller's to reset.
    """
    with finite_checks(model) as checks:
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
