"""Waiting: threads sleep at barriers while others compute, and spin again afterwards; people's own choice is obeyed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from matrixlib.hardware import openmp
from matrixlib.hardware.load import Usage
from matrixlib.hardware.machine import usable_processors

GNU = torch.get_num_threads() > 0 and openmp.library() is not None  # torch has to be loaded
needs_two = pytest.mark.skipif(
    len(usable_processors()) < 2, reason="with one processor the library always waits briefly"
)
needs_gnu = pytest.mark.skipif(not GNU, reason="torch's OpenMP library here is not GNU's")


def sleeping() -> bool:
    return any(thread.name == "sleeping team" for thread in threading.enumerate())


def until(wanted: bool) -> bool:
    """Whether it came to be within ten seconds."""
    end = time.monotonic() + 10
    while sleeping() is not wanted and time.monotonic() < end:
        time.sleep(0.01)
    return sleeping() is wanted


@needs_gnu
def test_a_team_sleeps_while_others_compute_and_goes_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    others = 0.0

    def since(*_: object) -> Usage:
        return Usage(0.01, 2, 1.0, others, 0.0, 0.0, 0, None)

    for name in openmp.BY_PEOPLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(Usage, "since", since)
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
    assert threading.active_count() == threads


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
        "with openmp.sleeping_team(openmp.library()):\n"
        "    asleep = spent()\n"
        "print(active, asleep, spent())\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (*openmp.BY_PEOPLE, "OMP_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    active, asleep, again = map(float, done.stdout.split())
    assert asleep < active / 2
    assert asleep < again / 2
