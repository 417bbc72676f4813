"""From stored frames to the inputs of a network: one builder for training and for play."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matrixlib.tasks.melee.columns import (
    BUTTONS,
    CHARACTERS,
    CONTROLLER,
    DELAYS,
    EVERYTHING,
    FRAME,
    GROUND,
    HALVES,
    ITEM,
    LEFT,
    PAIR,
    PLAYER,
    RIGHT,
    SAFE,
    SHOULDER_STEPS,
    STICK_STEPS,
    STICKS,
    UNKNOWN,
)
from matrixlib.tasks.melee.controller import mirror_sticks, pressed

ACTIONS = 399
"""Classes of action state."""
STAGES = {2: "Fountain of Dreams", 3: "Pokémon Stadium", 8: "Yoshi's Story", 28: "Dream Land", 31: "Battlefield"}
STAGES[32] = "Final Destination"
SYMMETRIC = (2, 28, 31, 32)
"""Stages that stay what they are when left and right change places; Randall and the stadium's forms do not."""
EDGE = 85.0  # about where stages end
GAME_FRAMES = 28_800.0  # eight minutes
DEAD_SIDEWAYS = (1, 2)
"""Action states of a player who is lost over the left and the right edge."""
SLOTS = 5
"""Items that a network is told of."""

# Kinds of action state: the first state of each. From 341 on they are a character's own.
KINDS = np.array(
    [0, 11, 14, 15, 18, 20, 23, 25, 29, 35, 39, 42, 44, 65, 75, 92, 178, 183, 199, 205, 212, 223, 233, 252, 341]
)

STATE = ("percent", "facing", "x", "y", "invulnerable", "jumps", "shield", "on ground")
SPEEDS = ("speed air x", "speed ground x", "speed y", "speed hit x", "speed hit y")
LEADER = (*STATE, *SPEEDS, "hitstun", "action frame", "stocks", "ledge")
MEASURED = [LEADER.index(name) for name in ("percent", "shield", "x", "y", *SPEEDS, "hitstun", "action frame")]
"""Where HALVES stand in LEADER, by SCALES."""
SCALES = np.array([0.01, 0.01, 0.05, 0.05, *[0.5] * len(SPEEDS), 1 / 120, 1 / 60], np.float32)
SIGNS = np.array([0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0], "<u2") << 15
"""The sign of those of HALVES that change it in a mirror."""
_OF_SECOND = (*STATE, "speed air x", "speed y", "hitstun", "action frame", "stocks")
OF_SECOND = [LEADER.index(name) for name in _OF_SECOND]
_KINDS = (f"kind {number}" for number in range(len(KINDS)))
SECOND = tuple(f"second {name}" for name in ("there", *_OF_SECOND, *_KINDS))
CONTROLS = (*BUTTONS, *STICKS, "shoulder")
SPATIAL = ("distance", "dx", "dy", "time")
ITEM_FIELDS = ("there", "owner", "x", "y", "type", "speed x", "speed y")
KNOWN = ("speeds", "on ground", "action frame", "invulnerable", "items")

INPUTS: tuple[str, ...] = (
    *(f"{whose} {name}" for whose in ("own", "other") for name in (*LEADER, *SECOND)),
    *(f"stage {name}" for name in (*STAGES.values(), "other")),
    *(f"previous {name}" for name in CONTROLS),
    *SPATIAL,
    *(f"item {slot} {name}" for slot in range(SLOTS) for name in ITEM_FIELDS),
    "delay",
    *(f"known {name}" for name in KNOWN),
)
"""What each number of `numeric` is."""
PLACE = {name: number for number, name in enumerate(INPUTS)}
_CONTINUOUS = ("percent", " x", " y", "shield", "speed", "hitstun", "action frame", "ledge", "distance", "dx", "dy")
_OTHER = ("previous", "known")
CONTINUOUS = np.array(
    [place for place, name in enumerate(INPUTS) if name.endswith(_CONTINUOUS) and not name.startswith(_OTHER)]
)
"""Numbers of `numeric` that are measured and not counted: where noise is added."""


