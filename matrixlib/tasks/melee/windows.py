"""Games to stored rows, rows to training windows (start, delay, pairing, augmentation), stored frames to network
inputs: one builder for training and play.

The state after frame t is paired with the controller of frame t + 1 + delay. Slippi stores a frame's controller with
the state that it led to: paired with that, two of three presses could be read off the character's new action. The last
decision, the controller of t + delay, is an input.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from matrixlib.data.shards import Batch, concat, ranges
from matrixlib.tasks.melee import columns
from matrixlib.tasks.melee.columns import FRAME, LAYOUT, OWN, PAIR, RECORD, ROW, SLOTS
from matrixlib.tasks.melee.config import MeleeDataConfig
from matrixlib.tasks.melee.controller import Statistics, choices_of, pressed
from matrixlib.tasks.melee.replay import Replay

# Inputs

ACTIONS = 399  # classes of action state
STAGES = {2: "Fountain of Dreams", 3: "Pokémon Stadium", 8: "Yoshi's Story", 28: "Dream Land", 31: "Battlefield"}
STAGES[32] = "Final Destination"
SYMMETRIC = (2, 28, 31, 32)  # stages that are mirror-symmetric; Randall and the stadium's transformations are not
EDGE = 85.0  # about where stages end
GAME_FRAMES = 28_800.0  # eight minutes
DEAD_SIDEWAYS = (1, 2)  # action states of dying over the left and the right edge

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
SIGNS = np.array([0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 0], "<u2") << 15  # sign bits of HALVES that flip in a mirror
_OF_SECOND = (*STATE, "speed air x", "speed y", "hitstun", "action frame", "stocks")
OF_SECOND = [LEADER.index(name) for name in _OF_SECOND]
_KINDS = (f"kind {number}" for number in range(len(KINDS)))
SECOND = tuple(f"second {name}" for name in ("there", *_OF_SECOND, *_KINDS))
CONTROLS = (*columns.BUTTONS, *columns.STICKS, "shoulder")
SPATIAL = ("distance", "dx", "dy", "time")
ITEM_FIELDS = ("there", "owner", "x", "y", "type", "speed x", "speed y")
KNOWN = ("speeds", "on ground", "action frame", "invulnerable", "items")

INPUTS: tuple[str, ...] = (  # what each number of `numeric` is
    *(f"{whose} {name}" for whose in ("own", "other") for name in (*LEADER, *SECOND)),
    *(f"stage {name}" for name in (*STAGES.values(), "other")),
    *(f"previous {name}" for name in CONTROLS),
    *SPATIAL,
    *(f"item {slot} {name}" for slot in range(columns.SLOTS) for name in ITEM_FIELDS),
    "delay",
    *(f"known {name}" for name in KNOWN),
)
PLACE = {name: number for number, name in enumerate(INPUTS)}
_CONTINUOUS = ("percent", " x", " y", "shield", "speed", "hitstun", "action frame", "ledge", "distance", "dx", "dy")
_OTHER = ("previous", "known")
CONTINUOUS = np.array(  # numbers of `numeric` that are measured and not counted: where noise is added
    [place for place, name in enumerate(INPUTS) if name.endswith(_CONTINUOUS) and not name.startswith(_OTHER)]
)


def live(
    frame: np.ndarray,
    previous: np.ndarray,
    number: int,
    stage: int,
    delay: int = 0,
    followers: Mapping[int, np.ndarray] | None = None,
    items: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """One frame in play, SCENE (1, 1): from FRAME and CONTROLLER scalars and Slippi's frame number.

    followers: whose (0 ours, 1 theirs) -> PLAYER. items: ITEM. The frame's own controller is ignored.
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
    """Network inputs of SCENE (B, T): `numeric` f4 (B, T, len(INPUTS)), `action` i2 and `character` u1 (B, T, 2), own
    first, `previous` u1 (B, T, 13), the held controller."""
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
    """(B, T, count, size) view of the inputs from the one named `first`."""
    place = PLACE[first]
    return out[..., place : place + count * size].reshape(*out.shape[:2], count, size)


