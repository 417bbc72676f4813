"""The committed notebooks: their form, replay by nbval, and their parameters through papermill."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import papermill as papermill_api
import pytest
from click.testing import CliRunner
from networks import random_net, save_run
from papermill.cli import papermill as papermill_command

from matrixlib.runs.run import open_run
from matrixlib.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TINY = (
    "{data: {limit: 1024}, model: {channels: 16, blocks: 1}, train: {batch_size: 64}, validation: {sample: 128}, "
    "runtime: {precision: fp32, threads: 1, channels_last: false}}"
)


def papermill(name: str, reports: Path, *options: str, cwd: Path = ROOT) -> tuple[int, str]:
    """Run a notebook; returns the exit status and the error of the saved notebook ('' where there is none)."""
    out = reports / f"{name}.ipynb"
    path = os.path.relpath(ROOT / "notebooks" / f"{name}.ipynb", cwd)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setenv("MATRIXLIB_DEVICE", "cpu")
        patch.setenv("MATRIXLIB_LIVE", "0")
        done = CliRunner().invoke(papermill_command, [path, str(out), "-k", "python3", "--no-progress-bar", *options])
    saved = nbformat.read(out, as_version=4)
    errors = [o for c in saved.cells for o in c.get("outputs", []) if o.output_type == "error"]
    return done.exit_code, f"{errors[0].ename}: {errors[0].evalue}" if errors else ""


def shown(path: Path) -> tuple[list[Any], str]:
    """Outputs of a notebook, and all that they say as text."""
    outputs = [o for c in nbformat.read(path, as_version=4).cells for o in c.get("outputs", [])]
    return outputs, "\n".join(o.get("text", o.get("data", {}).get("text/plain", "")) for o in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.cells[0].cell_type == "markdown"
    opening = notebook.cells[0].source
    assert "?" in opening, "a notebook opens with the question that it answers"
    assert re.search(r"second|minute", opening), "and with how long it takes"
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.AnnAssign), "declare parameters as `name: type = default  # help`"
    assert all("#" in line for line in tagged[0].source.splitlines()), "each parameter has a line of help"
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert "check_parameters()" in code[1].source, "the second cell stops on a misspelt parameter"
    for cell in code:
        tree = ast.parse(cell.source)
        kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef, ast.Lambda)
        assert not any(isinstance(node, kinds) for node in ast.walk(tree)), "notebooks hold no function or class"
        assert cell.execution_count is not None, "a stored output without a count is not compared by nbval"
        for output in cell.outputs:
            assert output.output_type != "error"
            assert str(ROOT) not in json.dumps(output)


@pytest.mark.slow
def test_nbval_sees_one_changed_number(reports: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / "probe.ipynb", as_version=4)
    cell = next(c for c in notebook.cells if "policy_table" in c.source)
    cell.source = "from matrixlib.hardware import probe\n\n" + cell.source
    notebook.cells = [cell]  # nothing is measured
    html = cell.outputs[0].data["text/html"]
    assert "1024" in html
    cell.outputs[0].data["text/html"] = html.replace("1024", "1025", 1)
    path = tmp_path / "broken.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    command += ["--nbval-sanitize-with", str(ROOT / "tests" / "nbval.cfg"), "-c", os.devnull, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500, check=False)
    assert done.returncode == 1
    assert "1025" in done.stdout


@pytest.mark.slow
def test_train_runs_headless_and_leaves_static_pictures(reports: Path) -> None:
    """From the notebooks' folder; nbval and test_launch.py start it from the root."""
    options = ["-p", "steps", "50", "-y", f"overrides: {TINY}"]
    status, error = papermill("train", reports, *options, cwd=ROOT / "notebooks")
    assert (status, error) == (0, "")
    saved = nbformat.read(reports / "train.ipynb", as_version=4)
    pictures = [o for c in saved.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2, "the panel as it ended, and where the time went"
    assert "widgets" not in saved.metadata, "no widget is made without a front end"
    (summary,) = reports.glob("demo-*/summary.json")
    result = json.loads(summary.read_text())
    assert (result["steps"], result["complete"], result["verdict"]["passed"]) == (50, True, True)
    assert (summary.parent / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("train", ["-p", "devcie", "mps"], "did you mean 'device'"),
        ("compare", ["-y", "overrides_b: {optim: {learing_rate: 2e-4}}"], "did you mean 'learning_rate'"),
    ],
    ids=["misspelt parameter", "misspelt override"],
)
def test_a_bad_parameter_stops_with_one_line(reports: Path, name: str, options: list[str], reason: str) -> None:
    status, error = papermill(name, reports, *options)
    assert status != 0
    assert reason in error
    assert "\n" not in error.strip()