@dataclass(frozen=True)
class Window:
    """B stretches of T frames. Followers and items say first which they belong to: (row, frame, whose or slot).

    frames: (B, T) FRAME. previous: (B, T) CONTROLLER, what the player decided last. first: (B,) Slippi's number of the
    first frame. stage, known, delay: (B,). follower: (K,) PLAYER at follower_at (3, K); item: (M,) ITEM at item_at.
    """

    frames: np.ndarray
    previous: np.ndarray
    first: np.ndarray
    stage: np.ndarray
    known: np.ndarray
    delay: np.ndarray
    follower: np.ndarray
    follower_at: np.ndarray
    item: np.ndarray
    item_at: np.ndarray

    def at(self, frame: int) -> Window:
        """One frame of each row."""
        follower, item = self.follower_at[1] == frame, self.item_at[1] == frame
        moved = np.array([[0], [frame], [0]])
        return Window(
            frames=self.frames[:, frame : frame + 1],
            previous=self.previous[:, frame : frame + 1],
            first=self.first + frame,
            stage=self.stage,
            known=self.known,
            delay=self.delay,
            follower=self.follower[follower],
            follower_at=self.follower_at[:, follower] - moved,
            item=self.item[item],
            item_at=self.item_at[:, item] - moved,
        )


def live(
    frame: np.ndarray,
    previous: np.ndarray,
    number: int,
    stage: int,
    delay: int = 0,
    followers: dict[int, np.ndarray] | None = None,
    items: np.ndarray | None = None,
) -> Window:
    """One frame as it is played, as a window of one: FRAME and CONTROLLER scalars, Slippi's number of the frame.

    followers: whose (0 ours, 1 theirs) -> PLAYER. items: (M,) ITEM. The frame's own controller is not looked at.
    """
    second = followers or {}
    things = np.zeros(0, ITEM) if items is None else items[:SLOTS]
    whose = np.array(list(second), np.int64)
    return Window(
        frames=np.asarray(frame, FRAME).reshape(1, 1),
        previous=np.asarray(previous, CONTROLLER).reshape(1, 1),
        first=np.array([number]),
        stage=np.array([stage]),
        known=np.array([EVERYTHING]),
        delay=np.array([delay]),
        follower=np.array([second[who] for who in second], PLAYER),
        follower_at=np.stack([np.zeros_like(whose), np.zeros_like(whose), whose]),
        item=things,
        item_at=np.stack([np.zeros(len(things), np.int64), np.zeros(len(things), np.int64), np.arange(len(things))]),
    )


def inputs(window: Window) -> dict[str, np.ndarray]:
    """What a network sees: `numeric` f4 (B, T, len(INPUTS)), `action` i2 and `character` u1 (B, T, 2), own first."""
    out = np.zeros((*window.frames.shape, len(INPUTS)), np.float32)
    players = window.frames.view(PAIR)["players"]
    leader = _leader(players)
    both = _block(out, f"own {LEADER[0]}", 2, len(LEADER) + len(SECOND))
    both[..., : len(LEADER)] = leader
    if len(window.follower):
        row, frame, whose = window.follower_at
        both[row, frame, whose, len(LEADER) :] = _second(window.follower)
    stage = window.stage[:, None] == np.array(list(STAGES))
    _block(out, f"stage {STAGES[2]}", 1, len(STAGES) + 1)[:, :, 0] = np.c_[stage, ~stage.any(1)][:, None]
    _controls(_block(out, f"previous {CONTROLS[0]}", 1, len(CONTROLS))[:, :, 0], window.previous)
    x, y = np.moveaxis(leader[..., 1, 2:4] - leader[..., 0, 2:4], -1, 0)  # in twenties
    number = window.first[:, None] + np.arange(out.shape[1])
    values = (np.minimum(np.hypot(x, y) / 10, 1.5), x / 10, y / 5, number / GAME_FRAMES)
    for name, column in zip(SPATIAL, values, strict=True):
        out[..., PLACE[name]] = column
    if len(window.item):
        row, frame, slot = window.item_at
        _block(out, f"item 0 {ITEM_FIELDS[0]}", SLOTS, len(ITEM_FIELDS))[row, frame, slot] = _items(window.item)
    out[..., PLACE["delay"]] = window.delay[:, None] / DELAYS
    known = window.known[:, None, None] >> np.arange(len(KNOWN)) & 1
    _block(out, f"known {KNOWN[0]}", 1, len(KNOWN))[:, :, 0] = known
    return {
        "numeric": out,
        "action": np.minimum(players["action"], ACTIONS - 1).astype(np.int16),
        "character": np.minimum(players["character"], CHARACTERS - 1),
    }


