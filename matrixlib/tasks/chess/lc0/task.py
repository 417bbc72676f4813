"""Networks of Leela Chess Zero in the place of our own: what they are given, and what they say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.task import Batch
from matrixlib.play.game import Past
from matrixlib.tasks.chess import losses
from matrixlib.tasks.chess.config import ChessConfig
from matrixlib.tasks.chess.lc0 import planes as inputs
from matrixlib.tasks.chess.lc0 import weights
from matrixlib.tasks.chess.lc0.network import Lc0Network
from matrixlib.tasks.chess.model import PolicyValueNet
from matrixlib.tasks.chess.task import ChessTask, packed_state


@dataclass(frozen=True)
class Lc0Task(ChessTask):
    """Chess as a network of Lc0 sees it: the position and seven before it. Such networks are used, not trained."""

    input_planes: ClassVar[int] = weights.PLANES
    history: ClassVar[int] = inputs.PAST

    def inputs(
        self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray, past: Past | None = None
    ) -> dict[str, np.ndarray]:
        """As a ChessTask's, and what came before each position where it is given: `past` u8 (B, H, 32), `past_state`
        i16 (B, H, 6) and `known` i16 (B,), see `lc0.planes.planes`."""
        out = super().inputs(rows, index, offset)
        if past is not None:
            out["past"] = np.ascontiguousarray(past.states["pieces"])
            out["past_state"] = packed_state(past.states)
            out["known"] = past.known.astype(np.int16)
        return out

    def build_model(self) -> PolicyValueNet:
        raise ValueError("networks of Lc0 come from their weight files: they are not trained here")

    def planes(self, batch: Batch) -> Tensor:
        return inputs.planes(batch)

    def forward(self, model: nn.Module, batch: Batch, terms: frozenset[str]) -> dict[str, Any]:
        return model(self.planes(batch), terms)

    def network_index(self, batch: Batch) -> Tensor:
        return torch.where(batch["policy_index"] != losses.PAD, inputs.slots(batch), losses.PAD)


def open_weights(path: Path | str) -> tuple[Lc0Task, Lc0Network]:
    """The task and the network of a weight file, in fp32 on the CPU. Errors as of `weights.read`."""
    read = weights.read(path)
    kind = "wdl" if read.wdl else "scalar"
    config = ChessConfig.model_validate({"task": "chess", "model": {"ssl": [], "value": {"kind": kind}}})
    return Lc0Task(config), Lc0Network(read)
