"""The Latin-square task: what the engine trains, from stored squares to losses.

Terms: "cell" (cross-entropy of hidden cells; items are cells) and "constraint" (digits expected more than once;
items are grids with a hidden cell).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.curriculum import StagesConfig
from matrixlib.engine.task import Batch, Ungated
from matrixlib.tasks.latin import losses, pool
from matrixlib.tasks.latin.config import LatinConfig
from matrixlib.tasks.latin.losses import inside
from matrixlib.tasks.latin.model import LatinNet
from matrixlib.tasks.latin.vocabulary import EMPTY, MODES, PAD, SIDE, token_table


@dataclass(frozen=True)
class LatinTask(Ungated):
    """Completing Latin squares as `config` describes it. Frozen and picklable, as the workers get a copy.

    stage: the curriculum's values in force, dimension -> stage; None, for validation, is the last stage of size
    and mode, and the fill of all stages.
    """

    config: LatinConfig
    stage: Mapping[str, Any] | None = None

    @property
    def dimensions(self) -> dict[str, StagesConfig]:
        """The curriculum's dimensions."""
        curriculum = self.config.curriculum
        return {"size": curriculum.size, "mode": curriculum.mode, "fill": curriculum.fill}

    @property
    def values(self) -> Mapping[str, Any]:
        """Of this stage: `size` (smallest, largest), `mode` (names), `fill` (least, greatest)."""
        hardest = {name: section.stages[-1] for name, section in self.dimensions.items()}
        return self.stage or hardest | {"fill": self.every_fill}

    @property
    def every_size(self) -> list[int]:
        """Sizes of any stage."""
        stages = self.config.curriculum.size.stages
        return sorted({size for low, high in stages for size in range(low, high + 1)})

    @property
    def every_fill(self) -> tuple[float, float]:
        """Least and greatest fill of any stage."""
        lows, highs = zip(*self.config.curriculum.fill.stages, strict=True)
        return min(lows), max(highs)

    @property
    def weights(self) -> dict[str, float]:
        return {"cell": self.config.loss.cell, "constraint": self.config.loss.constraint}

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Stored squares, each permuted by a key of its own, to puzzles of this stage; N is its largest size.

        `square` u8 (B, N, N) digit indices, 0 outside; `hidden` bool (B, N, N); `size`, `mode` i64 (B,); `digits` i64
        (B, N), token of each digit index, PAD = none. `easy_share` of the rows have a fill of any stage. Every random
        number is drawn whether it is used or not.
        """
        return self._puzzles(batch["records"], rng, self.config.data.easy_share, self.config.data.augment)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """As `prepare`, with no square permuted and no easy share."""
        return self._puzzles(batch["records"], rng, 0.0, False)

    def _puzzles(
        self, records: np.ndarray, rng: np.random.Generator, easy: float, permuted: bool
    ) -> dict[str, np.ndarray]:
        count, size = len(records), records["size"].astype(np.int64)
        (smallest, side), modes = self.values["size"], self.values["mode"]
        if count and not (size.min() >= smallest and size.max() <= side):
            raise ValueError(f"squares of size {size.min()} to {size.max()}, but the stage has {smallest} to {side}")
        draws = [rng.random(count) for _ in range(4)]
        key = rng.integers(1, 2**63 - 1, count)
        cells = rng.random((count, SIDE, SIDE))
        bounds = np.where((draws[0] < easy)[:, None], self.every_fill, self.values["fill"])
        fill = bounds[:, 0] + (bounds[:, 1] - bounds[:, 0]) * draws[1]
        # The first mode has half of the rows, the others share the rest.
        others = len(modes) - 1
        which = np.where((draws[2] < 0.5) | (others == 0), 0, 1 + (draws[3] * others).astype(np.int64))
        mode = np.array([MODES.index(name) for name in modes])[which]
        square = pool.unpack(records, side)
        return {
            "square": pool.isotopes(square, size, key) if permuted else square,
            "hidden": (cells[:, :side, :side] >= fill[:, None, None]) & pool.inside(size, side),
            "size": size,
            "mode": mode,
            "digits": token_table()[mode, size, :side],
        }

    def build_model(self) -> LatinNet:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.config.seed)
            return LatinNet(self.config.model)

    def counts(self, batch: Batch) -> dict[str, int]:
        """Hidden cells; grids with a hidden cell."""
        hidden = batch["hidden"].flatten(1)
        return {"cell": int(hidden.sum()), "constraint": int(hidden.any(1).sum())}

    def losses(
        self, model: nn.Module, batch: Batch, active: frozenset[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums of the active terms and their metrics (see losses.py)."""
        logits = model(tokens(batch), batch["size"], batch["mode"])
        target, hidden, size = batch["square"].long(), batch["hidden"], batch["size"]
        sums: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        with torch.autocast(logits.device.type, enabled=False):
            log_p = losses.digit_log_probabilities(logits, batch["digits"])
            for term in sorted(active):
                if term == "cell":
                    smoothing = self.config.loss.label_smoothing
                    sums[term], details = losses.cell_loss(log_p, target, hidden, size, smoothing)
                else:
                    sums[term], details = losses.constraint_loss(log_p, target, hidden, size)
                metrics |= {f"{term}/{name}": value for name, value in details.items()}
        return sums, metrics

    def bounds(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Per term (chance, floor) as sums over the items of `counts`: see losses.py."""
        hidden, size = batch["hidden"], batch["size"]
        return {
            "cell": losses.cell_bounds(hidden, size, self.config.loss.label_smoothing),
            "constraint": (losses.constraint_chance(batch["square"].long(), hidden, size), 0.0),
        }

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`cell` (B, N, N, N): logits of the puzzle's digits, NaN for others and outside the grid."""
        digits, side = batch["digits"][:, None, None], batch["square"].shape[1]
        logits = model(tokens(batch), batch["size"], batch["mode"])
        shown = (digits != PAD) & inside(batch["size"], side)[..., None]
        return {"cell": logits.gather(3, digits.expand(-1, side, side, -1)).masked_fill(~shown, torch.nan)}


def tokens(batch: Batch) -> Tensor:
    """(B, N, N) int64 input tokens of `prepare`'s arrays: digits where revealed, EMPTY, PAD outside."""
    square = batch["square"]
    digits = batch["digits"].gather(1, square.long().flatten(1)).view_as(square)
    return torch.where(inside(batch["size"], square.shape[1]), torch.where(batch["hidden"], EMPTY, digits), PAD)
