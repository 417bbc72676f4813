"""Processes of this machine that compute parts of a job for it."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from matrixlib import files

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
