"""The committed notebooks: their form, replay by nbval, and their parameters through papermill."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from cells import run_notebook
from click.testing import CliRunner
from nbval.plugin import get_sanitize_patterns
from networks import random_net, save_run
from papermill.cli import papermill as papermill_command
from test_stockfish import fake_engine
from test_strength import FIRST_MOVE

from matrixlib.config import ConfigError
from matrixlib.engine import onnx
from matrixlib.play.match import EngineError
from matrixlib.runs.run import open_run
from matrixlib.tasks import get_task
from matrixlib.tasks.chess.importers.import_files import import_listed

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    monkeypatch.setenv("MATRIXLIB_LIVE", "0")


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
    assert "check_parameters(" in code[1].source, "the second cell stops on a misspelt parameter"
    numeric = re.findall(r"^(\w+): (?:list\[)?(?:int|float)", tagged[0].source, re.MULTILINE)
    checked = re.search(r"check_parameters\((.*?)^(?=\S)(?!\))", code[1].source + "\nend", re.DOTALL | re.MULTILINE)
    unbounded = {name for name in numeric if not re.search(rf"\b{name}\b", checked[1] if checked else "")}
    assert unbounded <= {"seed", "steps", "roll_back_to"}, "open_run and roll_back check these"
    for cell in code:
        assert len(cell.source.splitlines()) <= 40, "a cell of more than 40 lines is two cells, or a module"
        assert cell.execution_count is not None, "a stored output without a count is not compared by nbval"
        for output in cell.outputs:
            assert output.output_type != "error"
            assert str(ROOT) not in json.dumps(output)


MASKS = dict(get_sanitize_patterns((ROOT / "tests" / "nbval.cfg").read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_masks_leave_the_verdict_to_be_compared(path: Path) -> None:
    outputs = [o for c in nbformat.read(path, as_version=4).cells for o in c.get("outputs", [])]
    for text in (o.text for o in outputs if o.output_type == "stream"):
        masked = text
        for regex, replacement in MASKS.items():
            masked = re.sub(regex, replacement, masked)
        assert all(masked.count(word) == text.count(word) for word in ("PASS", "FAIL"))


def test_a_misspelt_parameter_stops_with_one_line(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of papermill, started in the notebooks' folder; test_launch.py and test_wheel.py start it elsewhere."""
    monkeypatch.chdir(ROOT / "notebooks")
    words = ["train.ipynb", str(reports / "train.ipynb"), "-k", "python3", "--no-progress-bar", "-p", "devcie", "mps"]
    assert CliRunner().invoke(papermill_command, words).exit_code != 0
    cells = nbformat.read(reports / "train.ipynb", as_version=4).cells
    (error,) = (o for cell in cells for o in cell.get("outputs", []) if o.output_type == "error")
    assert error.traceback == [f"ParameterError: {error.evalue}"]
    assert error.evalue.startswith("unknown parameter 'devcie', did you mean 'device'")


