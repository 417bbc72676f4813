"""pyproject.toml, environment.yml and requirements.lock name the same things; the front door starts where it says."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CONDA_NAMES = {"pytorch": "torch"}
CONDA_ALONE = {"python", "pip", "make", "git"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
DECLARED = {canonicalize_name(item.name): item.specifier for item in map(Requirement, LINES)}
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
LOCKED = [Requirement(line) for line in LOCK if line and not line.startswith("#")]


def test_environment_has_the_same_packages_and_ranges() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    (pip,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    assert pip[-1] == "--editable ."
    lines = [item for item in environment["dependencies"] if isinstance(item, str)] + pip[:-1]
    requirements = map(Requirement, lines)
    ranges = {canonicalize_name(CONDA_NAMES.get(item.name, item.name)): item.specifier for item in requirements}
    assert str(ranges["python"]) == PROJECT["requires-python"]
    assert {name: item for name, item in ranges.items() if name not in CONDA_ALONE} == DECLARED


def test_lock_is_exact_satisfies_every_range_and_pins_torch_without_cuda_or_index() -> None:
    pins: dict[str, set[str]] = {}
    for item in LOCKED:
        (specifier,) = item.specifier
        assert specifier.operator == "==", f"{item} is not exact"
        assert not item.name.startswith(("nvidia", "cuda", "triton"))
        pins.setdefault(canonicalize_name(item.name), set()).add(specifier.version)
    assert pins["torch"] == {"2.13.0"}
    for name, specifiers in DECLARED.items():
        assert name in pins, f"{name} is not in requirements.lock: run `make lock`"
        assert all(specifiers.contains(version) for version in pins[name])
    for name in ("requirements.lock", "environment.yml", "pyproject.toml", ".ci/run"):
        assert not re.search(r"https?://|index-url", (ROOT / name).read_text(encoding="utf-8"))


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "VENV"))}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, env={**inherited, **environment}, check=False
    )


def test_make_installs_once(tmp_path: Path) -> None:
    for installs in (True, False):
        said = make("--dry-run", f"VENV={tmp_path}", "train").stdout
        assert "matrixlib.runs.launch --preset quick" in said
        assert ("uv pip install" in said, "pip" in said) == (installs, installs)
        (tmp_path / ".installed").touch()


@pytest.mark.parametrize("works", [True, False], ids=["uv", "pip after uv"])
def test_pip_s_settings_go_to_uv_and_pip_comes_after_it(tmp_path: Path, works: bool) -> None:
    """With programs in the environment that only note what they are told."""
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    settings = """:env:.index-url='https://one.org/simple'
global.find-links='/wheels\\n/more'
global.no-index='1'
:env:.extra-index-url=''
install.no-index='0'
install.only-binary=':all:'
download.extra-index-url='https://other.org'
"""
    (tmp_path / "settings").write_text(settings)
    texts = {
        "python": f'case "$*" in *"config list"*) cat {tmp_path}/settings;; *) echo "$*" >> {calls};; esac',
        "uv": f"cat > {tmp_path}/lines; exit {int(not works)}",
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    result = make("install", f"VENV={tmp_path}")
    assert result.returncode == 0, result.stderr
    given, lock = (tmp_path / "lines").read_text().split("# Exact versions", 1)
    expected = ["--index-url https://one.org/simple", "--find-links /wheels", "--find-links /more"]
    assert [line.strip() for line in given.splitlines()] == [*expected, "--no-index", "--only-binary :all:"]
    assert "\ntorch==" in lock
    by_pip = "-m pip install --quiet --no-compile --requirement requirements.lock" in calls.read_text()
    assert by_pip is not works
    assert ("uv cannot install here" in result.stderr) is not works


def test_make_installs_torch_first_and_alone_from_an_index(tmp_path: Path) -> None:
    (tmp_path / ".installed").touch()
    arguments = ["--dry-run", f"VENV={tmp_path}", "TORCH_INDEX=https://example.org/whl", "install"]
    lines = [line for line in make(*arguments).stdout.splitlines() if "pip install" in line]
    assert "--index-url https://example.org/whl torch==2.13.0" in lines[0]
    assert not any("example.org" in line for line in lines[1:])
    (tmp_path / ".torch-index").write_text("https://example.org/whl\n")
    assert "pip" not in make(*arguments).stdout


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    result = make(f"VENV={tmp_path}/venv", "PYTHON=/bin/false", "train")
    assert result.returncode != 0
    assert "Python 3.11 or newer is needed" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_make_test_in_a_fresh_environment() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert 'make VENV="$folder/venv" test' in script.read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert any(step.get("run") == ".ci/run" for step in workflow["jobs"]["test"]["steps"])
