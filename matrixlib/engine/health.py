"""Verdict on an update, from numbers alone: may the weights move? No tensors here.

A non-finite loss or gradient moves no weight (SKIP); too many in a row stop the run with a diagnosis (HALT).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What the step does with an update."""

    OK = "ok"
    SKIP = "skip"
    ROLLBACK = "rollback"
    """Reserved: go back to an earlier checkpoint. Nothing returns it yet."""
    HALT = "halt"


class TrainingHalted(ArithmeticError):
    """Training was stopped because updates stayed non-finite; the message is the diagnosis."""


@dataclass
class Health:
    """Counts of a run and its verdicts. Its whole state goes into the checkpoint (`to_dict`).

    limit: SKIPs in a row that stop the run. updates: updates judged. skipped: those with a non-finite loss or
    gradient. overflows: fp16 gradients beyond the range at the current loss scale; the scaler halves the
    scale, which is normal, so they count apart and not towards `limit`. consecutive: SKIPs in a row up to
    now. warm: finite updates after the warm-up; clipped: those of them whose gradient was clipped (during
    warm-up clipping is expected). last: what was wrong with the newest SKIP.
    """

    limit: int = 10
    updates: int = 0
    skipped: int = 0
    overflows: int = 0
    consecutive: int = 0
    warm: int = 0
    clipped: int = 0
    last: str = ""

    def judge(
        self,
        loss: float,
        grad_norm: float,
        finite: bool = True,
        *,
        overflow: bool = False,
        clipped: bool = False,
        warming_up: bool = False,
        detail: str = "",
    ) -> Verdict:
        """Verdict on one update, counted.

        loss: total loss. grad_norm: global norm before clipping. finite: False if any part (a term, a
        gradient) is not finite though both sums are. overflow: the loss is finite and a loss scale explains
        the rest. clipped: the norm was above the threshold. detail: what is not finite, in words, for the
        diagnosis.
        """
        self.updates += 1
        if finite and math.isfinite(loss) and math.isfinite(grad_norm):
            self.consecutive = 0
            if not warming_up:
                self.warm += 1
                self.clipped += clipped
            return Verdict.OK
        self.last = f"update {self.updates}: loss {loss:.6g}, gradient norm {grad_norm:.6g}" + (
            f"; {detail}" if detail else ""
        )
        if overflow:
            self.overflows += 1
            return Verdict.SKIP
        self.skipped += 1
        self.consecutive += 1
        return Verdict.HALT if self.consecutive >= self.limit else Verdict.SKIP

    @property
    def clip_share(self) -> float:
        """Share of the updates after the warm-up whose gradient was clipped; 0 before there are any."""
        return self.clipped / self.warm if self.warm else 0.0

    def diagnosis(self) -> str:
        """Why training was halted and what to try."""
        return (
            f"{self.consecutive} updates in a row were not finite ({self.last}). No weight moved since the "
            f"last finite update; {self.skipped} of {self.updates} updates were skipped in all. Lower "
            "optim.learning_rate, lengthen optim.warmup_steps, use runtime.precision fp32, or look for bad "
            "targets in the data."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the checkpoint; Health.from_dict(h.to_dict()) == h."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Health:
        """Raises ValueError naming the keys that are missing or unknown."""
        known = {field.name for field in fields(cls)}
        if odd := sorted(known ^ set(data)):
            raise ValueError(f"health state of the checkpoint is of another version: {', '.join(odd)}")
        return cls(**data)
