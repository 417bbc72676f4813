"""The benchmark notebook: what is timed, records beside older ones; the command that prints what notebooks show."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cells import definitions, run_notebook

from matrixlib.bench import __main__ as bench
from matrixlib.data.loader import Loader
from matrixlib.hardware import machine
from matrixlib.hardware.machine import DeviceFacts, Gpu
from matrixlib.hardware.runtime import resolve
from matrixlib.tasks import load_config

NOTEBOOK = definitions("bench")


def record(day: int, brief: bool = False, **workloads: dict[str, tuple[float, str]]) -> dict[str, Any]:
    """A record of workloads, each with its figures: (value, unit) by name."""
    figures = {
        workload: [{"name": name, "value": value, "unit": unit} for name, (value, unit) in part.items()]
        for workload, part in workloads.items()
    }
    return {"started": f"2026-01-0{day}T00:00:00Z", "brief": brief, "figures": figures}


def test_a_rate_that_fell_and_a_time_that_grew_are_named_and_nothing_else() -> None:
    """Beside the newest older figure measured in the same way, whatever else its record has."""
    old = [
        record(1, updates={"a": (100, "positions/s"), "b": (2.0, "s"), "c": (100, "positions/s"), "d": (1, "s")}),
        record(2, loader={"a": (1.0, "s")}),
        record(2, True, updates={"a": (1000, "positions/s")}),
        record(9, updates={"a": (1000, "positions/s")}),
    ]
    new = {"a": (89, "positions/s"), "b": (2.3, "s"), "c": (91, "positions/s"), "d": (9, "positions/s")}
    now = record(3, updates=new, loader={"a": (1.0, "s")})
    slower, words = NOTEBOOK["regressions"](now, [*old, now])
    assert [line.split(" takes")[0] for line in slower] == ["updates: a", "updates: b"]
    assert "(100 -> 89 positions/s)" in slower[0]
    assert "slower than on 2026-01-01T00:00:00Z and 2026-01-02T00:00:00Z" in words
    assert words.endswith("not compared, as no older record has them: updates (d)")
    assert NOTEBOOK["regressions"](now, [now]) == ([], "first record of this machine: nothing to compare with")


def test_an_update_has_as_many_rows_as_its_work_allows_on_a_machine_with_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(NOTEBOOK["UPDATE_FLOPS"], "cpu", 5e8)
    config = load_config("demo", {"runtime": {"device": "cpu"}})
    chosen = resolve(config.runtime, config.train, config.data)
    update = NOTEBOOK["Update"](chosen, "demo", {})
    assert update.flops is not None
    assert update.rows * update.flops <= 5e8 < 2 * update.rows * update.flops
    assert NOTEBOOK["Update"](chosen, "demo", {}, rows=8).rows == 8
    gpu = Gpu("NVIDIA H200", (9, 0), True, 141 * 10**9)
    monkeypatch.setattr(machine, "facts", lambda: DeviceFacts(cores=16, gpu=gpu))
    assert NOTEBOOK["machine_name"]("cuda") == "nvidia-h200"
    assert NOTEBOOK["machine_name"]("cpu").endswith("-16-cores")


def test_what_was_measured_before_a_failure_is_kept(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "records", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_notebook("bench", device="cpu", only=["updates", "loader"])
    (path,) = (reports / "bench").glob("*/*.json")
    assert list(pd.read_json(path, typ="series")["figures"]) == ["updates"]
    with pytest.raises(ValueError, match="unknown benchmark nonsense; there are updates"):
        run_notebook("bench", device="cpu", only=["nonsense"])


@pytest.mark.slow
def test_the_command_prints_what_the_notebook_shows(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu", "--only", "search", "--seconds", "0.01"]) == 0
    assert "trees, 8 leaves of each at once" in capsys.readouterr().out
    assert bench.main(["--only", "nonsense"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("ValueError: unknown benchmark nonsense")


@pytest.mark.soak
def test_the_command_searches_beside_lc0(
    reports: Path, shared: Path, lc0: str, capsys: pytest.CaptureFixture[str]
) -> None:
    network = str(shared / "maia" / "maia-1900.pb.gz")
    assert bench.main(["--device", "cpu", "--only", "search", "--seconds", "0.01", "--network", network]) == 0
    out = capsys.readouterr().out
    assert all(f"maia-1900.pb.gz, {engine}" in out for engine in ("matrixlib-uci", "Lc0 eigen", "Lc0 blas"))
