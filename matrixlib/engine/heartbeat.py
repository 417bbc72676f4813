"""What a run's heartbeat.json says, and whether its process lives."""

import platform

import psutil
from pydantic import AwareDatetime, BaseModel, NonNegativeFloat


class Heartbeat(BaseModel):
    """heartbeat.json in a run's folder: proof of progress. interval: seconds between heartbeats."""

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

    def process_lives(self) -> bool:
        """Whether its process exists; True if unknown, on another machine."""
        if self.host != platform.node():
            return True
        try:
            process = psutil.Process(self.pid)
            # the process id may have been reused
            return process.create_time() <= self.time.timestamp() + 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.AccessDenied:
            return True
        except psutil.NoSuchProcess:
            return False
