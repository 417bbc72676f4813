"""From games to rows: a game cut into stretches, each as one of its players sees it."""

import itertools
from dataclasses import asdict
from typing import Any

import numpy as np

from matrixlib.data.shards import Batch, concat
from matrixlib.tasks.melee.columns import FOLLOWER, FRAME, ITEM, LAYOUT, OWN, RECORD, ROW
from matrixlib.tasks.melee.controller import choices_of
from matrixlib.tasks.melee.features import Window
from matrixlib.tasks.melee.replay import Replay
from matrixlib.tasks.melee.statistics import Statistics
from matrixlib.tasks.melee.windows import cut


def stretches(replay: Replay, held_out: bool) -> Batch:
    """The rows of a game: each player's, in order. A row never crosses a gap in the frame numbers."""
    breaks = np.flatnonzero(np.diff(replay.number) != 1) + 1
    edges = [0, *breaks.tolist(), len(replay.number)]
    starts, stops = [], []
    for begin, end in itertools.pairwise(edges):
        own = np.arange(begin, end - 1, OWN)  # the last frame has no controller after it
        starts.append(own)
        stops.append(np.minimum(own + ROW, end))
    start, stop = np.concatenate(starts), np.concatenate(stops)
    ends = np.repeat(edges[1:], [len(own) for own in starts])
    return concat([_view(replay, who, start, stop, np.minimum(ends - start, OWN), held_out) for who in (0, 1)], LAYOUT)


def count(batch: Batch) -> Statistics:
    """Of the controllers of the own frames of rows."""
    offset, own = batch["frame_offset"], batch["records"]["own"].astype(np.int64)
    place = np.arange(len(batch["frame_state"])) - np.repeat(offset[:-1], np.diff(offset))
    mine = place < np.repeat(own, np.diff(offset))
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


def watch(replay: Replay, who: int = 0, delay: int = 0) -> Window:
    """All of a game as one window (1, n), seen by the first or the second of its players; ValueError where there are
    gaps in it."""
    count = len(replay.number)
    if replay.number[-1] - replay.number[0] != count - 1:
        raise ValueError("frames are missing in the middle of this game")
    whole = _view(replay, who, np.array([0]), np.array([count]), np.array([OWN]), False)
    window, _ = cut(whole, np.array([0]), np.array([delay]), count)
    return window


def _view(replay: Replay, who: int, start: np.ndarray, stop: np.ndarray, own: np.ndarray, held_out: bool) -> Batch:
    """Rows of frames start..stop-1 as one player sees them."""
    frames = np.zeros(len(replay.number), FRAME)
    frames["self"], frames["other"] = replay.players[:, who], replay.players[:, 1 - who]
    frames["controller"] = replay.controllers[:, who]
    records = np.zeros(len(start), RECORD)
    records["game"], records["first"], records["stage"] = replay.game, replay.number[start], replay.stage
    records["own"], records["port"], records["known"] = own, replay.ports[who], replay.known
    records["held_out"] = held_out
    at, offset = _ranges(start, stop)
    second, second_offset, place = _within(replay.follower_at, start, stop)
    follower = np.zeros(len(second), FOLLOWER)
    follower["at"], follower["whose"] = place, replay.whose[second] != who
    follower["state"] = replay.follower[second]
    thing, thing_offset, place = _within(replay.item_at, start, stop)
    item: np.ndarray = replay.item[thing].astype(ITEM)
    item["at"] = place
    item["owner"] = np.where(replay.owner[thing] < 0, 0, np.where(replay.owner[thing] == who, 1, -1))
    return {
        "records": records,
        "frame_offset": offset,
        "frame_state": frames[at],
        "follower_offset": second_offset,
        "follower_state": follower,
        "item_offset": thing_offset,
        "item_state": item,
    }


def _ranges(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(all of start..stop-1 one behind the other, offsets (rows + 1,) of each)."""
    offset = np.concatenate([[0], np.cumsum(stop - start)]).astype("<i8")
    return np.arange(offset[-1]) + np.repeat(start - offset[:-1], stop - start), offset


def _within(at: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(which of the rising `at` lie in each range, offsets, their places from its start)."""
    pick, offset = _ranges(np.searchsorted(at, start), np.searchsorted(at, stop))
    return pick, offset, at[pick] - np.repeat(start, np.diff(offset))
