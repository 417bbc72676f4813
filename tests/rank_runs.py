"""Toy trainings by several ranks, as processes that a test starts once and asks for all of them."""

from __future__ import annotations

import contextlib
import itertools
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
from saved import newest
from torch import Tensor, nn
from toy_task import FEATURES, ToyData, ToyNet, ToySource, ToyTask, toy_held_out, toy_runtime, toy_trainer

from matrixlib import config as configuration
from matrixlib.engine.curriculum import Curriculum, Phase, StagesConfig
from matrixlib.engine.distributed import LostRank, Ranks
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
    source: Any = None,
    stages: Any = None,
    curriculum: Curriculum | None = None,
    **sections: dict[str, Any],
) -> Trainer:
    config = load_config("demo", configuration.merge(CHANGES, sections))

    def held_out(kind: str) -> Iterable[Batch]:
        return [share(batch, ranks, double) for batch in toy_held_out(kind)]

    source = source or RankSource(ROWS, change=change, ranks=ranks, double=double)
    data = ToyData(task or ToyTask(), source, held_out, stages)
    options = {"runtime": toy_runtime(micro_batch), "steps": STEPS, "curriculum": curriculum}
    return toy_trainer(folder, config, data, ranks=ranks, double=double, **options)


def run(trainer: Trainer, stop: int | None = None, resume: bool = True) -> Trainer:
    if resume:
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
    """One whose passes of more than two rows find no memory on this rank in their backward half, when heads have been
    through it and what is below them has not. after: passes that do."""

    short: bool = False
    after: int = 0

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> Any:
        def fail(*_: object) -> None:
            raise MemoryError("no room")

        if self.short and model.training and len(batch["x"]) > 2:
            self.after -= 1
            hook = model.norm.register_full_backward_hook(fail) if self.after < 0 else None
            try:
                return super().losses(model, batch, active)
            finally:
                if hook is not None:
                    hook.remove()
        return super().losses(model, batch, active)


class BranchNet(ToyNet):
    """A part of it sees only rows of one kind, so that a pass without any leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(FEATURES, 12)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.norm(self.inner(x)))
        if (rows := x[:, 0] > 1.2).any():
            hidden = hidden.index_add(0, rows.nonzero().squeeze(1), self.branch(x[rows]))
        return {"class": self.classes(hidden), "plane": self.plane(hidden).squeeze(1)}


class BranchTask(ToyTask):
    def build_model(self) -> nn.Module:
        return BranchNet()


@contextlib.contextmanager
def logged(rank: int, folder: Path) -> Iterator[None]:
    """What one of the processes prints, its error too, goes to <folder>/<rank>.log."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stderr = (folder / f"{rank}.log").open("w", buffering=1)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise


