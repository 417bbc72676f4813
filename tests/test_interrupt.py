"""Ctrl-C at the end of a block."""

from __future__ import annotations

import signal
import threading

import pytest

from matrixlib.engine import interrupt


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
