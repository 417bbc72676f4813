"""Toy trainings by several ranks, as processes that a test starts once and asks for all of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from toy_task import ToyData, ToySource, ToyTask, toy_held_out, toy_runtime

from matrixlib import config as configuration
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.metrics import MetricsLog, NoLog
from matrixlib.engine.parallel import LostRank, Ranks
from matrixlib.engine.signals import Terminated
from matrixlib.engine.task import Batch
from matrixlib.engine.trainer import Trainer
from matrixlib.tasks import load_config

STEPS, ROWS = 10, 23  # so that ranks have different numbers of rows
CHANGES: dict[str, Any] = {
    "optim": {"warmup_steps": 3, "ema_decay": 0.9, "learning_rate": 0.01},
    "train": {"batch_size": ROWS, "statistics_interval": 100, "heartbeat_seconds": 100},
    "validation": {"interval": 4, "full_every": 2, "sample": 24, "batch_size": 16, "min_delta": 0.0},
    "health": {"skips": 3},
    "gating": {"freeze_steps": 0},
    "checkpoint": {"interval": 5, "keep": 2},
}


@dataclass(frozen=True)
class RankSource(ToySource):
    """Every rank's own rows of the same batches."""

    ranks: Ranks = Ranks()
    double: bool = False

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        for batch in super().batches(start, stop):
            yield share(batch, self.ranks, self.double)


def share(batch: Batch, ranks: Ranks, double: bool) -> Batch:
    own = {name: value[ranks.rank :: ranks.size] for name, value in batch.items()}
    return {name: value.double() if double and value.is_floating_point() else value for name, value in own.items()}


def build(
    folder: Path,
    ranks: Ranks,
    *,
    double: bool = False,
    change: Callable[[int, Batch], object] = lambda number, batch: None,
    task: ToyTask | None = None,
    micro_batch: int = 4,
    **sections: dict[str, Any],
) -> Trainer:
    task = task or ToyTask()
    config = load_config("demo", configuration.merge(CHANGES, sections))
    torch.manual_seed(1 + ranks.rank)  # weights are rank 0's
    model: nn.Module = task.build_model()

    def held_out(kind: str) -> Iterable[Batch]:
        return [share(batch, ranks, double) for batch in toy_held_out(kind)]

    log = MetricsLog if ranks.first else NoLog
    return Trainer(
        task=task,
        model=model.double() if double else model,
        runtime=toy_runtime(micro_batch),
        config=config,
        data=ToyData(task, RankSource(ROWS, change=change, ranks=ranks, double=double), held_out),
        folder=folder,
        checkpoints=Checkpoints(folder / "checkpoints", config.checkpoint.keep),
        metrics=log(folder / "metrics.jsonl"),
        steps=STEPS,
        ranks=ranks,
    )


def run(trainer: Trainer, stop: int | None = None) -> Trainer:
    trainer.resume()
    for _ in trainer.train(stop):
        pass
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of the network and of its average."""
    assert trainer.ema is not None
    averages = {f"average {name}": value for name, value in trainer.ema.state_dict().items()}
    return {name: value.detach().double().clone() for name, value in trainer.model.state_dict().items()} | averages


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


def poison(number: int, batch: Batch) -> None:
    """The second row, which is another rank's than the first."""
    if number == 4:
        batch["x"][1] = torch.nan


def ruin(number: int, batch: Batch) -> None:
    """Enough bad updates in a row for a rollback."""
    if number in (6, 7, 8):
        batch["x"][1] = torch.nan


@dataclass
class ShortTask(ToyTask):
    """One whose passes of more than two rows find no memory on this rank."""

    short: bool = False
    passes: int = 0

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> Any:
        if self.short and model.training and len(batch["x"]) > 2:
            raise MemoryError("no room")
        self.passes += model.training
        return super().losses(model, batch, active)


