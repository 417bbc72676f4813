"""The range test of the learning rate."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import Scaled, build, equal, history, poison, settings, weights
from toy_task import ToyData, ToySource, ToyTask, toy_runtime

from matrixlib.engine import rng
from matrixlib.runs.rate_test import HIGHEST, LOWEST, RateTest, rate_test


def test_it_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """In the middle of a run with batch norms, dropout, an average and a loss scale: all that a checkpoint would hold,
    the process's own random streams, and the run that goes on.
    """
    runtime = Scaled(**toy_runtime(8).to_dict())
    plain = build(tmp_path / "plain", runtime=runtime)
    list(plain.train())
    trainer = build(tmp_path / "tested", runtime=runtime)
    updates = trainer.train()
    for _ in range(7):
        next(updates)
    tensors, state = copy.deepcopy(trainer._step.state_dict())
    modes = [module.training for module in trainer.model.modules()]
    gradients = [p.grad.clone() for p in trainer.model.parameters() if p.grad is not None]
    streams = rng.capture(torch.device("cpu"))
    data: Any = ToyData(trainer.task, ToySource(20))
    data.teacher = None
    test = rate_test(SimpleNamespace(trainer=trainer, data=data, processes=1), 30)  # type: ignore[arg-type]
    assert len(test.rates) > 10
    now, plain_state = trainer._step.state_dict()
    assert now.keys() == tensors.keys()
    assert all(equal(dict(now[group]), dict(tensors[group])) for group in now)
    assert plain_state == state
    assert modes == [module.training for module in trainer.model.modules()]
    assert all(map(torch.equal, gradients, [p.grad for p in trainer.model.parameters() if p.grad is not None]))
    after = rng.capture(torch.device("cpu"))
    assert torch.equal(after.torch, streams.torch)
    assert after.python == streams.python
    assert np.array_equal(after.numpy["state"]["key"], streams.numpy["state"]["key"])
    list(updates)
    assert equal(weights(trainer), weights(plain))
    assert history(tmp_path / "tested") == history(tmp_path / "plain")


def test_it_leaves_out_what_a_rollback_left_out(tmp_path: Path) -> None:
    trainer = build(tmp_path, source=poison(6, 8), config=settings(health={"skips": 3}), steps=14)
    list(trainer.train())
    data: Any = ToyData(trainer.task, poison(6, 8))
    data.teacher = None
    trainer.step = 4  # batches that it left out lie ahead
    test = rate_test(SimpleNamespace(trainer=trainer, data=data, processes=1), 10)  # type: ignore[arg-type]
    assert "no longer finite" not in test.end
    assert len(test.rates) == 10


def test_it_ends_where_the_loss_diverges(tmp_path: Path) -> None:
    config = settings(optim={"optimiser": "sgd", "clip_norm": 1e9})
    trainer = build(tmp_path, task=ToyTask(norm="none"), config=config)
    data: Any = ToyData(trainer.task, ToySource(20))
    data.teacher = None
    test = rate_test(SimpleNamespace(trainer=trainer, data=data, processes=1), 60)  # type: ignore[arg-type]
    ratios = np.diff(np.log(test.rates))
    assert test.rates[0] == pytest.approx(LOWEST)
    assert ratios == pytest.approx(math.log(HIGHEST / LOWEST) / 59)
    assert "diverged" in test.end
    assert test.rates[-1] < HIGHEST
    assert test.suggestion is not None
    assert 1e-4 < test.suggestion < test.rates[-1]
    with pytest.raises(ValueError, match="10 at least"):
        rate_test(SimpleNamespace(trainer=trainer, data=data, processes=1), 3)  # type: ignore[arg-type]


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    """A fall whose middle is at 1e-3, then divergence; noise has no say, and a loss that never falls gives none."""
    rates = np.geomspace(1e-6, 1.0, 120)
    place = np.log10(rates)
    losses = 3 - 2 / (1 + np.exp(-4 * (place + 3))) + np.exp(6 * (place + 0.8))
    test = RateTest(tuple(rates), tuple(losses), tuple(losses), "", 0.01)
    assert test.suggestion == pytest.approx(1e-3, rel=0.15)
    assert "suggested: 0.00" in str(test)
    assert len(test.figure().axes[0].get_lines()) == 4
    rising = RateTest(tuple(rates), tuple(place), tuple(place), "", 0.01)
    assert rising.suggestion is None
    assert "no rate can be suggested" in str(rising)
