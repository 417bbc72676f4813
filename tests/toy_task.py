"""A task with no chess in it: the class of a point and a noisy plane over it, with targets missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.config import Config
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.curriculum import Phase
from matrixlib.engine.distributed import Ranks
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.task import Batch, slice_batch
from matrixlib.engine.trainer import Context, Trainer
from matrixlib.hardware.runtime import Runtime

FEATURES, CLASSES = 6, 3
ROW = np.dtype([("x", "<f4", (FEATURES,)), ("label", "i1"), ("target", "<f4"), ("known", "u1")])


class ToyNet(nn.Module):
    """Two layers and two heads; `norm` is "layer", "batch" or "none"."""

    def __init__(self, width: int = 12, dropout: float = 0.0, norm: str = "layer") -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, width)
        norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = norms[norm](width) if norm in norms else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(width, CLASSES)
        self.plane = nn.Linear(width, 1)
        nn.init.zeros_(self.classes.weight)
        nn.init.zeros_(self.classes.bias)

    def edges(self) -> list[nn.Module]:
        """Those that give the outputs; `inner` counts as hidden, so that there is a hidden matrix."""
        return [self.classes, self.plane]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.dropout(torch.relu(self.norm(self.inner(x))))
        return {"class": self.classes(hidden), "plane": self.plane(hidden).squeeze(1)}


@dataclass
class ToyTask:
    """Terms: "class" (cross-entropy; label -1 = none) and "plane" (squared error; known 0 = none)."""

    width: int = 12
    dropout: float = 0.0
    norm: str = "layer"
    noise: float = 0.1
    class_weight: float = 1.0
    plane_weight: float = 0.5
    gate_plane: bool = False

    @property
    def weights(self) -> Mapping[str, float]:
        return {"class": self.class_weight, "plane": self.plane_weight}

    @property
    def gated(self) -> frozenset[str]:
        return frozenset({"plane"}) if self.gate_plane else frozenset()

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        out = self.prepare_plain(batch, rng)
        return out | {"x": (out["x"] + rng.normal(0, 0.01, out["x"].shape)).astype(np.float32)}

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        records = batch["records"]
        return {
            "x": np.ascontiguousarray(records["x"]),
            "label": records["label"].astype(np.int64),
            "target": np.ascontiguousarray(records["target"]),
            "known": np.ascontiguousarray(records["known"]),
        }

    def build_model(self) -> nn.Module:
        return ToyNet(self.width, self.dropout, self.norm)

    def set_chunk(self, model: nn.Module, rows: int) -> int:
        """Remembered by the model, so that tests can see it."""
        model.chunk = rows  # type: ignore[assignment]
        return rows

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"class": int((batch["label"] >= 0).sum()), "plane": int(batch["known"].sum())}

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        out = model(batch["x"])
        losses, metrics = {}, {}
        if "class" in active:
            logits, label = wide(out["class"]), batch["label"]
            losses["class"] = nn.functional.cross_entropy(logits, label, ignore_index=-1, reduction="sum")
            metrics["class/hits"] = ((logits.argmax(1) == label) & (label >= 0)).sum()
        if "plane" in active:
            error = torch.where(batch["known"] > 0, wide(out["plane"]) - batch["target"], 0.0)
            losses["plane"] = (error * error).sum()
            metrics["plane/absolute"] = error.detach().abs().sum()
        return losses, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        counts = self.counts(batch)
        power = float((batch["target"].double().square() * batch["known"]).sum())
        return {"class": (counts["class"] * math.log(CLASSES), 0.0), "plane": (power, counts["plane"] * self.noise**2)}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        out = model(batch["x"])
        return {"class": out["class"], "plane": torch.where(batch["known"] > 0, out["plane"], torch.nan)}


@dataclass
class Hungry(ToyTask):
    """Runs out of memory with more rows than `room`, after drawing its random numbers. seen: rows of each pass."""

    room: int = 5
    error: str = ""
    seen: tuple[int, ...] = ()

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> Any:
        self.seen = (*self.seen, len(batch["x"]))
        out = super().losses(model, batch, active)
        if model.training and len(batch["x"]) > self.room:
            raise RuntimeError(self.error) if self.error else torch.OutOfMemoryError("CUDA out of memory. Tried ...")
        return out


class Compiled(nn.Module):
    """As torch.compile's wrapper, where the compiler fails after `good` calls, with random numbers drawn."""

    def __init__(self, model: nn.Module, good: int = 0, **options: object) -> None:
        super().__init__()
        self._orig_mod, self.good = model, good

    def forward(self, *inputs: Tensor, **more: object) -> object:
        assert self._orig_mod.training, "evaluation goes through the plain module"
        self.good -= 1
        if self.good < 0:
            torch.rand(3)
            raise RuntimeError("InductorError: no C++ compiler\nat length")
        return self._orig_mod(*inputs, **more)


