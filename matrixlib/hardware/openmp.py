"""How the threads of one computation wait for each other: actively on a quiet machine, hardly at all on a busy one."""

import contextlib
import ctypes
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from matrixlib.hardware import machine
from matrixlib.hardware.load import Clocks, Usage

BY_PEOPLE = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Variables by which somebody has decided how threads wait."""
LOOK_SECONDS = 0.5
"""Between two looks at the processors."""
IDLE = 0.1
"""Share of its threads' time that a process uses at most while its computation rests and has nothing to give away."""
QUIET_LOOKS = 4
"""Looks in a row without anybody else after which threads wait actively again."""


@contextlib.contextmanager
def considerate(threads: int | None = None) -> Iterator[None]:
    """While inside, this process's threads, `threads` to a computation (None: one on each processor), give their cores
    away at once where other processes want them.

    A thread that has done its part waits for the others in a loop, for milliseconds: that is fast, and asleep it would
    be woken too late for the hundreds of barriers of an update. Where another process computes, the loop takes its time
    from the very thread that is waited for, and updates become several times slower than their share of the machine.
    GNU's library, which torch brings for Linux, loops 300,000 times, but only 100 while it manages more threads
    than there are processors; so a team of sleeping threads is kept while others are busy, and turns are short
    (`turns`). The threads of the computation, and so all bits, stay as they are. Nothing happens with one thread, with
    another library, or where anybody has decided (`BY_PEOPLE`).
    """
    path, threads = libgomp(), len(machine.usable_processors()) if threads is None else threads
    if threads < 2 or path is None or os.environ.keys() & set(BY_PEOPLE):
        yield
        return
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(path, threads, done), name="considerate", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def libgomp(maps: Path = Path("/proc/self/maps")) -> Path | None:
    """GNU's OpenMP library, where this process has loaded it: torch's own of several, None if none of them is. maps:
    what the process has loaded, as Linux lists it."""
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.is_file() else []
    paths = {Path(line.split(maxsplit=5)[-1]) for line in lines if "/libgomp" in line}
    if len(paths) > 1:
        torch = importlib.util.find_spec("torch")  # where it lies, without importing it
        folder = Path(torch.origin).resolve().parent if torch and torch.origin else Path()
        paths = {path for path in paths if {folder, folder.with_name("torch.libs")} & set(path.parents)}
    return paths.pop() if len(paths) == 1 else None


def _watch(path: Path, threads: int, done: threading.Event) -> None:
    """Until `done`: keep a team of sleeping threads, and turns short, while other processes compute."""
    quiet, before = 0, Clocks.now(held_back=False)
    with contextlib.ExitStack() as remedies:
        held = False
        while not done.wait(LOOK_SECONDS):
            now = Clocks.now(held_back=False)
            usage, before = Usage.between(before, now), now
            crowded = usage.own > IDLE * threads and usage.crowded(threads)
            quiet = 0 if crowded else quiet + 1
            if crowded and not held:
                from matrixlib.hardware.turns import short_turns  # numba takes a second to import

                remedies.enter_context(sleeping_team(path))
                remedies.enter_context(short_turns())
                held = True
            elif held and quiet >= QUIET_LOOKS:
                remedies.close()
                held = False


@contextlib.contextmanager
def sleeping_team(path: Path) -> Iterator[None]:
    """So many threads more in the library's count that it waits briefly; they belong to a thread that does nothing, and
    go with it."""
    started, over = threading.Event(), threading.Event()
    parallel = ctypes.CDLL(str(path)).GOMP_parallel
    nothing = ctypes.CDLL(None).free  # free(NULL) is a function that does nothing
    count = len(machine.usable_processors())

    def hold() -> None:
        try:
            parallel(nothing, None, ctypes.c_uint(count), ctypes.c_uint(0))
        finally:
            started.set()  # even then: nobody may wait for a team that there is not
        over.wait()

    holder = threading.Thread(target=hold, name="sleeping team", daemon=True)
    holder.start()
    started.wait()
    try:
        yield
    finally:
        over.set()
        holder.join()