def _block(out: np.ndarray, first: str, count: int, size: int) -> np.ndarray:
    """(B, T, count, size) of the numbers from the one named `first` on: a view."""
    place = PLACE[first]
    return out[..., place : place + count * size].reshape(*out.shape[:2], count, size)


def _number(values: np.ndarray) -> np.ndarray:
    """Halves as floats; what is not known is 0, and a flag of `known` says so."""
    number = values.astype(np.float32)
    number[~np.isfinite(number)] = 0
    return number


def _leader(state: np.ndarray) -> np.ndarray:
    """(..., len(LEADER)) of players (...)."""
    out = np.empty((*state.shape, len(LEADER)), np.float32)
    out[..., MEASURED] = _number(state.view(HALVES)["halves"]) * SCALES
    np.clip(out[..., 0], 0, 5, out=out[..., 0])
    flags, x = state["flags"], out[..., LEADER.index("x")] * np.float32(20)
    columns = {
        "facing": ((flags & RIGHT) > 0).astype(np.float32) - ((flags & LEFT) > 0),
        "invulnerable": (flags & SAFE) > 0,
        "jumps": np.where(state["jumps"] == UNKNOWN, 0, state["jumps"]) / 6,
        "on ground": (flags & GROUND) > 0,
        "stocks": state["stocks"] / 4,
        "ledge": (EDGE - np.abs(x)) / EDGE,
    }
    for name, column in columns.items():
        out[..., LEADER.index(name)] = column
    return out


def _second(state: np.ndarray) -> np.ndarray:
    """(K, len(SECOND)) of players (K,)."""
    kind = np.searchsorted(KINDS, state["action"], side="right") - 1
    return np.c_[np.ones(len(state)), _leader(state)[:, OF_SECOND], kind[:, None] == np.arange(len(KINDS))]


def _controls(out: np.ndarray, controller: np.ndarray) -> None:
    buttons = len(BUTTONS)
    out[..., :buttons] = pressed(controller["buttons"])
    out[..., buttons : buttons + 4] = controller["sticks"] / np.float32(STICK_STEPS)
    out[..., buttons + 4] = controller["shoulder"] / np.float32(SHOULDER_STEPS)


def _items(item: np.ndarray) -> np.ndarray:
    """(M, len(ITEM_FIELDS)) of items (M,)."""
    place, speed = _number(item["place"]) * 0.05, _number(item["speed"]) * 0.5
    return np.c_[np.ones(len(item)), item["owner"] * 0.5, place, item["type"] * 0.01, speed]


# Left and right


def mirror(window: Window, rows: np.ndarray) -> None:
    """Exchange left and right in `rows` (B,) bool, in place."""
    for who in ("self", "other"):
        _mirror_players(window.frames[who], rows)
    mirror_sticks(window.previous, rows)
    _mirror_players(window.follower, rows[window.follower_at[0]])
    things = rows[window.item_at[0]]
    for field in ("place", "speed"):
        window.item[field][things, 0] *= -1


def _mirror_players(state: np.ndarray, rows: np.ndarray) -> None:
    state.view(HALVES)["halves"].view("<u2")[rows] ^= SIGNS
    flags = state["flags"][rows]
    turned = (flags & RIGHT) // RIGHT * LEFT | (flags & LEFT) // LEFT * RIGHT
    state["flags"][rows] = flags & ~np.uint8(RIGHT | LEFT) | turned
    action = state["action"][rows]
    state["action"][rows] = np.where(np.isin(action, DEAD_SIDEWAYS), sum(DEAD_SIDEWAYS) - action, action)
