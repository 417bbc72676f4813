"""Parts of a training that a caller (a cell, say) provides: heads, trunk, losses, schedule, optimizer."""

import ast
import functools
import hashlib
import inspect
import linecache
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, bytes, tuple, list, dict, types.NoneType)
_LIBRARIES = ("builtins", "abc", "torch", "numpy", "matrixlib")


@dataclass(frozen=True)
class Parts:
    """Replacements for, and additions to, the configured parts. heads, trunk, losses: as the task takes them. schedule:
    update index (from 0) -> learning rate. optimizer: parameter groups -> `torch.optim.Optimizer`."""

    heads: tuple[Any, ...] = ()
    trunk: "Callable[[Any], nn.Module] | None" = None
    losses: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    schedule: Callable[[int], float] | None = None
    optimizer: "Callable[[list[dict[str, Any]]], Optimizer] | None" = None

    def __bool__(self) -> bool:
        return bool(self.named())

    def named(self) -> dict[str, Any]:
        """The given parts by name, such as `heads.mobility` or `schedule`."""
        named = {f"heads.{head.name}": head for head in self.heads}
        named |= {f"losses.{term}": loss for term, loss in self.losses.items()}
        named |= {"trunk": self.trunk, "schedule": self.schedule, "optimizer": self.optimizer}
        return {name: part for name, part in named.items() if part is not None}

    def record(self) -> dict[str, dict[str, str]]:
        """What run.json stores of each part; ValueError if a source cannot be found."""
        return {name: describe(part) for name, part in self.named().items()}


def describe(part: Any) -> dict[str, str]:
    """Import path of a part, SHA-256 of its whole source (its own, what it uses of the same module or notebook, plain
    values), and the source itself if it is from a cell."""
    owner = part if isinstance(part, type | types.FunctionType) else type(part)
    text = "\n".join(dict.fromkeys(_sources(part, set())))
    local = {"source": text} if owner.__module__ == "__main__" else {}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"path": f"{owner.__module__}:{owner.__qualname__}", "sha256": digest, **local}


def _sources(part: Any, seen: set[int]) -> Iterator[str]:
    """Source of a part and of everything that it uses of its module or notebook."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, functools.partial):
        yield from _values({"args": part.args, **part.keywords, "func": part.func}, seen)
    elif not isinstance(part, type | types.FunctionType):  # an object: its class and attributes
        yield from _sources(type(part), seen)
        yield from _values(getattr(part, "__dict__", {}), seen)
    elif part.__module__.split(".")[0] in _LIBRARIES:  # run.json records its version
        yield f"{part.__module__}.{part.__qualname__}"
    else:
        yield _source(part)
        for function in [part] if isinstance(part, types.FunctionType) else _methods(part):
            used = inspect.getclosurevars(function)
            for name, value in used.globals.items():
                if isinstance(value, _PLAIN) or getattr(value, "__module__", "") in (part.__module__, "__main__"):
                    yield from _values({name: value}, seen)
            yield from _values(used.nonlocals, seen)
        for base in part.__bases__ if isinstance(part, type) else ():
            yield from _sources(base, seen)


def _values(values: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Plain values as `name = value`; of functions, classes and objects their sources."""
    for name, value in sorted(values.items()):
        if isinstance(value, _PLAIN):
            yield f"{name} = {value!r}"
        else:
            yield f"{name}:"
            yield from _sources(value, seen)


def _methods(part: type) -> list[types.FunctionType]:
    return [value for value in vars(part).values() if isinstance(value, types.FunctionType)]


def _source(part: Any) -> str:
    """Source of a function or class, also from a cell."""
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):  # inspect needs a module file for classes; a cell has none
        for method in _methods(part):
            text = "".join(linecache.getlines(method.__code__.co_filename))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == part.__name__:
                    return ast.get_source_segment(text, node) or ""
    raise ValueError(f"the source of {part!r} cannot be found: define it in a cell or in a module")


def check_same_parts(given: Parts, recorded: Mapping[str, Mapping[str, str]], run: str) -> None:
    """ValueError unless these are the parts that the run started with."""
    own = given.record()
    differences = [f"'{name}' is missing" for name in recorded.keys() - own.keys()]
    differences += [f"'{name}' is new" for name in own.keys() - recorded.keys()]
    both = own.keys() & recorded.keys()
    differences += [f"'{name}' has another source" for name in both if recorded[name]["sha256"] != own[name]["sha256"]]
    if differences:
        text = f"run '{run}' was started with other parts: {', '.join(sorted(differences))}"
        raise ValueError(f"{text}; give open_run() the same ones (their source is in run.json), or another run name")
