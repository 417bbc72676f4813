"""Waiting: threads sleep at barriers while others compute, and spin again afterwards; people's own choice is obeyed."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import matrixlib
from matrixlib.hardware import machine, openmp
from matrixlib.hardware.load import Clocks, Usage
from matrixlib.hardware.machine import usable_processors
from matrixlib.hardware.turns import short_turns
from matrixlib.runs import run as runs
from matrixlib.runs.rate_test import rate_test
from matrixlib.tasks.chess.board.session import Session

GNU = torch.get_num_threads() > 0 and openmp.libgomp() is not None  # torch has to be loaded
needs_two = pytest.mark.skipif(
    len(usable_processors()) < 2, reason="with one processor the library always waits briefly"
)
needs_gnu = pytest.mark.skipif(not GNU, reason="torch's OpenMP library here is not GNU's")


def sleeping() -> bool:
    return {"sleeping team", "short turns"} <= {thread.name for thread in threading.enumerate()}


def until(wanted: bool) -> bool:
    """Whether it came to be within ten seconds."""
    end = time.monotonic() + 10
    while sleeping() is not wanted and time.monotonic() < end:
        time.sleep(0.01)
    return sleeping() is wanted


@needs_gnu
def test_a_team_sleeps_while_others_compute_and_goes_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = 1.0, 0.0

    def between(*_: object) -> Usage:
        return Usage(0.01, 2, own, others, 0.0, 0.0, 0, None)

    for name in openmp.BY_PEOPLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Usage, "between", between)
    threads = threading.active_count()
    with openmp.considerate(2):
        time.sleep(0.1)
        assert not sleeping()
        others = 1.0
        assert until(True)
        others = 0.0
        assert until(False)
        others = 1.0
        assert until(True)
        own = 0.1  # a training that rests while others compute
        assert until(False)
        own = 1.0
        assert until(True)
    assert threading.active_count() == threads


@needs_gnu
def test_a_thread_on_each_processor_keeps_turns_short() -> None:
    def woken(thread: threading.Thread) -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    mine = os.sched_getaffinity(0)
    with short_turns():
        threads = [thread for thread in threading.enumerate() if thread.name == "short turns"]
        end = time.monotonic() + 10
        while min(map(woken, threads)) < 100 and time.monotonic() < end:
            time.sleep(0.01)
        assert min(map(woken, threads)) >= 100
        kept = [os.sched_getaffinity(thread.native_id or 0) for thread in threads]
        assert sorted(processor for (processor,) in kept) == sorted(usable_processors())
        assert os.sched_getaffinity(0) == mine
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("variable", openmp.BY_PEOPLE)
def test_what_people_set_is_obeyed(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "PASSIVE")
    threads = threading.active_count()
    with openmp.considerate(2):
        assert threading.active_count() == threads


def test_one_thread_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in openmp.BY_PEOPLE:
        monkeypatch.delenv(name, raising=False)
    threads = threading.active_count()
    with openmp.considerate(1):
        assert threading.active_count() == threads


def test_a_look_reads_the_processors_once_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Clocks] = []
    real = Clocks.now

    def now(*args: bool, **options: bool) -> Clocks:
        looks.append(real(*args, **options))
        return looks[-1]

    def crowded(usage: Usage, threads: int) -> bool:
        if len(looks) > 3:
            done.set()
        return False

    def unneeded() -> float:
        raise AssertionError("is not looked at")

    done = threading.Event()
    shares: list[tuple[Clocks, Clocks]] = []
    between = Usage.between
    monkeypatch.setattr(openmp, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Clocks, "now", now)
    monkeypatch.setattr(Usage, "between", lambda *pair: shares.append(pair) or between(*pair))
    monkeypatch.setattr(Usage, "crowded", crowded)
    monkeypatch.setattr(machine, "throttled", unneeded)
    monkeypatch.setattr(machine, "slowdowns", unneeded)
    openmp._watch(Path("none"), 2, done)
    assert shares == list(pairwise(looks))


def test_of_several_libraries_torchs_own_is_taken(tmp_path: Path) -> None:
    """numpy's neighbours bring one, too, which comes first by name; one that is alone is torch's wherever it lies."""
    folder = Path(torch.__file__).resolve().parent
    other, own = Path("/a/scipy.libs/libgomp-1.so"), folder / "lib" / "libgomp.so.1"
    for paths, library in (([other, own], own), ([other], other), ([other, Path("/b/libgomp.so.1")], None), ([], None)):
        lines = [f"7f00-7f01 r-xp 00000000 00:2c 1 {path}\n" for path in paths]
        (tmp_path / "maps").write_text("7f00-7f01 rw-p 00000000 00:00 0\n" + "".join(2 * lines))
        assert openmp.libgomp(tmp_path / "maps") == library


def test_a_team_that_cannot_be_made_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(*_: object) -> None:
        raise OSError("no more threads")

    def use() -> None:
        with openmp.sleeping_team(Path("none")):
            pass

    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(GOMP_parallel=parallel, free=None))
    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(5)
    assert not user.is_alive()
    assert len(errors) == 1


@needs_gnu
@needs_two
def test_with_a_sleeping_team_the_library_waits_briefly() -> None:
    """Seen in the processor time of a thread that waits for work: some milliseconds a time, and next to none."""
    code = (
        "import time, torch\n"
        "from matrixlib.hardware import openmp\n"
        "torch.set_num_threads(2)\n"
        "x = torch.ones(1 << 20)\n"
        "def spent():\n"
        "    x.add_(1)\n"
        "    began = time.process_time()\n"
        "    for _ in range(20):\n"
        "        x.add_(1)\n"
        "        time.sleep(0.01)\n"
        "    return time.process_time() - began\n"
        "active = spent()\n"
        "with openmp.sleeping_team(openmp.libgomp()):\n"
        "    asleep = spent()\n"
        "print(active, asleep, spent())\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (*openmp.BY_PEOPLE, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    active, asleep, again = map(float, done.stdout.split())
    assert asleep < active / 2
    assert asleep < again / 2


def test_everything_that_computes_with_several_threads_is_considerate(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[int] = []
    for name in openmp.BY_PEOPLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "libgomp", lambda: Path("libgomp.so"))
    monkeypatch.setattr(openmp, "_watch", lambda path, threads, done: entered.append(threads))
    monkeypatch.setattr(openmp.machine, "usable_processors", lambda: [0, 1, 2])
    model = {"channels": 16, "blocks": 1, "ssl": []}
    options = {"runtime": {"threads": 2}, "model": model, "train": {"batch_size": 16}, "validation": {"limit": 64}}
    run = runs.open_run(device="cpu", run="considerate", steps=2, overrides=options)
    assert entered == [3], "trials before the run"
    for _ in run.train():
        pass
    assert entered == [3, 2]
    rate_test(run, 10)
    net = matrixlib.load(run.folder)
    runs.held_out_figures(net, 64)
    assert entered == [3, 2, 3, 3]
    Session(net, "network", side="black", simulations=1).think()
    assert entered == [3, 2, 3, 3, 3]
