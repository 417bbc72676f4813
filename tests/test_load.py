"""How busy the machine is: counters told apart, causes in words, a start that says so."""

from dataclasses import replace
from pathlib import Path

import pytest

from matrixlib.hardware import load, machine
from matrixlib.hardware.load import Clocks, Usage

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
