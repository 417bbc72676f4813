"""What a run trains, beyond the engine's seam: a task's data, its phases and its figures.

`engine.task.Task` is all that the engine asks. The composition also has to find the data, to go through a curriculum
and to say how good the result is; that is a `Subject`, one for each task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from matrixlib.config import (
    ChessConfig,
    Config,
    ConfigError,
    LatinConfig,
    SourceCurriculumConfig,
    TicTacToeConfig,
)
from matrixlib.files import cache_root

if TYPE_CHECKING:
    from torch import nn

    from matrixlib.data.catalogue import Catalogue
    from matrixlib.data.loader import Loader
    from matrixlib.data.shards import Layout
    from matrixlib.engine.curriculum import Curriculum, Phase
    from matrixlib.engine.task import Task
    from matrixlib.hardware.runtime import Runtime
    from matrixlib.tasks.chess.task import ChessTask
    from matrixlib.tasks.latin.task import LatinTask
    from matrixlib.tasks.tictactoe.task import TicTacToeTask

Check = tuple[str, bool, str]
"""Name, whether it holds, what it says."""

LEAST_GRIDS = 16  # held-out puzzles of each kind; a tenth of `validation.sample` where that is more


@dataclass(frozen=True)
class Stage:
    """A phase made concrete: its task, the sources of the shards that it is trained on (all where there is none),
    and their shares of a batch where they are not those of their sizes."""

    task: Task
    sources: Sequence[str]
    weights: Mapping[str, float] | None = None


class Subject(Protocol):
    """All that a run needs to know about one task."""

    @property
    def task(self) -> Task:
        """What the engine trains."""
        ...

    @property
    def layout(self) -> Layout:
        """What a shard of it holds."""
        ...

    def folder(self) -> Path:
        """Folder of its shards; a set that ships or is generated is made at first use. Raises ConfigError."""
        ...

    def curriculum(self) -> Curriculum | None:
        """The phases of its training; None where there is one."""
        ...

    def staged(self, phase: Phase) -> Stage:
        """What a phase trains, and on what."""
        ...

    def training_flops(self) -> float | None:
        """Floating-point operations of training on one row; None where nobody has counted them."""
        ...

    def evaluate(
        self, model: nn.Module, runtime: Runtime, held_out: Loader, catalogue: Catalogue
    ) -> dict[str, Any]:
        """Figures on held-out data, with their `baselines`; names as `report.figure_rows` shows them."""
        ...

    def headline(self, figures: Mapping[str, Any]) -> str:
        """The figures in one line."""
        ...

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        """What must hold of any network that has learned something."""
        ...


def of(config: Config) -> Subject:
    """The subject of a configuration."""
    if isinstance(config, LatinConfig):
        from matrixlib.tasks.latin.task import LatinTask

        return Latin(LatinTask(config))
    if isinstance(config, TicTacToeConfig):
        from matrixlib.tasks.tictactoe.task import TicTacToeTask

        return TicTacToe(TicTacToeTask(config))
    assert isinstance(config, ChessConfig)
    from matrixlib.tasks.chess.task import ChessTask

    return Chess(ChessTask(config))


def given_folder(source: str, known: str = "") -> Path:
    """A folder of shards given by the user; ConfigError where there is none. known: the name that needs no folder."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        also = f"'{known}' or " if known else ""
        raise ConfigError(f"data.source '{source}' is no folder; use {also}a folder of shards")
    return folder


def source_curriculum(config: SourceCurriculumConfig) -> Curriculum | None:
    """The phases of a curriculum over sources; None where all of the data are always used."""
    from matrixlib.engine.curriculum import Curriculum, Dimension

    made = Curriculum(config, [Dimension.of("sources", config.sources)])
    return made if len(made.phases) > 1 or made.values["sources"] else None


@dataclass(frozen=True)
class Chess:
    """Chess: positions with moves and results."""

    task: ChessTask

    @property
    def layout(self) -> Layout:
        from matrixlib.tasks.chess.records import LAYOUT

        return LAYOUT

    def folder(self) -> Path:
        from matrixlib.tasks.chess.sample_set import unpack_sample

        source = self.task.config.data.source
        return unpack_sample() if source == "sample" else given_folder(source, "sample")

    def curriculum(self) -> Curriculum | None:
        return source_curriculum(self.task.config.curriculum)

    def staged(self, phase: Phase) -> Stage:
        weights = phase.values["sources"]
        return Stage(self.task, list(weights), weights)

    def training_flops(self) -> float:
        from matrixlib.engine.task import active_terms
        from matrixlib.tasks.chess.model import training_flops

        return training_flops(self.task.config.model, active_terms(self.task))

    def evaluate(
        self, model: nn.Module, runtime: Runtime, held_out: Loader, catalogue: Catalogue
    ) -> dict[str, Any]:
        from matrixlib.tasks.chess.evaluate import held_out as evaluation
        from matrixlib.tasks.chess.evaluate.net import Net

        return evaluation.held_out(Net(model, self.task, runtime), held_out)

    def headline(self, figures: Mapping[str, Any]) -> str:
        base = figures["baselines"]
        parts = [
            f"top-1 {figures['top1']:.1%} (best capture {base['best_capture_top1']:.1%}, "
            f"uniform {base['uniform_top1']:.1%}), top-3 {figures['top3']:.1%}, KL {figures['policy_kl']:.2f}"
        ]
        if "wdl_accuracy" in figures:
            parts.append(f"WDL {figures['wdl_accuracy']:.1%}")
        if "value_correlation" in figures:
            parts.append(f"value correlation {figures['value_correlation']:.2f}")
        return ", ".join(parts)

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        base = figures["baselines"]
        return [
            (
                "held-out policy better than uniform",
                figures["policy_kl"] < base["uniform_kl"],
                "KL to the teacher below that of a uniform guess",
            ),
            (
                "held-out moves better than a random legal one",
                figures["top1"] > base["uniform_top1"],
                "top-1 agreement with the teacher above a random move's",
            ),
        ]


