"""The history of a long run: the right means of each interval after any cut or reopening; no log is read whole."""

import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.engine import history, rows
from matrixlib.engine.metrics import MetricsLog
from matrixlib.engine.timing import table, totals

FEW = 8


@pytest.fixture(autouse=True, scope="module")
def few_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "ROWS", FEW)
        yield


def row(step: int, **more: Any) -> dict[str, Any]:
    losses = {"policy": 8.0 / step, **({"value": float(step)} if step % 3 == 0 else {})}
    times = {"wait": 0.001 * step, **({"validation": 0.5} if step % 4 == 0 else {})}
    return {"step": step, "loss": 8.0 / step, "losses": losses, "seconds": 0.1, "times": times, "skipped": step} | more


def write(path: Path, first: int, last: int) -> None:
    with MetricsLog(path) as log:
        for step in range(first, last + 1):
            log.write(row(step))


def whole(path: Path) -> None:
    """The history stands for every row of the log, with its means."""
    log, intervals = rows.read(path), history.read(path)
    assert sum(map(history.updates, intervals)) == len(log)
    assert len(intervals) <= FEW
    start = 0
    for interval in intervals:
        part = log[start : start + history.updates(interval)]
        start += len(part)
        assert interval["step"] == part[-1]["step"]
        assert interval["skipped"] == part[-1]["skipped"]
        assert interval["loss"] == pytest.approx(statistics.fmean(one["loss"] for one in part))
        values = [one["losses"]["value"] for one in part if "value" in one["losses"]]
        assert interval["losses"].get("value", math.nan) == pytest.approx(
            statistics.fmean(values) if values else math.nan, nan_ok=True
        )


def test_a_short_run_has_no_file_beside_its_log(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 1, FEW - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert history.read(tmp_path / "metrics.jsonl") == rows.read(tmp_path / "metrics.jsonl")


@settings(max_examples=40, deadline=None)
@given(stops=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=4))
def test_any_cuts_and_reopenings_leave_the_right_means(
    tmp_path_factory: pytest.TempPathFactory, stops: list[tuple[int, int]]
) -> None:
    path, step = tmp_path_factory.mktemp("log") / "metrics.jsonl", 0
    for more, back in stops:
        write(path, step + 1, step + more)
        whole(path)
        end, step = step + more, max(0, step + more - back)
        with MetricsLog(path) as log:
            assert log.truncate_to(step) == end - step
        whole(path)


def test_a_million_is_opened_cut_and_read_without_reading_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 1000)

    def refuse(file: Path) -> Iterator[Any]:
        assert file != path, "the log is read from its start"
        return iterate(file)

    iterate = rows.iterate
    monkeypatch.setattr(rows, "iterate", refuse)
    monkeypatch.setattr(rows, "BLOCK", 512)
    with MetricsLog(path) as log:
        assert log.truncate_to(990) == 10
        log.write(row(991))
    assert len(history.read(path)) <= FEW
    assert len(rows.after(path, 980)) == 11


@pytest.mark.parametrize("damage", ["missing", "torn", "garbage", "behind"])
def test_a_damaged_history_is_made_of_the_log_again(tmp_path: Path, damage: str) -> None:
    path, beside = tmp_path / "metrics.jsonl", tmp_path / history.NAME
    write(path, 1, 100)
    lines = beside.read_text().splitlines(keepends=True)
    match damage:
        case "missing":
            beside.unlink()
        case "torn":
            beside.write_text("".join(lines)[:-20])
        case "garbage":
            beside.write_text("".join([lines[0], "{broken\n", *lines[2:]]))
        case "behind":
            beside.write_text(lines[0])
    if damage != "torn":
        whole(path)
    if damage == "garbage":
        beside.unlink()  # what only a reader sees is left to it
    write(path, 101, 103)
    whole(path)


def test_an_interval_keeps_what_a_person_must_know() -> None:
    parts = [
        row(1, verdict="ok", messages=["first"], initial={"policy": 1.0}),
        row(2, verdict="skip", losses={"policy": math.nan}, loss=math.nan, messages=["a", "b"]),
        row(3, verdict="ok", validation={"kind": "full", "loss": 1.0}),
        row(4, verdict="ok", validation={"kind": "sample", "loss": 2.0}),
    ]
    merged = history.merge([history.merge(parts[:2]), history.merge(parts[2:])])
    assert merged["verdict"] == "skip"
    assert merged["validation"] == {"kind": "full", "loss": 1.0}
    assert merged["initial"] == {"policy": 1.0}
    assert history.not_finite(merged) == 1
    assert merged["loss"] == pytest.approx((8 + 8 / 3 + 2) / 3)
    assert history.messages([merged]) == [(1, "first"), (2, "a"), (2, "b")]
    warned = [row(step, messages=[f"warning {step}"]) for step in range(6, 30)]
    kept = history.messages([history.merge([row(5, messages=["rolled back to update 3"]), *warned])])
    assert kept[0] == (5, "rolled back to update 3"), "what was decided outlives warnings"
    assert kept[1:] == [(step, f"warning {step}") for step in range(15, 30)]


def test_times_of_intervals_add_up_to_those_of_updates() -> None:
    each = [row(step) for step in range(1, 65)]
    merged = [history.merge(each[:32]), history.merge(each[32:])]
    assert {name: spent.total for name, spent in totals(merged).items()} == pytest.approx(
        {name: spent.total for name, spent in totals(each).items()}
    )
    assert table(merged)[["count", "total s", "share"]].equals(table(each)[["count", "total s", "share"]])


def test_lines_of_any_length_are_read_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCK", 64)
    draw = random.Random(0)
    with MetricsLog(tmp_path / "m.jsonl") as log:
        for step in range(1, 7):
            log.write({"step": step, "text": "é" * draw.choice((0, 30, 64, 300))})
        assert rows.after(log.path, 0) == rows.read(log.path)
    path = tmp_path / "broken.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{broken\n{"step": 4}\n{"step": 5')
    assert rows.last(path) == {"step": 4}
    with pytest.raises(rows.MetricsError, match="line 3 is not JSON"):
        rows.after(path, 1)
