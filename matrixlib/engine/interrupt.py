"""Ctrl-C and SIGTERM that wait for the end of an update, so that what is saved is whole."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SAME_WISH = 3.0
"""Seconds in which a second SIGTERM is taken for the first one."""


class Terminated(SystemExit):
    """SIGTERM came (a cluster's scheduler takes the machine back); the exit status is the usual 143."""


@dataclass
class Termination:
    """Whether SIGTERM has come, and when (monotonic seconds)."""

    requested: bool = False
    since: float = 0.0

    def check(self) -> None:
        """Raises Terminated if it has."""
        if self.requested:
            raise Terminated(128 + signal.SIGTERM)


@contextmanager
def termination() -> Iterator[Termination]:
    """SIGTERM inside the block is noted and not acted upon; another one seconds later ends the process at once.

    One right after the first is the same wish: schedulers signal every process of a job, and launchers pass it on.
    Only the main thread gets signals, so elsewhere nothing changes; nor where the process has set SIGTERM itself.
    """
    found = Termination()
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before != signal.SIG_DFL:
        yield found
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if not found.requested:
            found.requested, found.since = True, time.monotonic()
            print("SIGTERM: finishing this update, then saving", file=sys.stderr)
        elif time.monotonic() - found.since > SAME_WISH:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield found
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class Interruption:
    """How often SIGINT has come."""

    count: int = 0

    def check(self) -> None:
        """Raises KeyboardInterrupt if it has."""
        if self.count:
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[Interruption]:
    """SIGINT inside the block raises KeyboardInterrupt where `check` is called, or at its end; a second one at once.

    Only the main thread gets signals, so elsewhere nothing changes; nor where the process ignores SIGINT.
    """
    found = Interruption()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield found
        return

    def handler(number: int, frame: FrameType | None) -> None:
        found.count += 1
        if found.count > 1:
            raise KeyboardInterrupt
        print("finishing this update, then saving; interrupt again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handler)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
    found.check()