@dataclass(frozen=True)
class Latin:
    """Latin squares: puzzles of several sizes, modes and fills."""

    task: LatinTask

    @property
    def layout(self) -> Layout:
        from matrixlib.tasks.latin.pool import LAYOUT

        return LAYOUT

    def folder(self) -> Path:
        source = self.task.config.data.source
        if source != "generated":
            return given_folder(source, "generated")
        folder = cache_root() / self.task.pool_name
        self.task.make_pool(folder)
        return folder

    def curriculum(self) -> Curriculum:
        from matrixlib.engine.curriculum import Curriculum, Dimension

        dimensions = [Dimension.of(name, section) for name, section in self.task.dimensions.items()]
        return Curriculum(self.task.config.curriculum, dimensions)

    def staged(self, phase: Phase) -> Stage:
        from matrixlib.tasks.latin import pool

        task = self.task.at(phase.values)
        return Stage(task, [pool.source(size) for size in task.sizes])

    def training_flops(self) -> None:
        return None

    def evaluate(
        self, model: nn.Module, runtime: Runtime, held_out: Loader, catalogue: Catalogue
    ) -> dict[str, Any]:
        from matrixlib.tasks.latin import pool, rates

        squares = pool.read(row.path for row in catalogue.shards("validation"))
        grids = max(LEAST_GRIDS, self.task.config.validation.sample // 10)
        found = rates.measure(self.task, model, squares, grids=grids, seed=self.task.config.seed)
        means = {
            name: float(np.mean([getattr(rate, name) for rate in found]))
            for name in ("valid", "accuracy", "iterative", "beam", "iterative_baseline", "beam_baseline")
        }
        return {
            "puzzles": grids * len(found),
            "one_pass_valid": means["valid"],
            "cell_accuracy": means["accuracy"],
            "iterative_valid": means["iterative"],
            "beam_valid": means["beam"],
            "baselines": {
                "uniform_accuracy": float(np.mean([1 / rate.size for rate in found])),
                "no_network_iterative": means["iterative_baseline"],
                "no_network_beam": means["beam_baseline"],
            },
            "rates": [rate.to_dict() for rate in found],
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
        return [
            (
                "held-out cells better than uniform",
                figures["cell_accuracy"] > figures["baselines"]["uniform_accuracy"],
                "the best digit is right more often than a random one",
            )
        ]


@dataclass(frozen=True)
class TicTacToe:
    """Tic-tac-toe: positions of self-play."""

    task: TicTacToeTask

    @property
    def layout(self) -> Layout:
        from matrixlib.tasks.tictactoe.records import LAYOUT

        return LAYOUT

    def folder(self) -> Path:
        return given_folder(self.task.config.data.source)

    def curriculum(self) -> Curriculum | None:
        return source_curriculum(self.task.config.curriculum)

    def staged(self, phase: Phase) -> Stage:
        weights = phase.values["sources"]
        return Stage(self.task, list(weights), weights)

    def training_flops(self) -> None:
        return None

    def evaluate(
        self, model: nn.Module, runtime: Runtime, held_out: Loader, catalogue: Catalogue
    ) -> dict[str, Any]:
        from matrixlib.engine.validation import validate
        from matrixlib.tasks.tictactoe.losses import chances

        batches = list(held_out.sequential(self.task.config.validation.batch_size))
        seen = validate(self.task, model, batches, runtime, frozenset(self.task.weights), "full")
        if seen is None or not seen.counts["policy"]:
            raise ValueError("the held-out positions have no policy target to evaluate on; play more games")
        uniform = sum(float(chances(batch["policy"], batch["squares"] == 0).sum()) for batch in batches)
        figures: dict[str, Any] = {
            "positions": sum(len(batch["squares"]) for batch in batches),
            "top1": seen.metrics["policy/top1"],
            "policy_kl": seen.metrics["policy/kl"],
        }
        if seen.counts["value"]:
            figures["wdl_accuracy"] = seen.metrics["value/accuracy"]
        return figures | {"baselines": {"uniform_top1": uniform / seen.counts["policy"]}}

    def headline(self, figures: Mapping[str, Any]) -> str:
        said = (
            f"top-1 {figures['top1']:.1%} (uniform {figures['baselines']['uniform_top1']:.1%}), "
            f"KL {figures['policy_kl']:.2f}"
        )
        return said + (f", WDL {figures['wdl_accuracy']:.1%}" if "wdl_accuracy" in figures else "")

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        return [
            (
                "held-out moves better than a random one",
                figures["top1"] > figures["baselines"]["uniform_top1"],
                "top-1 agreement with the search above that of a random move",
            )
        ]
