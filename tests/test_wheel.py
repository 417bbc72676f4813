"""The built wheel, installed without a checkout: presets, notebooks, sample set and commands come along."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("matrixlib", "params", "notebooks", "pyproject.toml", "setup.py", "README.md", "LICENSE")
SUFFIXES = (".ipynb", ".yaml", ".js", ".css")
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command of an environment that has the wheel, and our dependencies but not this checkout, in an empty
    folder; returns what it printed."""
    # find_spec("pip") would have setuptools' import hook give up distutils, for this process
    if not {"pip", "setuptools"} <= {package.name for package in importlib.metadata.distributions()}:
        pytest.skip("pip and setuptools build the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source, empty = folder / "source", folder / "empty"
    source.mkdir()
    empty.mkdir()
    for name in SOURCES:  # a build leaves folders behind
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, source)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MATRIXLIB_", "PYTHON", "JPY_"))}
    environment |= {"MATRIXLIB_DEVICE": "cpu", "MATRIXLIB_LIVE": "0"}
    environment |= {k: v for k, v in os.environ.items() if k == "MATRIXLIB_CACHE"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    bin_folder = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    run(*pip, "--python", bin_folder / "python", "install", "--no-deps", "--no-compile", wheel)
    where = run(bin_folder / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # A line of a .pth leads to the packages of this environment, but follows no .pth of it: none to the checkout
    (Path(where) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"
    environment["JUPYTER_PATH"] = str(Path(sysconfig.get_path("data")) / "share" / "jupyter")  # nbconvert's templates
    return run


def places(run: Run) -> list[str]:
    """Where a command is started, where the package is installed, and the reports root."""
    code = "import matrixlib.files as f, pathlib; print(pathlib.Path().resolve(), f.PACKAGE, f.reports_root())"
    return run("python", "-c", code).split()


@pytest.mark.slow
def test_the_wheel_holds_what_a_checkout_has_and_its_command_starts(run: Run) -> None:
    empty, package, reports = places(run)
    assert not Path(package).is_relative_to(ROOT)
    assert Path(reports) == Path(empty) / "reports"
    for name, there in (("notebooks", ROOT), ("params", ROOT), ("tasks/chess/board", ROOT / "matrixlib")):
        wanted, installed = (
            {p.relative_to(root).as_posix() for p in root.joinpath(name).rglob("*.*") if p.suffix in SUFFIXES}
            for root in (there, Path(package))
        )
        assert wanted == installed
    assert "usage: matrixlib-uci" in run("matrixlib-uci", "--help")


@pytest.mark.soak
def test_the_wheel_works_without_a_checkout(run: Run) -> None:
    _, package, reports = places(run)
    launch = ["python", "-m", "matrixlib.runs.launch", "--preset", "demo", "--steps", "40", "--run", "first"]
    first, *_, result, report, look, play = run(*launch).splitlines()
    folder = Path(reports) / "first"
    assert first == "run first: notebooks/train.ipynb -> reports/first/train.ipynb"
    assert "best capture" in result
    assert report == "report: reports/first/report.html"
    assert look.startswith("next: ")
    assert [name for name in re.findall(r"\w+\.ipynb", look) if not Path(package, "notebooks", name).exists()] == []
    assert play.endswith("--checkpoint reports/first")
    assert "first" in (Path(reports) / "index.html").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["complete"], summary["verdict"]["passed"]) == (40, True, True)
    assert json.loads((folder / "run.json").read_text())["commit"] == "", "there is no checkout"
    saved = nbformat.read(folder / "train.ipynb", as_version=4)
    pictures = [o for c in saved.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 3, "the schedule, the panel as it ended, and where the time went"
    assert "widgets" not in saved.metadata, "no widget is made without a front end"
    (folder / "report.html").unlink()
    run("python", "-m", "matrixlib.runs.report", "first")
    assert (folder / "report.html").exists()
