"""Where the time goes: phases add up, the loader's lateness is told once and with its remedy, a trace is a trace."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from matrixlib.engine.stats import Stats
from matrixlib.engine.timing import STARVED_UPDATES, TRACED, Clock, Throughput, phase_seconds, traced

ROWS = [
    {"step": 1, "seconds": 0.010, "times": {"wait": 0.002, "forward": 0.003, "backward": 0.004}},
    {"step": 2, "seconds": 0.020, "times": {"wait": 0.001, "forward": 0.005, "backward": 0.010, "validation": 0.5}},
    {"step": 3, "seconds": 0.030},  # of a run from before there were phases
]


def test_a_clock_adds_up_and_forgets() -> None:
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("forward"):
            time.sleep(0.01)
    with clock.phase("wait"):
        pass
    with pytest.raises(ValueError, match="x"), clock.phase("backward"):
        raise ValueError("x")  # what fails is not counted
    taken = clock.take()
    assert list(taken) == ["wait", "forward"]
    assert 0.02 <= taken["forward"] < 1
    assert clock.take() == {}


def test_totals_are_those_of_the_rows_and_the_rest_is_named() -> None:
    found = phase_seconds(ROWS)
    assert {name: found[name].dropna().tolist() for name in found} == {
        "wait": [0.002, 0.001],
        "forward": [0.003, 0.005],
        "backward": [0.004, 0.010],
        "validation": [0.5],
        "other": pytest.approx([0.001, 0.004, 0.030]),
    }


@pytest.mark.parametrize(
    ("times", "phases"),
    [
        (
            {"wait": 0.02, "forward": 0.03, "backward": 0.05, "read": 0.07},
            {"wait": 0.02, "forward": 0.03, "backward": 0.05, "read": 0.0, "other": 0.01},
        ),
        ({"wait": 0.02, "forward": 0.03, "read": 0.09}, {"wait": 0.02, "forward": 0.03, "read": 0.06, "other": 0}),
        ({"wait": 0.08, "optimiser": 0.12, "read": 0.0}, {"wait": 0.044, "optimiser": 0.066, "read": 0, "other": 0}),
    ],
    ids=["the wait for the device", "more than that", "the update before"],
)
def test_what_a_gpu_does_meanwhile_is_not_counted_twice(times: dict[str, float], phases: dict[str, float]) -> None:
    """On a GPU `read` is the host's wait for phases that are measured there."""
    found = phase_seconds([{"step": 1, "seconds": 0.11, "times": {**times, "validation": 3.0}}]).sum().to_dict()
    assert found.pop("validation") == 3.0
    assert found == pytest.approx(phases)
    sums = {name: 4 * seconds for name, seconds in times.items()}
    rows = [{"step": 4, "seconds": 0.11, "updates": 4, "times": sums}]  # of a long run
    assert phase_seconds(rows).sum().to_dict() == pytest.approx({name: 4 * value for name, value in phases.items()})


def test_starvation_is_told_with_what_to_do() -> None:
    late, fine = Throughput(2, 4), Throughput(2, 4)
    messages = [late.add(8, 1.0, 0.4)[1] for _ in range(3 * STARVED_UPDATES)]
    assert "took 40% of the last 100 updates; raise data.workers (now 2)" in messages[-1]
    assert not any(messages[:STARVED_UPDATES])
    first = [fine.add(8, 11.0, 10.0)[1] for _ in range(5)]  # with prefetching the first updates always wait
    assert not any(first + [fine.add(8, 1.0, 0.0)[1] for _ in range(3 * STARVED_UPDATES)])


def test_the_rate_is_that_of_the_last_updates() -> None:
    pace = Throughput(0, 2)
    assert [pace.add(rows, 1.0, 0.0)[0] for rows in (10, 30)] == [10, 20]
    assert [pace.add(30, 1.0, 0.0)[0] for _ in range(20)][-1] == 30


@pytest.mark.parametrize(("after", "traced_updates"), [(2, TRACED), (6, 2), (0, 0)])
def test_a_trace_holds_the_updates_that_were_asked_for(tmp_path: Path, after: int, traced_updates: int) -> None:
    def updates() -> Iterator[Stats]:
        for step in range(1, 9):
            torch.ones(step, 100) @ torch.ones(100, 3)
            yield Stats(step, 1.0, 1.0)

    path = tmp_path / "trace.json"
    assert [stats.step for stats in traced(updates(), after, path)] == list(range(1, 9))
    assert path.exists() == bool(after)
    events = json.loads(path.read_text())["traceEvents"] if after else []
    assert sum(event.get("name") == "aten::matmul" for event in events) == traced_updates
    stopped = traced(updates(), after, path)
    for stats in stopped:
        if stats.step == 3:
            break
    stopped.close()  # an interrupted training leaves no profiler running
    assert not torch.autograd.profiler._is_profiler_enabled
