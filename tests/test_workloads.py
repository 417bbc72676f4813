"""What benchmarks measure: figures with limits that make sense. How fast anything is stands in no test."""

import subprocess
import sys

import psutil
import pytest

from matrixlib.bench import workloads
from matrixlib.hardware import machine
from matrixlib.hardware.benchmark import Figure, Plan, make_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan("cpu", 0.0, brief=True)


def test_shares_are_of_the_better_side() -> None:
    assert Figure("rate", 50, "positions/s", 200).share == 0.25
    assert Figure("time", 4, "s", 1).share == 0.25
    assert Figure("free", 4, "s").share is None


def test_tasks_add_to_the_general_workloads() -> None:
    """What each of them gives is replayed in bench.ipynb."""
    names = list(workloads.workloads())
    assert names[:3] == ["updates", "options", "scaling"]
    assert {"inference", "targets", "search"} <= set(names)
    assert set(workloads.ON_GPU) <= set(names)


def test_the_loader_is_measured_for_the_probe() -> None:
    assert workloads.loader_rate(64)["rows_per_second"] > 0


def test_an_update_has_as_many_rows_as_its_work_allows(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.UPDATE_FLOPS, "cpu", 5e8)
    update = workloads.Update(plan, "demo", {})
    assert update.flops is not None
    assert update.rows * update.flops <= 5e8 < 2 * update.rows * update.flops
    assert workloads.Update(plan, "demo", {}, rows=8).rows == 8


def test_the_device_must_be_there() -> None:
    with pytest.raises(ValueError, match="asked for"):
        make_plan("cuda" if machine.facts().mps else "mps")


def test_what_a_process_started_in_a_session_of_its_own_ends_with_it() -> None:
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True, "
    child += "stdin=subprocess.PIPE); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        grandchild = int(process.stdout.readline())
        assert psutil.pid_exists(grandchild)
        workloads.end(process)
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_a_notebook_that_fails_at_once_is_named_whatever_is_left_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def fails(words: list[str], **options: object) -> subprocess.Popen[bytes]:
        process = popen([sys.executable, "-c", "raise SystemExit(1)"], start_new_session=True)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(RuntimeError, match="made no update"):
        workloads.first_update("cpu")