def test_papermill_reads_every_parameter_with_its_type_and_help() -> None:
    """What `--help-notebook` shows. papermill cannot parse `int | None`, and drops all that follows it."""
    for path in NOTEBOOKS:
        parameters = papermill_api.inspect_notebook(path)
        tagged = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
        assert list(parameters) == [statement.target.id for statement in ast.parse(tagged[0].source).body]
        for parameter in parameters.values():
            assert parameter["inferred_type_name"] != "None"
            assert parameter["help"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_help_notebook_shows_typed_parameters_with_a_line_of_help(path: Path) -> None:
    done = CliRunner().invoke(papermill_command, ["--help-notebook", str(path)])
    assert done.exit_code == 0, done.output
    shown = re.findall(r"^  (\w+): (.+?) \(default", done.output, re.MULTILINE)
    tagged = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
    declared = ast.parse(tagged[0].source).body
    assert shown == [(one.target.id, ast.unparse(one.annotation)) for one in declared]
    words = " ".join(done.output.split())
    for line in tagged[0].source.splitlines():
        assert " ".join(line.rpartition("  # ")[2].split()) in words


@pytest.mark.slow
def test_eval_solves_puzzles_and_suites_and_plays_games(reports: Path, tmp_path: Path) -> None:
    save_run(reports / "demo-tiny", random_net())
    (reports / "demo-tiny" / "summary.json").write_text('{"complete": true}')
    (reports / "demo-tiny" / "run.json").write_text('{"requested": {"task": "chess"}}')
    (tmp_path / "puzzles.csv").write_text("FEN,Moves,Rating\n6k1/4rppp/8/8/8/8/5PPP/3R2K1 b - - 0 1,e7a7 d1d8,900\n")
    (tmp_path / "mates.epd").write_text("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+;\n")
    (tmp_path / "game.pgn").write_text("1. f3 e5 2. g4 Qh4# 0-1\n")
    options = {
        "run": "demo-tiny",
        "sample": 256,
        "simulations": [4, 16],
        "puzzles": str(tmp_path / "puzzles.csv"),
        "suites": [str(tmp_path / "mates.epd")],
        "game": str(tmp_path / "game.pgn"),
        "games": 2,
        "pgn": str(tmp_path / "played.pgn"),
    }
    if onnx := all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        options |= {"onnx": str(tmp_path / "model.onnx"), "int8": str(tmp_path / "model.int8.onnx")}
    _, error = papermill("eval", reports, "-y", json.dumps(options))
    outputs, text = shown(reports / "eval.ipynb")
    assert "VERDICT" in text, error
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 6
    assert re.search(r"^all +1 +search 16 +100.0% \[.*\] +\d", text, re.MULTILINE), "a mate in one comes first"
    assert re.search(r"^mates +1 +search 4 +100.0%", text, re.MULTILINE)
    assert re.search(r"network 16 +network 4 ", text)
    assert (tmp_path / "played.pgn").read_text().count("[Event ") == 10
    if onnx:
        assert "differs from torch by" in text
        assert re.search(r"^ONNX int8 +\d", text, re.MULTILINE), text
        assert (tmp_path / "model.onnx").stat().st_size > (tmp_path / "model.int8.onnx").stat().st_size


@pytest.mark.slow
def test_eval_takes_runs_of_other_tasks(reports: Path) -> None:
    overrides = get_task("latin").small | {"train": {"steps": 4, "batch_size": 16}}
    current = open_run("latin_demo", "cpu", run="latin-tiny", overrides=overrides)
    for _ in current.train():
        pass
    current.close()
    _, error = papermill("eval", reports, "-p", "run", "latin-tiny", "-p", "sample", "64")
    _, text = shown(reports / "eval.ipynb")
    assert re.search(r"^cell accuracy .* uniform", text, re.MULTILINE), error
    assert "VERDICT" in text
    _, error = papermill("eval", reports, "-p", "run", "latin-tiny", "-p", "games", "2")
    assert "run 'latin-tiny' is of latin: game, puzzles, suites, games and int8 are for chess" in error


GAMES = """[White "Mated"]
[Black "By the fool"]
[Result "0-1"]

1. f3 e5 2. g4 Qh4# 0-1

[White "Scholar"]
[Black "Pupil"]
[Result "0-1"]

1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4. Qxf7# 0-1

[White "Légal"]
[Black "Saint Brie"]
[Result "1-0"]

1. e4 e5 2. Nf3 d6 3. Bc4 Bg4 4. Nc3 g6 5. Nxe5 Bxd1 6. Bxf7+ Ke7 7. Nd5# 1-0
"""  # the second result contradicts the board


@pytest.mark.slow
def test_data_brings_games_in_and_shows_what_is_in_quarantine(reports: Path, tmp_path: Path) -> None:
    (tmp_path / "games.pgn").write_text(GAMES)
    options = ["-p", "paths", str(tmp_path / "games.pgn"), "-p", "workers", "1"]
    status, error = papermill("data", reports, *options, "-p", "backup", str(tmp_path / "copy.sqlite"))
    assert (status, error) == (0, "")
    outputs, text = shown(reports / "data.ipynb")
    assert "3 entries: 2 stored, 1 in quarantine, 0 left out" in text
    assert re.search(r'^result contradicts the board +games\.pgn +1 +0-1 .*\[White "Scholar"\]', text, re.MULTILINE)
    assert re.search(r"^games\.pgn +pgn +3 +2 +1 +0 +17$", text, re.MULTILINE)
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 4
    assert (tmp_path / "copy.sqlite").exists()
    assert (reports / "data" / "catalogue.sqlite").exists()
    status, error = papermill("data", reports, *options, "-p", "repair", "True")
    assert (status, error) == (0, "")
    _, text = shown(reports / "data.ipynb")
    assert "3 entries: 1 stored, 0 in quarantine, 2 left out" in text
    assert re.search("^pass  accounts add up +2 accounts$", text, re.MULTILINE)
