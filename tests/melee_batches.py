"""Batches of Melee as `prepare` gives them, made up: for tests that need no replay."""

from typing import Any

import numpy as np
import torch

from matrixlib.config import merge
from matrixlib.engine.task import Batch
from matrixlib.tasks import load_config
from matrixlib.tasks.melee.columns import CHARACTERS
from matrixlib.tasks.melee.controller import STICK_CLASSES, Statistics
from matrixlib.tasks.melee.features import ACTIONS, INPUTS
from matrixlib.tasks.melee.task import MeleeTask

SMALL = {"data": {"window": 12}, "model": {"width": 16, "layers": 2, "heads": 2, "embedding": 4, "head_width": 8}}


def melee_task(**sections: Any) -> MeleeTask:
    """`melee_quick` with a network of a few thousand parameters, and the statistics of a made-up set."""
    config: Any = load_config("melee_quick", merge(SMALL, sections))
    return MeleeTask(config, Statistics.count(decisions(np.random.default_rng(0), 500)))


def decisions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Choices (..., 13), buttons pressed one time in five, sticks mostly in the middle."""
    sticks = np.clip(rng.normal(8, 3, (*shape, 4)).round(), 0, STICK_CLASSES - 1)
    buttons, shoulder = rng.random((*shape, 8)) < 0.2, rng.integers(0, 5, (*shape, 1))
    return np.concatenate([buttons, sticks, shoulder], -1).astype(np.uint8)


def melee_batch(rows: int = 6, frames: int = 12, seed: int = 0) -> Batch:
    """A batch whose last row has no target behind its fourth frame, as at the end of a game."""
    rng = np.random.default_rng(seed)
    valid = np.ones((rows, frames), np.uint8)
    valid[-1, 4:] = 0
    arrays = {
        "numeric": rng.standard_normal((rows, frames, len(INPUTS))).astype(np.float32),
        "action": rng.integers(0, ACTIONS, (rows, frames, 2)).astype(np.int16),
        "character": rng.integers(0, CHARACTERS, (rows, frames, 2)).astype(np.uint8),
        "choices": decisions(rng, rows, frames),
        "previous": decisions(rng, rows, frames),
        "valid": valid,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
