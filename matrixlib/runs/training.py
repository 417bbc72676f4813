"""The trainer of a run: the engine's, with the run's data, folder and ranks, where its newest checkpoint left it."""

from functools import partial
from pathlib import Path

import torch

from matrixlib import config as configuration
from matrixlib.engine import optim, storage
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.context import Context, Hook
from matrixlib.engine.distributed import Ranks, batch_norms
from matrixlib.engine.inspection import TargetLog
from matrixlib.engine.memory import fresh_model
from matrixlib.engine.metrics import MetricsLog, NoLog, interval
from matrixlib.engine.trainer import Trainer
from matrixlib.runs.data import RunData
from matrixlib.runs.start import Start


def build_trainer(data: RunData, folder: Path, ranks: Ranks, start: Start | None) -> Trainer:
    """Ready to train; start: weights to begin with, where there is no checkpoint yet."""
    data.try_workers()
    config, teacher, task, steps = data.config, data.teacher, data.task, data.config.train.steps
    assert isinstance(steps, int)
    hooks: list[tuple[Hook, int]] = []
    if ranks.first:
        target_log = TargetLog(folder / "targets.jsonl", partial(data.spec.ssl_targets, task))
        hooks.append((target_log, config.train.targets_interval))
    log = folder / "metrics.jsonl"
    model, kept = fresh_model(task), config.checkpoint
    context = Context(
        task=task,
        model=model,
        runtime=data.runtime,
        config=config,
        data=data,
        folder=folder,
        checkpoints=Checkpoints(
            folder / "checkpoints",
            kept.keep,
            kept.compress,
            best=kept.keep_best,
            every=kept.keep_every,
            largest=storage.largest_group(model),
        ),
        metrics=MetricsLog(log, interval(steps)) if ranks.first else NoLog(log),
        steps=steps,
        state_extra={
            "config": configuration.dump(config),
            "catalogue": data.catalogue.hash(),
            **({"teacher": dict(teacher.record)} if teacher is not None else {}),
        },
        curriculum=data.spec.curriculum(config),
        teacher=teacher,
        hooks=hooks,
        parts=data.parts,
        ranks=ranks,
    )
    trainer = Trainer(context)
    if ranks.size > 1 and batch_norms(trainer.model):
        trainer.messages.append("batch normalisation: each rank uses its own rows, and the averages kept are rank 0's")
    if not trainer.resume() and config.train.init:
        begin(trainer, start)
    return trainer


def begin(trainer: Trainer, start: Start | None) -> None:
    """Before the first update, with the weights that rank 0 has read."""
    ranks, own = trainer.ranks, optim.named_tensors(trainer.model)
    given = start if ranks.first and not trainer.checkpoints.steps() else None
    if ranks.same(given is not None):
        tensors = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in own.items()}
        if given is not None:
            tensors = {name: tensor.copy_(given.tensors[name]) for name, tensor in tensors.items()}
        ranks.broadcast(tensors.values())
        trainer.start_from(tensors)
        trainer.save()  # so that a resumed run needs the source no more
