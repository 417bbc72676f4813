"""Ctrl-C and SIGTERM that wait for the end of an update, so that what is saved is whole."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matrixlib.engine.distributed import Ranks

SAME_WISH = 3.0
"""Seconds in which a second SIGTERM is taken for the first one."""


class Terminated(SystemExit):
    """SIGTERM came (a cluster's scheduler takes the machine back); the exit status is the usual 143."""


class Signals:
    """Signals of a `deferred` block. interrupts: SIGINTs. terminated: when SIGTERM came. agreed: all ranks end."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminated: float | None = None
        self.agreed = False
        self._before: dict[int, Any] = {}  # who was told until the block began
        self._ended = False

    def check(self) -> None:
        """Raises Terminated or KeyboardInterrupt if one has come."""
        _raise(self.terminated is not None, self.interrupts)

    def agree(self, ranks: Ranks) -> None:
        """As `check`, on all ranks where one of them has been told; what comes meanwhile is heard next time."""
        told = ranks.total({"interrupts": self.interrupts, "terminated": int(self.terminated is not None)})
        self.agreed = any(told.values())
        _raise(told["terminated"], told["interrupts"])

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
            _tell("finishing this update, then saving; interrupt again to stop at once")
        elif self.terminated is None:
            self.terminated = time.monotonic()
            _tell("SIGTERM: finishing this update, then saving")
        elif time.monotonic() - self.terminated > SAME_WISH:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def begin(self) -> None:
        """Put the handler in, where SIGINT is not ignored and SIGTERM is as the process found it."""
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self.note)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self.note)

    def end(self) -> None:
        """Put back the handlers from before, unless others have come since; never that of a block that has ended."""
        self._ended = True
        for number, before in self._before.items():
            while isinstance(owner := getattr(before, "__self__", None), Signals) and owner._ended:
                before = owner._before[number]
            if signal.getsignal(number) == self.note:
                signal.signal(number, before)


@contextlib.contextmanager
def deferred() -> Iterator[Signals]:
    """SIGINT and SIGTERM inside the block raise KeyboardInterrupt and Terminated where `check` is called, and SIGINT at
    its end; a generator that is closed within it raises them to whoever calls its `close`. A second SIGINT raises at
    once, another SIGTERM seconds later ends the process (schedulers and launchers send the first one twice).
    """
    signals = Signals()
    if threading.current_thread() is threading.main_thread():
        signals.begin()
    try:
        yield signals
    except GeneratorExit:
        signals.check()
        raise
    finally:
        signals.end()
    if signals.interrupts:
        raise KeyboardInterrupt


def _raise(terminated: float, interrupts: float) -> None:
    if terminated:
        raise Terminated(128 + signal.SIGTERM)
    if interrupts:
        raise KeyboardInterrupt


def _tell(text: str) -> None:
    """Write to stderr from a signal handler: `print` fails where the signal came in the middle of another print."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
