"""The teacher of a training: a frozen network, asked about every batch on its way into the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from matrixlib.engine.task import Batch, rows, slice_batch, to_device
from matrixlib.tasks.chess.config import ChessConfig, TeacherConfig
from matrixlib.tasks.chess.distill.losses import pairs, reversal, scheduled
from matrixlib.tasks.chess.evaluate.net import INPUTS, Net
from matrixlib.tasks.chess.losses import FILL
from matrixlib.tasks.chess.model import depth


@dataclass(frozen=True)
class ChessTeacher:
    """A network in evaluation mode, in its own precision. Rows that have its outputs already are not asked about."""

    net: Net
    config: TeacherConfig
    sha256: str
    blocks: tuple[int, ...] = ()
    """Whose features the student's are compared with."""

    @classmethod
    def of(cls, net: Net, config: ChessConfig) -> ChessTeacher:
        """A network that a student's configuration names. ValueError where it lacks a head, or a block."""
        name, blocks = config.teacher.network, tuple[int, ...]()
        if config.teacher.wdl and net.task.config.model.value.kind == "scalar":
            raise ValueError(f"teacher '{name}' has no win-draw-loss to learn from: set teacher.wdl to 0")
        if config.teacher.features:
            tower = getattr(net.model, "tower", None)
            if tower is None:
                raise ValueError(
                    f"teacher '{name}' is an ONNX file, whose blocks nobody sees: give its run, or set "
                    "teacher.features to 0"
                )
            blocks = tuple(theirs for _, theirs in pairs(config.teacher, depth(config.model), len(tower)))
        return cls(net, config.teacher, net.sha256, blocks)

    @property
    def record(self) -> Mapping[str, Any]:
        return {"name": self.config.network, "sha256": self.sha256, "runtime": self.net.runtime.to_dict()}

    @property
    def auxiliary_terms(self) -> frozenset[str]:
        return frozenset({"teacher_features"}) if self.blocks else frozenset()

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        """The batch with `teacher_policy` (B, L), log-probabilities of `policy_index`'s moves, `teacher_wdl` (B, 3)
        where it has such a head, and `temperature` (B,) and `reversal` (B,), alike in all rows; in training, for each
        of `blocks`, `teacher_features_<k>` as of `losses.additions`. Held-out rows are scored at T = 1.
        """
        count, device = rows(batch), batch["pieces"].device
        heat = 1.0 if progress is None else scheduled(self.config, progress)
        factor = 0.0 if progress is None else reversal(progress)
        return {
            **batch,
            **({} if "teacher_policy" in batch else self.ask(batch, self.blocks if progress is not None else ())),
            "temperature": torch.full((count,), heat, device=device),
            "reversal": torch.full((count,), factor, device=device),
        }

    def ask(self, batch: Batch, blocks: Sequence[int] = ()) -> dict[str, Tensor]:
        """Its outputs in fp32 on the device of the batch. No inference mode: losses keep them for their gradients."""
        own, most, task = self.net.runtime.torch_device, self.net.serving.sizes[-1], self.net.task
        inputs = {name: batch[name] for name in INPUTS}
        names = frozenset({"policy", "value", *(("stream",) if blocks else ())})
        parts = []
        with torch.no_grad(), self.net.runtime.autocast():
            for start in range(0, rows(batch), most):
                part = to_device(slice_batch(inputs, start, start + most), own)
                out = task.forward(self.net.model, part, names)
                added = task.additions(out.get("stream", ()), part, blocks, self.config.squares)
                parts.append(task.probabilities(out, part) | {f"features_{k}": maps for k, maps in enumerate(added)})
        outputs = {
            f"teacher_{name}": torch.cat([part[name] for part in parts]).float().to(batch["pieces"].device)
            for name in parts[0]
            if name != "value"
        }
        return outputs | {"teacher_policy": outputs["teacher_policy"].clamp(min=FILL)}
