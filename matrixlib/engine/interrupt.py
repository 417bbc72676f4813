"""Ctrl-C that waits for the end of an update, so that what is saved is whole."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred() -> Iterator[None]:
    """SIGINT inside the block raises KeyboardInterrupt at its end; a second one does not wait.

    Only the main thread gets signals, so elsewhere nothing changes; nor where the process ignores SIGINT.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt
        print("finishing this update, then saving; interrupt again to stop at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt
