"""What a trainer works with, in one object."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from matrixlib.config import Config
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.curriculum import Curriculum
from matrixlib.engine.distributed import Ranks
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.parts import Parts
from matrixlib.engine.stats import Stats
from matrixlib.engine.task import Batch, Data, Task, Teacher
from matrixlib.hardware.runtime import Runtime

Hook = Callable[[Stats, Batch], None]


@dataclass(frozen=True)
class Context:
    """What a trainer works with.

    data: what it trains on and is judged by. folder: gets heartbeat.json and evidence/. steps: updates of the whole
    run. state_extra: JSON data that every checkpoint also holds (config, ...). teacher: for losses that need it.
    hooks: (function, every): called with the stats and the host batch of every so many updates; 0 = never.
    parts: schedule and optimizer of the caller's own. ranks: that train together; the first alone writes.
    """

    task: Task
    model: nn.Module
    runtime: Runtime
    config: Config
    data: Data
    folder: Path
    checkpoints: Checkpoints
    metrics: MetricsLog
    steps: int
    state_extra: Mapping[str, Any] = field(default_factory=dict)
    curriculum: Curriculum | None = None
    teacher: Teacher | None = None
    hooks: Sequence[tuple[Hook, int]] = ()
    parts: Parts = Parts()
    ranks: Ranks = Ranks()
