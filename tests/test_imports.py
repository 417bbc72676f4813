"""The import rule, by `ast` over the components of each path; light modules stay light; no work at import."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "matrixlib"
MODULES = sorted(path.relative_to(ROOT).with_suffix("").parts for path in PACKAGE.rglob("*.py"))
BASE = ("files", "progress", "config", "hardware")
ENGINE = (*BASE, "engine", "data", "play")
SHARED = tuple(f"tasks.{path.stem}" for path in PACKAGE.glob("tasks/*.py") if path.stem != "__init__")
ALLOWED = {
    "files": (),
    "progress": (),
    "config": ("files",),
    "hardware": BASE,
    "engine": (*BASE, "engine"),
    "data": (*BASE, "data"),
    "play": (*BASE, "data.shards", "play"),
    "tasks": (*ENGINE, *SHARED),
    "runs": (*ENGINE, "tasks", *SHARED, "runs", "bench"),
    "bench": (*ENGINE, "tasks", *SHARED, "runs", "bench"),
}
"""What the modules of a folder, or a module at the root, may import; a task also its own folder.

A row ends at the module that it names: `tasks` is `get_task`, and no particular task.
"""
LIGHT = ("", "files", "progress", "config", "hardware", "data.shards", "data.catalogue")
LIGHT += ("engine.health", "engine.schedule", "engine.metrics")
LIGHT += ("runs.launch", "runs.run", "runs.compare", "runs.browse")
LIGHT += tuple(f"tasks.chess.{name}" for name in ("bitboard", "records", "ssl_targets", "uci.engine"))


@functools.cache
def tree_of(parts: tuple[str, ...]) -> ast.Module:
    """A module, parsed."""
    return ast.parse(ROOT.joinpath(*parts).with_suffix(".py").read_text(encoding="utf-8"))


def ours(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Our module as a dotted path below matrixlib of every import, wherever it stands."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*up, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        yield from filter(None, map(below, names))


def below(name: str) -> str:
    """The longest module of ours that an imported dotted name starts with, without "matrixlib."; "" if none."""
    parts = tuple(name.split("."))
    if parts[0] != "matrixlib":
        return ""
    while parts not in MODULES and (*parts, "__init__") not in MODULES:
        parts = parts[:-1]
    return ".".join(parts[1:])


def allowed(module: str, rows: tuple[str, ...]) -> bool:
    """Whether a module is one of the rows, or lies in one that is a folder but `tasks`."""
    return any(module == row or (row != "tasks" and module.startswith(f"{row}.")) for row in rows)


def rows_of(parts: tuple[str, ...]) -> tuple[str, ...] | None:
    """What a module may import; None: everything, for the three-line API."""
    own = parts[1:]
    if own == ("__init__",):
        return None
    if own[0] != "tasks":
        return ALLOWED[own[0]]
    return ALLOWED["tasks"] if len(own) == 2 else (*ALLOWED["tasks"], ".".join(own[:2]))


@pytest.mark.parametrize("parts", MODULES, ids=".".join)
def test_imports_follow_the_rule(parts: tuple[str, ...]) -> None:
    rows = rows_of(parts)
    bad = sorted({m for m in ours(tree_of(parts), parts[:-1]) if rows is not None and not allowed(m, rows)})
    assert not bad, f"{'.'.join(parts)} imports {', '.join(bad)}; allowed: {', '.join(rows or ())}"


def test_the_imports_go_in_no_circle() -> None:
    """Imports inside functions and for types count too: a circle is two modules that are one."""
    graph = {}
    for parts in MODULES:
        name = ".".join(part for part in parts[1:] if part != "__init__")
        graph[name] = {*ours(tree_of(parts), parts[:-1])} - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_root_and_its_files_stay_small() -> None:
    assert len([parts for parts in MODULES if len(parts) == 2]) <= 4
    lines = {p: p.read_text(encoding="utf-8").count("\n") for p in PACKAGE.rglob("*.py")}
    long = [f"{p.relative_to(PACKAGE)} ({n})" for p, n in lines.items() if n > 500 and p.name != "bitboard.py"]
    assert not long, f"more than 500 lines, so two nouns: {', '.join(long)}"


def test_light_modules_load_no_torch_and_start_nothing() -> None:
    lines = ["import sys, threading"]
    for name in LIGHT:
        lines.append(f"import {'.'.join(filter(None, ('matrixlib', name)))}")
        lines.append(f"assert 'torch' not in sys.modules, '{name} loads torch'")
        lines.append(f"assert threading.active_count() == 1, ('{name}', threading.enumerate())")
    command = [sys.executable, "-c", "\n".join(lines)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("parts", MODULES, ids=".".join)
def test_no_module_does_work_at_import(parts: tuple[str, ...]) -> None:
    """At the top level stand definitions, constants, imports and their conditions: no loop, `with` or bare call."""
    for node in tree_of(parts).body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        assert not isinstance(node, ast.For | ast.While | ast.With), f"line {node.lineno} works at import"
        late = isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node).split()[1].startswith("scipy")
        assert not late, f"line {node.lineno}: scipy takes a second to import, so where it is used"
        for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
                name = ast.unparse(call.func)
                bad = re.search(r"(^|\.)(open|Thread|Popen|run|read_text|read_bytes|load|loads|connect|print)$", name)
                assert not bad, f"line {call.lineno}: {name}() at import"
