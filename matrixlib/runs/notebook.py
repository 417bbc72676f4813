"""The bridge to notebooks: parameters in, verdict out, errors in one line.

The second code cell of every notebook calls `clean_errors()` and `check_parameters()`; the last one shows a
Verdict. A failed check raises, so that papermill exits non-zero with the notebook saved.
"""

import ast
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas
from IPython import get_ipython

from matrixlib import files
from matrixlib.config import nearest
from matrixlib.runs.report import add_verdict
from matrixlib.runs.report import figures_table as figures_table  # what notebooks call

PAPERMILL = "# Parameters\n"  # papermill's first line of the cell that it puts after the `parameters` cell
_DEFAULT_FORMAT = warnings.formatwarning
_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float | int,
    "bool": bool,
    "dict": dict,
    "list": list,
    "None": type(None),
}
"""Name of a parameter's type -> what its value may be."""


class ParameterError(ValueError):
    """A notebook parameter that is unknown or of the wrong type."""


class VerdictFailed(Exception):
    """At least one check of a notebook did not pass."""


def check_parameters(history: Sequence[str] | None = None, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compare what papermill injected with the `parameters` cell; returns the parameters in force.

    papermill only warns about a name that no cell declares and converts values by guesswork. Each parameter's type is
    its annotation (`seed: int = 0`), else the type of its default; an int may stand for a float, None only where it is
    declared. Without an injected cell (JupyterLab, nbval) there is nothing to check and {} comes back.

    history: sources of the cells run so far, values: name -> value; both are IPython's by default. Raises
    ParameterError, one line naming each unknown parameter with the nearest known one, and each wrong type.
    """
    if history is None or values is None:
        shell = get_ipython()
        if shell is None:
            return {}
        history, values = shell.user_ns["In"], shell.user_ns
    cells = [source for source in history if source.startswith(PAPERMILL)]
    if not cells:
        return {}
    declarations = _declarations(history)
    names = list(declarations)
    problems = []
    for name in _assignments(cells[-1]) or {}:
        if name.startswith("PAPERMILL_"):
            continue
        if name not in declarations:
            choice = f"parameters: {', '.join(names)}" if names else "the notebook declares no parameters"
            problems.append(f"unknown parameter '{name}'{nearest(name, names)} ({choice})")
        elif problem := _mismatch(name, declarations[name], values[name]):
            problems.append(problem)
    if problems:
        raise ParameterError("; ".join(problems))
    return {name: values[name] for name in names}


def clean_errors() -> None:
    """Show errors that are meant for people as one line, `ErrorName: reason`, without a traceback.

    These are the errors that this package defines, every ValueError that it raises, and the interrupt of a training,
    which says how to go on. The cell still fails, so papermill stops with a non-zero exit code; `%tb` and `%debug`
    still reach the traceback. Warnings of this package and of cells are shortened likewise, tables are shown whole, and
    matplotlib's figures as pictures. Outside IPython nothing happens.
    """
    shell = get_ipython()
    if shell is not None:
        for option in ("max_rows", "max_columns", "max_colwidth"):
            pandas.set_option(f"display.{option}", None)
        pandas.set_option("display.expand_frame_repr", False)
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show_error)
        warnings.formatwarning = _warning_line
        shell.display_formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _png)


class Verdict:
    """Named checks of a notebook: collected, shown as a table, stored, and raised when one failed.

    folder: the run's folder; the verdict goes into its summary.json, and its report is written again. None keeps the
    verdict in the notebook. demo: the run was too short to say anything about strength; the table says so.
    """

    def __init__(self, folder: Path | None = None, *, demo: bool = False) -> None:
        self.folder = folder
        self.demo = demo
        self.checks: list[tuple[str, bool, str]] = []

    def check(self, name: str, passed: object, detail: str = "") -> bool:
        """Add one check; `detail` says in one line what was measured or demanded. Returns `passed`."""
        self.checks.append((name, bool(passed), detail))
        return bool(passed)

    @property
    def passed(self) -> bool:
        """True when there is at least one check and none failed."""
        return bool(self.checks) and all(passed for _, passed, _ in self.checks)

    def text(self, details: bool = True) -> str:
        """The table; `details=False` leaves out the details, which may depend on the machine."""
        width = max((len(name) for name, _, _ in self.checks), default=0)
        lines = []
        for name, passed, detail in self.checks:
            note = f"  {detail}" if details and detail else ""
            lines.append(f"{'pass' if passed else 'FAIL'}  {name:{width if note else 0}}{note}")
        note = " - a demo: it shows that everything runs, not how strong the network is" if self.demo else ""
        lines.append(f"VERDICT: {'PASS' if self.passed else 'FAIL'}{note}")
        return "\n".join(lines)

    def show(self, details: bool = True) -> None:
        """Print the table, store it, and raise VerdictFailed naming the checks that failed."""
        print(self.text(details))
        if self.folder is not None:
            checks = [dict(zip(("name", "passed", "detail"), check, strict=True)) for check in self.checks]
            add_verdict(self.folder, {"passed": self.passed, "demo": self.demo, "checks": checks})
        if not self.passed:
            failed = [f"{name} ({detail})".removesuffix(" ()") for name, ok, detail in self.checks if not ok]
            raise VerdictFailed("failed: " + "; ".join(failed) if failed else "no check was made")


def _declarations(history: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parameter -> names of its types, `()` for any type.

    They stand in the cell before papermill's, newest first; in JupyterLab somebody may have run papermill's cell
    again on its own, so that another cell came before it: the parameters are a cell of plain assignments.
    """
    for at in range(len(history) - 1, 0, -1):
        if not history[at].startswith(PAPERMILL):
            continue
        assignments = _assignments(history[at - 1])
        if assignments and all(_is_literal(value) for _, value in assignments.values()):
            return {name: _types(*assignment) for name, assignment in assignments.items()}
    return {}


def _assignments(source: str) -> dict[str, tuple[ast.expr | None, ast.expr]] | None:
    """Name -> (annotation, value) of a cell of plain assignments; None for any other cell."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # magics and shell commands
        return None
    assignments: dict[str, tuple[ast.expr | None, ast.expr]] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            assignments[node.target.id] = (node.annotation, node.value)
        elif isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            assignments |= {ast.unparse(target): (None, node.value) for target in node.targets}
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return None
    return assignments


def _types(annotation: ast.expr | None, default: ast.expr) -> tuple[str, ...]:
    """Names of the types allowed: `int | None` -> ("int", "None"), `list[str]` -> ("list[str]",)."""
    names = [type(ast.literal_eval(default)).__name__]
    if annotation is not None:
        names = [part.strip() for part in ast.unparse(annotation).split("|")]
    return tuple(names) if all(name.partition("[")[0] in _TYPES for name in names) else ()


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def _is(value: object, kind: str) -> bool:
    """Whether a value is of a type of _TYPES, the items of a list, too, where it says of which: `list[int]`."""
    name, _, items = kind.removesuffix("]").partition("[")
    if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and name != "bool"):
        return False
    return not isinstance(value, list) or items not in _TYPES or all(_is(item, items) for item in value)


def _mismatch(name: str, allowed: tuple[str, ...], value: object) -> str:
    """Why `value` does not fit, with what to type instead; '' where it fits."""
    if not allowed or any(_is(value, kind) for kind in allowed):
        return ""
    hint, kinds = "", [kind.partition("[")[0] for kind in allowed]
    if "dict" in kinds:
        hint = f"; pass it as YAML: -y '{name}: {{optim: {{learning_rate: 2e-4}}}}'"
    elif "list" in kinds:
        hint = f"; pass it as YAML: -y '{name}: [first, second]'"
    elif "str" in kinds:
        hint = f"; -r {name} {value} keeps it as text"
    return f"parameter '{name}' must be {' or '.join(allowed)}, got {type(value).__name__} {value!r}{hint}"


def _ours(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether this package raised the error, and not a library that it called or the notebook itself."""
    if type(error).__module__.split(".")[0] == "matrixlib":
        return True
    if isinstance(error, KeyboardInterrupt):
        return bool(_notes(error))
    if not isinstance(error, ValueError):  # a bug, of which the traceback is what helps
        return False
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return isinstance(module, str) and module.split(".")[0] == "matrixlib"


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """`warning: text` for what this package or a cell warns about; others with the place that they come from."""
    if "ipykernel" in filename or Path(filename).is_relative_to(files.PACKAGE):
        return f"warning: {message}\n"
    return _DEFAULT_FORMAT(message, category, filename, lineno, line)


def _png(figure: Any) -> Any:
    """A matplotlib Figure as a cell shows it, with no backend chosen."""
    from IPython.core.pylabtools import print_figure

    return print_figure(figure, "png", bbox_inches=None, dpi=100)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _show_error(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> list[str] | None:
    """IPython's handler: must publish the error itself, else the notebook would hold none."""
    if not _ours(error, trace):
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        return None
    parts = filter(None, [str(error), *_notes(error)])
    line = f"{kind.__name__}: {' '.join('; '.join(parts).split())}"
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb and %debug
    shell._showtraceback(kind, error, [line])
    return [line]
