"""Ctrl-C and SIGTERM at the end of a block."""

import signal
import sys
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest

from matrixlib.engine.signals import Signals, Terminated, deferred


def test_the_first_waits_for_the_end_of_the_block(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []
    # as where the signal comes in the middle of a print: "reentrant call inside <_io.BufferedWriter>"
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr("builtins.print", None)

    def work() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]
    assert "interrupt again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_raised_where_the_block_asks() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred() as signals:
            signals.check()
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
            signals.check()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_the_second_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    done: list[str] = []

    def work() -> None:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == []
    assert signal.getsignal(signal.SIGINT) is before


def test_quiet_without_signals_in_threads_and_where_ignored() -> None:
    with deferred():
        pass
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with deferred():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def suspended(block: AbstractContextManager[object]) -> Generator[None]:
    """A generator that stands still within the block."""

    def steps() -> Generator[None]:
        with block:
            yield

    generator = steps()
    next(generator)
    return generator


def test_an_interrupt_before_a_generator_is_closed_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    generator = suspended(deferred())
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generator.close()
    assert signal.getsignal(signal.SIGINT) is before
    suspended(deferred()).close()  # without one nothing is raised
    generator = suspended(deferred())
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Terminated):
        generator.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_generators_closed_in_any_order_leave_no_handler(order: tuple[int, ...]) -> None:
    before = signal.getsignal(signal.SIGINT)
    generators = [suspended(deferred()) for _ in order]
    for number in order[:2]:
        generators[number].close()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generators[order[2]].close()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_came_within_the_block_stays() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with deferred():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_comes_while_ranks_agree_is_heard_by_all_the_next_time() -> None:
    signals = Signals()

    def total(told: dict[str, float]) -> dict[str, float]:
        signals.note(signal.SIGINT, None)  # this rank has said already that nothing came
        return told

    signals.agree(SimpleNamespace(total=total))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        signals.agree(SimpleNamespace(total=dict))  # type: ignore[arg-type]
