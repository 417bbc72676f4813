"""Ctrl-C and SIGTERM, deferred to the end of an update so that what is saved is consistent."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from matrixlib.engine.distributed import Ranks

SAME_SIGNAL_SECONDS = 3.0  # seconds within which a second SIGTERM counts as the first


class Terminated(SystemExit):
    """SIGTERM arrived (a scheduler wants the machine); exit status 143."""


class Signals:
    """Signals of a `deferred` block. interrupts: SIGINTs. terminated: time of SIGTERM. agreed: all ranks stop."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.terminated: float | None = None
        self.agreed = False
        self._before: dict[int, Any] = {}  # previous handlers
        self._ended = False

    def check(self) -> None:
        """Raise Terminated or KeyboardInterrupt if one arrived."""
        _raise(self.terminated is not None, self.interrupts)

    def agree(self, ranks: Ranks) -> None:
        """As `check`, on all ranks if one got a signal; later ones count next time."""
        told = ranks.total({"interrupts": self.interrupts, "terminated": int(self.terminated is not None)})
        self.agreed = any(told.values())
        _raise(told["terminated"], told["interrupts"])

    def note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
            _tell("finishing this update, then saving; interrupt again to stop at once")
        elif self.terminated is None:
            self.terminated = time.monotonic()
            _tell("SIGTERM: finishing this update, then saving")
        elif time.monotonic() - self.terminated > SAME_SIGNAL_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    def begin(self) -> None:
        """Install the handlers, unless SIGINT is ignored; SIGTERM only over the default."""
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self.note)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self.note)

    def end(self) -> None:
        """Restore the previous handlers, unless replaced since; never one of a finished block."""
        self._ended = True
        for number, before in self._before.items():
            while isinstance(owner := getattr(before, "__self__", None), Signals) and owner._ended:
                before = owner._before[number]
            if signal.getsignal(number) == self.note:
                signal.signal(number, before)


@contextlib.contextmanager
def deferred() -> Iterator[Signals]:
    """Context in which SIGINT and SIGTERM raise KeyboardInterrupt and Terminated at `check` (SIGINT also at the end);
    closing a generator inside raises them from `close`. A second SIGINT raises at once; another SIGTERM after
    `SAME_SIGNAL_SECONDS` seconds ends the process (schedulers and launchers send the first one twice)."""
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
    """Write to stderr from a signal handler: `print` fails if the signal interrupted another print."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
