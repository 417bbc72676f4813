"""The learning rate where the validation loss stands still: a factor over its schedule."""

import math
from dataclasses import dataclass

from matrixlib.config import OptimConfig
from matrixlib.engine.state import State


@dataclass
class Plateau(State):
    """Cuts the rate after so many full validations without improvement. Those of a sample are too noisy to count.

    best: lowest full loss that the next has to beat. stale: full validations since. cuts: of the rate so far.
    """

    config: OptimConfig
    best: float | None = None
    stale: int = 0
    cuts: int = 0

    @property
    def factor(self) -> float:
        """What the schedule's rate is multiplied by."""
        return float(self.config.plateau_factor**self.cuts)

    def record(self, loss: float, min_delta: float) -> str:
        """Take in a full validation's loss; a message where the rate is cut, else ""."""
        if not self.config.plateau:
            return ""
        if math.isfinite(loss) and (self.best is None or loss < self.best - min_delta):
            self.best, self.stale = loss, 0
            return ""
        self.stale += 1
        if self.stale < self.config.plateau:
            return ""
        self.stale, self.cuts = 0, self.cuts + 1
        return (
            f"{self.config.plateau} full validations in a row without an improvement: the learning rate is "
            f"{self.factor:.3g} times its schedule's from here on"
        )
