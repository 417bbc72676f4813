"""Short turns on a busy machine: who runs on a processor is chosen anew every millisecond."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import types

from matrixlib.hardware import machine
from matrixlib.hardware.kernels import kernel

MICROSECONDS = 1000
"""Between two wakings. A half and a fifth of it gave no more on two processors; at a twentieth the wakings cost all."""

_usleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """While inside, a thread on each processor that this process may use wakes up and sleeps again, all the time.

    Linux takes a processor from a thread that computes at the ticks of its clock, 4 ms apart in many kernels, or when
    another thread wakes there. In oneDNN's convolutions a thread that has done its part waits in a loop without end,
    whatever OpenMP is told; where another process has the processor of the thread that is waited for, both may share
    one, and the loop ends at the next tick. A waking ends it at once. The wakings take 2 % of each processor.
    """
    going = np.ones(1, bool)
    threads = [
        threading.Thread(target=_wake_on, args=(processor, going), name="short turns", daemon=True)
        for processor in machine.usable_processors()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        going[0] = False
        for thread in threads:
            thread.join()


def _wake_on(processor: int, going: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    os.sched_setaffinity(0, {processor})  # of this thread alone
    _wake(going, np.uint32(MICROSECONDS))


@kernel
def _wake(going: np.ndarray[Any, np.dtype[np.bool_]], microseconds: np.uint32) -> None:
    while going[0]:
        _usleep(microseconds)
