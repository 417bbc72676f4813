"""Toy trainings of a network that is cut over two ranks, as processes that a test starts once and asks for all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import rank_runs
import saved
import torch
import torch.distributed as dist
from rank_runs import BranchNet, ShortTask, build, distance, logged, lost, poison, ruin, run, told
from torch import Tensor, nn
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.engine import diagnostics, metrics
from matrixlib.engine.distributed import SHARDED_OPTIMISERS, Ranks, Reducer, full, local_part, unsharded
from matrixlib.engine.task import Batch, slice_batch
from matrixlib.engine.trainer import Trainer
from matrixlib.runs.start import begin
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.config import ModelConfig
from matrixlib.tasks.chess.model import PolicyValueNet

SHARD = {"runtime": {"shard": True}}
CLIPPED = {"clip_norm": 0.1}


def held_out(kind: str) -> Iterator[Batch]:
    """The last batch of the full set has one row, so that rank 1 has none."""
    batch = toy_batch(24 if kind == "sample" else 49, seed=77)
    return (slice_batch(batch, start, start + 16) for start in range(0, len(batch["x"]), 16))


class DeepNet(BranchNet):
    """With blocks that are gathered by themselves; some rows go through a branch, nothing through `idle`."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 0.5))  # averaged as weights are, and whole on each rank
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def parts(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + self.scale * block(x)
        return super().forward(x)


class DeepTask(ToyTask):
    def build_model(self) -> nn.Module:
        return DeepNet()


class ShortDeepTask(ShortTask, DeepTask):
    """Memory runs out in the backward half."""


def make(folder: Path, ranks: Ranks, **options: Any) -> Trainer:
    """A trainer whose network is cut if there are two ranks. Rank 0 needs two passes for its rows, rank 1 one."""
    options = {"double": True, "task": DeepTask(), "micro_batch": 11, **(SHARD if ranks.size > 1 else {}), **options}
    return build(folder, ranks, **options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Of the network, its average and the optimiser's state, whole; all ranks ask for them."""
    named = tensors(trainer)
    return {name: full(named[name]).detach().clone() for name in sorted(named)}


def tensors(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer.ema is not None
    named = {**trainer.model.state_dict(), **{f"average {n}": v for n, v in trainer.ema.state_dict().items()}}
    for i, parameter in enumerate(trainer._step._parameters):
        named |= {f"{i} {key}": torch.as_tensor(v) for key, v in trainer._step.optimiser.state[parameter].items()}
    return named


def layout(folder: Path) -> dict[str, Any]:
    """Files of a run's newest checkpoint with their tensors' names and shapes, and the keys of its state."""
    files = {file.name: file.stat().st_size for file in saved.newest(folder).path.glob("*.safetensors")}
    shapes = {name: list(tensor.shape) for name, tensor in saved.tensors(folder).items()}
    return {"files": files, "shapes": shapes, "state": sorted(saved.newest(folder).state)}


def member(rank: int, size: int, folder: Path) -> None:
    """One of three processes: all checks, then its results. Rank 2 ends in the first one and rank 1 in the last."""
    rank_runs.toy_held_out = held_out
    with logged(rank, folder):
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
        three = Ranks(rank, size, dist.group.WORLD, dist.PrefixStore("three", store))
        two = Ranks(rank, 2, dist.new_group([0, 1]), dist.PrefixStore("two", store))
        lost_rank = lost_while_looking(folder / "lost", three)
        worlds = [two] if rank else [Ranks(), two]
        out = {**checks(folder, worlds), **mixed(two), "lost": lost_rank}
        short = make(folder / "short", two, task=ShortDeepTask(short=rank == 1, after=5))
        try:
            out["short"] = lost(short, two, gone=-1)
        except ValueError as error:
            out["short"] = [str(error), short.step]
        (folder / f"{rank}.json").write_text(json.dumps(out), encoding="utf-8")


def lost_while_looking(folder: Path, ranks: Ranks) -> Any:
    """Rank 2 is gone where the statistics of the network are made."""
    trainer, look = make(folder, ranks, double=False, train={"statistics_interval": 3}), diagnostics.block_statistics
    if ranks.rank == 2:
        diagnostics.block_statistics = lambda *_: os._exit(1)
    try:
        return lost(trainer, ranks, gone=-1)
    finally:
        diagnostics.block_statistics = look


def checks(folder: Path, worlds: list[Ranks]) -> dict[str, Any]:
    """What came out of each training that this rank had a part in: first by one process, then by two."""
    out: dict[str, Any] = {}
    two = worlds[-1]

    def compare(name: str, stop: int | None = None, **options: Any) -> list[Trainer]:
        """The same training by one process and by two, with a distance as <name>."""
        trainers = [run(make(folder / f"{name} {ranks.size}", ranks, **options), stop) for ranks in worlds]
        states = [weights(trainer) for trainer in trainers]
        out[name] = distance(states[0], states[-1])
        return trainers

    for kind in SHARDED_OPTIMISERS:
        trainer = compare(kind, None if kind == "adamw" else 3, optim=CLIPPED | {"optimiser": kind})[-1]
    # buffers and counters of steps are on both
    held = [tensor for name, tensor in tensors(trainer).items() if tensor.ndim and "scale" not in name]
    out["share"] = sum(local_part(tensor).numel() for tensor in held) / sum(tensor.numel() for tensor in held)
    compare("rows", double=False, train={"statistics_interval": 4})
    out["rows"] = [metrics.read(folder / f"rows {size}" / "metrics.jsonl") for size in (1, 2)] if two.first else None
    out["layouts"] = [layout(folder / f"adamw {size}") for size in (1, 2)] if two.first else None
    # the same run by two ranks, by one, by two, by one that sees the weights of the two
    for ranks, stop in ((two, 4), (Ranks(), 7), (two, None)):
        if ranks is two or two.first:
            trainer = run(make(folder / "resumed", ranks, optim=CLIPPED), stop)
        two.same(None)
    model, state = trainer.evaluation_model(), weights(trainer)
    if two.first:
        alone = run(make(folder / "adamw 1", Ranks(), optim=CLIPPED))
        out["resumed"] = distance(weights(alone), state)
        network = {f"average {name}": value.double() for name, value in model.state_dict().items()}
        out["network"] = distance(network, state)
    else:
        out["network"] = model
    trainers = compare("poison", 6, change=poison, task=DeepTask(gate_plane=True), gating={"freeze_steps": 2})
    out["poison messages"], out["poison health"] = trainers[-1].messages, health(trainers)
    out["idle"] = [trainer.model.get_parameter("idle.weight").grad is None for trainer in trainers]
    out["ruin health"] = health(compare("ruin", change=ruin))
    out["told"] = told(make(folder / "told", two))
    trainer = make(folder / "bad weight", two)
    if not two.first:
        local_part(trainer.model.get_parameter("inner.weight").data)[-1] = torch.nan
    out["bad weight"] = trainer._step(next(trainer._source.batches(0, 1))).detail
    given = {name: tensor / 2 for name, tensor in DeepNet().state_dict().items()} if two.first else {}
    trainer = make(folder / "init", two, train={"init": "somewhere"})
    begin(trainer, given)
    state = weights(trainer)
    out["init"] = max([float((state[name] - value).abs().max()) for name, value in given.items()], default=0.0)
    return out


def health(trainers: list[Trainer]) -> list[list[int]]:
    return [[trainer._step.health.skipped, trainer._step.health.rollbacks] for trainer in trainers]


def mixed(ranks: Ranks) -> dict[str, Any]:
    """The chess network in bf16: how far outputs and gradients of the cut one are from those of the same one whole."""
    attention = {"every": 2, "heads": 2, "mask": True, "unmasked_mix": 0.5, "bias": True}
    out: dict[str, Any] = {}
    for norm in ("group", "batch"):
        options = {"channels": 16, "blocks": 2, "attention": attention, "checkpoint_every": 2, "norm": {"blocks": norm}}
        nets = []
        for _ in range(2):
            torch.manual_seed(3)
            nets.append(PolicyValueNet(ModelConfig.model_validate(options)))
        runtime = toy_runtime(dtype="bf16")
        shards = Reducer(ranks, nets[1], load_config("demo", SHARD), runtime)
        planes = torch.randn(4, 19, 8, 8, generator=torch.Generator().manual_seed(1))
        results = []
        for net in nets:
            with runtime.autocast():
                outputs = net(planes)
            (outputs["policy"].square().mean() + outputs["value"].square().mean()).backward()
            shards.finish("")
            results.append([*outputs.values(), *(full(p.grad) for p in net.parameters() if p.grad is not None)])
        # each rank has the same rows here, so the sum of its gradients is twice theirs
        plain, cut = ([value.detach().float() for value in result] for result in results)
        cut = cut[:2] + [value / ranks.size for value in cut[2:]]
        apart = [(a - b).norm() / b.norm().clamp(min=1e-3) for a, b in zip(cut, plain, strict=True)]
        out[f"mixed {norm}"] = max(map(float, apart))
        with unsharded(nets[1]):
            out[f"gathered {norm}"] = str(nets[1].get_parameter("tower.0.convs.0.weight").dtype)
    return out
