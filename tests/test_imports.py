"""The import rule, by `ast` over the components of each path; light modules stay light; no work at import."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "matrixlib"
BASE = ("config", "machine", "rates", "runtime")  # rates and runtime build on machine, and nothing else does
MODULES = sorted(path.relative_to(ROOT).with_suffix("").parts for path in PACKAGE.rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ALLOWED = {
    "config": (),
    "machine": (),
    "rates": ("machine",),
    "runtime": ("machine", "rates"),
    "engine": ("config", "runtime", "engine"),
    "data": ("config", "data"),
    "play": ("config", "runtime", "data.shards", "play"),
    "tasks": ("config", "engine.task", "engine.plots", "play.game", "data.shards"),
}
TYPES_ALONE = {
    "runtime": ("config",)
}  # under `if TYPE_CHECKING:` the policy names the sections that it reads
NOTEBOOK_ROWS = ("notebook", "runtime", "engine.plots", "tasks.*.plots")
LIGHT = ("", "config", "machine", "rates", "runtime", "uci", "data.shards", "data.catalogue", "data.quality")
TASK_WORDS = re.compile(
    r"chess|\blatin(?![-_]?1\b)|(?<![a-z])(pawn|knight|bishop|rook|queen|king)s?(?![a-z])|sudoku|isotop|tic-?tac-?toe"
    r"|castling|en[ _]passant|check_?mate|stale_?mate|stockfish|\b(lc0|leela|uci|pgn|fens?|syzygy)\b",
    re.IGNORECASE,
)
"""Words of a task; those of any game (move, ply, draw) and of mathematics (squares, digits) are not."""
LIGHT_CHESS = tuple(f"tasks.chess.{name}" for name in ("bitboard", "records", "ssl", "sources"))


def composition() -> list[str]:
    """Names of the composition files: every module at the top but the base and the bridge to notebooks."""
    return [
        parts[1] for parts in MODULES if len(parts) == 2 and parts[1] not in (*BASE, "notebook", "__init__")
    ]


def ours(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """(our module as a dotted path below matrixlib, only for types?) of every import, wherever it stands."""
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*up, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if module := below(name):
                yield module, id(node) in typed


def below(name: str) -> str:
    """The longest module of ours that an imported dotted name starts with, without "matrixlib."; "" if none."""
    parts = tuple(name.split("."))
    if parts[0] != "matrixlib":
        return ""
    while parts not in MODULES and (*parts, "__init__") not in MODULES:
        parts = parts[:-1]
    return ".".join(parts[1:])


def allowed(module: str, rows: tuple[str, ...]) -> bool:
    """Whether a module lies in one of the rows, compared component by component; * stands for one component."""
    parts = module.split(".")
    for row in (row.split(".") for row in rows):
        if len(row) <= len(parts) and all(r in ("*", p) for r, p in zip(row, parts, strict=False)):
            return True
    return False


@pytest.mark.parametrize("parts", MODULES, ids=".".join)
def test_imports_follow_the_rule(parts: tuple[str, ...]) -> None:
    own = parts[1:]
    tree = ast.parse((ROOT.joinpath(*parts)).with_suffix(".py").read_text(encoding="utf-8"))
    for module, typed in ours(tree, parts[:-1]):
        row = own[0]
        if row == "__init__":
            continue  # the three-line API
        if row == "tasks":
            rows = (*ALLOWED["tasks"], ".".join(own[:2]))  # and its own folder, never another task's
        elif row in ALLOWED:
            rows = (*ALLOWED[row], *(TYPES_ALONE.get(row, ()) if typed else ()))
        elif row == "notebook":
            rows = (*BASE, "engine", "data", "play", "tasks", *composition())
        else:
            rows = (*BASE, "engine", "data", "play", "tasks", *composition())
            assert module != "notebook", f"{'.'.join(parts)} imports the notebooks' bridge"
        assert allowed(module, rows), (
            f"{'.'.join(parts)} imports {module}; allowed: {', '.join(rows) or 'nothing'}"
        )


def test_the_rule_sees_every_form_of_import() -> None:
    lines = ["import matrixlib.engine.task", "from matrixlib.engine import step", "from . import shards"]
    lines += ["from .. import config", "def f():", "    from matrixlib import data, runtime as r"]
    lines += ["if TYPE_CHECKING:", "    from matrixlib.config import Config"]
    found = list(ours(ast.parse("\n".join(lines)), ("matrixlib", "data")))
    names = {"engine.task", "engine.step", "data.shards", "config", "data", "runtime"}
    assert {module for module, _ in found} == names
    assert [typed for module, typed in found if module == "config"] == [False, True]
    assert allowed("engine.task", ("engine",))
    assert not allowed("engineering", ("engine",))
    assert not allowed("engine.step", ("engine.task",))
    assert allowed("tasks.chess.plots", ("tasks.*.plots",))


def cells(path: Path) -> list[str]:
    """Source of the code cells without IPython's % and ! lines."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("%", "!")))
        for text in sources
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_import_what_they_may(path: Path) -> None:
    for text in cells(path):
        for module, _ in ours(ast.parse(text), ()):
            rows = (*NOTEBOOK_ROWS, *composition())
            assert not module or allowed(module, rows), (
                f"{path.name} imports {module}; allowed: {', '.join(rows)}"
            )


