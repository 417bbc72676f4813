"""Metrics log: standard JSON, torn lines, resume."""

import json
import math
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.engine import metrics
from matrixlib.engine.metrics import MetricsError, MetricsLog, read
from matrixlib.files import write_json


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not standard JSON")


def strict(text: str) -> object:
    """Parse as a standard JSON reader would: NaN and Infinity are refused."""
    return json.loads(text, parse_constant=_refuse)


def test_row_has_utc_time_step_and_micro_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "run" / "metrics.jsonl") as log:
        log.write({"step": 3, "losses": {"policy": 2.5}})
        log.write({"step": 4, "micro_step": 16})
    rows = read(log.path)
    assert [row["step"] for row in rows] == [3, 4]
    assert [row["micro_step"] for row in rows] == [None, 16]
    when = datetime.fromisoformat(rows[0]["time"])
    assert when.utcoffset() == timedelta(0)
    assert list(rows[0]) == ["time", "step", "micro_step", "losses"]


def test_line_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write({"step": 1})
    assert len(read(log.path)) == 1
    log.close()


def test_numbers_that_are_not_finite_are_standard_json_and_come_back(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write({"step": 1, "a": math.nan, "b": {"c": [math.inf, -math.inf]}, "d": np.float32("nan")})
    for line in log.path.read_text().splitlines():
        strict(line)
    row = read(log.path)[0]
    assert math.isnan(row["a"])
    assert math.isnan(row["d"])
    assert row["b"]["c"] == [math.inf, -math.inf]


def test_scalars_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write({"step": np.int64(1), "a": np.float32(0.5), "b": torch.tensor(2.0), "c": torch.tensor([3])})
    assert read(log.path)[0] | {"time": 0} == {"time": 0, "step": 1, "micro_step": None, "a": 0.5, "b": 2.0, "c": 3}


@pytest.mark.parametrize("bad", [torch.zeros(2), {1: 2}, {"x": object()}, np.zeros(0)])
def test_what_json_cannot_hold_is_named_and_nothing_is_written(tmp_path: Path, bad: object) -> None:
    log = MetricsLog(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match=r"row\.losses"):
        log.write({"step": 1, "losses": bad})
    log.close()
    assert log.path.read_text() == ""


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text().filter(lambda t: t not in ("nan", "inf", "-inf")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=4))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]]) -> None:
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    rows = [row | {"time": "t", "step": index, "micro_step": 0} for index, row in enumerate(rows)]
    with MetricsLog(path) as log:
        for row in rows:
            log.write(row)
    assert repr(sorted_keys(read(path))) == repr(sorted_keys(rows))  # repr: nan equals nan


def sorted_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(inner) for inner in value] if isinstance(value, list) else value


def write_steps(path: Path, steps: range) -> MetricsLog:
    log = MetricsLog(path)
    for step in steps:
        log.write({"step": step, "loss": step / 2})
    return log


def test_truncate_cuts_rows_beyond_the_step_and_goes_on(tmp_path: Path) -> None:
    log = write_steps(tmp_path / "m.jsonl", range(1, 11))
    assert log.truncate_to(6) == 4
    log.write({"step": 7, "loss": 0.0})
    log.close()
    assert [row["step"] for row in read(log.path)] == [1, 2, 3, 4, 5, 6, 7]
    assert list(tmp_path.iterdir()) == [log.path]


def test_truncate_of_nothing_changes_nothing(tmp_path: Path) -> None:
    log = write_steps(tmp_path / "m.jsonl", range(1, 4))
    before = log.path.read_bytes()
    assert log.truncate_to(3) == 0
    assert log.path.read_bytes() == before
    log.close()


@pytest.mark.parametrize("lost", [1, 5, 30])
def test_torn_last_line_is_left_out_and_cut_on_opening(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, range(1, 5)).close()
    path.write_bytes(path.read_bytes()[:-lost])
    assert [row["step"] for row in read(path)] == [1, 2, 3]
    with MetricsLog(path) as log:
        log.write({"step": 4, "loss": 1.0})
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4]


def test_a_file_that_is_one_long_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "x": "' + "y" * 200_000)
    MetricsLog(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1}', '{"step": "1"}', '{"step": true}'])
def test_damage_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(MetricsError, match="line 2"):
        read(path)


def test_crash_during_truncate_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_steps(tmp_path / "m.jsonl", range(1, 5))
    before = log.path.read_bytes()

    def crash(*_: object) -> None:
        raise OSError("crash")

    monkeypatch.setattr(os, "truncate", crash)
    with pytest.raises(OSError, match="crash"):
        log.truncate_to(2)
    assert log.path.read_bytes() == before


def test_write_json_is_standard_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan})
    write_json(path, {"a": math.inf, "text": "é"})
    assert strict(path.read_text(encoding="utf-8")) == {"a": "inf", "text": "é"}
    assert list(tmp_path.iterdir()) == [path]


def test_write_json_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match=r"summary\.json\.a"):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_module_loads_no_torch() -> None:
    code = f"import sys, {metrics.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tail", [1 << 20, 100, 101, 110, 125])
def test_rows_newer_than_one_are_read_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: int) -> None:
    """Wherever the tail begins, in the middle of a row's inner mapping, say; a torn last line is not there yet."""
    monkeypatch.setattr(metrics, "TAIL_BYTES", tail)
    path = tmp_path / "m.jsonl"
    rows = [{"step": step, "time": f"t{step}", "losses": {"policy": 1.0}} for step in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "ti')
    assert metrics.newer(path, ("t7", 7)) == rows[7:]
    assert metrics.newer(path, ("t8", 8)) == metrics.newer(tmp_path / "none", ("", 0)) == []
    if tail > 1000:
        assert metrics.newer(path, ("", 0)) == rows


def test_what_a_later_row_of_a_step_says_stands_over_the_earlier(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write({"step": 1, "loss": 1.0, "extra": {"a": 1}})
        log.write({"step": 1, "extra": {"b": 2}})
    (row,) = read(log.path)
    assert (row["loss"], row["extra"]) == (1.0, {"a": 1, "b": 2})
