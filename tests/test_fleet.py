"""Fleets: parts that are computed once each, errors and deaths that are told, and processes that do not stay behind."""

import os
import signal
import time
from collections.abc import Hashable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from matrixlib.runs.fleet import Here, gather
from matrixlib.runs.processes import FleetError, Lost, Processes


def add(number: int, *shared: int) -> tuple[int, int]:
    """Stands in for a chunk of games: (sum, process)."""
    return number + sum(shared), os.getpid()


def fail(number: int, folder: Path) -> None:
    """Number 0 fails, the others leave a file."""
    if not number:
        raise ValueError("planted")
    time.sleep(0.1)
    (folder / str(number)).touch()


def die(code: int) -> None:
    """By a signal where the number is negative."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def test_processes_give_what_this_process_gives_and_are_gone_afterwards() -> None:
    parts = {number: partial(add, number) for number in range(6)}
    here = {number: value for number, (value, _) in gather(Here(), parts, 10, 100)}
    with closing(Processes(2)) as fleet:
        there = dict(gather(fleet, parts, 10, 100))
        pids = {pid for _, pid in there.values()}
        assert len(pids) == 2, "each goes on to the next part"
    assert {number: value for number, (value, _) in there.items()} == here == {n: n + 110 for n in range(6)}
    assert not any(map(psutil.pid_exists, pids))


def test_an_error_does_not_wait_for_parts_that_have_not_begun(tmp_path: Path) -> None:
    parts = {number: partial(fail, number, tmp_path) for number in range(24)}
    with pytest.raises(ValueError, match="planted"), closing(Processes(2)) as fleet:
        list(gather(fleet, parts))
    assert len(list(tmp_path.iterdir())) < 12


def test_what_ends_a_process_is_told(tmp_path: Path) -> None:
    ends = {"killed by signal 9": -signal.SIGKILL, "ended with exit code 3": 3, "exit code 143": 143}
    with closing(Processes(3, tmp_path / "log")) as fleet:
        for text, code in ends.items():
            fleet.submit(text, partial(die, code))
        lost: dict[str, Any] = {}
        while len(lost) < 3:
            lost |= dict(fleet.collect())
    assert all(isinstance(lost[text], Lost) and text in lost[text].how for text in ends)
    assert [lost[text].interrupted for text in ends] == [False, False, True]


class Script:
    """A fleet whose parts end as somebody says: `ends` lists what each call of `collect` gives."""

    slots = 2

    def __init__(self, *ends: list[tuple[Hashable, Any]]) -> None:
        self.begun: list[Hashable] = []
        self.ends = list(ends)

    def share(self, value: Any) -> Any:
        return value

    def submit(self, key: Hashable, part: Any, *handles: Any) -> None:
        self.begun.append(key)

    def collect(self) -> list[tuple[Any, Any]]:
        return self.ends.pop(0)

    def close(self) -> None:
        pass


def test_each_result_counts_once_and_a_lost_part_is_an_error() -> None:
    parts: dict[Any, Any] = dict.fromkeys("abc", print)
    fleet = Script([("b", 1), ("b", 2)], [], [("x", 0), ("c", 3)], [("a", 4)])
    assert list(gather(fleet, parts)) == [("b", 1), ("c", 3), ("a", 4)]
    fleet = Script([("a", 1)], [("b", Lost("was killed by signal 9"))])
    results = gather(fleet, parts)
    assert next(results) == ("a", 1)
    with pytest.raises(FleetError, match="a process was killed by signal 9"):
        next(results)


def test_nothing_begins_after_the_results_that_were_wanted() -> None:
    fleet = Script([("a", 1)])
    with closing(gather(fleet, dict.fromkeys("abcd", print))) as results:
        assert next(results) == ("a", 1)
    assert fleet.begun == ["a", "b"]
