"""Melee as a task: players of recorded games, to be imitated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.engine.onnx import OnnxFile
from matrixlib.tasks.melee import imitation
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.export import export
from matrixlib.tasks.melee.sample_set import data_folder, statistics
from matrixlib.tasks.melee.task import MeleeTask
from matrixlib.tasks.spec import Check, Overfit, TaskSpec


class MeleeSpec(TaskSpec[MeleeConfig]):
    """Controllers of players, frame by frame."""

    name, demo = "melee", "melee_demo"
    config, layout = MeleeConfig, LAYOUT
    objective_options = ("loss.",)
    measured_on_options = ("validation.limit", "data.delay")
    held_out = "about one replay in ten is held out, and of several at least one"
    overfit = Overfit(
        overrides={
            "data": {"mirror": 0.0, "noise": 0.0, "random_start": False, "delay": [0, 0]},
            "model": {"dropout": 0.0},
            "optim": {"learning_rate": 0.003, "clip_norm": 1.0},
            "train": {"steps": 150},
            "loss": {"label_smoothing": 0.0, "focal": 0.0, "rare": 0.0},
        },
        inputs=("numeric", "action", "character"),
        labels=("choices",),
    )
    small = {"model": {"width": 16}, "train": {"batch_size": 16}, "runtime": {"precision": "fp32", "threads": 1}}

    def task(self, config: MeleeConfig) -> MeleeTask:
        return MeleeTask(config, statistics(config))

    def folder(self, config: MeleeConfig) -> Path:
        return data_folder(config)

    def export(self, net: Any, path: Path | str) -> OnnxFile:
        return export(net.model, net.task, path)

    def evaluate(self, net: Any, held_out: Loader, catalogue: Catalogue, sample: int = 0) -> dict[str, Any]:
        """Log-likelihoods and onsets of held-out frames, each beside what repeating the controller gives."""
        config = net.task.config
        batches = held_out.sequential(config.validation.batch_size, sample=sample)
        return imitation.figures(imitation.judge(net, batches, config.seed))

    def headline(self, figures: Mapping[str, Any]) -> str:
        total, onsets = figures["total"], figures["onsets"]
        return (
            f"{total['nll']:.3f} nats a frame (repeating {total['repeating']:.3f}, constant {total['constant']:.3f}), "
            f"{total['change_nll']:.2f} where the controller changes (repeating {total['change_repeating']:.2f}), "
            f"{onsets['recall']:.1%} of the onsets (repeating 0 %, other frames {onsets['false']:.1%})"
        )

    def checks(self, figures: Mapping[str, Any]) -> list[Check]:
        return imitation.checks(figures)


TASK = MeleeSpec()
