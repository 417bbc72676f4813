"""The Latin-square task: what the engine trains, from stored squares to losses.

Terms: "cell" (cross-entropy of hidden cells; items are cells) and "constraint" (digits expected more than once;
items are grids with a hidden cell).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.engine.curriculum import StagesConfig
from matrixlib.engine.task import Batch, Ungated
from matrixlib.tasks.latin import augment, losses, pool
from matrixlib.tasks.latin.augment import inside
from matrixlib.tasks.latin.config import LatinConfig
from matrixlib.tasks.latin.losses import Sums
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

    def at(self, stage: Mapping[str, Any] | None) -> LatinTask:
        """The same task in another stage of the curriculum."""
        return replace(self, stage=stage)

    @property
    def sizes(self) -> range:
        """Sizes of the squares in this stage."""
        low, high = self._stage("size")
        return range(low, high + 1)

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of the puzzles in this stage."""
        return self._stage("mode")

    @property
    def every_size(self) -> list[int]:
        """Sizes of any stage."""
        stages = self.config.curriculum.size.stages
        return sorted({size for low, high in stages for size in range(low, high + 1)})

    @property
    def every_fill(self) -> tuple[float, float]:
        """Least and greatest fill of any stage."""
        stages = self.config.curriculum.fill.stages
        return min(low for low, _ in stages), max(high for _, high in stages)

    def _stage(self, dimension: str) -> Any:
        if self.stage is not None:
            return self.stage[dimension]
        return self.dimensions[dimension].stages[-1]

    @property
    def dimensions(self) -> dict[str, StagesConfig]:
        """The curriculum's dimensions."""
        curriculum = self.config.curriculum
        return {"size": curriculum.size, "mode": curriculum.mode, "fill": curriculum.fill}

    @property
    def pool_name(self) -> str:
        """Name of the folder of the squares that `make_pool` would generate."""
        sizes = self.every_size
        return f"latin_{sizes[0]}-{sizes[-1]}_{self.config.data.squares}_seed{self.config.seed}"

    def make_pool(self, folder: Path | str) -> None:
        """Write the shards that the whole curriculum needs and that `folder` lacks."""
        pool.build(folder, self.every_size, self.config.data.squares, self.config.seed)

    def uses(self, source: str) -> bool:
        """Whether shards of this source hold squares of this stage."""
        return source in {pool.source(size) for size in self.sizes}

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each term."""
        return {"cell": self.config.loss.cell, "constraint": self.config.loss.constraint}

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Stored squares to puzzles of this stage, all with leading dimension B; N is the stage's largest size.

        `square` u8 (B, N, N) digit indices, 0 outside; `hidden` bool (B, N, N); `size`, `mode` i64 (B,);
        `key` i64 (B,), the sample's own random stream for its permutations on the device, 0 = none. `easy_share`
        of the rows have a fill of any stage. Every random number is drawn whether it is used or not.
        """
        return self._puzzles(batch["records"], rng, self.config.data.easy_share, self.config.data.augment)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """As `prepare`, with no square permuted and no easy share."""
        return self._puzzles(batch["records"], rng, 0.0, False)

    def _puzzles(
        self, records: np.ndarray, rng: np.random.Generator, easy: float, permuted: bool
    ) -> dict[str, np.ndarray]:
        count, size = len(records), records["size"].astype(np.int64)
        if count and not (size.min() >= self.sizes[0] and size.max() <= self.sizes[-1]):
            raise ValueError(f"squares of size {size.min()} to {size.max()}, but the stage has {self.sizes}")
        draws = [rng.random(count) for _ in range(4)]
        key = rng.integers(1, 2**63 - 1, count)
        cells = rng.random((count, SIDE, SIDE))
        own = self.every_fill if self.stage is None else self.stage["fill"]
        bounds = np.where((draws[0] < easy)[:, None], self.every_fill, own)
        fill = bounds[:, 0] + (bounds[:, 1] - bounds[:, 0]) * draws[1]
        # The first mode has half of the rows, the others share the rest.
        others = len(self.modes) - 1
        mode = np.where((draws[2] < 0.5) | (others == 0), 0, 1 + (draws[3] * others).astype(np.int64))
        side = self.sizes[-1]
        grid = inside(torch.from_numpy(size), side).numpy()
        return {
            "square": pool.unpack(records, side),
            "hidden": (cells[:, :side, :side] >= fill[:, None, None]) & grid,
            "size": size,
            "mode": np.array([MODES.index(name) for name in self.modes])[mode],
            "key": key if permuted else np.full(count, augment.NO_KEY),
        }

    def build_model(self) -> LatinNet:
        """A fresh fp32 network on the CPU, the same for the same seed; torch's random streams are left untouched."""
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
        target = augment.isotope(batch["square"].long(), batch["size"], batch["key"])
        logits = model(self.tokens(batch, target), batch["size"], batch["mode"])
        hidden, size = batch["hidden"], batch["size"]
        sums: Sums = {}
        metrics: Sums = {}
        with torch.autocast(logits.device.type, enabled=False):
            log_p = losses.digit_log_probabilities(logits, self.digit_tokens(batch))
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
        target = augment.isotope(batch["square"].long(), batch["size"], batch["key"])
        hidden, size = batch["hidden"], batch["size"]
        return {
            "cell": losses.cell_bounds(hidden, size, self.config.loss.label_smoothing),
            "constraint": (losses.constraint_chance(target, hidden, size), 0.0),
        }

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`cell` (B, N, N, N): logits of the puzzle's digits, NaN for others and outside the grid."""
        target = augment.isotope(batch["square"].long(), batch["size"], batch["key"])
        logits = model(self.tokens(batch, target), batch["size"], batch["mode"])
        tokens = self.digit_tokens(batch)[:, None, None]
        side = target.shape[1]
        digits = logits.gather(3, tokens.expand(-1, side, side, -1))
        shown = (tokens != PAD) & inside(batch["size"], side)[..., None]
        return {"cell": digits.masked_fill(~shown, torch.nan)}

    def digit_tokens(self, batch: Batch) -> Tensor:
        """(B, N) int64: token of each digit index of a row's puzzle, PAD = none."""
        side = batch["square"].shape[1]
        return _table(str(batch["size"].device))[batch["mode"], batch["size"], :side]

    def tokens(self, batch: Batch, square: Tensor) -> Tensor:
        """(B, N, N) int64 input tokens of squares (B, N, N): digits where revealed, EMPTY, PAD outside."""
        digits = self.digit_tokens(batch).gather(1, square.flatten(1)).view_as(square)
        shown = torch.where(batch["hidden"], EMPTY, digits)
        return torch.where(inside(batch["size"], square.shape[1]), shown, PAD)


@functools.cache
def _table(device: str) -> Tensor:
    """The token table on a device, copied there once; no inference tensor, which training could not use."""
    with torch.inference_mode(False):
        return torch.from_numpy(token_table()).to(device)
