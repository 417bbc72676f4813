"""Training runs that can be killed: with averages, validation, a rollback, many checkpoints, and in phases or with
dropout.
"""

import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from planted import change_batches, spoil_output
from toy_task import ToyData, ToySource, ToyTask, toy_batch, toy_runtime, toy_trainer

from matrixlib import config as configuration
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.task import Batch
from matrixlib.engine.trainer import Trainer
from matrixlib.runs import run as runs
from matrixlib.tasks import load_config

STEPS = {"toy": 300, "latin": 150}
POISONED = range(100, 104)
"""Batches in a row that lead to a rollback."""
CHANGES: dict[str, Any] = {
    "optim": {"warmup_steps": 3, "ema_decay": 0.9, "learning_rate": 0.003},
    "train": {"batch_size": 16, "statistics_interval": 50, "heartbeat_seconds": 100},
    "validation": {"interval": 13, "full_every": 3, "sample": 24, "batch_size": 24},
    "health": {"skips": 4},
    "checkpoint": {"interval": 7, "keep": 2},
}
LATIN: dict[str, Any] = {
    "model": {"width": 16, "layers": 1, "heads": 2, "feedforward": 2, "dropout": 0.2},
    "validation": {"limit": 96},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
}


def poison(raw: int, batch: Batch) -> None:
    if raw in POISONED:
        batch["x"][:] = torch.nan


def survive(folder: Path, compress: int, task: str = "toy") -> None:
    """Start or resume the run in `folder`/run and train to its end."""
    torch.set_num_threads(1)
    trainer = toy(folder / "run", compress) if task == "toy" else latin(folder, compress)
    for _ in trainer.train():
        pass
    (folder / "done").touch()


def toy(folder: Path, compress: int) -> Trainer:
    """The engine alone."""
    task = ToyTask(width=400, dropout=0.2, norm="batch")
    data = ToyData(task, ToySource(16, change=poison), lambda kind: [toy_batch(24, seed=77)])
    checkpoints = Checkpoints(folder / "checkpoints", CHANGES["checkpoint"]["keep"], compress)
    config = load_config("demo", CHANGES)
    trainer = toy_trainer(folder, config, data, runtime=toy_runtime(16), checkpoints=checkpoints, steps=STEPS["toy"])
    trainer.resume()
    return trainer


def latin(folder: Path, compress: int) -> Trainer:
    """A whole run: configuration, data, loader, and a curriculum of three phases."""
    os.environ["MATRIXLIB_REPORTS"] = str(folder)
    warnings.simplefilter("ignore")
    more = {"train": {"steps": STEPS["latin"]}, "checkpoint": {"compress": compress}}
    overrides = configuration.merge(configuration.merge(CHANGES, LATIN), more)
    current = runs.open_run("latin_demo", run="run", overrides=overrides)
    number = change_batches(())
    current.model.register_forward_hook(spoil_output(math.nan, lambda: number() in POISONED))
    return current.trainer