def test_what_cannot_be_done_is_told_before_anything_is_trained(reports: Path) -> None:
    wrong = {"optim": {"learing_rate": 2e-4}}
    for name, parameters in {"compare": {"overrides_b": wrong}, "distill": {"overrides": wrong}}.items():
        with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
            run_notebook(name, **parameters)
    assert list(reports.iterdir()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_help_notebook_shows_typed_parameters_with_a_line_of_help(path: Path) -> None:
    """papermill cannot parse `int | None`, and drops all that follows it."""
    done = CliRunner().invoke(papermill_command, ["--help-notebook", str(path)])
    assert done.exit_code == 0, done.output
    shown = re.findall(r"^  (\w+): (.+?) \(default", done.output, re.MULTILINE)
    tagged = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
    declared = ast.parse(tagged[0].source).body
    assert shown == [(one.target.id, ast.unparse(one.annotation)) for one in declared]
    words = " ".join(done.output.split())
    for line in tagged[0].source.splitlines():
        assert " ".join(line.rpartition("  # ")[2].split()) in words


@pytest.fixture
def tiny(reports: Path) -> str:
    """A complete run with random weights."""
    save_run(reports / "demo-tiny", random_net())
    (reports / "demo-tiny" / "summary.json").write_text('{"complete": true}')
    (reports / "demo-tiny" / "run.json").write_text('{"requested": {"task": "chess"}}')
    return "demo-tiny"


def test_eval_keeps_the_matches_that_ended_before_an_engine_fails(tiny: str, tmp_path: Path) -> None:
    engine = fake_engine(tmp_path, FIRST_MOVE.replace("{answer}", "if board.move_stack[2:]: sys.exit(4)"))
    matches = {"games": 2, "simulations": [0], "engines": [f"{engine} depth=3"], "pgn": str(tmp_path / "kept.pgn")}
    with pytest.raises(EngineError, match=r"no `bestmove` from First 1 in `position fen .*: exit status 4"):
        run_notebook("eval", run=tiny, sample=64, **matches)
    assert (tmp_path / "kept.pgn").read_text().count("[Event ") == 4, "against a random player and the best capture"


@pytest.mark.soak
def test_eval_solves_puzzles_and_suites_and_plays_games(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "puzzles.csv").write_text("FEN,Moves,Rating\n6k1/4rppp/8/8/8/8/5PPP/3R2K1 b - - 0 1,e7a7 d1d8,900\n")
    (tmp_path / "mates.epd").write_text("6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - bm Rd8+;\n")
    (tmp_path / "game.pgn").write_text("1. f3 e5 2. g4 Qh4# 0-1\n")
    options = {
        "run": tiny,
        "sample": 256,
        "simulations": [4, 16],
        "puzzles": str(tmp_path / "puzzles.csv"),
        "suites": [str(tmp_path / "mates.epd")],
        "game": str(tmp_path / "game.pgn"),
        "games": 2,
        "pgn": str(tmp_path / "played.pgn"),
    }
    if onnx.installed():
        options |= {"onnx": str(tmp_path / "model.onnx"), "int8": str(tmp_path / "model.int8.onnx")}
    shown = run_notebook("eval", **options)
    text = shown.text
    assert shown.pictures == 6
    assert len(re.findall(r"^ +search 16 +1 +100\.0", text, re.MULTILINE)) == 3, "a mate in one comes first"
    assert re.search(r"^mates +best capture +1 +0\.0", text, re.MULTILINE)
    assert (tmp_path / "played.pgn").read_text().count("[Event ") == 10
    if onnx.installed():
        assert re.search(r"^ONNX int8 +\d", text, re.MULTILINE), text
        assert (tmp_path / "model.onnx").stat().st_size > (tmp_path / "model.int8.onnx").stat().st_size


@pytest.mark.slow
def test_eval_takes_runs_of_other_tasks(reports: Path, tmp_path: Path) -> None:
    overrides = get_task("latin").small | {"train": {"steps": 4, "batch_size": 16}}
    current = open_run("latin_demo", "cpu", run="latin-tiny", overrides=overrides)
    for _ in current.train():
        pass
    current.close()
    path = str(tmp_path / "latin.onnx") if onnx.installed() else ""
    text = run_notebook("eval", run="latin-tiny", sample=64, onnx=path).text
    assert re.search(r"^cell accuracy .* uniform", text, re.MULTILINE)
    assert not path or "outputs cell_logits; differs from torch by" in text
    with pytest.raises(
        ValueError, match="'latin-tiny' is of latin: game, puzzles, suites, games, int8 and lc0 are for"
    ):
        run_notebook("eval", run="latin-tiny", games=2)


@pytest.mark.soak
@pytest.mark.skipif(not onnx.installed(), reason=f"needs {', '.join(onnx.PACKAGES)}")
def test_latin_compares_a_student_with_its_teacher(reports: Path) -> None:
    overrides = get_task("latin").small | {"train": {"batch_size": 16}}
    shown = run_notebook("latin", device="cpu", steps=4, student={"width": 8}, overrides=overrides)
    students = shown.values["students"]
    assert list(students) == ["teacher", "taught", "from the squares"]
    assert students["taught"]["parameters"] == students["from the squares"]["parameters"]
    assert students["taught"]["parameters"] < students["teacher"]["parameters"]
    for row in students.values():
        assert row["ms"] > 0
        assert all(0 <= row[name] <= 1 for name in ("cells", "one pass", "iterative", "(random)"))


GAME = '[White "{}"]\n[Black "?"]\n[Result "{}"]\n\n{}\n\n'
GAMES = GAME.format("Mated", "0-1", "1. f3 e5 2. g4 Qh4# 0-1")
GAMES += GAME.format("Scholar", "0-1", "1. e4 e5 2. Bc4 Nc6 3. Qh5 Nf6 4. Qxf7# 0-1")  # which contradicts the board
GAMES += GAME.format("Légal", "1-0", "1. e4 e5 2. Nf3 d6 3. Bc4 Bg4 4. Nc3 g6 5. Nxe5 Bxd1 6. Bxf7+ Ke7 7. Nd5# 1-0")


@pytest.mark.slow
def test_data_brings_games_in_and_shows_what_is_in_quarantine(reports: Path, tmp_path: Path) -> None:
    path = tmp_path / "games.pgn"
    path.write_text(GAMES)
    assert "3 entries: 2 stored, 1 in quarantine, 0 left out" in import_listed(str(path), reports / "data", workers=1)
    shown = run_notebook("data", paths=str(path), workers=1, repair=True, backup=str(tmp_path / "copy.sqlite"))
    text = shown.text
    assert "3 entries: 1 stored, 0 in quarantine, 2 left out" in text
    detail = "1 +claimed result 0-1, on the board 1-0: mate"
    assert re.search(rf'^result contradicts the board +games\.pgn +{detail} +\[White "Scholar"\]', text, re.MULTILINE)
    assert re.search(r"^games\.pgn +pgn +3 +2 +1 +0 +17$", text, re.MULTILINE)
    assert shown.pictures == 4
    assert (reports / "data" / "catalogue.sqlite").exists()
