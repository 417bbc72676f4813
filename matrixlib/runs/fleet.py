"""Where independent parts of a job are computed: in this process, in others of this machine, or on a Ray cluster.

A part is a function of plain data, so it comes to the same wherever it is computed, and may be computed again.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from matrixlib import files

Kind: TypeAlias = Literal["local", "ray"]
Part: TypeAlias = Callable[..., Any]
"""Of what all parts share; it has to be known by its name in every process."""
LOOK = 0.5  # seconds that `collect` waits at most
GRACE = 30.0
"""Seconds that a process gets to save."""
INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes after Ctrl-C and SIGTERM, which outside a training end the process themselves."""


DRIVERS = ("/proc/driver/nvidia", "/dev/kfd", "/dev/dxg")
"""One of these is there on a Linux with a GPU: of NVIDIA, of AMD, of a Windows around it."""


class FleetError(ValueError):
    """Parts that cannot be computed; says why and what to do."""


@dataclass(frozen=True)
class Lost:
    """In place of a result: the process of a part ended without one. how: in words; interrupted: by a signal to it."""

    how: str
    interrupted: bool = False


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


class Processes:
    """Processes of this machine; they end with this one. With several GPUs each takes one of them.

    log: each part has a process of its own, which prints there; without it processes go on to the next part.
    """

    def __init__(self, slots: int, log: Path | None = None) -> None:
        self.slots = slots
        self._log = log
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, tuple[Hashable, _Worker]] = {}

    def share(self, value: Any) -> Any:
        return value

    def submit(self, key: Hashable, part: Part, *handles: Any) -> None:
        worker = self._idle.pop() if self._idle else self._start()
        worker.pipe.send((part, handles))
        self._busy[worker.pipe] = key, worker

    def _start(self) -> _Worker:
        slot = min(set(range(self.slots)) - {worker.slot for _, worker in self._busy.values()})
        pipe, other = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(slot, other, self._log))
        process.start()
        other.close()
        return _Worker(slot, process, pipe)

    def collect(self) -> list[tuple[Any, Any]]:
        ended = []
        for pipe in wait(list(self._busy), timeout=LOOK):
            assert isinstance(pipe, Connection)
            key, worker = self._busy.pop(pipe)
            ended.append((key, self._result(worker)))
        return ended

    def _result(self, worker: _Worker) -> Any:
        try:
            result = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            code = worker.process.exitcode or 0
            how = f"killed by signal {-code}, perhaps out of memory" if code < 0 else f"ended with exit code {code}"
            return Lost(f"was {how}", code in INTERRUPTED)
        if self._log is None:
            self._idle.append(worker)
        else:
            worker.pipe.close()
            worker.process.join()
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        workers = [*self._idle, *(worker for _, worker in self._busy.values())]
        for worker in workers:
            worker.process.terminate()
        began = time.monotonic()
        for worker in workers:
            worker.process.join(max(0.0, GRACE - (time.monotonic() - began)))
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._idle.clear()
        self._busy.clear()


@dataclass(frozen=True, eq=False)
class _Worker:
    slot: int
    process: BaseProcess
    pipe: Connection


def _serve(slot: int, pipe: Connection, log: Path | None) -> None:
    """A process that computes parts until nobody asks for more."""
    files.end_with_parent()
    if log is not None:
        sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    result: Any
    try:
        for number in itertools.count():
            part, handles = pipe.recv()
            if number == 0:
                _take_gpu(slot)
            try:
                result = part(*handles)
            except Exception as error:  # noqa: BLE001 - raised again in the process that asked
                result = error
            pipe.send(result)
    except EOFError:
        return
    except KeyboardInterrupt:
        sys.exit(130)


def _take_gpu(slot: int) -> None:
    """Let this process see one of the GPUs, where there are several; before CUDA is begun."""
    if sys.platform == "linux" and not any(map(os.path.exists, DRIVERS)):
        return  # torch takes seconds
    import torch

    count = torch.cuda.device_count()
    if count > 1:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = names if len(names) == count else [str(number) for number in range(count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[slot % count]
