"""Parts that are computed once each, errors and deaths that are told, and processes that do not stay behind."""

import itertools
import multiprocessing
import os
import signal
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from matrixlib.runs.fleet import FleetError, compute


def add(number: int, *shared: int) -> tuple[int, int]:
    """Stands in for a chunk of games: (sum, process)."""
    print(number)
    return number + sum(shared), os.getpid()


def hold(folder: Path, number: int) -> None:
    """Number 0 fails, the others leave a file and then wait."""
    if not number:
        raise ValueError("planted")
    (folder / str(os.getpid())).touch()
    time.sleep(600)


class Pickled:
    """Counts how often it is pickled."""

    count = 0

    def __reduce__(self) -> Any:
        Pickled.count += 1
        return int, (100,)


def test_processes_give_what_this_process_gives_and_are_gone_afterwards(tmp_path: Path) -> None:
    parts = {number: partial(add, number) for number in range(6)}
    here = {number: value for number, (value, _) in compute(parts.items(), (10, 100))}
    there = dict(compute(parts.items(), (10, Pickled()), workers=2, log=tmp_path / "log"))
    assert sorted((tmp_path / "log").read_text().split()) == list("012345")
    pids = {pid for _, pid in there.values()}
    assert {number: value for number, (value, _) in there.items()} == here == {n: n + 110 for n in range(6)}
    assert len(pids) == 2, "each goes on to the next part"
    assert Pickled.count == 1, "once for all parts and processes"
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="no forkserver here")
def test_processes_of_all_stages_come_from_one_server_that_has_torch() -> None:
    parts = [(number, partial(os.getppid)) for number in range(2)]
    found = [dict(compute(parts, workers=2)) for _ in range(2)]
    assert len({pid for stage in found for pid in stage.values()} - {os.getpid()}) == 1


def test_parts_are_taken_as_processes_are_free_and_none_after_the_results_that_were_wanted() -> None:
    numbers = itertools.count()
    with closing(compute(((number, partial(add, number)) for number in numbers), workers=2)) as results:
        next(results)
    assert next(numbers) == 2


def test_an_error_ends_what_is_running(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="planted"):
        list(compute([(number, partial(hold, tmp_path, number)) for number in (1, 0, 2, 3)], workers=2))
    assert time.monotonic() - began < 60
    assert not [path for path in tmp_path.iterdir() if psutil.pid_exists(int(path.name))]


@pytest.mark.parametrize("end", [partial(os._exit, 3), partial(signal.raise_signal, signal.SIGTERM)])
def test_a_killed_process_is_told_and_what_was_done_is_kept(end: Any) -> None:
    with pytest.raises(FleetError, match="a process was killed, perhaps for want of memory; what was done is kept"):
        list(compute([("done", partial(add, 1)), ("killed", end)], workers=2))


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetError, match=r"pip install 'matrixlib\[ray\]'"):
        next(compute([(0, print)], kind="ray"))
