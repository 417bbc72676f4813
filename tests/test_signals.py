"""Ctrl-C and SIGTERM at the end of a block."""

import signal
import sys
import threading
from collections.abc import Generator, Iterator
from types import SimpleNamespace

import pytest

from matrixlib.engine.signals import Signals, Terminated, deferred


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """After each test the handler is that from before it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def interrupted(times: int, check: bool = False) -> list[str]:
    """What a block with so many interrupts has done when it ends with one."""
    done: list[str] = []

    def work() -> None:
        with deferred() as signals:
            signals.check()
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            done.append("whole")
            if check:
                signals.check()
            done.append("end")

    with pytest.raises(KeyboardInterrupt):
        work()
    return done


def test_the_first_waits_for_the_end_of_the_block_and_the_second_does_not(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where the signal comes in the middle of a print: "reentrant call inside <_io.BufferedWriter>"
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr("builtins.print", None)
    assert interrupted(1) == ["whole", "end"]
    assert "interrupt again" in capfd.readouterr().err
    assert interrupted(1, check=True) == ["whole"]
    assert interrupted(2) == []


def test_quiet_without_signals_in_threads_and_where_ignored() -> None:
    done: list[str] = []

    def work() -> None:
        with deferred():
            done.append("whole")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred():
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN
    with deferred():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL, "one that came within the block stays"
    assert done == ["whole"] * 2


def suspended() -> Generator[None]:
    """A generator that stands still within the block."""

    def steps() -> Generator[None]:
        with deferred():
            yield

    generator = steps()
    next(generator)
    return generator


def test_a_signal_before_a_generator_is_closed_is_not_lost() -> None:
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)):
        generator = suspended()
        signal.raise_signal(number)
        with pytest.raises(error):
            generator.close()
    suspended().close()  # without one nothing is raised


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_generators_closed_in_any_order_leave_no_handler(order: tuple[int, ...]) -> None:
    generators = [suspended() for _ in order]
    for number in order[:2]:
        generators[number].close()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        generators[order[2]].close()


def test_what_comes_while_ranks_agree_is_heard_by_all_the_next_time() -> None:
    signals = Signals()

    def total(told: dict[str, float]) -> dict[str, float]:
        signals.note(signal.SIGINT, None)  # this rank has said already that nothing came
        return told

    signals.agree(SimpleNamespace(total=total))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        signals.agree(SimpleNamespace(total=dict))  # type: ignore[arg-type]
    late = Signals()
    with pytest.raises(KeyboardInterrupt):
        late.agree(SimpleNamespace(total=lambda told: told | {"interrupts": 1}))  # type: ignore[arg-type]
    late.note(
        signal.SIGINT, None
    )  # the launcher has told this rank last: no second interrupt, which would end its save
