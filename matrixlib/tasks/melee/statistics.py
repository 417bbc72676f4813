"""How often each class of the controller is held in a training set: what a constant predictor knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from matrixlib.tasks.melee.controller import HEADS

LEAST, MOST = 1.0, 30.0  # weight of a pressed button


@dataclass(frozen=True)
class Statistics:
    """Counts over the targets of the training frames; its fields are JSON data.

    frames: with a known target. buttons (8,): pressed. sticks (4, 17), shoulder (5,): frames of each class.
    """

    frames: int
    buttons: Sequence[int]
    sticks: Sequence[Sequence[int]]
    shoulder: Sequence[int]

    @classmethod
    def count(cls, choices: np.ndarray) -> Statistics:
        """Of targets (n, 13), all of them known."""
        pressed = choices[:, HEADS[0].choices].sum(0, dtype=np.int64).tolist()
        *sticks, shoulder = (
            np.bincount(choices[:, head.choices][:, 0], minlength=head.classes).tolist() for head in HEADS[1:]
        )
        return cls(len(choices), pressed, sticks, shoulder)

    def __add__(self, other: Statistics) -> Statistics:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Statistics(*((np.array(one) + two).tolist() for one, two in pairs))

    def weights(self) -> list[float]:
        """(8,) weight of a pressed button in the loss, sqrt((1 - r) / r) of its rate r, from 1 to 30."""
        rate = self._rates()
        return np.clip(np.sqrt((1 - rate) / rate), LEAST, MOST).tolist()

    def logits(self) -> list[float]:
        """(81,) what a network would have to say always to give each class its rate."""
        rate = self._rates()
        classes = np.concatenate([_log_shares(counts) for counts in (*self.sticks, self.shoulder)])
        return [*np.log(rate / (1 - rate)).tolist(), *classes.tolist()]

    def _rates(self) -> np.ndarray:
        """(8,) above 0 and below 1."""
        return (np.asarray(self.buttons) + 0.5) / (self.frames + 1)


def _log_shares(counts: Sequence[int]) -> np.ndarray:
    """A class that was never held counts as half a time."""
    shares = np.maximum(counts, 0.5)
    return np.log(shares / shares.sum())
