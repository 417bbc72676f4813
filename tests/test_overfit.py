"""The overfit check passes on a sound network and names each planted fault."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matrixlib.runs import overfit
from matrixlib.runs.run import RunError
from matrixlib.tasks.chess.task import ChessTask

SMALL: dict[str, Any] = {
    "model": {"channels": 32, "blocks": 2},
    "validation": {"limit": 64},  # what is held out says nothing here
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}


def diagnose(overrides: dict[str, Any] | None = None, cut: bool = False) -> overfit.Diagnosis:
    current = overfit.open_run("demo", "auto", 0, "", 0, {**SMALL, **(overrides or {})})
    if cut:
        stem = current.model.stem
        whole = stem.forward
        stem.forward = lambda planes: whole(planes).detach()  # type: ignore[method-assign]
    try:
        return overfit.check(current)
    finally:
        current.close()


@pytest.mark.soak
def test_a_sound_network_learns_16_positions(reports: Path) -> None:
    """As nbval of overfit.ipynb sees it do."""
    found = diagnose()
    assert found.learned, found
    assert found.curve[-1].gaps["policy"] <= 0.05
    assert found.curve[-1].metrics == {"value/accuracy": 1.0}
    assert len(found.curve) == overfit.STEPS


@pytest.mark.soak
def test_another_task_says_what_it_has_to_learn(reports: Path) -> None:
    current = overfit.open_run("latin_demo", "cpu", 0, "", 0, {"runtime": {"precision": "fp32", "threads": 1}})
    diagnosis = overfit.check(current)
    current.close()
    assert diagnosis.learned, diagnosis
    assert [name for name, _, _ in diagnosis.checks()] == ["cell learned by heart", "cell/accuracy 100 %", "no fault"]


def test_a_layer_cut_off_from_the_gradient_is_named(reports: Path) -> None:
    found = diagnose({"train": {"steps": 20}}, cut=True)
    assert not found.learned
    assert any("cut off from the gradient: stem" in text for text in found.problems), found.problems


def test_a_learning_rate_of_zero_is_named(reports: Path) -> None:
    found = diagnose({"train": {"steps": 10}, "optim": {"learning_rate": 0.0}})
    assert any("learning rate is zero" in text for text in found.problems), found.problems


def test_a_learning_rate_far_too_large_is_named(reports: Path) -> None:
    found = diagnose({"train": {"steps": 20}, "optim": {"learning_rate": 30.0}})
    assert any("learning rate far too large" in text for text in found.problems), found.problems


def test_labels_that_change_between_visits_are_named(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ChessTask.prepare

    def restless(self: ChessTask, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        out = sound(self, batch, rng)
        out["wdl"] = rng.permuted(out["wdl"], axis=1)
        return out

    monkeypatch.setattr(ChessTask, "prepare", restless)
    found = diagnose({"train": {"steps": 5}})
    assert any("labels change between visits" in text for text in found.problems), found.problems


def test_target_mass_on_illegal_moves_is_named(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ChessTask.prepare

    def shifted(self: ChessTask, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        out = sound(self, batch, rng)
        index = out["policy_index"]
        out["policy_index"] = np.where(index >= 0, (index + 73) % 4672, index).astype(index.dtype)
        return out

    monkeypatch.setattr(ChessTask, "prepare", shifted)
    found = diagnose({"train": {"steps": 5}})
    assert any("target mass on illegal moves" in text for text in found.problems), found.problems


def test_too_few_updates_without_a_fault_says_so(reports: Path) -> None:
    found = diagnose({"train": {"steps": 3}})
    assert not found.learned
    assert len(found.problems) == 1
    assert "no known fault was found" in found.problems[0]


def test_without_a_value_loss_there_is_nothing_to_judge(reports: Path) -> None:
    with pytest.raises(RunError, match=r"needs loss\.policy and loss\.value above 0"):
        diagnose({"loss": {"value": 0.0}})