@dataclass(frozen=True)
class Scaled(Runtime):
    """A CPU runtime with a loss scaler, which the real policy never makes."""

    scale: float = 3e38

    def grad_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=4)


def wide(value: Tensor) -> Tensor:
    """At least fp32, whatever the autocast dtype."""
    return value if value.dtype == torch.float64 else value.float()


def toy_records(count: int, seed: int = 0, noise: float = 0.1) -> np.ndarray:
    """`count` rows; about a third of the labels and a quarter of the planes are missing."""
    rng = np.random.default_rng(seed)
    out = np.zeros(count, ROW)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    out["x"] = x
    out["label"] = np.where(rng.random(count) < 0.33, -1, x[:, :CLASSES].argmax(1))
    out["target"] = x[:, 3] - 0.5 * x[:, 4] + noise * rng.normal(size=count)
    out["known"] = rng.random(count) >= 0.25
    return out


def toy_batch(count: int, seed: int = 0) -> Batch:
    """Prepared host tensors, B = count."""
    arrays = ToyTask().prepare_plain({"records": toy_records(count, seed)}, np.random.default_rng(0))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class ToySource:
    """Batches of `size` rows; batch i depends on (seed, raw number) alone. `change` may spoil one: (raw, batch)."""

    size: int
    seed: int = 0
    skip: tuple[tuple[int, int], ...] = ()
    change: Callable[[int, Batch], object] = lambda number, batch: None

    def unskipped_index(self, i: int) -> int:
        for start, stop in self.skip:
            i += stop - start if i >= start else 0
        return i

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        for i in range(start, stop):
            number = self.unskipped_index(i)
            batch = toy_batch(self.size, seed=1000 * self.seed + number)
            self.change(number, batch)
            yield batch

    def prefetch_stats(self) -> dict[str, float]:
        return {}

    def skipping(self, ranges: Sequence[tuple[int, int]]) -> ToySource:
        return replace(self, skip=tuple(ranges))


def toy_held_out(kind: str) -> Iterator[Batch]:
    """24 rows of the sample, 50 of the full set, by 16."""
    batch = toy_batch(24 if kind == "sample" else 50, seed=77)
    return (slice_batch(batch, start, start + 16) for start in range(0, len(batch["x"]), 16))


@dataclass
class ToyData:
    """The data of a toy run. stages: task, source by phase, of a run with a curriculum; entered: those asked for."""

    task: ToyTask
    source: ToySource
    validation: Callable[[str], Iterable[Batch]] = toy_held_out
    stages: Callable[[Phase], tuple[ToyTask, ToySource]] | None = None
    entered: list[Phase] = field(default_factory=list)

    def batches(self, phase: Phase | None = None) -> tuple[ToyTask, ToySource]:
        if phase is None or self.stages is None:
            return self.task, self.source
        self.entered.append(phase)
        return self.stages(phase)

    def held_out(self, kind: str, phase: Phase | None = None) -> Iterable[Batch]:
        return self.validation(kind)

    def records(self, source: ToySource, batches: Sequence[int], folder: Path) -> None:
        (folder / "batches.txt").write_text(str(list(batches)))


def toy_runtime(micro_batch: int = 8, **changes: Any) -> Runtime:
    """A real Runtime on the CPU in fp32, eager, one thread."""
    return Runtime(
        **{
            "device": "cpu",
            "dtype": "fp32",
            "scaler": False,
            "tf32": False,
            "channels_last": False,
            "compile": False,
            "threads": 1,
            "workers": 0,
            "prefetch": 2,
            "micro_batch": micro_batch,
            **changes,
        }
    )


def toy_trainer(
    folder: Path,
    config: Config,
    data: ToyData,
    model: nn.Module | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008 - frozen
    double: bool = False,
    **more: Any,
) -> Trainer:
    """A run in `folder`. model: default that of the task, with other weights on each rank; double: in fp64. more:
    fields of its `Context`."""
    torch.manual_seed(1 + ranks.rank)
    model = model or data.task.build_model()
    fields: dict[str, Any] = {
        "runtime": toy_runtime(),
        "checkpoints": Checkpoints(folder / "checkpoints", config.checkpoint.keep),
        "metrics": MetricsLog(folder / "metrics.jsonl", writes=ranks.first),
    }
    fields |= {"task": data.task, "model": model.double() if double else model, "config": config, "data": data}
    return Trainer(Context(folder=folder, ranks=ranks, **fields | more))
