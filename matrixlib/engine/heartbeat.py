"""A run's heartbeat.json: what it says, and whether its process lives."""

import math
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from pydantic import AwareDatetime, BaseModel, NonNegativeFloat

from matrixlib.files import write_json

FILE = "heartbeat.json"


class Heartbeat(BaseModel, extra="allow"):
    """heartbeat.json of a run. interval: seconds between heartbeats; extra fields: memory (MiB) and utilisation."""

    time: AwareDatetime
    host: str
    pid: int = 0
    phase: str = "training"
    step: int = 0
    steps: int = 0
    step_seconds: NonNegativeFloat = 0.0
    interval: NonNegativeFloat = 0.0

    @property
    def updates(self) -> str:
        return f"update {self.step:,} of {self.steps:,}" if self.steps else f"{self.step:,} updates"

    @classmethod
    def write(cls, folder: Path, figures: Mapping[str, Any], **fields: Any) -> None:
        """Write the file, of this process and now. figures: the extra fields."""
        beat = cls(time=datetime.now(UTC), host=platform.node(), pid=os.getpid(), **fields, **figures)
        write_json(folder / FILE, beat.model_dump(mode="json"))

    def process_lives(self) -> bool:
        """Whether its process exists; True if unknown, on another machine."""
        return process_lives(self.host, self.pid, self.time.timestamp())


def process_lives(host: str, pid: int, known: float = math.inf) -> bool:
    """Whether a process exists; True if unknown, on another machine. known: when it lived, in seconds since 1970: a
    younger one has the same id by chance."""
    if host != platform.node():
        return True
    try:
        process = psutil.Process(pid)
        return process.create_time() <= known + 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