def _number(values: np.ndarray) -> np.ndarray:
    """float16 to float32; unknown values become 0, as a flag of `known` tells."""
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
    """Swap left and right in `rows` (B,) bool of SCENE (B, T), in place."""
    for players in (scene["players"], scene["follower"]):
        players.view(columns.HALVES)["halves"].view("<u2")[rows] ^= SIGNS
        flags, facing = players["flags"][rows], columns.RIGHT | columns.LEFT
        turns = np.isin(flags & facing, (columns.RIGHT, columns.LEFT))
        players["flags"][rows] = np.where(turns, flags ^ facing, flags)
        action = players["action"][rows]
        players["action"][rows] = np.where(np.isin(action, DEAD_SIDEWAYS), sum(DEAD_SIDEWAYS) - action, action)
    # Mirror stick steps, not classes: 16 - class is off by one at midpoints, which round up.
    for controller in (scene["previous"], scene["decision"]):
        controller["sticks"][rows] *= np.array([-1, 1, -1, 1], np.int8)
    for field in ("place", "speed"):
        scene["item"][field][rows, ..., 0] *= -1


def stretches(replay: Replay, held_out: bool) -> Batch:
    """The rows of a game, by player, in order. Rows never cross gaps in frame numbers."""
    breaks = np.flatnonzero(np.diff(replay.number) != 1) + 1
    starts, ends = [], []
    for first, after in itertools.pairwise([0, *breaks.tolist(), len(replay.number)]):
        starts.append(np.arange(first, after - 1, OWN))  # the last frame has no next controller
        ends.append(np.full(len(starts[-1]), after))
    start, end = np.concatenate(starts), np.concatenate(ends)
    stop = np.minimum(start + ROW, end)
    parts = []
    for who in (0, 1):
        frames = np.zeros(len(replay.number), FRAME)
        frames["self"], frames["other"] = replay.players[:, who], replay.players[:, 1 - who]
        frames["controller"] = replay.controllers[:, who]
        records = np.zeros(len(start), RECORD)
        records["game"], records["first"], records["stage"] = replay.game, replay.number[start], replay.stage
        records["own"], records["port"] = np.minimum(end - start, OWN), replay.ports[who]
        records["known"], records["held_out"] = replay.known, held_out
        at, offset = ranges(start, stop)
        follower, follower_offset = _within(replay.follower, start, stop)
        follower["whose"] = follower["whose"] != who
        item, item_offset = _within(replay.item, start, stop)
        item["owner"] = np.where(item["owner"] < 0, 0, np.where(item["owner"] == who, 1, -1))
        part = {"records": records, "frame_offset": offset, "frame_state": frames[at]}
        part |= {"follower_offset": follower_offset, "follower_state": follower}
        parts.append(part | {"item_offset": item_offset, "item_state": item})
    return concat(parts, LAYOUT)


