"""heartbeat.json: proof that the main loop is alive, with memory use and how busy the GPU is."""

import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from matrixlib.engine import memory
from matrixlib.files import utc_now, write_json
from matrixlib.hardware import backend


class Heartbeat:
    """heartbeat.json of a run: a watcher (`runs.watch`) sees a stalled run by the age of its time.

    It is written by the main loop itself, because a thread of its own would go on beating over a hung loop.
    """

    def __init__(
        self, path: Path, seconds: float, device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """seconds: least time between two writes."""
        self._path, self._seconds, self._device, self._clock = path, seconds, device, clock
        self._last = -math.inf

    def beat(self, step: int, step_seconds: float, phase: str, force: bool = False, steps: int = 0) -> None:
        """Write if `seconds` have passed, atomically. step_seconds: duration of the last whole update. steps: those
        of the whole run, as far as is known."""
        now = self._clock()
        if not force and now - self._last < self._seconds:
            return
        self._last = now
        write_json(
            self._path,
            {
                "time": utc_now(),
                "host": platform.node(),
                "pid": os.getpid(),
                "phase": phase,
                "step": step,
                "steps": steps,
                "step_seconds": step_seconds,
                "interval": self._seconds,
                **memory.usage(self._device),
                **backend.utilisation(self._device),
            },
        )
