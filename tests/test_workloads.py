"""What benchmarks measure: figures with limits that make sense. How fast anything is stands in no test."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from matrixlib import workloads
from matrixlib.workloads import Figure, Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return workloads.plan("cpu", 0.0, brief=True)


def test_calls_take_turns_after_one_that_warms_up() -> None:
    order: list[str] = []
    found = workloads.turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 0.0)
    assert order == ["a", "b"] * (1 + workloads.LEAST)
    assert set(found) == {"a", "b"}


def test_the_median_is_of_calls_without_the_first() -> None:
    waits = iter([0.05, 0.0, 0.0, 0.0])
    assert workloads.turns({"a": lambda: time.sleep(next(waits))}, 0.0)["a"] < 0.04


def test_shares_are_of_the_better_side() -> None:
    assert Figure("rate", 50, "positions/s", 200).share == 0.25
    assert Figure("time", 4, "s", 1).share == 0.25
    assert Figure("free", 4, "s").share is None


@pytest.mark.parametrize("name", [name for name in workloads.WORKLOADS if name != "start"])
def test_every_workload_gives_figures_with_names_of_their_own(name: str, plan: Plan, reports: Path) -> None:
    figures = list(workloads.WORKLOADS[name](plan))
    assert figures
    assert len({figure.name for figure in figures}) == len(figures)
    for figure in figures:
        assert figure.value > 0
        assert figure.limit is None or (figure.limit > 0 and figure.of)


def test_an_update_has_as_many_rows_as_its_work_allows(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.UPDATE_FLOPS, "cpu", 5e8)
    update = workloads.Update(plan, "demo", {})
    assert update.flops is not None
    assert update.rows * update.flops <= 5e8 < 2 * update.rows * update.flops
    assert workloads.Update(plan, "demo", {}, rows=8).rows == 8


def test_the_device_must_be_there() -> None:
    with pytest.raises(ValueError, match="asked for"):
        workloads.plan("mps" if not workloads.runtimes.machine.facts().mps else "cuda")
