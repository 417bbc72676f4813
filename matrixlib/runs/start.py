"""How a run starts: random or pretrained weights, its teacher, and its trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matrixlib import config as configuration
from matrixlib.config import Config
from matrixlib.data.shards import file_hash
from matrixlib.engine import optim
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.diagnostics import log_targets
from matrixlib.engine.distributed import Ranks, batch_norms
from matrixlib.engine.folder import read_run_config
from matrixlib.engine.memory import fresh_model
from matrixlib.engine.metrics import MetricsLog, interval
from matrixlib.engine.stats import listed
from matrixlib.engine.task import Task
from matrixlib.engine.trainer import Context, Trainer
from matrixlib.runs.data import RunData, RunError
from matrixlib.tasks import get_task, open_file, parse_config
from matrixlib.tasks.spec import find_run, other_weights, pick_checkpoint, weights

LISTED = 8  # names in a message


@dataclass(frozen=True)
class Start:
    """Initial weights by model state names. record, for run.json: `source` as requested, `sha256` of the file, names
    that are `new` (random), and names of the source `left_out`."""

    tensors: Mapping[str, Tensor]
    record: dict[str, Any]
    messages: list[str]


def initial_weights(folder: Path, config: Config, task: Task, record: Mapping[str, Any]) -> Start | None:
    """Initial weights of a run without a checkpoint. RunError if they changed since it started."""
    if not config.train.init or Checkpoints(folder / "checkpoints", config.checkpoint.keep).steps():
        return None
    start = read_start(config, task)
    check_same_weights(f"'{config.train.init}'", start.record["sha256"], record.get("init", {}), folder.name)
    return start


def check_same_weights(what: str, sha256: str, record: Mapping[str, Any], run: str) -> None:
    """RunError if the SHA-256 differs from the recorded one."""
    if problem := other_weights(what, sha256, record, f"run '{run}' began"):
        raise RunError(f"{problem}; give it another run name")


def read_start(config: Config, task: Task) -> Start:
    """The weights of `train.init`: of a run (the best, averaged if available), a checkpoint, or another program's file.
    ValueError names what does not fit, unless `train.init_partial`. Training-only tensors, such as a learned
    temperature, are reinitialised and not counted."""
    source = config.train.init
    tensors, options, sha256, aside = source_weights(source, config)
    model = task.build_model()
    own, anew = model.state_dict(), aside | optim.training_only(model)
    fits = {name for name in own.keys() & tensors.keys() if own[name].shape == tensors[name].shape} - anew
    new, left_out = ([name for name in names if name not in fits | anew] for names in (own, tensors))
    if not fits:
        raise RunError(f"train.init: nothing of '{source}' fits this network (in place of an ONNX file, give its run)")
    lists = {
        "new, so random": new,
        "left out of the source": left_out,
        "of the training, not of the network, so it counts for nothing": sorted(anew),
    }
    problems = [f"{what}: {len(names)} ({listed(names, LISTED)})" for what, names in lists.items() if names]
    differences = configuration.difference(config.model, options) if type(options) is type(config.model) else {}
    if changes := ", ".join(f"model.{key} {theirs}, not {ours}" for key, (theirs, ours) in differences.items()):
        problems.append(f"the source's network has {changes}")
    if not config.train.init_partial and (new or left_out):
        raise RunError(
            f"train.init: '{source}' is not of this network. {'; '.join(problems)}. Give the options of its network, "
            "or take what fits with train.init_partial: true"
        )
    return Start(
        {name: tensors[name] if name in fits else tensor for name, tensor in own.items()},
        {"source": source, "sha256": sha256, "new": new, "left_out": left_out},
        [f"begins with the weights of {source} (SHA-256 {sha256[:12]})", *problems],
    )


def source_weights(source: str, config: Config) -> tuple[Mapping[str, Tensor], Any, str, set[str]]:
    """(tensors, network options, SHA-256 of the tensors' file, names of training-only tensors)."""
    folder, named = find_run(source)
    if folder.is_file():
        net = open_file(folder, "cpu", False, config.task)
        options = net.task.config.model  # type: ignore[attr-defined]
        tensors = {name: tensor.contiguous() for name, tensor in net.model.state_dict().items()}
        counts = [count for name, count in tensors.items() if name.endswith("num_batches_tracked")]
        if getattr(options, "encoding", "") == "lc0" and not all(counts):
            raise RunError(f"train.init: '{source}' has its batch norm folded in, so it can be played, not trained on")
        return tensors, options, file_hash(folder), set()
    given = parse_config(*read_run_config(folder), config.task)
    if given.task != config.task:
        raise RunError(f"train.init: '{source}' is of the task {given.task}, not {config.task}")
    model = get_task(given.task).task(given).build_model()
    tensors, sha256 = weights(pick_checkpoint(folder, given, named))
    return tensors, given.model, sha256, optim.training_only(model)


def build_trainer(data: RunData, folder: Path, ranks: Ranks, start: Start | None) -> Trainer:
    """The engine's trainer, resumed from the newest checkpoint, or with the weights of `start`."""
    data.try_workers()
    config, teacher, steps = data.config, data.teacher, data.config.train.steps
    assert isinstance(steps, int)
    model, kept = fresh_model(data.task), config.checkpoint
    stored = Checkpoints(folder / "checkpoints", kept.keep, kept.compress, best=kept.keep_best, every=kept.keep_every)
    targets = partial(log_targets, folder / "targets.jsonl", partial(data.spec.ssl_targets, data.task))
    recorded = {"teacher": dict(teacher.record)} if teacher is not None else {}
    context = Context(
        task=data.task,
        model=model,
        runtime=data.runtime,
        config=config,
        data=data,
        folder=folder,
        checkpoints=stored,
        metrics=MetricsLog(folder / "metrics.jsonl", interval(steps), writes=ranks.first),
        steps=steps,
        epoch=data.training.count / config.train.batch_size,
        state_extra={"config": configuration.dump(config), "catalogue": data.catalogue.hash(), **recorded},
        curriculum=data.spec.curriculum(config),
        teacher=teacher,
        hooks=[(targets, config.train.targets_interval)] if ranks.first else [],
        strength=partial(data.strength, data) if data.strength else None,
        parts=data.parts,
        ranks=ranks,
    )
    trainer = Trainer(context)
    if ranks.size > 1 and batch_norms(trainer.model):
        trainer.messages.append("batch normalisation: each rank uses its own rows, and the averages kept are rank 0's")
    if not trainer.resume() and config.train.init:
        begin(trainer, start.tensors if start is not None and ranks.first and not trainer.checkpoints.steps() else {})
    return trainer


def begin(trainer: Trainer, given: Mapping[str, Tensor]) -> None:
    """Before the first update: load rank 0's initial weights, if any."""
    if trainer.ranks.same(bool(given)):
        own = optim.named_tensors(trainer.model).items()
        tensors = {name: given.get(name, torch.empty(value.shape)).to(value.dtype) for name, value in own}
        trainer.ranks.broadcast(tensors.values())
        trainer.start_from(tensors)
        trainer.save()  # a resumed run does not need the source
