"""From games to stored rows, and from rows to windows for training: where each begins, its delay, what it is paired
with, what is changed at random.

The state after frame t is paired with the controller of frame t + 1 + delay. Slippi stores a frame's controller beside
the state that it led to: paired with that, two of three pressed buttons could be read off the character's new action.
What the player has decided last, the controller of t + delay, is an input.
"""

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np

from matrixlib.data.shards import Batch, concat
from matrixlib.tasks.melee.columns import FRAME, LAYOUT, OWN, PAIR, RECORD, ROW, SLOTS
from matrixlib.tasks.melee.config import MeleeDataConfig
from matrixlib.tasks.melee.controller import Statistics, choices_of
from matrixlib.tasks.melee.features import CONTINUOUS, SYMMETRIC, blank, inputs, mirror
from matrixlib.tasks.melee.replay import Replay

# Rows


def stretches(replay: Replay, held_out: bool) -> Batch:
    """The rows of a game: each player's, in order. A row never crosses a gap in the frame numbers."""
    breaks = np.flatnonzero(np.diff(replay.number) != 1) + 1
    starts, ends = [], []
    for first, after in itertools.pairwise([0, *breaks.tolist(), len(replay.number)]):
        starts.append(np.arange(first, after - 1, OWN))  # the last frame has no controller after it
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
        at, offset = _ranges(start, stop)
        follower, follower_offset = _within(replay.follower, start, stop)
        follower["whose"] = follower["whose"] != who
        item, item_offset = _within(replay.item, start, stop)
        item["owner"] = np.where(item["owner"] < 0, 0, np.where(item["owner"] == who, 1, -1))
        part = {"records": records, "frame_offset": offset, "frame_state": frames[at]}
        part |= {"follower_offset": follower_offset, "follower_state": follower}
        parts.append(part | {"item_offset": item_offset, "item_state": item})
    return concat(parts, LAYOUT)


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(all of start..stop-1 one behind the other, offsets (rows + 1,) of each)."""
    offset = np.concatenate([[0], np.cumsum(stop - start)]).astype("<i8")
    return np.arange(offset[-1]) + np.repeat(start - offset[:-1], stop - start), offset


def _within(things: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(those that lie in each range, `at` counted from its start; offsets)."""
    pick, offset = _ranges(np.searchsorted(things["at"], start), np.searchsorted(things["at"], stop))
    inside = things[pick]
    inside["at"] = inside["at"] - np.repeat(start, np.diff(offset))
    return inside, offset


def count(batch: Batch) -> Statistics:
    """Of the controllers of the own frames of rows."""
    begin = batch["frame_offset"][:-1]
    mine, _ = _ranges(begin, begin + batch["records"]["own"])
    return Statistics.count(choices_of(batch["frame_state"]["controller"][mine]))


def figures(batch: Batch) -> dict[str, Any]:
    """What the catalogue says of a shard: rows, frames, games, and how often each class of the controller is held."""
    records = batch["records"]
    return {
        "records": len(records),
        "frames": int(records["own"].sum()),
        "games": len(np.unique(records["game"])),
        "classes": asdict(count(batch)),
    }


# Windows


def augment(batch: Batch, data: MeleeDataConfig, rng: np.random.Generator) -> Batch:
    """Rows (B,) of LAYOUT to windows for training, at random starts and delays, mirrored and with noise.

    Gives what `features.inputs` gives, `choices` u1 (B, T, 13) that are to be predicted, and `valid` u1 (B, T), 0 where
    there is nothing to predict: behind the end of a game.
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
    there = measured != 0  # what is exactly 0 is not there, unknown, or at rest
    for values, present, key in zip(measured, there, keys[noisy], strict=True):
        noise = np.random.default_rng(key).standard_normal(present.sum(), np.float32)
        values[present] += np.float32(data.noise_sigma) * noise
    part[..., CONTINUOUS] = measured
    out["numeric"][noisy] = part
    return out


def plain(batch: Batch, data: MeleeDataConfig) -> Batch:
    """The same of all own frames of each row, however long a window is in training, with the least delay and nothing
    at random."""
    start = np.zeros(len(batch["records"]), np.int64)
    return arrays(cut(batch, start, start + data.delay[0], OWN))


def arrays(scene: np.ndarray) -> Batch:
    """What the network sees of SCENE (B, T), and its targets."""
    return inputs(scene) | {"choices": choices_of(scene["decision"]), "valid": scene["valid"].copy()}


def cut(batch: Batch, start: np.ndarray, delay: np.ndarray, frames: int) -> np.ndarray:
    """SCENE (B, frames): the windows that begin at frame `start` (B,) of each row. What lies behind the end of a row
    repeats its last frame.
    """
    offset, records, scene = batch["frame_offset"], batch["records"], blank(len(start), frames)
    last = offset[1:, None] - 1
    at = (offset[:-1] + start)[:, None] + np.arange(frames)
    stored = batch["frame_state"]  # `take` copies rows of fields many times faster than an index does
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
    slot = np.arange(len(place)) - np.searchsorted(place, place)  # of those in the same frame, which follow each other
    few = slot < SLOTS
    scene["item"][row[few], frame[few], slot[few]] = things[few]
    return scene


def _inside(batch: Batch, group: str, start: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a ragged group has inside the windows, and the row and the frame of the window that each belongs to."""
    stored, offset = batch[f"{group}_state"], batch[f"{group}_offset"]
    row = np.repeat(np.arange(len(start)), np.diff(offset))
    frame = stored["at"].astype(np.int64) - start[row]
    within = (frame >= 0) & (frame < frames)
    return stored[within], row[within], frame[within]