def present(names: tuple[str, ...]) -> list[str]:
    """The importable names among those given."""
    full = [("matrixlib", *filter(None, name.split("."))) for name in names]
    return [".".join(parts) for parts in full if parts in MODULES or (*parts, "__init__") in MODULES]


@pytest.mark.parametrize("names", [LIGHT, LIGHT_CHESS], ids=["base", "chess"])
def test_light_modules_load_no_torch_and_start_nothing(names: tuple[str, ...]) -> None:
    lines = [
        "import sys, threading",
        *(f"import {name}" for name in present(names)),
        "assert 'torch' not in sys.modules, 'torch was loaded'",
        "assert threading.active_count() == 1, threading.enumerate()",
        "print('light')",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.stdout == "light\n", result.stderr


@pytest.mark.parametrize("parts", MODULES, ids=".".join)
def test_no_module_does_work_at_import(parts: tuple[str, ...]) -> None:
    """At the top level stand definitions, constants, imports and their conditions: no loop, `with` or bare call."""
    tree = ast.parse((ROOT.joinpath(*parts)).with_suffix(".py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        assert not isinstance(node, ast.For | ast.While | ast.With), f"line {node.lineno} works at import"
        for call in (inner for inner in ast.walk(node) if isinstance(inner, ast.Call)):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
                name = ast.unparse(call.func)
                bad = re.search(
                    r"(^|\.)(open|Thread|Popen|run|read_text|read_bytes|load|loads|connect|print)$", name
                )
                assert not bad, f"line {call.lineno}: {name}() at import"


@pytest.mark.parametrize("parts", [p for p in MODULES if p[1] in ("engine", "data", "play")], ids=".".join)
def test_engine_data_and_play_know_no_task(parts: tuple[str, ...]) -> None:
    text = (ROOT.joinpath(*parts)).with_suffix(".py").read_text(encoding="utf-8")
    assert [found.group() for found in TASK_WORDS.finditer(text)] == []


def test_the_search_for_words_of_tasks_finds_them() -> None:
    for text in (
        "a ChessTask",
        "Latin squares",
        "latin_demo",
        "two Knights",
        "the king's",
        "isotopies",
        "Sudoku",
        "tic-tac-toe",
    ):
        assert TASK_WORDS.search(text), text
    for text in (
        "latin-1",
        "shaking",
        "mean squares",
        "speaking",
        "looking",
        "promote",
        "the moves of a game",
    ):
        assert not TASK_WORDS.search(text), text
