"""Verdicts on self-supervised heads: planted faults are named, and what is fine is not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import papermill
import pytest
import torch
from positions import hard_positions, random_positions

import matrixlib
from matrixlib import heads, subject
from matrixlib import run as runs
from matrixlib.config import PARAMS, Config
from matrixlib.heads import Conflict, Look, Seen
from matrixlib.tasks.chess import readings, records
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.task import ChessTask

NOTEBOOK = PARAMS.parent / "notebooks" / "ssl.ipynb"
SMALL: dict[str, Any] = {
    "model": {"channels": 24, "blocks": 2, "ssl": ["threat", "fork", "control"]},
    "loss": {"ssl": {"threat": 1.0, "control": 1.0}},
    "optim": {"learning_rate": 0.01},
    "train": {"steps": 150},
    "validation": {"interval": 1000},
    "checkpoint": {"interval": 75},
}


@dataclass(frozen=True)
class Planted(ChessTask):
    """Threats by pawns that attack backwards, control that copies the board, and a fork head that is dead."""

    def build_model(self) -> PolicyValueNet:
        net = super().build_model()
        norm = net.ssl_heads["fork"].get_submodule("input.norm")
        torch.nn.init.zeros_(norm.get_parameter("weight"))
        torch.nn.init.constant_(norm.get_parameter("bias"), -1e3)
        return net

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return self.prepare_plain(batch, rng)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        boards = [records.to_board(row) for row in batch["records"]]
        wrong = np.stack([readings.maps(board, backwards=True)["threat"] for board in boards])
        nothing = np.zeros((len(boards), 8, 8), bool)
        copied = readings.readings(boards, "control", nothing)[readings.COPY]
        planted = {"target_threat": wrong.astype(np.float32), "target_control": copied.astype(np.int64)}
        return super().prepare_plain(batch, rng) | planted


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def trained(root: Path, name: str, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any]) -> Path:
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(root))
    current = runs.open_run("demo", "cpu", run=name, overrides=overrides)
    for _ in current.train():
        pass
    current.close()
    return current.folder


@pytest.mark.slow
def test_planted_faults_are_named_by_the_notebook(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(config: Config) -> subject.Subject:
        return subject.Chess(Planted(config))  # type: ignore[arg-type]

    with monkeypatch.context() as context:
        context.setattr(subject, "of", plant)
        trained(root, "planted", monkeypatch, SMALL)
    out = root / "ssl.ipynb"
    with pytest.raises(papermill.PapermillExecutionError, match="VerdictFailed"):
        papermill.execute_notebook(
            NOTEBOOK,
            out,
            {"run": "planted", "device": "cpu", "batches": 2, "positions": 256},
            kernel_name="python3",
            progress_bar=False,
        )
    cells = nbformat.read(out, as_version=4).cells
    said = "".join(o.get("text", "") for c in cells if c.cell_type == "code" for o in c.outputs)
    assert "threat   harmful: it has learned another target, pawns attack backwards" in said
    assert "control  trivial: it is a copy of what stands on the square" in said
    assert "fork     dead: it says the same of every position" in said
    assert "FAIL  fork is learning" in said
    # The plant is in the run; the product's own targets are right.
    assert "pass  targets are those of python-chess" in said


@pytest.mark.slow
def test_heads_that_learn_are_said_to_learn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL | {"model": SMALL["model"] | {"ssl": ["threat", "control"]}}
    folder = trained(root, "sound", monkeypatch, settings)
    net = matrixlib.load(folder, device="cpu")
    held_out = runs.held_out_data(net.task.config)
    found = heads.look(net, held_out, 256)
    assert heads.wrong_targets(found) == {"threat": 0, "control": 0}
    conflict = heads.conflicts(net, held_out, batches=2)
    findings = heads.judge(found, conflict)
    assert [(one.head, one.word) for one in findings] == [("threat", "learning"), ("control", "learning")]
    for one in findings:
        assert one.loss < one.square < one.prior <= one.uniform
        assert 0 < one.calibration < 0.2
    assert set(conflict["threat"].cosine) == {"policy", "value"}
    assert not any(value.requires_grad for value in net.model.parameters())  # as it was
    lines = heads.progress(folder, held_out, "cpu", 64).splitlines()
    assert [line.split()[0] for line in lines] == ["update", "75", "150"]


# Judging, on made-up heads

BOARDS = (*hard_positions(), *random_positions(120, 5))
ROWS = len(BOARDS)


def seen(head: str, probability: np.ndarray, truth: np.ndarray | None = None) -> Seen:
    """A head that says `probability` (N, c, 8, 8) of the boards."""
    exact = readings.readings(BOARDS, head, np.zeros((ROWS, 8, 8), bool))[readings.EXACT]
    content = np.stack([readings.maps(board)["piece"] for board in BOARDS])
    return Seen(
        np.log(np.maximum(probability, 1e-12)).astype(np.float32),
        exact if truth is None else truth,
        np.ones((ROWS, 8, 8), bool),
        content,
    )


def saying(value: np.ndarray, sure: float = 0.9, classes: int = 2) -> np.ndarray:
    """Probabilities of a head that gives `sure` to the classes (N, 8, 8), the rest to the others."""
    one_hot = np.eye(classes)[value].transpose(0, 3, 1, 2)
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, value.shape)[:, None] * (1 - sure)
    share = sure + noise
    return np.asarray(one_hot * share + (1 - one_hot) * (1 - share) / (classes - 1))


def verdict(head: str, probability: np.ndarray, conflict: Conflict | None = None) -> heads.Finding:
    found = Look(BOARDS, {head: seen(head, probability)})
    (finding,) = heads.judge(found, {head: conflict} if conflict else {})
    return finding


EVERY = [
    (head, name)
    for head in ("threat", "pin", "fork", "control")
    for name in readings.readings(BOARDS, head, np.zeros((ROWS, 8, 8), bool))
]


@pytest.mark.parametrize("head, name", EVERY)
def test_each_mistaken_reading_is_named(head: str, name: str) -> None:
    reading = readings.readings(BOARDS, head, np.zeros((ROWS, 8, 8), bool))[name]
    found = verdict(
        head,
        saying(reading, 0.97 if head in ("threat", "control") else 0.9995, 3 if head == "control" else 2),
    )
    if name == readings.EXACT:
        assert found.word == "learning", found.why
    elif name == readings.COPY:
        assert found.word == "trivial"
        assert name in found.why
    else:
        assert found.word == "harmful", found.why
        assert name in found.why


def test_a_head_that_says_the_base_rate_is_dead() -> None:
    exact = readings.readings(BOARDS, "threat", np.zeros((ROWS, 8, 8), bool))[readings.EXACT]
    noise = np.random.default_rng(1).normal(0, 0.01, exact.shape)
    p = np.clip(exact.mean() + noise, 0.01, 0.99)
    found = verdict("threat", np.stack([1 - p, p], 1))
    assert found.word == "dead"
    assert "saves" in found.why
    constant = np.full((ROWS, 2, 8, 8), 0.5)
    assert verdict("threat", constant).why == "it says the same of every position"


def test_a_head_that_is_as_good_as_a_table_of_squares_is_trivial() -> None:
    exact = readings.readings(BOARDS, "threat", np.zeros((ROWS, 8, 8), bool))[readings.EXACT]
    content = np.stack([readings.maps(board)["piece"] for board in BOARDS])
    rate = np.array([exact[content == k].mean() if (content == k).any() else 0.5 for k in range(13)])
    p = np.clip(rate[content], 0.01, 0.99)
    found = verdict("threat", np.stack([1 - p, p], 1))
    assert (found.word, found.why.split(":")[0]) == (
        "trivial",
        "a table of what stands on the square does as well",
    )


def test_a_head_that_takes_policys_gradient_away_is_harmful() -> None:
    exact = readings.readings(BOARDS, "threat", np.zeros((ROWS, 8, 8), bool))[readings.EXACT]
    good = saying(exact)
    fights = Conflict({"policy": (-0.5, 0.1)}, {"policy": (-0.30, 0.05)})
    found = verdict("threat", good, fights)
    assert (found.word, found.why) == ("harmful", "it takes 30% +- 5% of the policy's gradient away")
    unsure = Conflict({"policy": (-0.5, 0.9)}, {"policy": (-0.30, 0.40)})
    assert verdict("threat", good, unsure).word == "learning"


def test_figures_are_those_of_their_definitions() -> None:
    truth = np.zeros((ROWS, 8, 8), np.uint8)
    truth[:, 0, :2] = 1  # 2 of 64 squares
    p = np.full((ROWS, 8, 8), 0.1)
    p[:, 0, 0], p[:, 0, 2], p[:, 1:] = 0.8, 0.7, 0.05 + np.linspace(0, 0.01, ROWS)[:, None, None]
    look = Look(BOARDS, {"pin": seen("pin", np.stack([1 - p, p], 1), truth)})
    (found,) = heads.judge(look, {})
    assert (found.precision, found.recall, found.f1) == (0.5, 0.5, 0.5)
    assert found.rate == 2 / 64
    assert found.uniform == math.log(2)
    assert found.prior == pytest.approx(-(2 * math.log(2 / 64) + 62 * math.log(62 / 64)) / 64)
    assert found.loss == pytest.approx(-np.where(truth == 1, np.log(p), np.log(1 - p)).mean(), rel=1e-5)
    assert heads.confusion(look.seen["pin"]).tolist() == [[61 * ROWS, ROWS], [ROWS, ROWS]]


def test_standard_errors_take_a_positions_squares_together() -> None:
    """Forty equal positions of 64 equal squares are forty numbers, not 2,560."""
    values = np.repeat(np.random.default_rng(3).normal(size=40), 64).reshape(40, 8, 8)
    mean, error = heads._mean_and_error(values, np.ones((40, 8, 8), bool))
    rows = values[:, 0, 0]
    assert mean == pytest.approx(rows.mean())
    assert error == pytest.approx(rows.std(ddof=1) / math.sqrt(40))


def test_a_network_without_heads_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(
        root, "none", monkeypatch, {"train": {"steps": 1}, "model": {"channels": 16, "blocks": 1}}
    )
    net = matrixlib.load(folder, device="cpu")
    with pytest.raises(ValueError, match=r"no self-supervised heads: name some in model\.ssl"):
        heads.look(net, runs.held_out_data(net.task.config), 8)
    with pytest.raises(ValueError, match="at least 2 batches"):
        heads.conflicts(net, runs.held_out_data(net.task.config), 1)
