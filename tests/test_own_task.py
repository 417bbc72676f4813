"""A task from outside of the package, through the notebooks, with no edit in matrixlib."""

from pathlib import Path

import pytest
import toy_spec
import yaml
from cells import run_notebook

import matrixlib
from matrixlib.config import ConfigError
from matrixlib.runs import run as runs
from matrixlib.tasks import get_task, parse_config

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
    for name, value in {"REPORTS": str(place / "reports"), "LIVE": "0"}.items():
        monkeypatch.setenv(f"MATRIXLIB_{name}", value)


def test_it_is_trained_and_evaluated(place: Path) -> None:
    text = run_notebook("train", preset=str(place / "toy.yaml"), device="cpu", run="toy").text
    assert "held-out class_loss below chance" in text
    assert "VERDICT: PASS" in text
    text = run_notebook("eval", run="toy", device="cpu", task=PATH).text
    assert "class loss" in text
    assert "VERDICT: PASS" in text
    assert matrixlib.load("toy", device="cpu", task=PATH).parameters > 0
    with pytest.raises(ConfigError, match="name it, if you trust it"):
        matrixlib.load("toy", device="cpu")


def test_it_is_overfitted_and_compared(place: Path) -> None:
    preset = str(place / "toy.yaml")
    text = run_notebook("overfit", preset=preset, device="cpu").text
    assert "class learned by heart" in text
    assert "VERDICT: PASS" in text
    text = run_notebook("compare", preset_a=preset, preset_b=preset, device="cpu").text
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
    with pytest.raises(ValueError, match="cannot be written as ONNX"):
        toy_spec.TASK.export(None, "net.onnx")
