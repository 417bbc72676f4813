"""heartbeat.json: proof that the main loop is alive, with memory use."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from matrixlib.engine.metrics import utc_now, write_json


def memory(device: torch.device) -> dict[str, float]:
    """MiB: resident memory of this process and, on an accelerator, what torch holds there."""
    mebi = 1 / 2**20
    out = {"rss_mib": psutil.Process().memory_info().rss * mebi}
    if device.type == "cuda":
        out["device_mib"] = torch.cuda.memory_allocated(device) * mebi
        out["device_peak_mib"] = torch.cuda.max_memory_allocated(device) * mebi
    elif device.type == "mps":
        out["device_mib"] = torch.mps.current_allocated_memory() * mebi
    return {name: round(value, 1) for name, value in out.items()}


class Heartbeat:
    """heartbeat.json of a run: a watcher sees a stalled run by the age of its time.

    It is written by the main loop itself, because a thread of its own would go on beating over a hung loop.
    """

    def __init__(
        self, path: Path, seconds: float, device: torch.device, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """seconds: least time between two writes."""
        self._path, self._seconds, self._device, self._clock = path, seconds, device, clock
        self._last = -math.inf

    def beat(self, step: int, step_seconds: float, phase: str, force: bool = False) -> None:
        """Write if `seconds` have passed, atomically. step_seconds: duration of the last whole update."""
        now = self._clock()
        if not force and now - self._last < self._seconds:
            return
        self._last = now
        record = {"time": utc_now(), "pid": os.getpid(), "step": step, "step_seconds": step_seconds}
        write_json(self._path, record | {"phase": phase} | memory(self._device))
