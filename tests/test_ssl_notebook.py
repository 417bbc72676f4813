"""Heads of real runs: planted faults are named by the notebook; conflicts are those of the true gradients."""

import contextlib
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import definitions, run_notebook
from networks import random_net
from torch import Tensor, nn

from matrixlib.engine.task import Batch
from matrixlib.runs import run as runs
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.evaluate import oracle
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


def trained(name: str, overrides: dict[str, Any]) -> None:
    with contextlib.closing(runs.open_run("demo", "cpu", run=name, overrides=overrides)) as current:
        for _ in current.train():
            pass


@pytest.mark.soak
def test_planted_faults_are_named_by_the_notebook(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(ChessSpec, "task", lambda self, config: Planted(config))
        trained("planted", SMALL)
    shown = run_notebook("ssl", run="planted", device="cpu", batches=4, positions=512)
    text = shown.text
    assert "threat   harmful: it has learned another target, pawns attack backwards" in text
    assert "control  trivial: it is a copy of what stands on the square" in text
    assert "fork     dead: it says the same of every position" in text
    assert "FAIL  fork is learning" in text
    assert "fork is learning" in shown.failed
    # The plant is in the run; the product's own targets are right.
    assert "pass  targets are those of python-chess" in text


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
    hits, conflict = 0, definitions("ssl")["conflict"]
    for seed in range(20):
        angle, interval, effect, _ = conflict(gradients(cosine, 3.0, seed=seed), 1, 0, 0.5 / 2.0)
        assert abs(angle - cosine) < 0.4
        assert abs(effect - cosine / 4) < 0.1  # 0.5 / 2.0 of it
        hits += abs(angle - cosine) <= interval
    assert hits >= 16  # of the 95 % intervals


@dataclass(frozen=True)
class Contrary(ChessTask):
    """The threat head's loss is a third of the policy's, turned round."""

    def counts(self, batch: Batch) -> dict[str, int]:
        result = super().counts(batch)
        return result | {"ssl_threat": result["policy"]}

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        result, metrics = super().losses(model, batch, active)
        return result | {"ssl_threat": -result["policy"] / 3}, metrics


def test_a_head_that_fights_policy_is_seen() -> None:
    net = random_net({"loss": {"ssl": {"threat": 1.0}}}, ssl=["threat"])
    net.task = Contrary(net.task.config)
    conflicts, held_out = definitions("ssl")["conflicts"], runs.held_out_data(net.task.config)
    row = conflicts(net, held_out, 4).loc[("ssl_threat", "policy")]
    assert row.tolist() == [-1.0, 0.0, pytest.approx(-0.33), 0.0]
    assert not any(value.requires_grad for value in net.model.parameters())
    with pytest.raises(ValueError, match="take 4 at least"):
        conflicts(net, held_out, 3)
    with pytest.raises(ValueError, match=r"no self-supervised heads: name some in model\.ssl"):
        definitions("ssl")["head_outputs"](random_net(), held_out, 8)
