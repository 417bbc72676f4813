"""Records of benchmarks: kept for each machine, compared with the last time, shown."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from matrixlib.bench import report as bench
from matrixlib.hardware import machine
from matrixlib.hardware.benchmark import Figure, Plan, make_plan
from matrixlib.hardware.machine import DeviceFacts, Gpu


def record(*figures: Figure, started: str = "2026-01-02T00:00:00Z", brief: bool = False) -> dict[str, Any]:
    return {
        "machine": "box",
        "started": started,
        "brief": brief,
        "load": 0.0,
        "versions": {"torch": "2"},
        "figures": {"updates": [vars(figure) for figure in figures]},
    }


def keep(entry: dict[str, Any]) -> None:
    path = bench.folder("box") / f"{entry['started']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entry))


def test_a_rate_that_fell_and_a_time_that_grew_are_named_and_nothing_else(reports: Path) -> None:
    keep(
        record(
            Figure("a", 100, "positions/s"),
            Figure("b", 2.0, "s"),
            Figure("c", 100, "positions/s"),
            started="2026-01-01T00:00:00Z",
        )
    )
    slower, words = bench.regressions(
        record(Figure("a", 89, "positions/s"), Figure("b", 2.3, "s"), Figure("c", 91, "positions/s"))
    )
    assert [line.split(" takes")[0] for line in slower] == ["updates: a", "updates: b"]
    assert "takes 12% longer (89 -> " not in slower[0], "from the old figure to the new one"
    assert "(100 -> 89 positions/s)" in slower[0]
    assert all(line in words for line in slower)
    faster = record(Figure("a", 200, "positions/s"), Figure("b", 1.0, "s"))
    assert bench.regressions(faster) == ([], "nothing over 10% slower than on 2026-01-01T00:00:00Z")


def test_figures_that_are_new_or_have_another_unit_are_not_compared_and_named(reports: Path) -> None:
    keep(record(Figure("a", 100, "positions/s"), Figure("b", 100, "positions/s"), started="2026-01-01T00:00:00Z"))
    now = record(Figure("new", 1, "s"), Figure("a", 900, "s"), Figure("b", 100, "positions/s"))
    slower, words = bench.regressions(now)
    assert not slower
    assert words.endswith("not compared, as no older record has them: updates (new), updates (a)")


def test_the_last_record_is_of_this_machine_and_made_in_the_same_way(reports: Path) -> None:
    now = record(Figure("a", 1, "s"), started="2026-01-05T00:00:00Z")
    assert bench.last(now) == {}
    assert bench.regressions(now) == ([], "first record of this machine: nothing to compare with")
    keep(record(Figure("a", 2, "s"), started="2026-01-01T00:00:00Z"))
    keep(record(Figure("a", 3, "s"), started="2026-01-02T00:00:00Z"))
    keep(record(Figure("a", 4, "s"), started="2026-01-03T00:00:00Z", brief=True))
    keep(record(Figure("a", 5, "s"), started="2026-01-06T00:00:00Z"))
    keep(now)
    assert bench.last(now) == {("updates", "a", "s"): ("2026-01-02T00:00:00Z", Figure("a", 3, "s"))}
    assert bench.regressions(now) == ([], "nothing over 10% slower than on 2026-01-02T00:00:00Z")


def test_a_record_of_a_few_workloads_hides_no_regression_of_the_others(reports: Path) -> None:
    def day(number: int, **seconds: float) -> dict[str, Any]:
        figures = {name: [vars(Figure("a", value, "s"))] for name, value in seconds.items()}
        return record(started=f"2026-01-0{number}T00:00:00Z") | {"figures": figures}

    keep(day(1, updates=1.0, loader=1.0))
    keep(day(2, loader=1.0))
    slower, words = bench.regressions(day(3, updates=2.0, loader=1.0, search=1.0))
    assert slower == ["updates: a takes 100% longer (1 -> 2 s)"]
    assert words.splitlines() == [
        "slower than on 2026-01-01T00:00:00Z and 2026-01-02T00:00:00Z:",
        "  updates: a takes 100% longer (1 -> 2 s)",
        "not compared, as no older record has them: search (a)",
    ]


def test_limits_and_shares_stand_beside_the_figures() -> None:
    entry = record(Figure("rate", 50, "positions/s", 200, "copying"), Figure("time", 4.0, "s", 1.0, "the disk"))
    assert bench.table(entry).loc["updates", "rate"].tolist() == [50, "positions/s", 200, 0.25, "copying"]
    assert bench.text(entry).loc["updates", "time"].tolist() == ["4 s", "1", "25%", "the disk"]


def test_machines_are_named_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA H200", (9, 0), True, 141 * 10**9)
    monkeypatch.setattr(machine, "facts", lambda ranks=1: DeviceFacts(cores=16, gpu=gpu))
    assert bench.machine_name("cuda") == "nvidia-h200"
    assert bench.machine_name("cpu").endswith("-16-cores")


def test_a_record_is_kept_and_an_unknown_benchmark_is_refused(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "workloads", lambda: {"updates": lambda plan: iter([Figure("a", 1.0, "s")])})
    plan = make_plan("cpu", 0.0, brief=True)
    with pytest.raises(ValueError, match="unknown benchmark nonsense; there are updates"):
        bench.measure(plan, ["nonsense"])
    with pytest.raises(ValueError, match="unknown benchmark 1; there are"):
        bench.measure(plan, [1])
    entry = bench.measure(plan)
    (path,) = bench.folder(entry["machine"]).glob("*.json")
    assert json.loads(path.read_text())["figures"]["updates"][0]["value"] == 1.0
    assert entry["brief"]


def test_each_workload_starts_with_nothing_compiled(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measures(plan: Plan) -> Iterator[Figure]:
        order.append("measured")
        yield Figure("a", 1.0, "s")

    monkeypatch.setattr(bench, "workloads", lambda: {"updates": measures, "inference": measures})
    monkeypatch.setattr(torch.compiler, "reset", lambda: order.append("reset"))
    plan = make_plan("cpu", 0.0, brief=True)
    bench.measure(replace(plan, compile=True))
    assert order == ["measured", "reset"] * 2
    bench.measure(plan)
    assert order[4:] == ["measured"] * 2, "the compiler is not even imported"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no room\nat all"), OSError("no room\nat all"), subprocess.CalledProcessError(1, ["no room"])],
)
def test_what_was_measured_before_a_failure_is_kept(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fails(plan: Plan) -> Iterator[Figure]:
        raise error

    monkeypatch.setattr(
        bench, "workloads", lambda: {"updates": lambda plan: iter([Figure("a", 1.0, "s")]), "start": fails}
    )
    assert bench.main(["--device", "cpu", "--seconds", "0"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{type(error).__name__}: ")
    assert "no room" in line
    (path,) = (reports / "bench").glob("*/*.json")
    assert list(json.loads(path.read_text())["figures"]) == ["updates"]


def test_the_command_line_fails_for_a_regression_only_when_asked(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(bench, "workloads", lambda: {"updates": lambda plan: iter([Figure("a", next(seconds), "s")])})
    arguments = ["--device", "cpu"]
    plan = make_plan("cpu", 0.0, brief=True)
    monkeypatch.setattr(bench, "make_plan", lambda *options: plan)
    assert bench.main(arguments) == 0
    before = {("updates", "a", "s"): ("2026-01-01T00:00:00Z", Figure("a", 1.0, "s"))}
    monkeypatch.setattr(bench, "last", lambda now: before)
    assert bench.main(arguments) == 0
    assert "takes 100% longer" in capsys.readouterr().out
    assert bench.main([*arguments, "--fail"]) == 1


def test_no_gpu_is_said_in_one_line(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if machine.facts().gpu:
        pytest.skip("this machine has CUDA")
    assert bench.main(["--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert "device 'cuda' was asked for, but" in error
    assert len(error.splitlines()) == 1
