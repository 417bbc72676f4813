"""How a run stands, by its heartbeat: training, validating, stalled, gone, ended how."""

import os
import platform
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from matrixlib.files import write_json
from matrixlib.runs import report, watch

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def beat(folder: Path, age: float, phase: str = "training", now: datetime = NOW, **more: Any) -> None:
    """A heartbeat of a process that is there, so many seconds old."""
    record = {"time": (now - timedelta(seconds=age)).isoformat(), "host": platform.node(), "pid": os.getpid()}
    record |= {"phase": phase, "step": 1200, "steps": 20_000, "step_seconds": 0.16, "interval": 5.0}
    folder.mkdir(exist_ok=True)
    write_json(folder / "run.json", {"started": "2026-01-01T00:00:00Z"})
    write_json(folder / "heartbeat.json", record | more)


@pytest.fixture(autouse=True)
def began_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is older than the heartbeats of these tests."""
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)


@pytest.mark.parametrize(
    ("age", "more", "word", "text"),
    [
        (3, {}, "training", "training, update 1,200 of 20,000, 160 ms an update, about 50 min 8 s left"),
        (3, {"phase": "validation"}, "validating", "validating, update 1,200 of 20,000"),
        (720, {}, "stalled", "stalled for 12 min 0 s (training) after update 1,200 of 20,000"),
        (720, {"step_seconds": 90.0}, "training", "training, "),
        (720, {"interval": 600.0}, "training", "training, "),
        (720, {"phase": "evaluation"}, "evaluating", "evaluating, "),
        (3, {"pid": 2**22 + 1}, "gone", "died 3.0 s ago after update 1,200 of 20,000: killed"),
        (3, {"phase": "stopped"}, "stopped", "stopped after update 1,200 of 20,000; rerun the same command to resume"),
    ],
)
def test_a_heartbeat_says_how_a_run_stands(
    tmp_path: Path, age: float, more: dict[str, Any], word: str, text: str
) -> None:
    beat(tmp_path / "run", age, **more)
    standing = watch.run_status(tmp_path / "run", NOW)
    assert standing.word == word
    assert standing.text.startswith(text)


def test_another_process_with_the_number_of_one_that_is_gone_is_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat(tmp_path / "run", 3)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: NOW.timestamp() + 60)
    assert watch.run_status(tmp_path / "run", NOW).word == "gone"


@pytest.mark.parametrize(
    ("summary", "word", "text"),
    [
        ({"complete": True, "steps": 500}, "complete", "ended: 500 updates"),
        ({"complete": True, "steps": 5, "stopped_early": "x"}, "complete", "ended: 5 updates, stopped early: x"),
        ({"end": "halted", "steps": 7, "reason": "10 in a row"}, "halted", "halted after 7 updates: 10 in a row"),
        ({}, "begun", "has not made an update yet"),
    ],
)
def test_a_summary_says_how_it_ended(tmp_path: Path, summary: dict[str, Any], word: str, text: str) -> None:
    write_json(tmp_path / "summary.json", summary)
    assert watch.run_status(tmp_path) == watch.RunStatus(word, text)


def test_a_run_that_goes_on_is_not_what_its_old_summary_says(tmp_path: Path) -> None:
    beat(tmp_path / "run", 3)
    for seconds, word in ((60, "training"), (0, "halted")):
        when = (NOW - timedelta(seconds=seconds)).isoformat()
        write_json(tmp_path / "run" / "summary.json", {"end": "halted", "steps": 7, "ended": when})
        assert watch.run_status(tmp_path / "run", NOW).word == word


def test_index_and_the_command_say_it(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime.now(UTC)
    beat(reports / "quiet", 720, now=now)
    beat(reports / "busy", 3, now=now)
    (reports / "broken").mkdir()
    (reports / "broken" / "heartbeat.json").write_text("{")
    assert watch.main(["broken"]) == watch.main([""]) == 2
    (reports / "broken" / "run.json").write_text("{")
    assert watch.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == "quiet" and "stalled for 12 min" in line for line in lines)
    assert any(line.split()[0] == "busy" and "training, update 1,200" in line for line in lines)
    assert watch.main(["busy", "broken"]) == 0
    assert "has not made an update yet" in capsys.readouterr().out
    assert watch.main(["absent"]) == 2
    page = report.write_index(reports).read_text(encoding="utf-8")
    assert '<span class="fail">stalled</span>' in page
    assert '<span class="open">training</span>' in page
