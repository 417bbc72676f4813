"""Custom heads: module, targets and loss of an additional output."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor, nn

from matrixlib.engine.task import Batch
from matrixlib.tasks.chess import losses
from matrixlib.tasks.chess.config import ModelConfig
from matrixlib.tasks.chess.losses import Sums


class Head(ABC):
    """A custom head; subclass it and pass an instance to `open_run(..., heads=[...])`.

    name: of its term, output and targets. weight: of its mean loss. gated: the engine may ramp the term up and skip it
    for some updates, as with self-supervised terms.
    """

    name: str
    weight: float = 1.0
    gated: bool = False

    @abstractmethod
    def build(self, config: ModelConfig) -> nn.Module:
        """Module from features (B, config.channels, 8, 8) to an output (B, ...), in the frame of the planes."""

    @abstractmethod
    def targets(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Targets (B, ...) of stored rows after mirroring, on the oriented board; runs in the loader's workers.

        rows: `records` (B,), see `records.RECORD`; `policy_index` and `policy_weight` (K,) of all legal moves, those of
        row b from policy_offset[b] to policy_offset[b + 1].
        """

    @abstractmethod
    def row_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """fp32 losses (B,)."""

    def row_metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Metrics by name, (B,) each, logged as means under `<head>/<name>`."""
        return {}

    def loss(self, outputs: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        """Sums of `row_losses` and of the metrics over the rows without hidden squares."""
        output, target = outputs[self.name], batch[self.name]
        metrics = self.row_metrics(output, target)
        return losses.sums(self.row_losses(output, target), losses.visible_rows(batch), metrics)
