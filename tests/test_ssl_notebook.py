"""Heads of real runs: planted faults are named by the notebook; conflicts are those of the true gradients."""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import run_notebook
from networks import random_net
from torch import Tensor, nn

import matrixlib
from matrixlib.engine.task import Batch
from matrixlib.runs import run as runs
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.evaluate import oracle, ssl_diagnosis, ssl_gradients
from matrixlib.tasks.chess.evaluate.ssl_outputs import head_outputs
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.spec import ChessSpec
from matrixlib.tasks.chess.ssl_targets import MAPS
from matrixlib.tasks.chess.task import ChessTask

SMALL: dict[str, Any] = {
    "data": {"limit": 1200},
    "model": {"channels": 24, "blocks": 2, "ssl": ["threat", "fork", "control"]},
    "loss": {"ssl": {"threat": 1.0, "control": 1.0}},
    "optim": {"learning_rate": 0.01},
    "train": {"steps": 150},
    "validation": {"interval": 1000, "limit": 1024},
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
        wrong, copied = map(np.stack, zip(*(planted_maps(row.tobytes()) for row in batch["records"]), strict=True))
        out = super().prepare_plain(batch, rng)
        for name, bits in (("threat", wrong), ("control_ours", copied == 2), ("control_theirs", copied == 0)):
            out["maps"][:, MAPS.index(name)] = np.packbits(bits, axis=2, bitorder="little")[..., 0]
        return out


@functools.cache
def planted_maps(row: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Threats by pawns that attack backwards, and a copy of the board as the control, of a stored position."""
    maps = oracle.maps(records.to_board(np.frombuffer(row, records.RECORD)[0]), backwards=True)
    return maps["threat"], np.where(maps["piece"] == oracle.EMPTY, 1, np.where(maps["piece"] < 6, 2, 0))


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
    with monkeypatch.context() as context:
        context.setattr(ChessSpec, "task", lambda self, config: Planted(config))
        trained(root, "planted", monkeypatch, SMALL)
    shown = run_notebook("ssl", run="planted", device="cpu", batches=4, positions=512)
    text = shown.text
    assert "threat   harmful: it has learned another target, pawns attack backwards" in text
    assert "control  trivial: it is a copy of what stands on the square" in text
    assert "fork     dead: it says the same of every position" in text
    assert "FAIL  fork is learning" in text
    assert "fork is learning" in shown.failed
    # The plant is in the run; the product's own targets are right.
    assert "pass  targets are those of python-chess" in text


@pytest.mark.slow
def test_heads_that_learn_are_said_to_learn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL | {"model": SMALL["model"] | {"ssl": ["threat", "control"]}}
    folder = trained(root, "sound", monkeypatch, settings)
    net = matrixlib.load(folder, device="cpu")
    held_out = runs.held_out_data(net.task.config)
    outputs = head_outputs(net, held_out, 512)
    assert outputs.wrong_targets() == {"threat": 0, "control": 0}
    diagnoses = ssl_diagnosis.diagnose_all(net, outputs)
    assert [(one.head, one.word) for one in diagnoses] == [("threat", "learning"), ("control", "learning")]
    for one in diagnoses:
        assert one.loss < one.table < one.prior <= one.uniform
        assert 0 < one.calibration < 0.2
    table = ssl_diagnosis.progress(folder, held_out, "cpu", 64)
    assert (list(table.index), list(table)) == ([75, 150], ["threat", "control"])
    assert (table.loc[150] > table.loc[75]).all()


# Gradients


def gradients(cosine: float, noise: float, batches: int = 16, seed: int = 0) -> np.ndarray:
    """(batches, 2, 4000) of a main term and a head: true ones of length 1 at an angle, and noise that they share."""
    rng = np.random.default_rng(seed)
    true = np.zeros((2, 4000))
    true[0, 0], true[1, :2] = 1, (cosine, math.sqrt(1 - cosine**2))
    shared = rng.normal(0, noise / math.sqrt(4000), (batches, 1, 4000))
    own = rng.normal(0, noise / math.sqrt(4000), (batches, 2, 4000))
    return (true + shared + own).astype(np.float32)


@pytest.mark.parametrize("cosine", [-0.8, 0.0, 0.6])
def test_conflicts_are_those_of_the_true_gradients(cosine: float) -> None:
    """Noise of 3 times the gradient, half of it shared, would pull every cosine of one batch towards one half."""
    hits = 0
    for seed in range(20):
        result = ssl_gradients.conflict(gradients(cosine, 3.0, seed=seed), 1, {"policy": 0}, [2.0, 0.5])
        angle, effect = result.cosine["policy"], result.effect["policy"]
        assert angle is not None
        assert effect is not None
        assert abs(angle[0] - cosine) < 0.4
        assert abs(effect[0] - cosine / 4) < 0.1  # 0.5 / 2.0 of it
        hits += abs(angle[0] - cosine) <= angle[1]
    assert hits >= 16  # of the 95 % intervals


def test_pure_noise_is_not_told() -> None:
    told = 0
    for seed in range(20):
        noise = gradients(1.0, 3.0, seed=seed)
        noise[:, :, 0] -= 1
        told += ssl_gradients.conflict(noise, 1, {"policy": 0}, [1.0, 1.0]).cosine["policy"] is not None
    assert told <= 2


@dataclass(frozen=True)
class Contrary(ChessTask):
    """The threat head's loss is a third of the policy's, turned round."""

    def counts(self, batch: Batch) -> dict[str, int]:
        result = super().counts(batch)
        return result | {"ssl_threat": result["policy"]}

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if active != {"ssl_threat"}:
            return super().losses(model, batch, active)
        result, _ = super().losses(model, batch, frozenset({"policy"}))
        return {"ssl_threat": -result["policy"] / 3}, {}


def test_a_head_that_fights_policy_is_seen() -> None:
    net = random_net({"loss": {"ssl": {"threat": 1.0}}}, ssl=["threat"])
    net.task = Contrary(net.task.config)
    result = ssl_gradients.conflicts(net, runs.held_out_data(net.task.config), batches=4)["threat"]
    cosine, effect = result.cosine["policy"], result.effect["policy"]
    assert cosine is not None
    assert effect is not None
    assert cosine == (pytest.approx(-1, abs=1e-4), pytest.approx(0, abs=1e-3))
    assert effect[0] == pytest.approx(-1 / 3, abs=1e-4)
    assert ssl_gradients.table({"threat": result}).loc["threat", "cosine with policy"] == "-1.00 +- 0.00"
    assert not any(value.requires_grad for value in net.model.parameters())


def test_a_network_without_heads_is_named() -> None:
    net = random_net()
    with pytest.raises(ValueError, match=r"no self-supervised heads: name some in model\.ssl"):
        head_outputs(net, runs.held_out_data(net.task.config), 8)
    assert ssl_gradients.conflicts(net, runs.held_out_data(net.task.config), 4) == {}


def test_too_few_positions_for_gradients_are_named() -> None:
    net = random_net(ssl=["threat"])
    with pytest.raises(ValueError, match="take 4 at least"):
        ssl_gradients.conflicts(net, runs.held_out_data(net.task.config), 3)


def test_a_head_without_weight_is_not_judged() -> None:
    net = random_net({"loss": {"ssl": {"threat": 0.0}}}, ssl=["threat"])
    diagnoses = ssl_diagnosis.diagnose_all(net, head_outputs(net, runs.held_out_data(net.task.config), 64))
    assert {one.head: one.reason for one in diagnoses}["threat"].startswith("its weight loss.ssl.threat is 0")
