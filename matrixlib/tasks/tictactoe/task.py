"""The tic-tac-toe task: what the engine trains, from stored positions to losses. Terms: "policy" and "value"."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.task import Batch, Ungated
from matrixlib.tasks.tictactoe import losses
from matrixlib.tasks.tictactoe.config import TicTacToeConfig
from matrixlib.tasks.tictactoe.game import SQUARES
from matrixlib.tasks.tictactoe.model import TicTacToeNet

PAD = -1  # policy index of a square that is no move
BOARD = np.arange(SQUARES).reshape(3, 3)
SYMMETRIES = np.array([np.rot90(b, k).ravel() for b in (BOARD, BOARD.T) for k in range(4)])
"""(8, 9): where each square's content comes from, in the board's eight symmetries."""


@dataclass(frozen=True)
class TicTacToeTask(Ungated):
    """Tic-tac-toe as `config` describes it. Frozen and picklable, as the loader's workers get a copy."""

    config: TicTacToeConfig

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term."""
        return {"policy": self.config.loss.policy, "value": self.config.loss.value}

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """As `prepare_plain`; with `data.augment` each board is turned by a random one of its symmetries."""
        turns = SYMMETRIES[rng.integers(len(SYMMETRIES), size=len(batch["records"]))]
        plain = self.prepare_plain(batch, rng)
        if not self.config.data.augment:
            return plain
        turned = {name: np.take_along_axis(plain[name], turns, 1) for name in ("squares", "policy")}
        return plain | turned

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`squares` i8 (B, 9), 1 ours, -1 theirs; `policy` f32 (B, 9), a row sums to 1 or 0; `result` i64 (B,)."""
        rows = batch["records"]
        weight = rows["policy"].astype(np.float32)
        return {
            "squares": _squares(rows),
            "policy": weight / np.maximum(weight.sum(1, keepdims=True), 1),
            "result": rows["result"].astype(np.int64),
        }

    def inputs(self, rows: np.ndarray, index: np.ndarray, offset: np.ndarray) -> dict[str, np.ndarray]:
        """What `predict` asks for, of states (B,) and their moves (K,) at offsets (B + 1,): `squares` and
        `policy_index` i64 (B, 9), each move at its own place, else PAD."""
        moves = np.full((len(rows), SQUARES), PAD, np.int64)
        moves[np.repeat(np.arange(len(rows)), np.diff(offset)), index] = index
        return {"squares": _squares(rows), "policy_index": moves}

    def build_model(self) -> TicTacToeNet:
        """A fresh fp32 network on the CPU, the same for the same seed; torch's random streams are left untouched."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return TicTacToeNet(self.config.model)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Rows with a policy, rows with a known result."""
        known = {"policy": batch["policy"].sum(1) > 0, "value": batch["result"] != losses.UNKNOWN}
        return {term: int(rows.sum()) for term, rows in known.items()}

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums of the active terms and their metrics (see losses.py)."""
        policy, value = model(batch["squares"])
        terms = {}
        with torch.autocast(policy.device.type, enabled=False):
            if "policy" in active:
                terms["policy"] = losses.policy_loss(policy, batch["policy"], batch["squares"] == 0)
            if "value" in active:
                terms["value"] = losses.value_loss(value, batch["result"])
        metrics = {f"{term}/{name}": v for term, (_, named) in terms.items() for name, v in named.items()}
        return {term: loss for term, (loss, _) in terms.items()}, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per term (chance, floor) as sums over the rows of `counts`."""
        return {
            "policy": losses.policy_bounds(batch["policy"], batch["squares"] == 0),
            "value": losses.value_bounds(batch["result"]),
        }

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`policy` (B, 9), logits, NaN on taken squares; `value` (B, 3)."""
        policy, value = model(batch["squares"])
        return {"policy": policy.masked_fill(batch["squares"] != 0, torch.nan), "value": value}

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """`policy` (B, 9) log-probabilities of `policy_index`'s moves; `wdl` (B, 3); `value` (B,) in -1..1."""
        policy, value = model(batch["squares"])
        wdl = value.float().softmax(1)
        log_p = losses.log_shares(policy, batch["policy_index"] != PAD)
        return {"policy": log_p, "wdl": wdl, "value": wdl[:, 0] - wdl[:, 2]}


def _squares(rows: np.ndarray) -> np.ndarray:
    """(B, 9) int8: 1 ours, -1 theirs, 0 empty."""
    bits = np.arange(SQUARES)
    ours, theirs = (rows[name][:, None] >> bits & 1 for name in ("ours", "theirs"))
    return ours.astype(np.int8) - theirs.astype(np.int8)
