"""A task from outside of the package, through the notebooks, with no edit in matrixlib."""

from __future__ import annotations

import json
import os
from pathlib import Path

import papermill
import pytest
import toy_spec
import yaml

import matrixlib
from matrixlib.config import ConfigError
from matrixlib.runs import run as runs
from matrixlib.tasks import get_task, parse_config

ROOT = Path(__file__).resolve().parents[1]
PATH = "toy_spec:TASK"
PRESET = {
    "task": PATH,
    "train": {"steps": 40, "batch_size": 64, "statistics_interval": 20},
    "validation": {"interval": 20, "sample": 128},
    "checkpoint": {"interval": 20},
    "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the data, a preset, and reports."""
    folder = tmp_path_factory.mktemp("own")
    toy_spec.sample(folder / "data")
    (folder / "reports").mkdir()
    preset = PRESET | {"data": {"source": str(folder / "data"), "workers": 0}}
    (folder / "toy.yaml").write_text(yaml.safe_dump(preset), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the notebooks' kernels."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    for name, value in {"REPORTS": str(place / "reports"), "LIVE": "0"}.items():
        monkeypatch.setenv(f"MATRIXLIB_{name}", value)
    monkeypatch.setenv("PYTHONPATH", paths)


def execute(place: Path, notebook: str, **parameters: str) -> str:
    """What a notebook prints, executed by papermill; its error is the test's."""
    done = papermill.execute_notebook(
        ROOT / "notebooks" / f"{notebook}.ipynb",
        place / f"{notebook}.ipynb",
        parameters,
        kernel_name="python3",
        progress_bar=False,
        cwd=ROOT,
    )
    return json.dumps([cell.get("outputs", []) for cell in done.cells])


@pytest.mark.slow
def test_it_is_trained_and_evaluated(place: Path) -> None:
    text = execute(place, "train", preset=str(place / "toy.yaml"), device="cpu", run="toy")
    assert "held-out class_loss below chance" in text
    assert "VERDICT: PASS" in text
    text = execute(place, "eval", run="toy", device="cpu", task=PATH)
    assert "class loss" in text
    assert "VERDICT: PASS" in text
    assert matrixlib.load("toy", device="cpu", task=PATH).parameters > 0
    with pytest.raises(ConfigError, match="name it, if you trust it"):
        matrixlib.load("toy", device="cpu")


@pytest.mark.slow
def test_it_is_overfitted_and_compared(place: Path) -> None:
    preset = str(place / "toy.yaml")
    text = execute(place, "overfit", preset=preset, device="cpu")
    assert "class learned by heart" in text
    assert "VERDICT: PASS" in text
    text = execute(place, "compare", preset_a=preset, preset_b=preset, device="cpu")
    assert "optim.learning_rate" in text
    assert "VERDICT: PASS" in text


def test_code_is_never_taken_from_a_run(place: Path) -> None:
    """A run folder that somebody hands over must not say what is imported."""
    with pytest.raises(ConfigError, match="which is code of somebody's own"):
        parse_config(PRESET, "config.yaml")
    assert parse_config(PRESET, "config.yaml", PATH).task == PATH
    stolen = place / "reports" / "stolen"
    stolen.mkdir()
    (stolen / "config.yaml").write_text("task: 'os:system'\n", encoding="utf-8")
    with pytest.raises(ValueError, match="which is code of somebody's own"):
        runs.held_out_data(matrixlib.load("stolen", device="cpu").task.config)


def test_it_has_what_every_task_has() -> None:
    assert get_task(PATH) is toy_spec.TASK
    assert toy_spec.TASK.benchmarks() == {}
    with pytest.raises(ValueError, match="cannot be written as ONNX"):
        toy_spec.TASK.export(None, "net.onnx")
