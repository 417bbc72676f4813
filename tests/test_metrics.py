"""Metrics log: standard JSON, torn lines, resume."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from matrixlib.engine import metrics
from matrixlib.engine.metrics import MetricsLog, read
from matrixlib.files import write_json


@pytest.fixture
def log(tmp_path: Path) -> Iterator[MetricsLog]:
    with closing(MetricsLog(tmp_path / "run" / "m.jsonl")) as opened:
        yield opened


def strict(text: str) -> object:
    """Parse as a standard JSON reader would: NaN and Infinity are refused."""
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not standard JSON"))


def test_row_has_utc_time_step_and_micro_step(log: MetricsLog) -> None:
    log.write({"step": 3, "losses": {"policy": 2.5}})
    log.write({"step": 4, "micro_step": 16})
    rows = read(log.path)  # on disk at once
    assert [(row["step"], row["micro_step"]) for row in rows] == [(3, None), (4, 16)]
    assert datetime.fromisoformat(rows[0]["time"]).utcoffset() == timedelta(0)
    assert list(rows[0]) == ["time", "step", "micro_step", "losses"]


def test_numbers_of_every_kind_are_standard_json_and_come_back(log: MetricsLog) -> None:
    log.write({"step": np.int64(1), "a": math.nan, "b": {"c": [math.inf, -math.inf]}, "d": np.float32("nan")})
    log.write({"step": 2, "a": np.float32(0.5), "b": torch.tensor(2.0), "c": torch.tensor([3])})
    for line in log.path.read_text().splitlines():
        strict(line)
    first, second = read(log.path)
    assert math.isnan(first["a"])
    assert math.isnan(first["d"])
    assert first["b"]["c"] == [math.inf, -math.inf]
    assert [second[name] for name in "abc"] == [0.5, 2.0, 3]


@pytest.mark.parametrize("bad", [torch.zeros(2), {1: 2}, {"x": object()}, np.zeros(0)])
def test_what_json_cannot_hold_is_named_and_nothing_is_written(log: MetricsLog, bad: object) -> None:
    with pytest.raises(TypeError, match=r"row\.losses"):
        log.write({"step": 1, "losses": bad})
    assert log.path.read_text() == ""


def write_steps(log: MetricsLog, steps: range) -> None:
    for step in steps:
        log.write({"step": step, "loss": step / 2})


def test_truncate_cuts_rows_beyond_the_step_and_goes_on(log: MetricsLog, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(log, range(1, 11))
    before = log.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", lambda *_: (_ for _ in ()).throw(OSError("crash")))
        with pytest.raises(OSError, match="crash"):
            log.truncate_to(6)
    log.truncate_to(10)
    assert log.path.read_bytes() == before
    log.truncate_to(6)
    write_steps(log, range(7, 9))
    assert [row["step"] for row in read(log.path)] == list(range(1, 9))
    assert list(log.path.parent.iterdir()) == [log.path]


@pytest.mark.parametrize("torn", ['{"step": 4, "loss"', '{"x": "' + "y" * 200_000])
def test_torn_last_line_is_left_out_and_cut_on_opening(log: MetricsLog, torn: str) -> None:
    write_steps(log, range(1, 4))
    whole = log.path.read_text()
    log.path.write_text(whole + torn)
    assert [row["step"] for row in read(log.path)] == [1, 2, 3]
    MetricsLog(log.path).close()
    with closing(MetricsLog(log.path, writes=False)) as other:  # of another rank
        other.write({"step": 4})
        other.truncate_to(1)
    assert log.path.read_text() == whole


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 1}', '{"step": "1"}', '{"step": true}'])
def test_damage_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(ValueError, match="line 2"):
        read(path)


def test_write_json_is_standard_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan})
    write_json(path, {"a": math.inf, "text": "é"})
    with pytest.raises(TypeError, match=r"summary\.json\.a"):
        write_json(path, {"a": object()})
    assert strict(path.read_text(encoding="utf-8")) == {"a": "inf", "text": "é"}
    assert list(tmp_path.iterdir()) == [path]


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


def test_what_a_later_row_of_a_step_says_stands_over_the_earlier(log: MetricsLog) -> None:
    log.write({"step": 1, "loss": 1.0, "extra": {"a": 1}})
    log.write({"step": 1, "extra": {"b": 2}})
    (row,) = read(log.path)
    assert (row["loss"], row["extra"]) == (1.0, {"a": 1, "b": 2})
