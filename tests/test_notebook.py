"""The bridge to notebooks, with real papermill runs of small notebooks."""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from click.testing import CliRunner
from nbclient import NotebookClient
from papermill.cli import papermill as papermill_command

from matrixlib.runs.notebook import ParameterError, Verdict, VerdictFailed, check_parameters, figures_table

PARAMETERS = '''"""Parameters."""
preset: str = "demo"  # name
device: str = "auto"
seed: int = 0
rate: float = 0.1
resume: bool = False
limit: int | None = None
overrides: dict = {}
suites: list = []
paths: list[str] = []
sizes: list[int] = []
plain = "text"
free = None
'''
SECOND = "from matrixlib.runs import notebook\nnotebook.clean_errors()\nvalues = notebook.check_parameters()\n"


def injected(*lines: str) -> list[str]:
    return ["", PARAMETERS, "# Parameters\n" + "\n".join(lines) + "\n", SECOND]


def check(history: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for source in history[1:3]:
        exec(source, values)
    return check_parameters(history, values)


def test_valid_parameters_are_returned_with_the_defaults() -> None:
    lines = ("device = 'mps'", "rate = 1", "limit = None", "overrides = {'optim': {'beta1': 0.5}}", "free = [1]")
    assert check(injected(*lines)) == {
        "preset": "demo",
        "device": "mps",
        "seed": 0,
        "rate": 1,
        "resume": False,
        "limit": None,
        "overrides": {"optim": {"beta1": 0.5}},
        "suites": [],
        "paths": [],
        "sizes": [],
        "plain": "text",
        "free": [1],
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("devcie = 'mps'", "unknown parameter 'devcie', did you mean 'device'? (parameters: preset, device, "),
        ("zzz = 1", "unknown parameter 'zzz' (parameters: "),
        ("seed = '5'", "parameter 'seed' must be int, got str '5'"),
        ("seed = True", "parameter 'seed' must be int, got bool True"),
        ("seed = None", "parameter 'seed' must be int, got NoneType None"),
        ("seed = 1.0", "parameter 'seed' must be int, got float 1.0"),
        ("rate = '1e-3'", "parameter 'rate' must be float, got str '1e-3'"),
        ("rate = True", "parameter 'rate' must be float, got bool True"),
        ("resume = 1", "parameter 'resume' must be bool, got int 1"),
        ("limit = 'x'", "parameter 'limit' must be int or None, got str 'x'"),
        ("preset = 123", "parameter 'preset' must be str, got int 123; -r preset 123 keeps it as text"),
        ("plain = 1", "parameter 'plain' must be str, got int 1"),
        ("overrides = '{}'", "parameter 'overrides' must be dict, got str '{}'; pass it as YAML: -y 'overrides: {"),
        ("overrides = [1]", "parameter 'overrides' must be dict, got list [1]"),
        (
            "suites = '[]'",
            "parameter 'suites' must be list, got str '[]'; pass it as YAML: -y 'suites: [first, second]'",
        ),
        ("paths = ['a', 1]", "parameter 'paths' must be list[str], got list ['a', 1]; pass it as YAML: -y 'paths: ["),
        ("paths = 'a'", "parameter 'paths' must be list[str], got str 'a'"),
        ("sizes = [True]", "parameter 'sizes' must be list[int], got list [True]"),
    ],
)
def test_wrong_parameters_are_one_clear_line(line: str, message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        check(injected("device = 'cpu'", line))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_every_wrong_parameter_is_named() -> None:
    with pytest.raises(ParameterError, match=r"'devcie', did you mean 'device'.*; parameter 'seed' must be int"):
        check(injected("devcie = 'cpu'", "seed = 'x'"))


def test_papermill_paths_are_no_parameters() -> None:
    assert check(injected("PAPERMILL_OUTPUT_PATH = 'out.ipynb'"))["device"] == "auto"


def test_without_a_parameters_cell_nothing_is_known() -> None:
    history = ["", "# Parameters\nsteps = 5\n", SECOND]
    with pytest.raises(ParameterError, match=r"unknown parameter 'steps' .the notebook declares no"):
        check_parameters(history, {"steps": 5})


def test_interactive_use_has_nothing_to_check() -> None:
    assert check_parameters(["", PARAMETERS, SECOND], {}) == {}
    assert check_parameters() == {}  # no IPython at all


def test_cells_run_again_in_any_order() -> None:
    history = injected("seed = 3")
    again = [*history, "%matplotlib inline", "x = loss(1)", history[2], SECOND, history[2], SECOND]
    values: dict[str, Any] = {}
    exec(PARAMETERS, values)
    assert check_parameters(again, values | {"seed": 3})["seed"] == 3


def test_verdict_passes_and_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert stored["steps"] == 3
    assert stored["verdict"]["passed"] is True
    assert stored["verdict"]["checks"][0] == {"name": "losses fall", "passed": True, "detail": "3.2 -> 1.1"}
    assert "Verdict: PASS" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_verdict_fails_after_storing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(tmp_path)
    verdict.check("a", True, "0.123456")
    verdict.check("b", False, "3 > 2")
    with pytest.raises(VerdictFailed, match=r"^failed: b \(3 > 2\)$"):
        verdict.show(details=False)
    assert capsys.readouterr().out == "pass  a\nFAIL  b\nVERDICT: FAIL\n"
    assert json.loads((tmp_path / "summary.json").read_text())["verdict"]["passed"] is False


def test_a_verdict_without_checks_is_no_pass() -> None:
    with pytest.raises(VerdictFailed, match="no check was made"):
        Verdict().show()


def test_figures_stand_beside_their_baselines() -> None:
    figures = {
        "positions": 12345,
        "top1": 0.2712,
        "policy_kl": 1.16,
        "wdl_accuracy": 0.82,
        "baselines": {"uniform_top1": 0.057, "best_capture_top1": 0.171, "uniform_kl": 2.5, "majority_wdl": 0.4},
    }
    table = figures_table(figures)
    assert table.to_dict("index") == {
        "positions": {"value": "12,345", "baselines": ""},
        "top1": {"value": "27.1%", "baselines": "uniform 5.7%, best capture 17.1%"},
        "policy kl": {"value": "1.160", "baselines": "uniform 2.500"},
        "wdl accuracy": {"value": "82.0%", "baselines": "majority 40.0%"},
    }


# Real papermill


def notebook_of(cells: list[str]) -> nbformat.NotebookNode:
    """A notebook of such cells, of which the first holds the parameters."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.cells[0].metadata["tags"] = ["parameters"]
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return book


def papermill(folder: Path, cells: list[str], *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, code cells of the saved notebook, error; by the command, as people do."""
    nbformat.write(notebook_of(cells), folder / "in.ipynb")
    words = [str(folder / "in.ipynb"), str(folder / "out.ipynb"), "-k", "python3", "--no-progress-bar", *arguments]
    done = CliRunner().invoke(papermill_command, words)
    saved = json.loads((folder / "out.ipynb").read_text(encoding="utf-8"))
    return done.exit_code, [cell for cell in saved["cells"] if cell["cell_type"] == "code"], str(done.exception)


def error_of(cell: dict[str, Any]) -> dict[str, Any]:
    errors = [output for output in cell["outputs"] if output["output_type"] == "error"]
    assert len(errors) == 1
    return errors[0]


SHOWN = [
    "print(values['device'], values['seed'], values['overrides'])",
    "import pandas\npandas.DataFrame({name: ['x' * 70] * 99 for name in 'abc'})",
    "import warnings\nfrom matrixlib import files\n"
    "warnings.warn('the loader is late')\nwarnings.warn_explicit('x', UserWarning, 'a.py', 3)\n"
    "warnings.warn_explicit('ours', UserWarning, files.__file__, 3)",
]


def test_papermill_passes_parameters_shows_whole_tables_and_short_warnings(tmp_path: Path) -> None:
    parameters = ["-p", "device", "mps", "-p", "seed", "7", "-y", "overrides: {optim: {learning_rate: 2e-4}}"]
    code, cells, _ = papermill(tmp_path, [PARAMETERS, SECOND, *SHOWN], *parameters)
    assert code == 0
    printed, table, warned = (cell["outputs"] for cell in cells[-3:])
    assert "".join(printed[0]["text"]) == "mps 7 {'optim': {'learning_rate': '2e-4'}}\n"
    plain, markup = ("".join(table[0]["data"][kind]) for kind in ("text/plain", "text/html"))
    assert plain.count("x" * 70) == markup.count("x" * 70) == 3 * 99
    assert len(plain.splitlines()) == 100
    text = "".join("".join(output["text"]) for output in warned)
    assert text == "warning: the loader is late\na.py:3: UserWarning: x\nwarning: ours\n", "no cell, no path of ours"


def test_papermill_stops_at_an_unknown_parameter_with_one_line(tmp_path: Path) -> None:
    code, cells, told = papermill(tmp_path, [PARAMETERS, SECOND, "print('reached')"], "-p", "devcie", "mps")
    assert code == 1
    error = error_of(cells[2])
    assert error["ename"] == "ParameterError"
    assert error["evalue"].startswith("unknown parameter 'devcie', did you mean 'device'?")
    assert error["traceback"] == [f"ParameterError: {error['evalue']}"]
    assert cells[3]["outputs"] == []
    assert "did you mean 'device'?" in told


# Errors, of which a kernel shows one after the other


ERRORS = """
try:
    from pathlib import Path
    from matrixlib.engine import checkpoint
    checkpoint.Checkpoints(Path("."), 1)
finally:
    print("ran")
"""
FAILED = "notebook.Verdict().show()"
FOREIGN = "def inner():\n    return int('x')\ninner()"
FIGURE = "from matplotlib.figure import Figure\nFigure().subplots().figure"
INTERRUPTED = "error = KeyboardInterrupt()\nerror.add_note('stopped; the same goes on')\nraise error"


def test_only_our_errors_are_shortened_and_figures_are_shown() -> None:
    book = notebook_of([PARAMETERS, SECOND, ERRORS, FAILED, INTERRUPTED, FOREIGN, FIGURE])
    NotebookClient(book, kernel_name="python3", allow_errors=True).execute()
    ours, failed, interrupted, foreign = (error_of(cell) for cell in book.cells[2:6])
    assert "image/png" in book.cells[6].outputs[0].data
    assert ours["traceback"] == [f"ValueError: {ours['evalue']}"]
    assert failed["traceback"] == ["VerdictFailed: no check was made"]
    assert interrupted["traceback"] == ["KeyboardInterrupt: stopped; the same goes on"]
    assert (foreign["ename"], "inner" in "".join(foreign["traceback"])) == ("ValueError", True)
