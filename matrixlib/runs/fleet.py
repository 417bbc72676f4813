"""Where independent parts of a job are computed: in this process, in others of this machine, or on a Ray cluster.

A part is a function of plain data, so it comes to the same wherever it is computed, and may be computed again.
"""

from collections import deque
from collections.abc import Generator, Hashable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from matrixlib.runs.processes import FleetError, Lost, Part, Processes

Kind: TypeAlias = Literal["local", "ray"]


class Fleet(Protocol):
    """Where parts are computed."""

    @property
    def slots(self) -> int:
        """Parts at once."""

    def share(self, value: Any) -> Any:
        """A handle of what many parts get: whatever it weighs, it is brought to each machine once."""

    def submit(self, key: Hashable, part: Part, *handles: Any) -> None:
        """Begin a part; there is a free slot."""

    def collect(self) -> list[tuple[Any, Any]]:
        """(key, result or `Lost`) of parts that have ended since the last call; waits a moment for one.

        Raises what a part raised.
        """

    def close(self) -> None:
        """End what is running: what trains saves first."""


def open_fleet(kind: Kind, workers: int, gpu: bool = False, log: Path | None = None, **here: Any) -> Fleet:
    """The fleet of this kind.

    workers: parts at once; on a cluster as many as it has threads (or GPUs) for where it is 0. gpu: whether a cluster's
    GPUs are meant. log: each part gets a process of its own, which prints into this file, and is at no time computed
    twice. here: further arguments of every part where this process computes them.
    """
    if kind == "ray":
        from matrixlib.runs.ray_fleet import RayFleet

        return RayFleet(workers, gpu, log)
    return Here(**here) if workers == 1 else Processes(workers, log)


def gather(fleet: Fleet, parts: Mapping[Any, Part], *shared: Any) -> Generator[tuple[Any, Any], None, None]:
    """(key, result) of every part once, as they come; FleetError where a process ended without one.

    Parts begin in their order, and none after the iteration has been closed.
    """
    handles = [fleet.share(value) for value in shared]
    waiting, running = deque(parts), set[Hashable]()
    while waiting or running:
        while waiting and len(running) < fleet.slots:
            key = waiting.popleft()
            running.add(key)
            fleet.submit(key, parts[key], *handles)
        for key, result in fleet.collect():
            if isinstance(result, Lost):
                raise FleetError(f"a process {result.how}; what was done is kept: start again to go on")
            if key in running:
                running.remove(key)
                yield key, result


class Here:
    """This process computes one part after the other. extra: arguments of each, which do not travel."""

    slots = 1

    def __init__(self, **extra: Any) -> None:
        self._extra = extra
        self._ended: list[tuple[Any, Any]] = []

    def share(self, value: Any) -> Any:
        return value

    def submit(self, key: Hashable, part: Part, *handles: Any) -> None:
        self._ended.append((key, part(*handles, **self._extra)))

    def collect(self) -> list[tuple[Any, Any]]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Nothing is running."""
