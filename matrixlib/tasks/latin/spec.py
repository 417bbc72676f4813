"""Latin squares as a task: puzzles of several sizes, modes and fills."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.remote import local_path
from matrixlib.engine.curriculum import Curriculum, Phase
from matrixlib.engine.onnx import OnnxFile
from matrixlib.files import cache_root
from matrixlib.tasks.latin import decode, pool
from matrixlib.tasks.latin.config import LatinConfig
from matrixlib.tasks.latin.model import export
from matrixlib.tasks.latin.task import LatinTask
from matrixlib.tasks.spec import Check, Overfit, Stage, TaskSpec, given_folder

MIN_GRIDS = 16  # held-out puzzles of each kind; a tenth of `validation.sample` where that is more


class LatinSpec(TaskSpec[LatinConfig]):
    """Completing Latin squares."""

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
        "curriculum": {  # a phase long enough before the fault that its band is known, and one after it
            "size": {"fractions": [0.2, 0.8]},
            "mode": {"fractions": [0.8, 0.2]},
            "fill": {"fractions": [0.2, 0.6, 0.2]},
        },
        "optim": {"learning_rate": 0.01},
        "train": {"batch_size": 64},
        "health": {"window": 32},
        "validation": {"sample": 256},  # sixteen puzzles of each kind to decode, not a hundred
        "runtime": {"precision": "fp32", "threads": 1},
    }

    def task(self, config: LatinConfig) -> LatinTask:
        return LatinTask(config)

    def folder(self, config: LatinConfig) -> Path:
        if config.data.source != "generated":
            return given_folder(config.data, "generated")
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
        return export(net.model, path)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Valid grids and right cells over all kinds of puzzles, beside decoding without a network."""
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
