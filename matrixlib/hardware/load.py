"""How busy this machine is: processor time of this process, of all others, and what is held back."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

from matrixlib.hardware import machine

NOTICED = 0.05
"""Share of the time from which something held back is a cause."""
CROWDED = 0.5
"""Processors that others use when a machine counts as busy."""


@dataclass(frozen=True)
class Clocks:
    """Counters at one moment, in seconds. wall: time that passes. busy: all processes on the processors that this one
    may use; own: this one, with its children if asked. stolen: what the host of a virtual machine gave to others.
    throttled: what the quota of a container held back. hot: how often a processor has clocked down because of heat.
    """

    wall: float
    busy: float
    own: float
    stolen: float
    throttled: float
    hot: int

    @classmethod
    def now(cls, children: bool = False, held_back: bool = True) -> Clocks:
        """Read them; children: count living child processes as this one; held_back: read throttled and hot, which are 0
        without. Each takes some milliseconds."""
        every = psutil.cpu_times(percpu=True)
        used = [every[n] for n in machine.usable_processors() if n < len(every)] or every
        stolen = sum(getattr(times, "steal", 0.0) for times in used)
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in used)
        guests = sum(getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0) for times in used)  # in user, too
        return cls(
            wall=time.monotonic(),
            busy=sum(sum(times) for times in used) - idle - stolen - guests,
            own=_own(children),
            stolen=stolen,
            throttled=machine.throttled() if held_back else 0.0,
            hot=machine.slowdowns() if held_back else 0,
        )


@dataclass(frozen=True)
class Usage:
    """What happened between two looks at the clocks. own, others: processors in use on average. stolen, throttled:
    share of the time. load: processes that wanted to run, a mean over a minute; None where the system has none."""

    seconds: float
    cores: int
    own: float
    others: float
    stolen: float
    throttled: float
    hot: int
    load: float | None

    @classmethod
    def since(cls, start: Clocks, children: bool = False) -> Usage:
        """From `start` to now."""
        return cls.between(start, Clocks.now(children))

    @classmethod
    def between(cls, start: Clocks, end: Clocks) -> Usage:
        """From `start` to `end`, which count the same processes."""
        wall, cores = max(end.wall - start.wall, 1e-9), len(machine.usable_processors())
        own = max(end.own - start.own, 0.0) / wall
        return cls(
            seconds=wall,
            cores=cores,
            own=own,
            others=max((end.busy - start.busy) / wall - own, 0.0),
            stolen=(end.stolen - start.stolen) / wall / cores,
            throttled=min((end.throttled - start.throttled) / wall, 1.0),
            hot=end.hot - start.hot,
            load=load_average(),
        )

    def crowded(self, threads: int) -> bool:
        """Whether others take processors that so many threads would use."""
        return self.others >= CROWDED and self.others + threads > self.cores + CROWDED / 2

    def words(self, threads: int = 0) -> str:
        """What can be seen of the causes of slowness; threads: those that compute, 0 where a GPU does."""
        causes = []
        if self.throttled > NOTICED:
            causes.append(f"the container's quota held this process back for {self.throttled:.0%} of the time")
        if self.hot:
            causes.append(f"the processor clocked down {self.hot} times because of its heat")
        if self.stolen > NOTICED:
            causes.append(f"the host gave {self.stolen:.0%} of this machine's time to others")
        used = f"other processes use {self.others:.1f} of {self.cores} processors"
        if self.others >= CROWDED / 2:
            causes.append(used)
        cause = "; ".join(causes) or f"{used}, and nothing holds this one back"
        facts = [f"load {self.load:.1f}"] if self.load is not None else []
        if threads:
            facts.append(f"this process had {self.own / threads:.0%} of the time of its {threads} threads")
        return f"{cause} ({', '.join(facts)})" if facts else cause


def load_average() -> float | None:
    """Processes that ran or wanted to, a mean over the last minute; None where the system does not count them."""
    return float(psutil.getloadavg()[0]) if hasattr(psutil, "getloadavg") else None


def _own(children: bool) -> float:
    process = psutil.Process()
    times = process.cpu_times()
    seconds = float(times.user + times.system)
    for child in process.children(recursive=True) if children else ():
        try:
            spent = child.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        seconds += spent.user + spent.system
    return seconds
