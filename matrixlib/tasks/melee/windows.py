"""From stored rows to windows for training: where each begins, its delay, what it is paired with, what is changed at
random.

The state after frame t is paired with the controller of frame t + 1 + delay. Slippi stores a frame's controller beside
the state that it led to: paired with that, two of three pressed buttons could be read off the character's new action.
What the player has decided last, the controller of t + delay, is an input.
"""

import numpy as np

from matrixlib.tasks.melee.columns import OWN
from matrixlib.tasks.melee.config import MeleeDataConfig
from matrixlib.tasks.melee.controller import choices_of, mirror_sticks
from matrixlib.tasks.melee.features import CONTINUOUS, SLOTS, SYMMETRIC, Window, inputs, mirror

Arrays = dict[str, np.ndarray]


def augment(batch: Arrays, data: MeleeDataConfig, rng: np.random.Generator) -> Arrays:
    """Rows (B,) of LAYOUT to windows for training, at random starts and delays, mirrored and with noise.

    Gives what `features.inputs` gives, `choices` u1 (B, T, 13) that are to be predicted, `previous` likewise, the
    controller held, and `valid` u1 (B, T), 0 where there is nothing to predict: behind the end of a game.
    """
    records = batch["records"]
    length = np.diff(batch["frame_offset"])
    draws = [rng.random(len(records)) for _ in range(4)]
    keys = rng.integers(2**63, size=len(records))  # of each row's noise
    least, most = data.delay
    delay = least + (draws[0] * (most - least + 1)).astype(np.int64)
    starts = np.clip(length - data.window - delay, 1, records["own"]) if data.random_start else 1
    start = (draws[1] * starts).astype(np.int64)
    window, following = cut(batch, start, delay, data.window)
    turned = (draws[2] < data.mirror) & np.isin(records["stage"], SYMMETRIC)
    mirror(window, turned)
    mirror_sticks(following, turned)
    out = inputs(window)
    noisy = np.flatnonzero(draws[3] < data.noise)
    part = out["numeric"][noisy]
    measured = part.take(CONTINUOUS, -1)
    there = measured != 0  # what is exactly 0 is not there, unknown, or at rest
    for values, present, key in zip(measured, there, keys[noisy], strict=True):
        values[present] += np.float32(data.noise_sigma) * np.random.default_rng(key).standard_normal(
            present.sum(), np.float32
        )
    part[..., CONTINUOUS] = measured
    out["numeric"][noisy] = part
    return out | _decisions(window, following) | {"valid": _valid(length, start, delay, data.window)}


def plain(batch: Arrays, data: MeleeDataConfig) -> Arrays:
    """The same of all own frames of each row, however long a window is in training, with the least delay and nothing
    at random."""
    count = len(batch["records"])
    start, delay = np.zeros(count, np.int64), np.full(count, data.delay[0], np.int64)
    window, following = cut(batch, start, delay, OWN)
    valid = _valid(np.diff(batch["frame_offset"]), start, delay, OWN)
    return inputs(window) | _decisions(window, following) | {"valid": valid}


def cut(batch: Arrays, start: np.ndarray, delay: np.ndarray, frames: int) -> tuple[Window, np.ndarray]:
    """The windows that begin at frame `start` (B,) of each row, and the controllers (B, frames) that follow on them.

    What lies behind the end of a row repeats its last frame.
    """
    offset = batch["frame_offset"]
    first, last = (offset[:-1] + start)[:, None], offset[1:, None] - 1
    at = first + np.arange(frames)
    stored = batch["frame_state"]  # `take` copies rows of fields many times faster than an index does
    after = at + delay[:, None]
    records = batch["records"]
    follower, follower_at = _inside(batch, "follower", start, frames)
    item, item_at = _inside(batch, "item", start, frames)
    few = (slot := _slots(item_at)) < SLOTS
    window = Window(
        frames=stored.take(np.minimum(at, last)),
        previous=stored.take(np.minimum(after, last))["controller"],
        first=records["first"] + start,
        stage=records["stage"],
        known=records["known"],
        delay=delay,
        follower=follower["state"],
        follower_at=np.stack([*follower_at, follower["whose"].astype(np.int64)]),
        item=item[few],
        item_at=np.stack([*item_at, slot])[:, few],
    )
    return window, stored.take(np.minimum(after + 1, last))["controller"]


def _inside(batch: Arrays, group: str, start: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """What a ragged group has inside the windows, and (2, K) the row and the frame of the window that it belongs to."""
    stored, offset = batch[f"{group}_state"], batch[f"{group}_offset"]
    row = np.repeat(np.arange(len(start)), np.diff(offset))
    frame = stored["at"].astype(np.int64) - start[row]
    within = (frame >= 0) & (frame < frames)
    return stored[within], np.stack([row[within], frame[within]])


def _slots(at: np.ndarray) -> np.ndarray:
    """(K,) how many of the same row and frame, which follow each other, come before."""
    new = np.ones(at.shape[1], bool)
    new[1:] = (np.diff(at) != 0).any(0)
    begin = np.flatnonzero(new)
    return np.arange(at.shape[1]) - np.repeat(begin, np.diff(begin, append=at.shape[1]))


def _decisions(window: Window, following: np.ndarray) -> Arrays:
    return {"previous": choices_of(window.previous), "choices": choices_of(following)}


def _valid(length: np.ndarray, start: np.ndarray, delay: np.ndarray, frames: int) -> np.ndarray:
    """(B, frames) u1: whether the controller that a frame is paired with is stored."""
    known = start[:, None] + np.arange(frames) + delay[:, None] + 1 < length[:, None]
    return known.astype(np.uint8)
