"""A training run that can be killed: a toy task with dropout, averages, validation, a rollback and many checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from toy_task import ToySource, ToyTask, toy_batch, toy_runtime

from matrixlib import config as configuration
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.task import Batch
from matrixlib.engine.trainer import Trainer

STEPS = 300
CHANGES = {
    "optim": {"warmup_steps": 3, "ema_decay": 0.9, "learning_rate": 0.003},
    "train": {"batch_size": 16, "statistics_interval": 50, "heartbeat_seconds": 100},
    "validation": {"interval": 13, "full_every": 3, "sample": 24, "batch_size": 24},
    "health": {"skips": 4},
    "checkpoint": {"interval": 7, "keep": 2},
}


def poison(raw: int, batch: Batch) -> None:
    """Four batches in a row that lead to a rollback."""
    if 100 <= raw < 104:
        batch["x"][:] = torch.nan


def survive(folder: Path, compress: int) -> None:
    """Start or resume the run in `folder` and train to its end."""
    torch.set_num_threads(1)
    config = configuration.load("demo", CHANGES)
    task = ToyTask(width=400, dropout=0.2, norm="batch")
    torch.manual_seed(1)
    trainer = Trainer(
        task=task,
        model=task.build_model(),
        runtime=toy_runtime(16),
        config=config,
        source=ToySource(16, change=poison),
        validation=lambda kind: [toy_batch(24, seed=77)],
        folder=folder,
        checkpoints=Checkpoints(folder / "checkpoints", config.checkpoint.keep, compress),
        metrics=MetricsLog(folder / "metrics.jsonl"),
        steps=STEPS,
    )
    trainer.resume()
    for _ in trainer.train():
        pass
    (folder / "done").touch()
