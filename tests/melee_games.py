"""Melee for tests: games of random states, in which each number says where it is from, and batches without a game."""

from typing import Any

import numpy as np
import torch

from matrixlib.config import merge
from matrixlib.engine.task import Batch
from matrixlib.tasks import load_config
from matrixlib.tasks.melee.columns import (
    CHARACTERS,
    CONTROLLER,
    EVERYTHING,
    FIRST,
    FOLLOWER,
    GROUND,
    ITEM,
    OPEN,
    PLAYER,
    RIGHT,
)
from matrixlib.tasks.melee.controller import STICK_CLASSES, Statistics
from matrixlib.tasks.melee.replay import Replay
from matrixlib.tasks.melee.spec import MeleeTask
from matrixlib.tasks.melee.windows import ACTIONS, INPUTS


def game(frames: int = 200, seed: int = 0, stage: int = 31, **changes: Any) -> Replay:
    """A game with one item a second, and a follower of the second player in its first 20 frames."""
    rng = np.random.default_rng(seed)
    players = np.zeros((frames, 2), PLAYER)
    for name in ("percent", "shield", "x", "y", "hitstun", "action_frame"):
        players[name] = rng.uniform(0, 60, (frames, 2))
    players["speeds"] = rng.normal(size=(frames, 2, 5))
    players["action"] = rng.integers(0, 380, (frames, 2))
    players["character"], players["stocks"], players["jumps"] = (1, 9), 4, 2
    players["flags"] = RIGHT | GROUND | OPEN
    controllers = np.zeros((frames, 2), CONTROLLER)
    controllers["buttons"] = rng.integers(0, 256, (frames, 2))
    controllers["sticks"] = rng.integers(-80, 81, (frames, 2, 4))
    controllers["shoulder"] = rng.integers(0, 141, (frames, 2))
    item, follower = np.zeros(frames // 60, ITEM), np.zeros(min(frames, 20), FOLLOWER)
    item["type"], item["place"], item["speed"], item["at"] = 54, (10, 20), (1, -1), np.arange(len(item)) * 60
    follower["at"], follower["whose"], follower["state"] = np.arange(len(follower)), 1, players[:20, 1]
    facts = {
        "stage": stage,
        "ports": (0, 3),
        "known": EVERYTHING,
        "number": np.arange(FIRST, FIRST + frames),
        "players": players,
        "controllers": controllers,
        "follower": follower,
        "item": item,
    }
    return Replay(**facts | changes)


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
