"""How busy the machine is: counters told apart, causes in words, a start that says so."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_run import TINY

from matrixlib.hardware import load, machine
from matrixlib.hardware.load import Clocks, Usage
from matrixlib.hardware.runtime import Runtime
from matrixlib.runs import autotune
from matrixlib.runs import run as runs

QUIET = Usage(30.0, 4, 3.9, 0.05, 0.0, 0.0, 0, 4.0)
CLOCKS = Clocks(wall=100.0, busy=50.0, own=20.0, stolen=1.0, throttled=2.0, hot=5)


def test_counters_never_go_back_and_the_own_time_is_part_of_the_busy() -> None:
    first = Clocks.now()
    sum(range(2_000_000))
    usage, second = Usage.since(first), Clocks.now(children=True)
    assert second.wall > first.wall
    assert second.own > first.own
    assert usage.own > 0.1
    assert 0 <= usage.others <= usage.cores + 1


def test_a_share_is_of_the_time_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Clocks(wall=110.0, busy=65.0, own=25.0, stolen=3.0, throttled=4.0, hot=7)
    monkeypatch.setattr(Clocks, "now", lambda children=False, **_: end)
    monkeypatch.setattr(machine, "usable_processors", lambda: [0, 1])
    monkeypatch.setattr(load, "load_average", lambda: 2.5)
    usage = Usage.since(CLOCKS)
    assert usage == Usage(10.0, 2, 0.5, 1.0, 0.1, 0.2, 2, 2.5)


@pytest.mark.parametrize(
    ("usage", "threads", "words"),
    [
        (QUIET, 4, "other processes use 0.1 of 4 processors, and nothing holds this one back "
         "(load 4.0, this process had 98% of the time of its 4 threads)"),
        (replace(QUIET, others=1.5, own=2.0), 4, "other processes use 1.5 of 4 processors "
         "(load 4.0, this process had 50% of the time of its 4 threads)"),
        (replace(QUIET, throttled=0.4, load=None), 0,
         "the container's quota held this process back for 40% of the time"),
        (replace(QUIET, hot=3), 0, "the processor clocked down 3 times because of its heat (load 4.0)"),
        (replace(QUIET, stolen=0.25), 0, "the host gave 25% of this machine's time to others (load 4.0)"),
    ],
)  # fmt: skip
def test_the_cause_that_can_be_seen_is_named(usage: Usage, threads: int, words: str) -> None:
    assert usage.words(threads) == words


@pytest.mark.parametrize(
    ("others", "threads", "crowded"), [(1.0, 4, True), (1.0, 2, False), (0.2, 4, False), (3.5, 1, True)]
)
def test_others_crowd_a_machine_whose_processors_are_wanted(others: float, threads: int, crowded: bool) -> None:
    assert replace(QUIET, others=others).crowded(threads) is crowded


def test_a_quota_and_heat_are_read_from_the_system(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "cpu.stat").write_text("usage_usec 5\nnr_throttled 3\nthrottled_usec 1500000\n")
    assert machine.throttled(group, tmp_path / "none") == 1.5
    assert machine.throttled(tmp_path / "none", tmp_path / "none") == 0.0
    for number in (0, 1):
        folder = tmp_path / f"cpu{number}" / "thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text("4\n")
    assert machine.slowdowns(tmp_path) == 8
    assert machine.slowdowns(tmp_path / "none") == 0


@pytest.mark.parametrize(("average", "others", "says"), [(0.1, 2.0, False), (3.0, 0.0, False), (3.0, 2.0, True)])
def test_the_start_says_when_the_machine_is_busy(
    average: float, others: float, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors are looked at only where the load says that somebody may have been busy."""
    monkeypatch.setattr(autotune, "load_average", lambda: average)
    monkeypatch.setattr(Usage, "since", lambda clocks, children: replace(QUIET, others=others))
    runtime = Runtime("cpu", "fp32", False, False, False, False, 4, 0, 2, 64, ())
    notes = autotune.start_notes(runtime, Clocks.now())
    assert notes == (
        ["warning: the machine is busy: other processes use 2.0 of 4 processors (load 4.0); "
         "updates will take longer than they could"] if says else []
    )  # fmt: skip


def test_our_own_children_are_nobody_else_as_a_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's workers, say, which live on. They computed for a whole second."""
    start, end = replace(CLOCKS, own=20.0), replace(CLOCKS, wall=101.0, busy=54.0)
    monkeypatch.setattr(autotune, "load_average", lambda: 3.0)
    monkeypatch.setattr(Clocks, "now", lambda children=False, **_: replace(end, own=24.0 if children else 20.0))
    runtime = Runtime("cpu", "fp32", False, False, False, False, 4, 0, 2, 64, ())
    assert autotune.start_notes(runtime, start) == []


def test_a_run_counts_its_children_from_the_start(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks: list[Clocks] = []
    monkeypatch.setattr(Clocks, "now", lambda children=False, **_: replace(CLOCKS, own=24.0 if children else 20.0))
    monkeypatch.setattr(autotune, "start_notes", lambda _, start: clocks.append(start) or [])
    runs.open_run(run="start", overrides=TINY).close()
    assert [start.own for start in clocks] == [24.0]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["2,1", "two", "0", "-1", "1.5"])
def test_a_number_of_threads_that_is_none_is_named(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(machine.ThreadsError, match=rf"{name} is '{text}'; set it to one whole number above 0"):
        machine.facts()


def test_a_child_that_has_ended_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def cpu_times(self) -> None:
            raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [Gone()])
    assert Clocks.now(children=True).own > 0
