"""Melee as a task: players of recorded games, to be imitated."""

import functools
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.config import ConfigError
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.data.reader import kept_rows
from matrixlib.data.remote import local_path
from matrixlib.data.shards import Shard, select
from matrixlib.engine.onnx import OnnxFile
from matrixlib.tasks.melee import imitation
from matrixlib.tasks.melee.columns import LAYOUT
from matrixlib.tasks.melee.config import MeleeConfig
from matrixlib.tasks.melee.controller import Statistics
from matrixlib.tasks.melee.player import export
from matrixlib.tasks.melee.sample_set import unpack_sample
from matrixlib.tasks.melee.task import MeleeTask
from matrixlib.tasks.melee.windows import count
from matrixlib.tasks.spec import Check, Overfit, TaskSpec, given_folder


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
        return MeleeTask(config, self.statistics(config))

    def statistics(self, config: MeleeConfig) -> Statistics | None:
        """Of the training rows of a configuration; None where its data are not on this machine.

        The catalogue has the counts of each shard, made when it was written. They are added up over the shards in use,
        so that another split, another limit or a shard in quarantine gives other rates; where a limit keeps a part of a
        shard, the rows of that part are counted. Raises ShardError for a shard that cannot be read.
        """
        try:
            rows = Catalogue(self.folder(config)).shards("train")
        except ConfigError:
            return None
        kept = kept_rows([row.count for row in rows], [row.source for row in rows], config.data.limit)
        parts = []
        for row, rows_kept in zip(rows, kept, strict=True):
            if rows_kept == row.count and "classes" in row.quality:
                parts.append(Statistics(**row.quality["classes"]))
            elif rows_kept:
                parts.append(count(select(Shard(local_path(row), LAYOUT).arrays, np.arange(rows_kept), LAYOUT)))
        return functools.reduce(operator.add, parts) if parts else None

    def folder(self, config: MeleeConfig) -> Path:
        return unpack_sample() if config.data.source == "sample" else given_folder(config.data, "sample")

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
