"""What a benchmark gives: figures beside the limits of the machine, and the plan by which they are measured."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from matrixlib import config as configuration
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware import speed


@dataclass(frozen=True)
class Figure:
    """One measured number. limit: what this machine could do at most, in the same unit, and `of` what that is; None
    where nothing sets one."""

    name: str
    value: float
    unit: str  # "s": less is better; anything else is a rate
    limit: float | None = None
    of: str = ""

    @property
    def share(self) -> float | None:
        """Share of the limit that is reached."""
        if not self.limit:
            return None
        return self.limit / self.value if self.unit == "s" else self.value / self.limit


@dataclass(frozen=True)
class Plan:
    """How to measure. seconds: of each group's turns. compile: also with torch.compile, which takes minutes on a CPU.
    brief: small networks and few figures, for a demo."""

    runtime: runtimes.Runtime
    seconds: float
    compile: bool = False
    brief: bool = False

    @property
    def device(self) -> str:
        return self.runtime.device

    def matrix_rate(self, dtype: str = "") -> float:
        """FLOP a second of a matrix product."""
        seconds = 0.1 if self.brief else 0.5
        return 1e9 * speed.matrix_rate(self.device, dtype or self.runtime.dtype, self.runtime.threads, seconds)


Workload = Callable[[Plan], Iterator[Figure]]


def make_plan(device: str = "auto", seconds: float = 6.0, compile: bool = False, brief: bool = False) -> Plan:
    """A plan in the runtime that the policy decides on for `device`; sets torch's threads.

    Raises ValueError where the device is absent.
    """
    config = configuration.load_shared("quick", {"runtime": {"device": device}})
    runtime = runtimes.resolve(config.runtime, config.train, config.data)
    runtime.apply()
    return Plan(runtime, seconds, compile or runtime.device == "cuda", brief)
