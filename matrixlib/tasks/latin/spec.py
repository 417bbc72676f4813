"""The Latin-squares task: puzzles of several sizes, modes and fills.

Terms: "cell" (cross-entropy of hidden cells) and "constraint" (digits expected more than once in a grid).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.remote import local_path
from matrixlib.engine.curriculum import Curriculum, Phase, StagesConfig
from matrixlib.engine.onnx import OnnxFile
from matrixlib.engine.task import Batch, Sums, Ungated
from matrixlib.files import cache_root
from matrixlib.tasks.latin import decode, losses, pool
from matrixlib.tasks.latin.config import LatinConfig
from matrixlib.tasks.latin.losses import inside, tokens
from matrixlib.tasks.latin.model import LatinNet, export
from matrixlib.tasks.latin.vocabulary import MODES, PAD, SIDE, TOKENS, token_table
from matrixlib.tasks.spec import Check, Overfit, Stage, TaskSpec, given_folder


@dataclass(frozen=True)
class LatinTask(Ungated):
    """Completing Latin squares. Frozen and picklable, for loader workers.

    stage: current curriculum values, dimension -> stage; None (validation): the last stage of size and mode, fills of
    all stages.
    """

    config: LatinConfig
    stage: Mapping[str, Any] | None = None

    @property
    def dimensions(self) -> dict[str, StagesConfig]:
        curriculum = self.config.curriculum
        return {"size": curriculum.size, "mode": curriculum.mode, "fill": curriculum.fill}

    @property
    def values(self) -> Mapping[str, Any]:
        """Of this stage: `size` (smallest, largest), `mode` (names), `fill` (lowest, highest)."""
        hardest = {name: section.stages[-1] for name, section in self.dimensions.items()}
        return self.stage or hardest | {"fill": self.every_fill}

    @property
    def every_size(self) -> list[int]:
        """Sizes of any stage."""
        stages = self.config.curriculum.size.stages
        return sorted({size for low, high in stages for size in range(low, high + 1)})

    @property
    def every_fill(self) -> tuple[float, float]:
        """Lowest and highest fill of any stage."""
        lows, highs = zip(*self.config.curriculum.fill.stages, strict=True)
        return min(lows), max(highs)

    @property
    def weights(self) -> dict[str, float]:
        return {"cell": self.config.loss.cell, "constraint": self.config.loss.constraint}

    def prepare(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Stored squares, each permuted by its own key, to puzzles of this stage; N is its largest size.

        `square` u8 (B, N, N) digit indices, 0 outside; `hidden` bool (B, N, N); `size`, `mode` i64 (B,); `digits` i64
        (B, N), token of each digit index, PAD = none. `easy_share` of the rows have a fill of any stage. All random
        numbers are drawn whether used or not.
        """
        return self._puzzles(batch["records"], rng, self.config.data.easy_share, self.config.data.augment)

    def prepare_plain(self, batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """`prepare` without permutation and easy share."""
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

    def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> tuple[Sums, Sums]:
        logits = model(tokens(batch), batch["size"], batch["mode"])
        target, hidden, size = batch["square"].long(), batch["hidden"], batch["size"]
        sums, metrics = Sums(), Sums()
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
        """Per term (chance, floor) as sums over the items of `counts`. Chance: of equal logits."""
        target, hidden, size = batch["square"].long(), batch["hidden"], batch["size"]
        logits, digits = torch.zeros(*target.shape, TOKENS), batch["digits"]
        if iterations := self.config.model.sinkhorn:  # a fresh network knows the digits of each line
            logits = losses.sinkhorn(logits, tokens(batch), digits, iterations)
        log_p = losses.digit_log_probabilities(logits, digits)
        cell, _ = losses.cell_loss(log_p, target, hidden, size, 0.0)
        constraint, _ = losses.constraint_loss(log_p, target, hidden, size)
        floor = losses.cell_floor(hidden, size, self.config.loss.label_smoothing)
        return {"cell": (cell.item(), floor), "constraint": (constraint.item(), 0.0)}

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """`cell` (B, N, N, N): logits of the puzzle's digits, NaN for others and outside the grid."""
        digits, side = batch["digits"][:, None, None], batch["square"].shape[1]
        logits = model(tokens(batch), batch["size"], batch["mode"])
        shown = (digits != PAD) & inside(batch["size"], side)[..., None]
        return {"cell": logits.gather(3, digits.expand(-1, side, side, -1)).masked_fill(~shown, torch.nan)}


MIN_GRIDS = 16  # held-out puzzles of each kind; or a tenth of `validation.sample`


class LatinSpec(TaskSpec[LatinConfig]):
    name, demo = "latin", "latin_demo"
    config, layout = LatinConfig, pool.LAYOUT
    objective_options = ("loss.",)
    measured_on_options = ("validation.limit", *(f"curriculum.{name}.stages" for name in ("size", "mode", "fill")))
    held_out = "about one square in eight is held out"
    overfit = Overfit(
        overrides={
            "data": {"augment": False, "easy_share": 0.0},
            "model": {"dropout": 0.0},
            "optim": {"learning_rate": 0.005},
            "train": {"steps": 400},
            "loss": {"label_smoothing": 0.0},
            "curriculum": {
                name: {"enabled": False, "stages": [stage], "fractions": [1.0]}
                for name, stage in (("size", [4, 4]), ("mode", ["standard"]), ("fill", [0.8, 0.8]))
            },
        },
        gaps={"cell": 0.05},
        exact=("cell/accuracy",),
    )
    small = {
        "data": {"squares": 20480},
        "model": {"width": 16, "layers": 1, "heads": 2, "feedforward": 2},
        "curriculum": {  # a phase long enough before the fault to know its band, and one after
            "size": {"fractions": [0.2, 0.8]},
            "mode": {"fractions": [0.8, 0.2]},
            "fill": {"fractions": [0.2, 0.6, 0.2]},
        },
        "optim": {"learning_rate": 0.01},
        "train": {"batch_size": 64},
        "health": {"window": 32},
        "validation": {"sample": 256},  # decode 16 puzzles of each kind, not 100
        "runtime": {"precision": "fp32", "threads": 1},
    }

    def task(self, config: LatinConfig) -> LatinTask:
        return LatinTask(config)

    def folder(self, config: LatinConfig) -> Path:
        if config.data.source != "generated":
            folder = given_folder(config.data, "generated")
            pool.mark_suspicious(folder)
            return folder
        sizes = self.task(config).every_size
        folder = cache_root() / f"latin_{sizes[0]}-{sizes[-1]}_{config.data.squares}_seed{config.seed}"
        pool.build(folder, sizes, config.data.squares, config.seed)
        return folder

    def curriculum(self, config: LatinConfig) -> Curriculum:
        return Curriculum(config.curriculum, self.task(config).dimensions)

    def stage(self, task: Any, phase: Phase) -> Stage:
        staged = replace(task, stage=phase.values)
        smallest, largest = staged.values["size"]
        return Stage(staged, [pool.source(size) for size in range(smallest, largest + 1)])

    def export(self, net: Any, path: Path | str) -> OnnxFile:
        return export(net.model, path, net.task.every_size)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Valid grids and correct cells over all kinds of puzzles, with decoding without a network as baseline."""
        task = net.task
        squares = pool.read(local_path(row) for row in catalogue.shards("validation"))
        grids = max(MIN_GRIDS, (sample or task.config.validation.sample) // 10)
        rates = decode.rates(net.model, squares, task.values["mode"], grids=grids, seed=task.config.seed)

        def mean(name: str) -> float:
            return float(np.mean([rate[name] for rate in rates]))

        return {
            "puzzles": grids * len(rates),
            "one_pass_valid": mean("valid"),
            "cell_accuracy": mean("accuracy"),
            "iterative_valid": mean("iterative"),
            "beam_valid": mean("beam"),
            "baselines": {
                "uniform_accuracy": float(np.mean([1 / rate["size"] for rate in rates])),
                "no_network_iterative": mean("iterative_baseline"),
                "no_network_beam": mean("beam_baseline"),
            },
            "rates": rates,
        }

    def headline(self, figures: Mapping[str, Any]) -> str:
        base = figures["baselines"]
        return (
            f"valid in one pass {figures['one_pass_valid']:.1%}, cells {figures['cell_accuracy']:.1%} "
            f"(uniform {base['uniform_accuracy']:.1%}), iterative {figures['iterative_valid']:.1%} "
            f"(no network {base['no_network_iterative']:.1%}), beam {figures['beam_valid']:.1%} "
            f"(no network {base['no_network_beam']:.1%})"
        )

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        better = figures["cell_accuracy"] > figures["baselines"]["uniform_accuracy"]
        return [("held-out cells better than uniform", better, "the best digit is right more often than a random one")]


TASK = LatinSpec()
