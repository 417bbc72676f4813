"""How often each class of the controller is held in a training set: what a constant predictor knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from matrixlib.tasks.melee.controller import AXES
from matrixlib.tasks.melee.features import SHOULDER_CLASSES, STICK_CLASSES

LEAST, MOST = 1.0, 30.0  # weight of a pressed button


@dataclass(frozen=True)
class Statistics:
    """Counts over the targets of the training frames. Plain tuples, as a task goes to the loader's workers.

    frames: with a known target. buttons (8,): pressed. sticks (4, 17), shoulder (5,): frames of each class.
    """

    frames: int
    buttons: tuple[int, ...]
    sticks: tuple[tuple[int, ...], ...]
    shoulder: tuple[int, ...]

    @classmethod
    def count(cls, buttons: np.ndarray, sticks: np.ndarray, shoulder: np.ndarray) -> Statistics:
        """Of targets buttons (n, 8), sticks (n, 4), shoulder (n,), all of them known."""
        axes = (np.bincount(sticks[:, axis], minlength=STICK_CLASSES).tolist() for axis in range(len(AXES)))
        pressed = buttons.sum(0, dtype=np.int64).tolist()
        levels = np.bincount(shoulder, minlength=SHOULDER_CLASSES).tolist()
        return cls(len(buttons), tuple(pressed), tuple(map(tuple, axes)), tuple(levels))

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.frames + other.frames,
            tuple(a + b for a, b in zip(self.buttons, other.buttons, strict=True)),
            tuple(
                tuple(a + b for a, b in zip(*pair, strict=True)) for pair in zip(self.sticks, other.sticks, strict=True)
            ),
            tuple(a + b for a, b in zip(self.shoulder, other.shoulder, strict=True)),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Statistics:
        """From `to_dict`."""
        sticks = tuple(map(tuple, data["sticks"]))
        return cls(data["frames"], tuple(data["buttons"]), sticks, tuple(data["shoulder"]))

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)

    def weights(self) -> list[float]:
        """(8,) weight of a pressed button in the loss, sqrt((1 - r) / r) of its rate r, from 1 to 30."""
        rate = self._rates()
        weights: list[float] = np.clip(np.sqrt((1 - rate) / rate), LEAST, MOST).tolist()
        return weights

    def logits(self) -> list[float]:
        """(81,) what a network would have to say always to give each class its rate."""
        rate = self._rates()
        classes = np.concatenate([_log_shares(counts) for counts in (*self.sticks, self.shoulder)])
        return [*np.log(rate / (1 - rate)).tolist(), *classes.tolist()]

    def _rates(self) -> np.ndarray:
        """(8,) above 0 and below 1."""
        rate: np.ndarray = (np.asarray(self.buttons) + 0.5) / (self.frames + 1)
        return rate


def _log_shares(counts: tuple[int, ...]) -> np.ndarray:
    """A class that was never held counts as half a time."""
    shares = np.maximum(counts, 0.5)
    log: np.ndarray = np.log(shares / shares.sum())
    return log
