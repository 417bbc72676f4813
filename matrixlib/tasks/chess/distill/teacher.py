"""The teacher of a training: a frozen network, asked about every batch on its way into the losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from matrixlib.data.shards import file_hash
from matrixlib.engine.task import rows, slice_batch, to_device
from matrixlib.tasks.chess.distill.agreement import INPUTS
from matrixlib.tasks.chess.distill.temperature import reversal, scheduled
from matrixlib.tasks.chess.losses import FILL
from matrixlib.tasks.spec import weights_file

if TYPE_CHECKING:
    from torch import Tensor

    from matrixlib.engine.task import Batch
    from matrixlib.tasks.chess.config import TeacherConfig
    from matrixlib.tasks.chess.evaluate.net import Net


@dataclass(frozen=True)
class ChessTeacher:
    """A network in evaluation mode, in its own precision. Rows that have its outputs already are not asked about."""

    net: Net
    config: TeacherConfig
    sha256: str

    @classmethod
    def of(cls, net: Net, config: TeacherConfig) -> ChessTeacher:
        """A network that `config` names. ValueError where it lacks a head."""
        if config.wdl and net.task.config.model.value.kind == "scalar":
            raise ValueError(f"teacher '{config.network}' has no win-draw-loss to learn from: set teacher.wdl to 0")
        return cls(net, config, file_hash(weights_file(config.network)))

    @property
    def record(self) -> Mapping[str, str]:
        return {"name": self.config.network, "sha256": self.sha256}

    def __call__(self, batch: Batch, progress: float | None = None) -> Batch:
        """The batch with `teacher_policy` (B, L), log-probabilities of `policy_index`'s moves, `teacher_wdl` (B, 3)
        where it has such a head, and `temperature` (B,) and `reversal` (B,), alike in all rows. Held-out rows are
        scored at T = 1.
        """
        count, device = rows(batch), batch["pieces"].device
        heat = 1.0 if progress is None else scheduled(self.config, progress)
        factor = 0.0 if progress is None else reversal(progress)
        return {
            **batch,
            **({} if "teacher_policy" in batch else self.ask(batch)),
            "temperature": torch.full((count,), heat, device=device),
            "reversal": torch.full((count,), factor, device=device),
        }

    def ask(self, batch: Batch) -> dict[str, Tensor]:
        """Its outputs in fp32 on the device of the batch. No inference mode: losses keep them for their gradients."""
        own, most = self.net.runtime.torch_device, self.net.serving.sizes[-1]
        inputs = {name: batch[name] for name in INPUTS}
        parts = []
        with torch.no_grad(), self.net.runtime.autocast():
            for start in range(0, rows(batch), most):
                part = to_device(slice_batch(inputs, start, start + most), own)
                parts.append(self.net.task.predict(self.net.model, part))
        outputs = {
            f"teacher_{name}": torch.cat([part[name] for part in parts]).float().to(batch["pieces"].device)
            for name in ("policy", "wdl")
            if name in parts[0]
        }
        return outputs | {"teacher_policy": outputs["teacher_policy"].clamp(min=FILL)}
