"""The bridge to notebooks, with real papermill runs of small notebooks."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient
from papermill.cli import papermill as papermill_command

from matrixlib.config import Count, CountOrZero, InputFile, OutputFile, Positive
from matrixlib.runs import notebook
from matrixlib.runs.notebook import ParameterError, Verdict, VerdictFailed
from matrixlib.tasks.spec import figures_table

PARAMETERS = '''"""Parameters."""
preset: str = "demo"  # name
device: str = "auto"
seed: int = 0
rate: float = 0.1
resume: bool = False
limit: int | None = None
overrides: dict = {}
sizes: list[int] = []
'''
SECOND = "from matrixlib.runs import notebook\nnotebook.prepare()\nnotebook.check_parameters()\n"


def check_parameters(history: Sequence[str], values: Mapping[str, Any], **bounds: Any) -> None:
    """Check after these cells, with these values of names."""
    shell = SimpleNamespace(user_ns={**values, "In": history})
    with mock.patch.object(notebook, "get_ipython", return_value=shell):
        notebook.check_parameters(**bounds)


def check(*lines: str, **bounds: Any) -> None:
    """Check the parameters, with these lines in papermill's cell."""
    history, values = ["", PARAMETERS, "# Parameters\n" + "\n".join(lines) + "\n", SECOND], dict[str, Any]()
    for source in history[1:3]:
        exec(source, values)
    again = [*history, "%matplotlib inline", "x = loss(1)", history[2], SECOND]  # cells run again in any order
    for order in (again, history):
        check_parameters(order, values, **bounds)


