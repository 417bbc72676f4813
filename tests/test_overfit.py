"""The overfit check passes on a sound network and names each planted fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import Shown, run_notebook

from matrixlib.runs import run as runs
from matrixlib.tasks.chess.task import ChessTask
from matrixlib.tasks.melee.controller import HEADS

SMALL: dict[str, Any] = {
    "model": {"channels": 32, "blocks": 2},
    "validation": {"limit": 64},  # what is held out says nothing here
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}
Arrays = dict[str, np.ndarray]


def check(**overrides: Any) -> Shown:
    return run_notebook("overfit", seed=0, overrides={**SMALL, **overrides})


@pytest.mark.soak
def test_a_sound_network_learns_16_positions(reports: Path) -> None:
    """As nbval of overfit.ipynb sees it do."""
    shown = check()
    assert not shown.failed
    assert shown.values["curve"].iloc[-1].tolist() == [pytest.approx(0, abs=0.05), 1.0]
    assert len(shown.values["curve"]) == 100


@pytest.mark.soak
def test_another_task_says_what_it_has_to_learn(reports: Path) -> None:
    shown = run_notebook("overfit", preset="latin_demo", overrides={"runtime": {"precision": "fp32", "threads": 1}})
    assert not shown.failed
    assert shown.text.count("pass  cell") == 2


def test_a_melee_network_learns_16_windows_of_frames(reports: Path) -> None:
    """Every part of the controller, all of whose floors are 0."""
    runtime = {"device": "cpu", "precision": "fp32", "threads": 1}
    shown = run_notebook("overfit", preset="melee_demo", seed=0, overrides={"runtime": runtime, "data": {"window": 20}})
    assert not shown.failed
    last = shown.values["curve"].iloc[-1]
    assert set(last.index) == {head.name for head in HEADS}
    assert last.to_dict() == pytest.approx(dict.fromkeys(last.index, 0), abs=0.05)


def test_a_layer_cut_off_from_the_gradient_is_named(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_run = runs.open_run

    def cut(*given: Any, **options: Any) -> runs.Run:
        run = open_run(*given, **options)
        run.model.stem.register_forward_hook(lambda module, args, output: output.detach())
        return run

    monkeypatch.setattr(runs, "open_run", cut)
    assert "cut off from the gradient: stem" in check(train={"steps": 20}).failed


@pytest.mark.parametrize(
    ("steps", "rate", "word"),
    [(10, 0.0, "learning rate is zero"), (20, 30.0, "learning rate far too large"), (3, 0.003, "no known fault was")],
)
def test_a_learning_rate_that_cannot_work_is_named(reports: Path, steps: int, rate: float, word: str) -> None:
    shown = check(train={"steps": steps}, optim={"learning_rate": rate})
    assert word in shown.failed
    assert len(shown.values["problems"]) == 1


def restless(out: Arrays, rng: np.random.Generator) -> Arrays:
    return out | {"wdl": rng.permuted(out["wdl"], axis=1)}


def shifted(out: Arrays, rng: np.random.Generator) -> Arrays:
    index = out["policy_index"]
    return out | {"policy_index": np.where(index >= 0, (index + 73) % 4672, index).astype(index.dtype)}


@pytest.mark.parametrize(
    ("spoil", "word"), [(restless, "labels change between visits"), (shifted, "policy targets on illegal moves")]
)
def test_labels_that_are_wrong_are_named(
    reports: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., Arrays], word: str
) -> None:
    sound = ChessTask.prepare
    monkeypatch.setattr(ChessTask, "prepare", lambda self, batch, rng: spoil(sound(self, batch, rng), rng))
    assert word in check(train={"steps": 5}).failed


def test_without_a_value_loss_there_is_nothing_to_judge(reports: Path) -> None:
    with pytest.raises(ValueError, match=r"needs loss\.policy and loss\.value above 0"):
        check(loss={"value": 0.0})
