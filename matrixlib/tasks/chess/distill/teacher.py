"""The teacher: a frozen network, evaluated on every batch, or once on all data with cached outputs.

The cache is a sidecar file per shard in shard format: rows `losses.RECORD`, the SHA-256 of shard and teacher.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from matrixlib.data.catalogue import ShardRow
from matrixlib.data.reader import Sidecars
from matrixlib.data.shards import BLOCK, DamagedBlock, Shard, ShardError, file_hash, write_shard
from matrixlib.engine.task import Batch, rows, slice_batch, to_device
from matrixlib.progress import live_bar
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.config import ChessConfig, TeacherConfig
from matrixlib.tasks.chess.distill import losses as soft
from matrixlib.tasks.chess.evaluate.net import POSITION, Net
from matrixlib.tasks.chess.losses import PAD_LOGIT
from matrixlib.tasks.chess.model import tower_depth
from matrixlib.tasks.chess.task import ChessTask

QUERY_ROWS = 256  # batch size for sidecars, fixed for reproducible bytes


@dataclass(frozen=True)
class ChessTeacher:
    """A frozen network in its own precision. Batches with cached outputs are not evaluated."""

    net: Net
    config: TeacherConfig
    sha256: str
    blocks: tuple[int, ...] = ()  # of the feature loss

    @classmethod
    def of(cls, net: Net, config: ChessConfig) -> Self:
        """The teacher of a student's configuration; ValueError if the network lacks a head or block."""
        name, blocks = config.teacher.network, tuple[int, ...]()
        if config.teacher.wdl and net.task.config.model.value.kind == "scalar":
            raise ValueError(f"teacher '{name}' has no win-draw-loss to learn from: set teacher.wdl to 0")
        if config.teacher.features:
            tower = getattr(net.model, "tower", None)
            if tower is None:
                remedy = "give its run, or set teacher.features to 0"
                raise ValueError(f"teacher '{name}' is an ONNX file, without access to its blocks: {remedy}")
            pairs = soft.block_pairs(config.teacher, tower_depth(config.model), len(tower))
            blocks = tuple(theirs for _, theirs in pairs)
        return cls(net, config.teacher, net.sha256, blocks)

    @property
    def record(self) -> Mapping[str, Any]:
        return {"name": self.config.network, "sha256": self.sha256, "runtime": self.net.runtime.to_dict()}

    @property
    def auxiliary_terms(self) -> frozenset[str]:
        return frozenset({"teacher_features"}) if self.blocks else frozenset()

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        """Add the teacher's outputs to a batch:

        teacher_policy: log-probabilities (B, L).  teacher_wdl: (B, 3), unless its value head is scalar.
        temperature, reversal: (B,), constant; T = 1 for held-out rows (progress None).
        teacher_features_<k>: `ChessTask.residuals` of `blocks`, in training.
        """
        count, device = rows(batch), batch["pieces"].device
        temperature = 1.0 if progress is None else soft.scheduled_temperature(self.config, progress)
        factor = 0.0 if progress is None else soft.reversal_factor(progress)
        return {
            **batch,
            **({} if "teacher_policy" in batch else self.query(batch, self.blocks if progress is not None else ())),
            "temperature": torch.full((count,), temperature, device=device),
            "reversal": torch.full((count,), factor, device=device),
        }

    def query(self, batch: Batch, blocks: Sequence[int] = ()) -> dict[str, Tensor]:
        """fp32 outputs on the device of the batch; no inference mode, as losses save them for their backward pass."""
        own, most, task = self.net.runtime.torch_device, self.net.serving.sizes[-1], self.net.task
        inputs = {name: batch[name] for name in POSITION}
        names = frozenset({"policy", "value", *(("stream",) if blocks else ())})
        parts = []
        with torch.no_grad(), self.net.runtime.autocast():
            for start in range(0, rows(batch), most):
                part = to_device(slice_batch(inputs, start, start + most), own)
                out = task.forward(self.net.model, part, names)
                added = task.residuals(out.get("stream", ()), part, blocks, self.config.squares)
                parts.append(task.probabilities(out, part) | {f"features_{k}": maps for k, maps in enumerate(added)})
        outputs = {
            f"teacher_{name}": torch.cat([part[name] for part in parts]).float().to(batch["pieces"].device)
            for name in parts[0]
            if name != "value"
        }
        return outputs | {"teacher_policy": outputs["teacher_policy"].clamp(min=PAD_LOGIT)}


