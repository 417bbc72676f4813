"""The controller as classes: eight buttons, four stick axes with 17 classes each, the shoulder with 5.

A controller is 13 integers, `choices`: 8 buttons (0 or 1), main x, main y, c x, c y (0..16, centre 8), shoulder (0..4).
A network's `logits` (81): 8 for buttons, then those of the classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from matrixlib.tasks.melee.columns import BUTTONS, CHARACTERS, CONTROLLER, SHOULDER_STEPS, STICK_STEPS

STICK_CLASSES, CENTRE, SHOULDER_CLASSES = 17, 8, 5
AXES = ("main_x", "main_y", "c_x", "c_y")
LOGITS = len(BUTTONS) + len(AXES) * STICK_CLASSES + SHOULDER_CLASSES


@dataclass(frozen=True)
class Head:
    """A part of the controller decided at once. logits, choices: its slices."""

    name: str
    classes: int
    logits: slice
    choices: slice


HEADS = (  # in autoregressive order
    Head("buttons", 8, slice(0, 8), slice(0, 8)),
    *(Head(a, STICK_CLASSES, slice(8 + 17 * i, 25 + 17 * i), slice(8 + i, 9 + i)) for i, a in enumerate(AXES)),
    Head("shoulder", SHOULDER_CLASSES, slice(76, 81), slice(12, 13)),
)


@dataclass(frozen=True)
class Controller:
    """Input of one frame. buttons: pressed, by name. main, c: (x, y) in -1..1. shoulder: 0..1."""

    buttons: tuple[str, ...]
    main: tuple[float, float]
    c: tuple[float, float]
    shoulder: float

    @classmethod
    def of(cls, choices: np.ndarray) -> Self:
        """From choices (13,)."""
        pressed = tuple(name for name, held in zip(BUTTONS, choices[:8], strict=True) if held)
        x, y, c_x, c_y = (choices[8:12] / CENTRE - 1).tolist()
        return cls(pressed, (x, y), (c_x, c_y), float(choices[12] / (SHOULDER_CLASSES - 1)))


NEUTRAL = np.array([*[0] * len(BUTTONS), *[CENTRE] * len(AXES), 0], np.int64)  # choices of an untouched controller

STICK_STEP, SHOULDER_STEP = STICK_STEPS // CENTRE, SHOULDER_STEPS // (SHOULDER_CLASSES - 1)
_BYTES = np.arange(256, dtype=np.uint8)
_STICK = (2 * _BYTES.view(np.int8).astype(int) + STICK_STEP) // (2 * STICK_STEP) + CENTRE
_STICK = np.clip(_STICK, 0, STICK_CLASSES - 1).astype(np.uint8)
_SHOULDER = ((2 * _BYTES.astype(int) + SHOULDER_STEP) // (2 * SHOULDER_STEP)).clip(0, SHOULDER_CLASSES - 1)
_SHOULDER = _SHOULDER.astype(np.uint8)  # the class of each stored byte: steps in units of a class, rounded half up


def pressed(buttons: np.ndarray) -> np.ndarray:
    """(..., 8) u1: pressed buttons, in the order of BUTTONS."""
    return buttons[..., None] >> np.arange(len(BUTTONS), dtype=np.uint8) & 1


def choices_of(controller: np.ndarray) -> np.ndarray:
    """(..., 13) u1 choices of CONTROLLER (...)."""
    sticks, shoulder = _STICK[controller["sticks"].view(np.uint8)], _SHOULDER[controller["shoulder"]]
    return np.concatenate([pressed(controller["buttons"]), sticks, shoulder[..., None]], -1)


def controllers(choices: np.ndarray) -> np.ndarray:
    """Inverse of `choices_of`, at class centres: CONTROLLER (...)."""
    out = np.zeros(choices.shape[:-1], CONTROLLER)
    out["buttons"] = np.packbits(choices[..., :8].astype(bool), axis=-1, bitorder="little")[..., 0]
    out["sticks"] = (choices[..., 8:12].astype(np.int16) - CENTRE) * STICK_STEP
    out["shoulder"] = choices[..., 12].astype(np.int16) * SHOULDER_STEP
    return out


@dataclass(frozen=True)
class Statistics:
    """Class frequencies of the controller in a training set, for the constant predictor.

    held (81,): how many of `frames` have a button pressed or a class held. characters (33,): how many are of each own
    character; empty if not counted. JSON data.
    """

    frames: int
    held: Sequence[int]
    characters: Sequence[int] = field(default_factory=list)

    @classmethod
    def count(cls, choices: np.ndarray, character: np.ndarray | None = None) -> Self:
        """Of choices (n, 13) and own characters (n,)."""
        held = [choices[:, HEADS[0].choices].sum(0, dtype=np.int64)]
        held += [np.bincount(choices[:, head.choices][:, 0], minlength=head.classes) for head in HEADS[1:]]
        characters = [] if character is None else np.bincount(character, minlength=CHARACTERS).tolist()
        return cls(len(choices), np.concatenate(held).tolist(), characters)

    def __add__(self, other: "Statistics") -> "Statistics":
        characters = [a + b for a, b in zip(self.characters, other.characters, strict=False)]
        return Statistics(self.frames + other.frames, np.add(self.held, other.held).tolist(), characters)

    def weights(self) -> list[float]:
        """(8,) loss weight of a pressed button, sqrt((1 - r) / r) of its rate r, from 1 to 30."""
        rate = self._rates()
        return np.clip(np.sqrt((1 - rate) / rate), 1.0, 30.0).tolist()

    def character_weights(self, strength: float) -> list[float]:
        """(33,) loss weight of a frame of each own character: its rate to the power -strength, scaled to mean 1 over
        all frames, then at most 30; 1 for unseen characters."""
        rate = np.array(self.characters) / max(sum(self.characters), 1)
        power = np.where(rate > 0, np.maximum(rate, 1e-9) ** -strength, 0)
        power = np.minimum(power / (rate @ power), 30)
        return np.where(rate > 0, power, 1.0).tolist()

    def logits(self) -> list[float]:
        """(81,) logits of the class frequencies; unseen classes count half a time."""
        rate, counts = self._rates(), np.maximum(self.held, 0.5)
        classes = [np.log(counts[head.logits] / counts[head.logits].sum()) for head in HEADS[1:]]
        return np.concatenate([np.log(rate / (1 - rate)), *classes]).tolist()

    def _rates(self) -> np.ndarray:
        """(8,) in the open interval (0, 1)."""
        return (np.array(self.held[: len(BUTTONS)]) + 0.5) / (self.frames + 1)
