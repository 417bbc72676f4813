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
from IPython.core.pylabtools import select_figure_formats
from pydantic import TypeAdapter, ValidationError

from matrixlib import files
from matrixlib.config import nearest
from matrixlib.runs.report import add_verdict
from matrixlib.runs.report import figures_table as figures_table  # what notebooks call

PAPERMILL = "# Parameters\n"  # papermill's first line of the cell that it puts after the `parameters` cell
HINTS = {
    "dict": "; pass it as YAML: -y '{0}: {{optim: {{learning_rate: 2e-4}}}}'",
    "list": "; pass it as YAML: -y '{0}: [first, second]'",
    "str": "; -r {0} {1} keeps it as text",
}
_DEFAULT_FORMAT = warnings.formatwarning


class ParameterError(ValueError):
    """A notebook parameter that is unknown or of the wrong type."""


class VerdictFailed(Exception):
    """At least one check of a notebook did not pass."""


def check_parameters(history: Sequence[str] | None = None, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compare what papermill injected with the `parameters` cell before it; returns the parameters in force.

    papermill only warns about a name that no cell declares and converts values by guesswork. A parameter's type is its
    annotation (`seed: int = 0`); an int may stand for a float. Without an injected cell (JupyterLab, nbval) there is
    nothing to check and {} comes back.

    history: sources of the cells run so far, values: name -> value; both are IPython's by default. Raises
    ParameterError, one line naming each unknown parameter with the nearest known one, and each wrong type.
    """
    if history is None or values is None:
        shell = get_ipython()
        if shell is None:
            return {}
        history, values = shell.user_ns["In"], shell.user_ns
    injected = [at for at, source in enumerate(history) if source.startswith(PAPERMILL)]
    if not injected:
        return {}
    declared = [node for node in ast.parse(history[injected[0] - 1]).body if isinstance(node, ast.AnnAssign)]
    types = {ast.unparse(node.target): ast.unparse(node.annotation) for node in declared}
    problems = []
    for node in ast.walk(ast.parse(history[injected[-1]])):
        name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else "PAPERMILL_"
        if name.startswith("PAPERMILL_"):
            continue
        if name not in types:
            choice = f"parameters: {', '.join(types)}" if types else "the notebook declares no parameters"
            problems.append(f"unknown parameter '{name}'{nearest(name, list(types))} ({choice})")
            continue
        try:
            TypeAdapter(eval(types[name], dict(values))).validate_python(values[name], strict=True)
        except ValidationError:
            value, hint = values[name], HINTS.get(types[name].partition("[")[0], "").format(name, values[name])
            problems.append(f"parameter '{name}' must be {types[name]}, got {type(value).__name__} {value!r}{hint}")
    if problems:
        raise ParameterError("; ".join(problems))
    return {name: values[name] for name in types}


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
        select_figure_formats(shell, {"png"}, bbox_inches=None, dpi=100)  # with no backend chosen


class Verdict:
    """Named checks of a notebook: collected, shown as a table, stored, and raised when one failed.

    folder: the run's folder; the verdict goes into its summary.json, and its report is written again. None keeps the
    verdict in the notebook. demo: the run was too short to say anything about strength; the table says so.
    """

    def __init__(self, folder: Path | None = None, *, demo: bool = False) -> None:
        self.folder = folder
        self.demo = demo
        self.checks: list[dict[str, Any]] = []

    def check(self, name: str, passed: object, detail: str = "") -> bool:
        """Add one check; `detail` says in one line what was measured or demanded. Returns `passed`."""
        self.checks.append({"name": name, "passed": bool(passed), "detail": detail})
        return bool(passed)

    def show(self, details: bool = True) -> None:
        """Print the table, store it, and raise VerdictFailed naming the checks that failed, or where there is none.

        details: False leaves out of the table what may depend on the machine.
        """
        width = max((len(check["name"]) for check in self.checks), default=0)
        for check in self.checks:
            note = f"{'':{width - len(check['name'])}}  {check['detail']}" if details and check["detail"] else ""
            print(f"{'pass' if check['passed'] else 'FAIL'}  {check['name']}{note}")
        failed = [f"{one['name']} ({one['detail']})".removesuffix(" ()") for one in self.checks if not one["passed"]]
        passed = bool(self.checks) and not failed
        note = " - a demo: it shows that everything runs, not how strong the network is" if self.demo else ""
        print(f"VERDICT: {'PASS' if passed else 'FAIL'}{note}")
        if self.folder is not None:
            add_verdict(self.folder, {"passed": passed, "demo": self.demo, "checks": self.checks})
        if not passed:
            raise VerdictFailed("failed: " + "; ".join(failed) if failed else "no check was made")


def _ours(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether this package raised the error, and not a library that it called or the notebook itself."""
    if type(error).__module__.split(".")[0] == "matrixlib":
        return True
    if isinstance(error, KeyboardInterrupt):
        return hasattr(error, "__notes__")
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__")) if trace is not None else ""
    return isinstance(error, ValueError) and module.split(".")[0] == "matrixlib"  # others are bugs


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """`warning: text` for what this package or a cell warns about; others with the place that they come from."""
    if "ipykernel" in filename or Path(filename).is_relative_to(files.PACKAGE):
        return f"warning: {message}\n"
    return _DEFAULT_FORMAT(message, category, filename, lineno, line)


def _show_error(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> list[str] | None:
    """IPython's handler: must publish the error itself, else the notebook would hold none."""
    if not _ours(error, trace):
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        return None
    parts = filter(None, [str(error), *getattr(error, "__notes__", [])])
    line = f"{kind.__name__}: {' '.join('; '.join(parts).split())}"
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb and %debug
    shell._showtraceback(kind, error, [line])
    return [line]
