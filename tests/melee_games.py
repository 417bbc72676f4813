"""Games of Melee for tests: random states, in which every number says where it is from."""

from typing import Any

import numpy as np

from matrixlib.tasks.melee.columns import CONTROLLER, EVERYTHING, FIRST, GROUND, ITEM, OPEN, PLAYER, RIGHT
from matrixlib.tasks.melee.replay import Replay


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
    item = np.zeros(frames // 60, ITEM)
    item["type"], item["place"], item["speed"] = 54, (10, 20), (1, -1)
    facts = {
        "stage": stage,
        "ports": (0, 3),
        "known": EVERYTHING,
        "number": np.arange(FIRST, FIRST + frames),
        "players": players,
        "controllers": controllers,
        "follower": players[:20, 1].copy(),
        "follower_at": np.arange(20),
        "whose": np.ones(20, np.int64),
        "item": item,
        "item_at": np.arange(len(item)) * 60,
        "owner": np.zeros(len(item), np.int64),
    }
    return Replay(**facts | changes)
