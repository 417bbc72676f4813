"""The cells of a committed notebook in this process: what papermill runs in a kernel, without the start of one."""

from __future__ import annotations

import ast
import contextlib
import io
from dataclasses import dataclass
from typing import Any

import nbformat
import pandas as pd
from IPython.display import HTML, Image
from matplotlib.figure import Figure

from matrixlib.files import NOTEBOOKS
from matrixlib.runs.notebook import VerdictFailed

WHOLE = ("display.max_rows", None, "display.max_columns", None, "display.max_colwidth", None)


@dataclass(frozen=True)
class Shown:
    """What the cells printed and ended with, as text, how many pictures were among it, why the verdict failed, and what
    the cells have assigned, by name.
    """

    text: str
    pictures: int
    failed: str
    values: dict[str, Any]


def run_notebook(name: str, **parameters: Any) -> Shown:
    """Run every cell, with `parameters` over the notebook's own; an error is the caller's."""
    out, values, pictures, failed = io.StringIO(), dict[str, Any](__name__="__main__"), 0, ""
    with contextlib.redirect_stdout(out), pd.option_context(*WHOLE, "display.expand_frame_repr", False):
        for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
            if cell.cell_type != "code":
                continue
            body = ast.parse(cell.source).body
            last = body.pop().value if body and isinstance(body[-1], ast.Expr) else None
            try:
                exec(compile(ast.Module(body, []), name, "exec"), values)
                result = eval(compile(ast.Expression(last), name, "eval"), values) if last is not None else None
            except VerdictFailed as error:
                failed = str(error)
                continue
            if "parameters" in cell.metadata.get("tags", []):
                assert parameters.keys() <= values.keys(), f"{name}.ipynb declares {', '.join(values)}"
                values |= parameters
            pictures += isinstance(result, Image | Figure | HTML)
            if result is not None:
                print(result)
    return Shown(out.getvalue(), pictures, failed, values)


def definitions(name: str) -> dict[str, Any]:
    """What the cells of a notebook import and define: functions, classes and constants in capitals, by name."""
    values: dict[str, Any] = {}
    for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells:
        for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            names = [n.id for t in getattr(node, "targets", ()) for n in ast.walk(t) if isinstance(n, ast.Name)]
            constant = isinstance(node, ast.Assign) and all(map(str.isupper, names))
            if constant or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
                exec(compile(ast.Module([node], []), name, "exec"), values)
    return values
