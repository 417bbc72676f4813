"""A head of one's own beside policy, value and the self-supervised ones: its module, its targets and its loss."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor, nn

from matrixlib.engine.task import Batch
from matrixlib.tasks.chess import losses
from matrixlib.tasks.chess.config import ModelConfig
from matrixlib.tasks.chess.losses import Sums


class Head(ABC):
    """Subclass it and give an instance to `ChessTask(config, heads=(...))`.

    name: of its term, its output and its targets in a batch. weight: of its mean loss. gated: the engine may ramp its
    term up and leave it out for a while, as it does with self-supervised ones.
    """

    name: str
    weight: float = 1.0
    gated: bool = False

    @abstractmethod
    def build(self, config: ModelConfig) -> nn.Module:
        """A module from features (B, config.channels, 8, 8) to an output (B, ...), in the frame of the planes."""

    @abstractmethod
    def targets(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """(B, ...) targets of stored rows, after mirroring; runs in the loader's workers. Maps are of the oriented
        board.

        rows: `records` (B,) as `records.LAYOUT`; of all legal moves `policy_index` and `policy_weight` (K,), those of
        row b from policy_offset[b] to policy_offset[b + 1].
        """

    @abstractmethod
    def row_losses(self, output: Tensor, target: Tensor) -> Tensor:
        """(B,) fp32 losses."""

    def row_metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Metrics by name, (B,) each; their means are logged as `<head>/<name>`."""
        return {}

    def loss(self, outputs: dict[str, Any], batch: Batch) -> tuple[Tensor, Sums]:
        """Sum of `row_losses` over the rows without hidden squares, and sums of the metrics."""
        output, target = outputs[self.name], batch[self.name]
        metrics = self.row_metrics(output, target)
        return losses.sums(self.row_losses(output, target), losses.visible_rows(batch), metrics)