def member(rank: int, size: int, folder: Path) -> None:
    """One of `size` processes: all checks, then its results in <folder>/<rank>.json."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stderr = (folder / f"{rank}.log").open("w", buffering=1)
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        three = Ranks(rank, size, dist.group.WORLD, dist.PrefixStore("ours", store)).introduce()
        pair = dist.new_group([0, 1])
        two = Ranks(rank, 2, pair) if rank < 2 else None
        results = checks(folder, {1: Ranks() if rank == 0 else None, 2: two, 3: three})
        (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
        raise


def checks(folder: Path, worlds: dict[int, Ranks | None]) -> dict[str, Any]:
    """What came out of each training that this rank had a part in; the last one kills rank 2."""
    out: dict[str, Any] = {}
    for double in (True, False):
        alone: dict[str, Tensor] = {}
        for size, ranks in worlds.items():
            if ranks is not None:
                trainer = run(build(folder / f"equal_{double}_{size}", ranks, double=double))
                alone = alone or weights(trainer)
                out[f"equal {double} {size}"] = distance(weights(trainer), alone) if ranks.first else None
                out[f"replica {double} {size}"] = trainer._step._summation._replica is not None
    three = worlds[3]
    assert three is not None
    # the same run by two ranks, by one, by three
    for size, stop in ((2, 4), (1, 7), (3, None)):
        ranks = worlds[size]
        if ranks is not None:
            trainer = run(build(folder / "resumed", ranks, double=True), stop)
            if size == 3 and ranks.first:
                out["resumed"] = distance(weights(trainer), alone_weights(folder / "equal_True_1"))
        three.same(None)
    for name, change, sections in (
        ("poison", poison, {"gating": {"freeze_steps": 2}}),
        ("ruin", ruin, {}),
    ):
        task = ToyTask(gate_plane=name == "poison")
        for size in (1, 2):
            if (ranks := worlds[size]) is not None:
                place = folder / f"{name}_{size}"
                trainer = run(build(place, ranks, double=True, change=change, task=task, **sections))
                out[f"{name} {size} messages"] = trainer.messages
                out[f"{name} {size} weights"] = [float(value.sum()) for value in weights(trainer).values()]
                out[f"{name} {size} health"] = [trainer._step.health.skipped, trainer._step.health.rollbacks]
    if (ranks := worlds[2]) is not None:
        short = ShortTask(short=ranks.rank == 1)
        trainer = run(build(folder / "short", ranks, double=True, task=short))
        out["short"] = [trainer._step.micro_batch, trainer.messages]
        if ranks.first:
            out["short distance"] = distance(weights(trainer), alone_weights(folder / "equal_True_1"))
        out["told"] = told(build(folder / "told", ranks, double=True))
    three.same(None)
    out["lost"] = lost(build(folder / "lost", three, double=True), three)
    return out


def alone_weights(folder: Path) -> dict[str, Tensor]:
    """Of a run's last checkpoint, by the names of `weights`."""
    newest = Checkpoints(folder / "checkpoints", 2).newest()
    assert newest is not None
    averages = {f"average {name}": value for name, value in newest.tensors["ema"].items()}
    return newest.tensors["model"] | averages


def told(trainer: Trainer) -> Any:
    """SIGTERM to rank 1 alone, in its fourth update."""
    try:
        for stats in trainer.train():
            if stats.step == 4 and trainer.ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except Terminated:
        return [trainer.step, trainer.checkpoints.steps() if trainer.ranks.first else []]
    return None


def lost(trainer: Trainer, ranks: Ranks) -> Any:
    """Rank 2 is gone in the middle of an update."""
    began = time.monotonic()
    try:
        for stats in trainer.train():
            began = time.monotonic()
            if stats.step == 7 and ranks.rank == 2:
                trainer._step.model.register_forward_hook(lambda *_: os._exit(1))
    except LostRank as error:
        notes = getattr(error, "__notes__", [])
        return [str(error), trainer.step, time.monotonic() - began, notes]
    return None