def sidecars(teacher: ChessTeacher, task: ChessTask, folder: Path, shards: Sequence[ShardRow]) -> Sidecars:
    """Sidecar files of these shards in the data set's folder; missing and outdated ones are computed. ValueError if
    they cannot be written, ShardError for a shard that differs from the catalogue."""
    if any(row.remote for row in shards):
        raise ValueError("cached teacher outputs need local shards: set teacher.cache to false, or copy the data set")
    own = folder / f"teacher-{teacher.sha256[:16]}"
    paths = {row.name: own / f"{row.name}.outputs" for row in shards}
    missing = [row for row in shards if not is_current(paths[row.name], row, teacher)]
    if not missing:
        return Sidecars(soft.LAYOUT, paths)
    count = sum(row.count for row in missing)
    try:
        own.mkdir(exist_ok=True)
        bar = live_bar(total=count, desc="teacher outputs", unit="position", leave=False)
        with FileLock(own / "lock"), bar:
            for row in missing:
                if not is_current(paths[row.name], row, teacher):  # another process may have computed it
                    _write_sidecar(paths[row.name], row, teacher, task, bar)
    except OSError as error:
        raise ValueError(
            f"cannot write teacher outputs to {own} ({error}): make it writable, or set teacher.cache to false"
        ) from error
    return Sidecars(soft.LAYOUT, paths)


def is_current(path: Path, row: ShardRow, teacher: ChessTeacher) -> bool:
    """Whether a sidecar is intact and made from this teacher and the shard's current rows."""
    if not path.exists() or Sidecars.note(path).exists():
        return False
    try:
        file = Shard(path, soft.LAYOUT)
    except ShardError:
        return False
    known: dict[str, Any] = {"shard": row.sha256, "teacher": teacher.sha256, "count": row.count}
    with suppress(ShardError):  # a damaged shard is reported by the loader
        known["rows"] = Shard(row.path, records.LAYOUT).fingerprint
    return known.items() <= file.meta.items()


def _write_sidecar(path: Path, row: ShardRow, teacher: ChessTeacher, task: ChessTask, bar: Any) -> None:
    """Compute the sidecar of one shard, block by block."""
    if file_hash(row.path) != row.sha256:
        raise ShardError(f"{row.path}: it has changed since it was catalogued; import it again")
    shard, blocks = Shard(row.path, records.LAYOUT), []
    for start in range(0, row.count, BLOCK):
        blocks.append(_query_block(shard, np.arange(start, min(start + BLOCK, row.count)), teacher, task))
        bar.update(len(blocks[-1]))
    meta = {"source": row.source, "generator": "teacher", "seed": 0, "split": row.split}
    meta |= {"shard": row.sha256, "rows": shard.fingerprint, "teacher": teacher.sha256}
    meta["created"] = shard.meta["created"]  # same outputs, same bytes
    write_shard(path, soft.LAYOUT, {"records": np.concatenate(blocks)}, meta)
    Sidecars.note(path).unlink(missing_ok=True)


def _query_block(shard: Shard, places: np.ndarray, teacher: ChessTeacher, task: ChessTask) -> np.ndarray:
    """`losses.RECORD` rows of one block of a shard; zeros for a damaged block, which the loader skips."""
    try:
        batch = shard.gather(places)
    except DamagedBlock:
        return np.zeros(len(places), soft.RECORD)
    inputs = task.inputs(batch["records"], batch["policy_index"], batch["policy_offset"])
    parts = []
    for start in range(0, len(places), QUERY_ROWS):
        part = {name: torch.from_numpy(array[start : start + QUERY_ROWS]) for name, array in inputs.items()}
        out = teacher.query(part)
        wdl = out.get("teacher_wdl", torch.zeros(len(part["pieces"]), 3))
        arrays = (tensor.numpy() for tensor in (out["teacher_policy"], wdl, part["policy_index"]))
        parts.append(soft.pack_outputs(*arrays))
    return np.concatenate(parts)
