"""The controller as classes: eight buttons, four axes of the sticks with 17 classes each, the shoulder with 5.

A controller is 13 whole numbers, `choices`: 8 buttons (0 or 1), main x, main y, c x, c y (0..16, the middle is 8), the
shoulder (0..4). A network says 81 numbers of it, `logits`: 8 of the buttons, then those of the classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from matrixlib.tasks.melee.columns import BUTTONS, CONTROLLER, SHOULDER_STEPS, STICK_STEPS

STICK_CLASSES, CENTRE, SHOULDER_CLASSES = 17, 8, 5
AXES = ("main_x", "main_y", "c_x", "c_y")
LOGITS = len(BUTTONS) + len(AXES) * STICK_CLASSES + SHOULDER_CLASSES


@dataclass(frozen=True)
class Head:
    """A part of the controller that is decided at once. logits, choices: where it stands in them."""

    name: str
    classes: int
    logits: slice
    choices: slice


def _heads() -> tuple[Head, ...]:
    count = len(BUTTONS)
    heads, logit, choice = [Head("buttons", count, slice(0, count), slice(0, count))], count, count
    for name, classes in (*((axis, STICK_CLASSES) for axis in AXES), ("shoulder", SHOULDER_CLASSES)):
        heads.append(Head(name, classes, slice(logit, logit + classes), slice(choice, choice + 1)))
        logit, choice = logit + classes, choice + 1
    return tuple(heads)


HEADS = _heads()
"""In the order in which an autoregressive network decides them."""


def centre(number: Any, classes: int) -> Any:
    """The value in 0..1 of a class."""
    return np.asarray(number) / (classes - 1)


@dataclass(frozen=True)
class Controller:
    """What is held for one frame. buttons: their names. main, c: (x, y) of the sticks in -1..1. shoulder: 0..1."""

    buttons: tuple[str, ...]
    main: tuple[float, float]
    c: tuple[float, float]
    shoulder: float

    @classmethod
    def of(cls, choices: np.ndarray) -> Controller:
        """From choices (13,)."""
        pressed = tuple(name for name, held in zip(BUTTONS, choices[:8], strict=True) if held)
        x, y, c_x, c_y = (2 * centre(choices[8:12], STICK_CLASSES) - 1).tolist()
        return cls(pressed, (x, y), (c_x, c_y), float(centre(choices[12], SHOULDER_CLASSES)))


NEUTRAL = np.array([*[0] * len(BUTTONS), *[CENTRE] * len(AXES), 0], np.int64)
"""Choices of a controller that nobody touches."""


# As it is stored


def _classes(steps: np.ndarray, width: int, middle: int, classes: int) -> np.ndarray:
    return np.clip(np.floor(steps / np.float32(width) + (middle + 0.5)), 0, classes - 1).astype(np.uint8)


STICK_STEP, SHOULDER_STEP = STICK_STEPS // CENTRE, SHOULDER_STEPS // (SHOULDER_CLASSES - 1)
_STICK = _classes(np.arange(256, dtype=np.uint8).view(np.int8), STICK_STEP, CENTRE, STICK_CLASSES)
_SHOULDER = _classes(np.arange(256), SHOULDER_STEP, 0, SHOULDER_CLASSES)
"""The class of each stored byte: an axis in 0..1 times the number of steps, rounded."""


def pressed(buttons: np.ndarray) -> np.ndarray:
    """(..., 8) u1: each button of BUTTONS."""
    return buttons[..., None] >> np.arange(len(BUTTONS), dtype=np.uint8) & 1


def choices_of(controller: np.ndarray) -> np.ndarray:
    """(..., 13) u1 choices of CONTROLLER (...)."""
    sticks, shoulder = _STICK[controller["sticks"].view(np.uint8)], _SHOULDER[controller["shoulder"]]
    return np.concatenate([pressed(controller["buttons"]), sticks, shoulder[..., None]], -1)


def controllers(choices: np.ndarray) -> np.ndarray:
    """The inverse of `choices_of`, at the centre of each class: CONTROLLER (...)."""
    out = np.zeros(choices.shape[:-1], CONTROLLER)
    out["buttons"] = np.packbits(choices[..., :8].astype(bool), axis=-1, bitorder="little")[..., 0]
    out["sticks"] = (choices[..., 8:12].astype(np.int16) - CENTRE) * STICK_STEP
    out["shoulder"] = choices[..., 12].astype(np.int16) * SHOULDER_STEP
    return out
