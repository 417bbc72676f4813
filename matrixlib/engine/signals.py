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
from typing import Any

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
    except GeneratorExit:
        found.check()
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, before)


@dataclass
class Interruption:
    """How often SIGINT has come. before: who was told of it until the block began. ended: whether the block has."""

    count: int = 0
    before: Any = None
    ended: bool = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if it has."""
        if self.count:
            raise KeyboardInterrupt

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        print("finishing this update, then saving; interrupt again to stop at once", file=sys.stderr)

    def end(self) -> None:
        """Put back the handler from before, unless another has come since; never that of a block that has ended."""
        self.ended = True
        if signal.getsignal(signal.SIGINT) != self.note:
            return
        before = self.before
        while isinstance(owner := getattr(before, "__self__", None), Interruption) and owner.ended:
            before = owner.before
        signal.signal(signal.SIGINT, before)


@contextmanager
def deferred() -> Iterator[Interruption]:
    """SIGINT inside the block raises KeyboardInterrupt where `check` is called, or at its end; a second one at once.

    A generator that is closed within the block raises it, too: to whoever calls its `close`. (Where a `break` drops the
    last reference Python only prints it.) Generators may be closed in any order.
    Only the main thread gets signals, so elsewhere nothing changes; nor where the process ignores SIGINT.
    """
    before = signal.getsignal(signal.SIGINT)
    found = Interruption(before=before)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield found
        return
    signal.signal(signal.SIGINT, found.note)
    try:
        yield found
    except GeneratorExit:
        found.check()
        raise
    finally:
        found.end()
    found.check()
