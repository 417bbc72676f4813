"""From stored frames to the inputs of a network, and controllers as classes: one builder for training and for play."""

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
    ITEM,
    LEFT,
    PLAYER,
    RIGHT,
    SAFE,
    SHOULDER_STEPS,
    STICK_STEPS,
    UNKNOWN,
)

ACTIONS = 399
"""Classes of action state."""
STICK_CLASSES, CENTRE, SHOULDER_CLASSES = 17, 8, 5
STAGES = {2: "Fountain of Dreams", 3: "Pokémon Stadium", 8: "Yoshi's Story", 28: "Dream Land", 31: "Battlefield"}
STAGES[32] = "Final Destination"
SYMMETRIC = (2, 28, 31, 32)
"""Stages that stay what they are when left and right change places; Randall and the stadium's forms do not."""
EDGE = 85.0  # about where stages end
GAME_FRAMES = 28_800.0  # eight minutes
SLOTS = 5
"""Items that a network is told of."""

# Kinds of action state: the first state of each. From 341 on they are a character's own.
KINDS = np.array(
    [0, 11, 14, 15, 18, 20, 23, 25, 29, 35, 39, 42, 44, 65, 75, 92, 178, 183, 199, 205, 212, 223, 233, 252, 341]
)

STATE = ("percent", "facing", "x", "y", "invulnerable", "jumps", "shield", "on ground")
SPEEDS = ("speed air x", "speed ground x", "speed y", "speed hit x", "speed hit y")
LEADER = (*STATE, *SPEEDS, "hitstun", "action frame", "stocks", "ledge")
_SECOND = ("there", *STATE, "speed air x", "speed y", "hitstun", "action frame", "stocks")
SECOND = tuple(f"second {name}" for name in (*_SECOND, *(f"kind {number}" for number in range(len(KINDS)))))
CONTROLS = (*BUTTONS, "main x", "main y", "c x", "c y", "shoulder")
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
    for name in ("self", "other"):
        _player(out, "own" if name == "self" else "other", window.frames[name])
    for whose, name in enumerate(("own", "other")):
        mine = window.follower_at[2] == whose
        _second(out, name, window.follower[mine], window.follower_at[:2, mine])
    places = [PLACE[f"stage {stage}"] for stage in (*STAGES.values(), "other")]
    _, kind = np.nonzero(np.concatenate([_stages(window.stage), ~_stages(window.stage).any(1, keepdims=True)], 1))
    out[np.arange(len(kind)), :, np.array(places)[kind]] = 1
    _controls(out, window.previous)
    _spatial(out, window)
    _items(out, window)
    out[..., PLACE["delay"]] = window.delay[:, None] / DELAYS
    for bit, name in enumerate(KNOWN):
        out[..., PLACE[f"known {name}"]] = (window.known >> bit & 1)[:, None]
    action, character = (
        np.stack([window.frames[who][name] for who in ("self", "other")], 2) for name in ("action", "character")
    )
    return {
        "numeric": out,
        "action": np.minimum(action, ACTIONS - 1).astype(np.int16),
        "character": np.minimum(character, CHARACTERS - 1),
    }


def _stages(stage: np.ndarray) -> np.ndarray:
    """(B, len(STAGES)) bool."""
    same: np.ndarray = stage[:, None] == np.array(list(STAGES))
    return same


def _number(values: np.ndarray) -> np.ndarray:
    """Halves as floats; what is not known is 0, and a flag of `known` says so."""
    number = values.astype(np.float32)
    number[~np.isfinite(number)] = 0
    return number


def _player(out: np.ndarray, whose: str, state: np.ndarray) -> None:
    first = PLACE[f"{whose} {LEADER[0]}"]
    for number, values in enumerate(_leader(state)):
        out[..., first + number] = values


def _shared(state: np.ndarray) -> list[np.ndarray]:
    """STATE of players of any shape."""
    flags = state["flags"]
    return [
        np.clip(_number(state["percent"]) * 0.01, 0, 5),
        ((flags & RIGHT) > 0).astype(np.float32) - ((flags & LEFT) > 0),
        _number(state["x"]) * 0.05,
        _number(state["y"]) * 0.05,
        (flags & SAFE) > 0,
        np.where(state["jumps"] == UNKNOWN, 0, state["jumps"]) / 6,
        _number(state["shield"]) * 0.01,
        (flags & GROUND) > 0,
    ]


def _leader(state: np.ndarray) -> list[np.ndarray]:
    speeds = _number(state["speeds"]) * 0.5
    return [
        *_shared(state),
        *(speeds[..., number] for number in range(len(SPEEDS))),
        _number(state["hitstun"]) / 120,
        _number(state["action_frame"]) / 60,
        state["stocks"] / 4,
        (EDGE - np.abs(_number(state["x"]))) / EDGE,
    ]


def _second(out: np.ndarray, whose: str, state: np.ndarray, at: np.ndarray) -> None:
    if not len(state):
        return
    speeds = _number(state["speeds"]) * 0.5
    values = [
        np.ones(len(state)),
        *_shared(state),
        speeds[:, 0],
        speeds[:, 2],
        _number(state["hitstun"]) / 120,
        _number(state["action_frame"]) / 60,
        state["stocks"] / 4,
    ]
    first = PLACE[f"{whose} {SECOND[0]}"]
    for number, column in enumerate(values):
        out[at[0], at[1], first + number] = column
    kind = np.searchsorted(KINDS, state["action"], side="right") - 1
    out[at[0], at[1], first + len(values) + kind] = 1


def _controls(out: np.ndarray, controller: np.ndarray) -> None:
    first = PLACE[f"previous {CONTROLS[0]}"]
    out[..., first : first + len(BUTTONS)] = _bits(controller["buttons"])
    sticks = first + len(BUTTONS)
    out[..., sticks : sticks + 4] = controller["sticks"] / np.float32(STICK_STEPS)
    out[..., sticks + 4] = controller["shoulder"] / np.float32(SHOULDER_STEPS)


def _spatial(out: np.ndarray, window: Window) -> None:
    own, other = window.frames["self"], window.frames["other"]
    dx, dy = (_number(other[axis]) - _number(own[axis]) for axis in ("x", "y"))
    number = window.first[:, None] + np.arange(out.shape[1])
    values = (np.minimum(np.hypot(dx, dy) / 200, 1.5), dx / 200, dy / 100, number / GAME_FRAMES)
    for name, column in zip(SPATIAL, values, strict=True):
        out[..., PLACE[name]] = column


def _items(out: np.ndarray, window: Window) -> None:
    item, (row, frame, slot) = window.item, window.item_at
    place, speed = _number(item["place"]) * 0.05, _number(item["speed"]) * 0.5
    columns = (1, item["owner"] * 0.5, place[:, 0], place[:, 1], item["type"] * 0.01, speed[:, 0], speed[:, 1])
    first = PLACE[f"item 0 {ITEM_FIELDS[0]}"] + slot * len(ITEM_FIELDS)
    for number, column in enumerate(columns):
        out[row, frame, first + number] = column


# Controllers as classes


def _bits(buttons: np.ndarray) -> np.ndarray:
    """(..., 8) u1: each button of BUTTONS."""
    return buttons[..., None] >> np.arange(len(BUTTONS), dtype=np.uint8) & 1


def previous(controller: np.ndarray) -> dict[str, np.ndarray]:
    """The last decision in classes, by the names that a batch has for it."""
    return {f"previous_{name}": part for name, part in classes(controller).items()}


def classes(controller: np.ndarray) -> dict[str, np.ndarray]:
    """Controllers (...) as `buttons` u1 (..., 8), `sticks` (..., 4) in 0..16 with the centre at 8, and `shoulder` (...)
    in 0..4: an axis in 0..1 times the number of steps, rounded."""
    sticks = np.floor(controller["sticks"] / np.float32(STICK_STEPS / CENTRE) + (CENTRE + 0.5))
    shoulder = np.floor(controller["shoulder"] / np.float32(SHOULDER_STEPS) * (SHOULDER_CLASSES - 1) + 0.5)
    return {
        "buttons": _bits(controller["buttons"]),
        "sticks": np.clip(sticks, 0, STICK_CLASSES - 1).astype(np.uint8),
        "shoulder": np.clip(shoulder, 0, SHOULDER_CLASSES - 1).astype(np.uint8),
    }


def controllers(buttons: np.ndarray, sticks: np.ndarray, shoulder: np.ndarray) -> np.ndarray:
    """The inverse of `classes`, at the centre of each class: CONTROLLER (...)."""
    out = np.zeros(shoulder.shape, CONTROLLER)
    out["buttons"] = np.packbits(buttons.astype(bool), axis=-1, bitorder="little")[..., 0]
    out["sticks"] = (sticks.astype(np.int16) - CENTRE) * (STICK_STEPS // CENTRE)
    out["shoulder"] = shoulder.astype(np.int16) * (SHOULDER_STEPS // (SHOULDER_CLASSES - 1))
    return out


def mirror(window: Window, rows: np.ndarray) -> Window:
    """The same with left and right exchanged in `rows` (B,) bool; the window's arrays are changed in place."""
    for who in ("self", "other"):
        _mirror_players(window.frames[who], rows)
    window.previous["sticks"][rows] *= np.array([-1, 1, -1, 1], np.int8)
    _mirror_players(window.follower, rows[window.follower_at[0]])
    things = rows[window.item_at[0]]
    for field in ("place", "speed"):
        window.item[field][things, 0] *= -1
    return window


def mirror_sticks(sticks: np.ndarray, rows: np.ndarray) -> None:
    """Exchange left and right in the classes (B, ..., 4) of `rows`, in place: 16 - class."""
    for axis in (0, 2):
        sticks[rows, ..., axis] = STICK_CLASSES - 1 - sticks[rows, ..., axis]


def _mirror_players(state: np.ndarray, rows: np.ndarray) -> None:
    state["x"][rows] *= -1
    state["speeds"][rows] *= np.array([-1, -1, 1, -1, 1], np.float16)
    flags = state["flags"][rows]
    turned = (flags & RIGHT) // RIGHT * LEFT | (flags & LEFT) // LEFT * RIGHT
    state["flags"][rows] = flags & ~np.uint8(RIGHT | LEFT) | turned
