"""The range test of the learning rate, in the cells of train.ipynb."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from cells import definitions
from saved import equal, history
from test_trainer import build, poison, settings, weights
from toy_task import Scaled, ToyData, ToySource, ToyTask, toy_runtime

from matrixlib.engine import rng


def rate_test(trainer: Any, updates: int, source: Any = None) -> pd.Series:
    data: Any = ToyData(trainer.task, source or ToySource(20))
    data.teacher = None
    run = SimpleNamespace(trainer=trainer, data=data, processes=1)
    return pd.Series(definitions("train")["rate_test"](run, updates))


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
    streams = rng.capture(torch.device("cpu"))
    assert len(rate_test(trainer, 30)) > 10
    now, plain_state = trainer._step.state_dict()
    assert all(equal(dict(now[group]), dict(tensors[group])) for group in now.keys() | tensors.keys())
    assert plain_state == state
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
    trainer.step = 4  # batches that it left out lie ahead
    assert len(rate_test(trainer, 10, poison(6, 8))) == 10


def test_it_ends_where_the_loss_diverges(tmp_path: Path) -> None:
    config = settings(optim={"optimiser": "sgd", "clip_norm": 1e9})
    trainer = build(tmp_path, task=ToyTask(norm="none"), config=config)
    losses = rate_test(trainer, 60)
    assert losses.index[0] == pytest.approx(1e-6)
    assert np.diff(np.log(losses.index)) == pytest.approx(math.log(1e6) / 59)
    assert losses.index[-1] < 1
    assert 1e-5 < definitions("train")["suggested"](losses)[0] < losses.index[-1]
    with pytest.raises(ValueError, match="10 updates at least"):
        rate_test(trainer, 3)


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    """A fall whose middle is at 1e-3, then divergence; a loss that never falls gives none."""
    rates = np.geomspace(1e-6, 1.0, 120)
    place = np.log10(rates)
    losses = 3 - 2 / (1 + np.exp(-4 * (place + 3))) + np.exp(6 * (place + 0.8))
    suggested = definitions("train")["suggested"]
    assert suggested(pd.Series(losses, rates))[0] == pytest.approx(1e-3, rel=0.15)
    assert math.isnan(suggested(pd.Series(place, rates))[0])
