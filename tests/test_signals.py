"""Ctrl-C at the end of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager

import pytest

from matrixlib.engine import signals as interrupt


def test_the_first_waits_for_the_end_of_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []

    def work() -> None:
        with interrupt.deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]
    assert "interrupt again" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_raised_where_the_block_asks() -> None:
    done: list[str] = []

    def work() -> None:
        with interrupt.deferred() as found:
            found.check()
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
            found.check()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_the_second_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []

    def work() -> None:
        with interrupt.deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []
    assert signal.getsignal(signal.SIGINT) is before


def test_quiet_without_signals_in_threads_and_where_ignored() -> None:
    with interrupt.deferred():
        pass
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with interrupt.deferred():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def suspended(block: AbstractContextManager[object]) -> Generator[None]:
    """A generator that stands still within the block."""

    def steps() -> Generator[None]:
        with block:
            yield

    found = steps()
    next(found)
    return found


def test_an_interrupt_before_a_generator_is_closed_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    found = suspended(interrupt.deferred())
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        found.close()
    assert signal.getsignal(signal.SIGINT) is before
    suspended(interrupt.deferred()).close()  # without one nothing is raised
    found = suspended(interrupt.termination())
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(interrupt.Terminated):
        found.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_generators_closed_in_any_order_leave_no_handler(order: tuple[int, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    found = [suspended(interrupt.deferred()) for _ in order]
    for number in order[:2]:
        found[number].close()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        found[order[2]].close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_came_within_the_block_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupt.deferred():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
