"""From stored frames to the inputs of a network: one builder for training and for play."""

from collections.abc import Mapping, Sequence

import numpy as np

from matrixlib.tasks.melee import columns
from matrixlib.tasks.melee.controller import choices_of, pressed

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
CONTROLS = (*columns.BUTTONS, *columns.STICKS, "shoulder")
SPATIAL = ("distance", "dx", "dy", "time")
ITEM_FIELDS = ("there", "owner", "x", "y", "type", "speed x", "speed y")
KNOWN = ("speeds", "on ground", "action frame", "invulnerable", "items")

INPUTS: tuple[str, ...] = (
    *(f"{whose} {name}" for whose in ("own", "other") for name in (*LEADER, *SECOND)),
    *(f"stage {name}" for name in (*STAGES.values(), "other")),
    *(f"previous {name}" for name in CONTROLS),
    *SPATIAL,
    *(f"item {slot} {name}" for slot in range(columns.SLOTS) for name in ITEM_FIELDS),
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


def live(
    frame: np.ndarray,
    previous: np.ndarray,
    number: int,
    stage: int,
    delay: int = 0,
    followers: Mapping[int, np.ndarray] | None = None,
    items: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """One frame as it is played, SCENE (1, 1): from FRAME and CONTROLLER scalars, Slippi's number of the frame.

    followers: whose (0 ours, 1 theirs) -> PLAYER. items: ITEM. The frame's own controller is not looked at.
    """
    scene = blank(1, 1)
    scene["players"] = np.asarray(frame, columns.FRAME).reshape(1).view(columns.PAIR)["players"]
    scene["previous"], scene["number"], scene["stage"] = previous, number, stage
    scene["known"], scene["delay"] = columns.EVERYTHING, delay
    for whose, state in (followers or {}).items():
        scene["follower"][0, 0, whose] = state
    for slot, item in enumerate(items[: columns.SLOTS]):
        scene["item"][0, 0, slot] = item
    return scene


def blank(*shape: int) -> np.ndarray:
    """SCENE of this shape, without second characters and items."""
    scene = np.zeros(shape, columns.SCENE)
    scene["follower"]["character"], scene["item"]["type"] = columns.UNKNOWN, columns.NOTHING
    return scene


def inputs(scene: np.ndarray) -> dict[str, np.ndarray]:
    """What a network sees of SCENE (B, T): `numeric` f4 (B, T, len(INPUTS)), `action` i2 and `character` u1 (B, T, 2),
    own first, `previous` u1 (B, T, 13), the controller held."""
    out = np.zeros((*scene.shape, len(INPUTS)), np.float32)
    players, follower, item = scene["players"], scene["follower"], scene["item"]
    leader = _leader(players)
    both = _block(out, f"own {LEADER[0]}", 2, len(LEADER) + len(SECOND))
    both[..., : len(LEADER)] = leader
    there = follower["character"] != columns.UNKNOWN
    second = follower[there]
    kind = np.searchsorted(KINDS, second["action"], side="right") - 1
    kinds = kind[:, None] == np.arange(len(KINDS))
    both[..., len(LEADER) :][there] = np.c_[np.ones(len(second)), _leader(second)[:, OF_SECOND], kinds]
    stage = scene["stage"][..., None] == np.array(list(STAGES))
    other = ~stage.any(-1, keepdims=True)
    _block(out, f"stage {STAGES[2]}", 1, len(STAGES) + 1)[:, :, 0] = np.concatenate([stage, other], -1)
    held = scene["previous"]
    controls = _block(out, f"previous {CONTROLS[0]}", 1, len(CONTROLS))[:, :, 0]
    controls[..., :8] = pressed(held["buttons"])
    controls[..., 8:12] = held["sticks"] / np.float32(columns.STICK_STEPS)
    controls[..., 12] = held["shoulder"] / np.float32(columns.SHOULDER_STEPS)
    x, y = np.moveaxis(leader[..., 1, 2:4] - leader[..., 0, 2:4], -1, 0)  # in twenties
    values = (np.minimum(np.hypot(x, y) / 10, 1.5), x / 10, y / 5, scene["number"] / GAME_FRAMES)
    for name, column in zip(SPATIAL, values, strict=True):
        out[..., PLACE[name]] = column
    there = item["type"] != columns.NOTHING
    thing = item[there]
    place, speed = _number(thing["place"]) * 0.05, _number(thing["speed"]) * 0.5
    rest = (np.ones(len(thing)), thing["owner"] * 0.5, place, thing["type"] * 0.01, speed)
    _block(out, f"item 0 {ITEM_FIELDS[0]}", columns.SLOTS, len(ITEM_FIELDS))[there] = np.c_[rest]
    out[..., PLACE["delay"]] = scene["delay"] / columns.DELAYS
    known = scene["known"][..., None] >> np.arange(len(KNOWN)) & 1
    _block(out, f"known {KNOWN[0]}", 1, len(KNOWN))[:, :, 0] = known
    return {
        "numeric": out,
        "action": np.minimum(players["action"], ACTIONS - 1).astype(np.int16),
        "character": np.minimum(players["character"], columns.CHARACTERS - 1),
        "previous": choices_of(scene["previous"]),
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
    out[..., MEASURED] = _number(state.view(columns.HALVES)["halves"]) * SCALES
    np.clip(out[..., 0], 0, 5, out=out[..., 0])
    flags, x = state["flags"], out[..., LEADER.index("x")] * np.float32(20)
    others = {
        "facing": ((flags & columns.RIGHT) > 0).astype(np.float32) - ((flags & columns.LEFT) > 0),
        "invulnerable": (flags & columns.SAFE) > 0,
        "jumps": np.where(state["jumps"] == columns.UNKNOWN, 0, state["jumps"]) / 6,
        "on ground": (flags & columns.GROUND) > 0,
        "stocks": state["stocks"] / 4,
        "ledge": (EDGE - np.abs(x)) / EDGE,
    }
    for name, column in others.items():
        out[..., LEADER.index(name)] = column
    return out


def mirror(scene: np.ndarray, rows: np.ndarray) -> None:
    """Exchange left and right in `rows` (B,) bool of SCENE (B, T), in place."""
    for players in (scene["players"], scene["follower"]):
        players.view(columns.HALVES)["halves"].view("<u2")[rows] ^= SIGNS
        flags, facing = players["flags"][rows], columns.RIGHT | columns.LEFT
        turns = np.isin(flags & facing, (columns.RIGHT, columns.LEFT))
        players["flags"][rows] = np.where(turns, flags ^ facing, flags)
        action = players["action"][rows]
        players["action"][rows] = np.where(np.isin(action, DEAD_SIDEWAYS), sum(DEAD_SIDEWAYS) - action, action)
    # Of sticks the steps, not the classes: 16 - class is one off in the middle between two, where it is rounded up.
    for controller in (scene["previous"], scene["decision"]):
        controller["sticks"][rows] *= np.array([-1, 1, -1, 1], np.int8)
    for field in ("place", "speed"):
        scene["item"][field][rows, ..., 0] *= -1