def results_of(context: Any, member: Callable[[int, int, Path], None], folder: Path, codes: list[int]) -> list[Any]:
    """What ranks 0 and 1 have written to <folder>/<rank>.json; codes: with which each rank ends."""
    processes = [context.Process(target=member, args=(rank, len(codes), folder)) for rank in range(len(codes))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
        process.kill()
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert [process.exitcode for process in processes] == codes, logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def member(rank: int, size: int, folder: Path) -> None:
    """One of `size` processes: all checks, then its results."""
    with logged(rank, folder):
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
        worlds: dict[int, Ranks | None] = {1: Ranks() if rank == 0 else None}
        for members in range(2, size + 1):
            group, ours = dist.new_group(list(range(members))), dist.PrefixStore(f"of {members}", store)
            worlds[members] = Ranks(rank, members, group, ours) if rank < members else None
        results, two = checks(folder, worlds), worlds[2]
        (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
        if two is not None:
            results["lost first"] = lost(build(folder / "lost_first", two, double=True), two, gone=0)
            (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")


def checks(folder: Path, worlds: dict[int, Ranks | None]) -> dict[str, Any]:
    """What came out of each training that this rank had a part in; the last one ends rank 2. Rank 3 ends early."""
    out: dict[str, Any] = {}
    for double in (True, False):
        alone: dict[str, Tensor] = {}
        for size, ranks in worlds.items():
            if ranks is not None:
                trainer = run(build(folder / f"equal_{double}_{size}", ranks, double=double))
                alone = alone or weights(trainer)
                out[f"equal {double} {size}"] = distance(weights(trainer), alone) if ranks.first else None
    three, four = worlds[3], worlds[4]
    assert four is not None
    # the same run by four ranks, by two, by one, by three
    for size, stop in ((4, 2), (2, 4), (1, 7), (3, None)):
        ranks = worlds[size]
        if ranks is not None:
            trainer = run(build(folder / "resumed", ranks, double=True), stop)
            if size == 3 and ranks.first:
                out["resumed"] = distance(weights(trainer), alone_weights(folder / "equal_True_1"))
        four.same(None)
    if three is None:
        return out
    for size in (1, 2):
        if (ranks := worlds[size]) is not None:
            out[f"staged {size}"] = staged(folder / f"staged_{size}", ranks)
    gated = {"task": ToyTask(gate_plane=True), "gating": {"freeze_steps": 2}}
    options: dict[str, Any] = {"poison": {"change": poison, **gated}, "ruin": {"change": ruin}}
    for name, size in itertools.product((*options, "branch"), (1, 2)):
        if (ranks := worlds[size]) is not None:
            own = options.get(name, {"task": BranchTask()})
            trainer = run(build(folder / f"{name}_{size}", ranks, double=True, **own))
            out[f"{name} {size} messages"] = trainer.messages
            out[f"{name} {size}"] = [float(value.sum()) for value in weights(trainer).values()]
            out[f"{name} {size} health"] = [trainer._step.health.skipped, trainer._step.health.rollbacks]
            if name == "branch":
                out[f"idle {size}"] = trainer.model.idle.weight.grad is None
    if (ranks := worlds[2]) is not None:
        for after in (0, 20):  # at the first update, and when updates of this kind have gone through
            short = ShortTask(short=ranks.rank == 1, after=after)
            trainer = run(build(folder / f"short_{after}", ranks, double=True, task=short))
            out[f"short {after}"] = [trainer._step.micro_batch, trainer.messages]
            if ranks.first:
                out[f"short distance {after}"] = distance(weights(trainer), alone_weights(folder / "equal_True_1"))
        mixed = ToyTask(dropout=0.3, norm="batch", width=16)
        trainer = run(build(folder / "mixed", ranks, task=mixed, optim={"optimiser": "muon"}))
        state = {**weights(trainer), **trainer.model.state_dict()}
        out["mixed"] = {name: value.flatten().tolist() for name, value in state.items()}
        out["judged"] = trainer.evaluation_model() is not None
        out["swa"] = averaged(folder / "swa", ranks)
        out["told"] = told(build(folder / "told", ranks, double=True))
    three.same(None)
    out["lost"] = lost(build(folder / "lost", three, double=True), three)
    return out


def averaged(folder: Path, ranks: Ranks) -> list[Any]:
    """A mean of weights with batch norms: (its losses in validation, how many batches were made)."""
    made: list[int] = []
    trainer = build(
        folder,
        ranks,
        task=ToyTask(norm="batch"),
        change=lambda number, batch: made.append(number),
        optim={"swa": 0.9, "swa_interval": 1},
    )
    return [[stats.validation["loss"] for stats in trainer.train() if stats.validation], len(made)]


def staged(folder: Path, ranks: Ranks) -> list[Any]:
    """Validations say when the next phase begins and when the run ends: (phases of the updates, why it ended)."""
    options = {"kind": "adaptive", "metric": "class/hits", "up": 0.2, "down": 0.0, "patience": 2, "dwell": 1}
    halves = {"half": StagesConfig(stages=("first", "second"), fractions=(0.5, 0.5))}

    def stages(phase: Phase) -> tuple[ToyTask, ToySource]:
        return ToyTask(), RankSource(ROWS, seed=phase.number, ranks=ranks, double=True)

    trainer = build(
        folder,
        ranks,
        double=True,
        stages=stages,
        curriculum=Curriculum(load_config("latin_quick").curriculum.model_copy(update=options), halves),
        validation={"interval": 2, "full_every": 1, "patience": 3, "min_delta": 10.0},
    )
    return [[stats.phase for stats in trainer.train()], trainer.stop_reason]


def alone_weights(folder: Path) -> dict[str, Tensor]:
    """Of a run's last checkpoint, by the names of `weights`."""
    saved = newest(folder).tensors
    return saved["model"] | {f"average {name}": value for name, value in saved.get("ema", {}).items()}


def told(trainer: Trainer) -> Any:
    """SIGTERM to rank 1 alone, in its fourth update."""
    try:
        for stats in trainer.train():
            if stats.step == 4 and trainer.ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except Terminated:
        return [trainer.step, trainer.checkpoints.steps() if trainer.ranks.first else []]
    return None


def lost(trainer: Trainer, ranks: Ranks, gone: int = 2) -> Any:
    """A rank is gone in the middle of an update."""
    began = time.monotonic()
    try:
        for stats in trainer.train():
            began = time.monotonic()
            if stats.step == 7 and ranks.rank == gone:
                trainer._step.model.register_forward_hook(lambda *_: os._exit(1))
    except LostRank as error:
        notes = getattr(error, "__notes__", [])
        return [str(error), trainer.step, time.monotonic() - began, notes]
    return None