def _within(things: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(things inside each range, `at` relative to its start; offsets)."""
    pick, offset = ranges(np.searchsorted(things["at"], start), np.searchsorted(things["at"], stop))
    inside = things[pick]
    inside["at"] = inside["at"] - np.repeat(start, np.diff(offset))
    return inside, offset


def count(batch: Batch) -> Statistics:
    """Class frequencies over the own frames of rows."""
    begin = batch["frame_offset"][:-1]
    mine, _ = ranges(begin, begin + batch["records"]["own"])
    state = batch["frame_state"]
    character = np.minimum(state["self"]["character"][mine], columns.CHARACTERS - 1)
    return Statistics.count(choices_of(state["controller"][mine]), character)


def figures(batch: Batch) -> dict[str, Any]:
    """Catalogue figures of a shard: rows, frames, games, class frequencies."""
    records = batch["records"]
    return {
        "records": len(records),
        "frames": int(records["own"].sum()),
        "games": len(np.unique(records["game"])),
        "classes": asdict(count(batch)),
    }


def augment(batch: Batch, data: MeleeDataConfig, rng: np.random.Generator) -> Batch:
    """Rows (B,) of LAYOUT to training windows, at random starts and delays, mirrored and with noise.

    Returns the arrays of `inputs`, `choices` u1 (B, T, 13), the targets, and `valid` u1 (B, T), 0 beyond the game.
    """
    records = batch["records"]
    draws = [rng.random(len(records)) for _ in range(4)]
    keys = rng.integers(2**63, size=len(records))  # of each row's noise
    least, most = data.delay
    delay = least + (draws[0] * (most - least + 1)).astype(np.int64)
    room = np.diff(batch["frame_offset"]) - data.window - delay
    starts = np.clip(room, 1, records["own"]) if data.random_start else 1
    scene = cut(batch, (draws[1] * starts).astype(np.int64), delay, data.window)
    mirror(scene, (draws[2] < data.mirror) & np.isin(records["stage"], SYMMETRIC))
    out = arrays(scene)
    noisy = np.flatnonzero(draws[3] < data.noise)
    part = out["numeric"][noisy]
    measured = part.take(CONTINUOUS, -1)
    there = measured != 0  # exactly 0: absent, unknown, or at rest
    for values, present, key in zip(measured, there, keys[noisy], strict=True):
        noise = np.random.default_rng(key).standard_normal(present.sum(), np.float32)
        values[present] += np.float32(data.noise_sigma) * noise
    part[..., CONTINUOUS] = measured
    out["numeric"][noisy] = part
    return out


def plain(batch: Batch, data: MeleeDataConfig) -> Batch:
    """The same for all own frames of each row, whatever the training window, with the smallest delay, not random."""
    start = np.zeros(len(batch["records"]), np.int64)
    return arrays(cut(batch, start, start + data.delay[0], OWN))


def arrays(scene: np.ndarray) -> Batch:
    """Inputs and targets of SCENE (B, T)."""
    return inputs(scene) | {"choices": choices_of(scene["decision"]), "valid": scene["valid"].copy()}


def cut(batch: Batch, start: np.ndarray, delay: np.ndarray, frames: int) -> np.ndarray:
    """SCENE (B, frames): windows from frame `start` (B,) of each row on. Beyond its end its last frame repeats."""
    offset, records, scene = batch["frame_offset"], batch["records"], blank(len(start), frames)
    last = offset[1:, None] - 1
    at = (offset[:-1] + start)[:, None] + np.arange(frames)
    stored = batch["frame_state"]  # `take` copies structured rows much faster than indexing
    after = at + delay[:, None]
    scene["players"] = stored.take(np.minimum(at, last)).view(PAIR)["players"]
    scene["previous"] = stored.take(np.minimum(after, last))["controller"]
    scene["decision"] = stored.take(np.minimum(after + 1, last))["controller"]
    scene["valid"] = after < last
    scene["number"] = (records["first"] + start)[:, None] + np.arange(frames)
    for name, values in (("stage", records["stage"]), ("known", records["known"]), ("delay", delay)):
        scene[name] = values[:, None]
    second, row, frame = _inside(batch, "follower", start, frames)
    scene["follower"][row, frame, second["whose"]] = second["state"]
    things, row, frame = _inside(batch, "item", start, frames)
    place = row * frames + frame
    slot = np.arange(len(place)) - np.searchsorted(place, place)  # within the same frame
    few = slot < SLOTS
    scene["item"][row[few], frame[few], slot[few]] = things[few]
    return scene


def _inside(batch: Batch, group: str, start: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items of a ragged group inside the windows, with row and frame of each."""
    stored, offset = batch[f"{group}_state"], batch[f"{group}_offset"]
    row = np.repeat(np.arange(len(start)), np.diff(offset))
    frame = stored["at"].astype(np.int64) - start[row]
    within = (frame >= 0) & (frame < frames)
    return stored[within], row[within], frame[within]
