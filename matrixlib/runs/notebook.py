"""Notebook helpers: check parameters, show verdicts, one-line errors.

The second code cell of every notebook calls `prepare()` and `check_parameters()`; the last one shows a Verdict. A
failed check raises, so papermill exits non-zero with the notebook saved.
"""

import ast
import gc
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
from matrixlib.hardware import runtime
from matrixlib.progress import interactive
from matrixlib.runs.report import add_verdict

PAPERMILL = "# Parameters\n"  # first line of papermill's injected cell
HINTS = {
    "dict": "; pass it as YAML: -y '{0}: {{optim: {{learning_rate: 2e-4}}}}'",
    "list": "; pass it as YAML: -y '{0}: [first, second]'",
    "str": "; -r {0} {1} keeps it as text",
}
_DEFAULT_FORMAT = warnings.formatwarning


class ParameterError(ValueError):
    """A notebook parameter is unknown or of the wrong type."""


class VerdictFailed(Exception):
    """At least one check of a notebook failed."""


def check_parameters(**bounds: Any) -> None:
    """Validate the parameters: what papermill injected against the types of the `parameters` cell, and bounds.

    papermill only warns about undeclared names and guesses types. Types are the annotations (`seed: int = 0`); an int
    may stand for a float. bounds: name -> type of `config`, such as `games=Count`; open_run checks `seed` and `steps`.
    ParameterError, one line, names each unknown parameter, wrong type, and value out of bounds.
    """
    shell = get_ipython()
    if shell is None:
        return
    values = shell.user_ns
    interactive()  # refuses a bad MATRIXLIB_LIVE before anything is computed
    runtime.check_environment()
    if not (problems := _mistyped(values["In"], values)):
        for name, bound in bounds.items():
            try:
                TypeAdapter(bound).validate_python(values[name])
            except ValidationError as error:
                text = error.errors()[0]["msg"].removeprefix("Value error, ")
                problems.append(f"parameter '{name}': {text}, got {values[name]!r:.200}")
    if problems:
        raise ParameterError("; ".join(problems))


def _mistyped(history: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    injected = [at for at, source in enumerate(history) if source.startswith(PAPERMILL)]
    if not injected:  # JupyterLab, nbval
        return []
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
    return problems


def prepare() -> None:
    """Show user errors as one line, `ErrorName: reason`, without a traceback; call it after the imports.

    User errors: those defined by this package, ValueErrors that it raises, and the interrupt of a training, which says
    how to resume. The cell still fails, so papermill exits non-zero; `%tb` and `%debug` show the traceback. Warnings of
    this package and of cells are shortened, tables shown whole, matplotlib figures as PNG. Garbage collections skip
    what was imported: with torch, the one at the kernel's end takes 0.8 s. No effect outside IPython.
    """
    shell = get_ipython()
    if shell is not None:
        for option in ("max_rows", "max_columns", "max_colwidth"):
            pandas.set_option(f"display.{option}", None)
        pandas.set_option("display.expand_frame_repr", False)
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show_error)
        warnings.formatwarning = _warning_line
        select_figure_formats(shell, {"png"}, bbox_inches=None, dpi=100)  # without choosing a backend
        gc.freeze()


class Verdict:
    """Named checks of a notebook: collected, printed, stored, and raised if one failed.

    folder: the run's; the verdict goes into its summary.json and report. None: only in the notebook. demo: too short to
    say anything about strength, as the table then says.
    """

    def __init__(self, folder: Path | None = None, *, demo: bool = False) -> None:
        self.folder = folder
        self.demo = demo
        self.checks: list[dict[str, Any]] = []

    def check(self, name: str, passed: object, detail: str = "") -> bool:
        """Add a check; `detail`: what was measured or required, one line. Returns `passed`."""
        self.checks.append({"name": name, "passed": bool(passed), "detail": detail})
        return bool(passed)

    def show(self, details: bool = True) -> None:
        """Print and store the table; VerdictFailed names failed checks, or says that there are none. details: False
        hides what may depend on the machine."""
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
    """Whether this package raised the error, not a library or the notebook."""
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
    """`warning: text` for this package's and cells' warnings; others with their location."""
    if "ipykernel" in filename or Path(filename).is_relative_to(files.PACKAGE):
        return f"warning: {message}\n"
    return _DEFAULT_FORMAT(message, category, filename, lineno, line)


def _show_error(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> list[str] | None:
    """IPython's handler; must publish the error itself, or the notebook would have none."""
    if not _ours(error, trace):
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
        return None
    parts = filter(None, [str(error), *getattr(error, "__notes__", [])])
    line = f"{kind.__name__}: {' '.join('; '.join(parts).split())}"
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # for %tb and %debug
    shell._showtraceback(kind, error, [line])
    return [line]