def test_valid_parameters_pass() -> None:
    lines = ("device = 'mps'", "rate = 1", "limit = None", "overrides = {'optim': {'beta1': 0.5}}", "sizes = [1]")
    check(
        *lines,
        "PAPERMILL_OUTPUT_PATH = 'out.ipynb'",
        rate=Positive,
        sizes=list[Count],
        device=InputFile | Literal["mps"],
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("devcie = 'mps'", "unknown parameter 'devcie', did you mean 'device'? (parameters: preset, device, "),
        ("seed = '5'", "parameter 'seed' must be int, got str '5'"),
        ("seed = True", "parameter 'seed' must be int, got bool True"),
        ("seed = 1.0", "parameter 'seed' must be int, got float 1.0"),
        ("rate = '1e-3'", "parameter 'rate' must be float, got str '1e-3'"),
        ("limit = 'x'", "parameter 'limit' must be int | None, got str 'x'"),
        ("preset = 123", "parameter 'preset' must be str, got int 123; -r preset 123 keeps it as text"),
        ("overrides = '{}'", "parameter 'overrides' must be dict, got str '{}'; pass it as YAML: -y 'overrides: {"),
        ("sizes = 'a'", "parameter 'sizes' must be list[int], got str 'a'; pass it as YAML: -y 'sizes: [first, sec"),
        ("sizes = [1.5]", "parameter 'sizes' must be list[int], got list [1.5]"),
    ],
)
def test_wrong_parameters_are_one_clear_line(line: str, message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        check("device = 'cpu'", line)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_wrong_parameter_is_named_and_nothing_is_checked_without_papermill() -> None:
    with pytest.raises(ParameterError, match=r"'devcie', did you mean 'device'.*; parameter 'seed' must be int"):
        check("devcie = 'cpu'", "seed = 'x'")
    with pytest.raises(ParameterError, match=r"unknown parameter 'steps' .the notebook declares no"):
        check_parameters(["", "# Parameters\nsteps = 5\n", SECOND], {"steps": 5})
    check_parameters(["", PARAMETERS, SECOND], {})
    notebook.check_parameters()  # no IPython at all


@pytest.mark.parametrize(
    ("line", "bounds", "message"),
    [
        ("seed = -1", {"seed": CountOrZero}, "parameter 'seed': Input should be greater than or equal to 0, got -1"),
        ("rate = float('nan')", {"rate": Positive}, "parameter 'rate': Input should be a finite number, got nan"),
        (
            "sizes = [1, 0]",
            {"sizes": list[Count]},
            "parameter 'sizes': Input should be greater than or equal to 1, got [1,",
        ),
        ("preset = 'x'", {"preset": InputFile}, "parameter 'preset': there is no such file, got 'x'"),
        (
            "preset = '.'",
            {"preset": OutputFile},
            "parameter 'preset': cannot be written: give a file in an existing, wr",
        ),
        ("preset = 'no/x'", {"preset": OutputFile}, "parameter 'preset': cannot be written: give a file in an existi"),
        (
            f"preset = '{'x' * 250}'",
            {"preset": OutputFile},
            "parameter 'preset': cannot be written: give a file in an exi",
        ),
        (f"preset = '{'x' * 5000}/y'", {"preset": OutputFile}, "parameter 'preset': cannot be written: give a file in"),
        (f"preset = '{'x' * 5000}'", {"preset": InputFile}, "parameter 'preset': there is no such file, got 'xx"),
    ],
)
def test_values_out_of_bounds_are_one_clear_line(line: str, bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        check(line, **bounds)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400
    values: dict[str, Any] = {}
    exec(line, values)
    with pytest.raises(ParameterError):  # changed by hand in JupyterLab
        check_parameters(["", PARAMETERS, SECOND], values, **bounds)


def test_verdict_is_shown_and_stored_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    verdict = Verdict(tmp_path, demo=True)
    assert verdict.check("losses fall", True, "3.2 -> 1.1")
    verdict.check("figures beat the baseline", 1)
    verdict.show()
    assert capsys.readouterr().out == (
        "pass  losses fall                3.2 -> 1.1\n"
        "pass  figures beat the baseline\n"
        "VERDICT: PASS - a demo: it shows that everything runs, not how strong the network is\n"
    )
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert (stored["steps"], stored["verdict"]["passed"]) == (3, True)
    assert stored["verdict"]["checks"][0] == {"name": "losses fall", "passed": True, "detail": "3.2 -> 1.1"}
    assert "Verdict: PASS" in (tmp_path / "report.html").read_text(encoding="utf-8")
    verdict.check("b", False, "3 > 2")
    with pytest.raises(VerdictFailed, match=r"^failed: b \(3 > 2\)$"):
        verdict.show(details=False)
    assert "\nFAIL  b\nVERDICT: FAIL" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["verdict"]["passed"] is False
    with pytest.raises(VerdictFailed, match="no check was made"):
        Verdict().show()


def test_figures_stand_beside_their_baselines() -> None:
    figures = {"positions": 12345, "top1": 0.2712, "policy_kl": 1.16, "wdl_accuracy": 0.82}
    baselines = {"uniform_top1": 0.057, "best_capture_top1": 0.171, "uniform_kl": 2.5, "majority_wdl": 0.4}
    table = figures_table(figures | {"baselines": baselines})
    assert table.to_dict("split")["data"] == [
        ["12,345", ""],
        ["27.1%", "uniform 5.7%, best capture 17.1%"],
        ["1.160", "uniform 2.500"],
        ["82.0%", "majority 40.0%"],
    ]
    assert list(table.index) == ["positions", "top1", "policy kl", "wdl accuracy"]


# Real papermill, and a kernel


def notebook_of(cells: list[str]) -> nbformat.NotebookNode:
    """A notebook of such cells, of which the first holds the parameters."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.cells[0].metadata["tags"] = ["parameters"]
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


SHOWN = [
    "print(device, seed, overrides)",
    "import pandas\npandas.DataFrame({name: ['x' * 70] * 99 for name in 'abc'})",
    "import warnings\nfrom matrixlib import files\n"
    "warnings.warn('the loader is late')\nwarnings.warn_explicit('x', UserWarning, 'a.py', 3)\n"
    "warnings.warn_explicit('ours', UserWarning, files.__file__, 3)",
]


def test_papermill_passes_parameters_shows_whole_tables_and_short_warnings(tmp_path: Path) -> None:
    """A misspelt one: test_notebooks.py."""
    nbformat.write(notebook_of([PARAMETERS, SECOND, *SHOWN]), tmp_path / "in.ipynb")
    words = [str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), "-k", "python3", "--no-progress-bar"]
    words += ["-p", "device", "mps", "-p", "seed", "7", "-y", "overrides: {optim: {learning_rate: 2e-4}}"]
    assert CliRunner().invoke(papermill_command, words).exit_code == 0
    printed, table, warned = (cell.outputs for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells[-3:])
    assert printed[0].text == "mps 7 {'optim': {'learning_rate': '2e-4'}}\n"
    assert table[0].data["text/plain"].count("x" * 70) == table[0].data["text/html"].count("x" * 70) == 3 * 99
    assert len(table[0].data["text/plain"].splitlines()) == 100
    text = "".join(output.text for output in warned)
    assert text == "warning: the loader is late\na.py:3: UserWarning: x\nwarning: ours\n", "no cell, no path of ours"


ERRORS = "from matrixlib.runs import compare\ncompare.train_arms({}, seeds=0)"
FAILED = "notebook.Verdict().show()"
FOREIGN = "def inner():\n    return int('x')\ninner()"
FIGURE = "from matplotlib.figure import Figure\nFigure().subplots().figure"
INTERRUPTED = "error = KeyboardInterrupt()\nerror.add_note('stopped; the same goes on')\nraise error"


def test_only_our_errors_are_shortened_and_figures_are_shown() -> None:
    book = notebook_of([PARAMETERS, SECOND, ERRORS, FAILED, INTERRUPTED, FOREIGN, FIGURE])
    NotebookClient(book, kernel_name="python3", allow_errors=True).execute()
    ours, failed, interrupted, foreign = (cell.outputs[-1] for cell in book.cells[2:6])
    assert "image/png" in book.cells[6].outputs[0].data
    assert ours["traceback"] == [f"ValueError: {ours['evalue']}"]
    assert failed["traceback"] == ["VerdictFailed: no check was made"]
    assert interrupted["traceback"] == ["KeyboardInterrupt: stopped; the same goes on"]
    assert (foreign["ename"], "inner" in "".join(foreign["traceback"])) == ("ValueError", True)
