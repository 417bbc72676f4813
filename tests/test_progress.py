"""Progress of long work: durations in words, where a panel or bar is shown, and what is left of a bar."""

import math
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrixlib import progress
from matrixlib.progress import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (84e-6, "84.0 µs"),
        (0.00084, "840 µs"),
        (0.0052, "5.2 ms"),
        (12.34, "12.3 s"),
        (59.96, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (3 * 86_400 + 4 * 3600, "3 d 4 h"),
        (math.nan, "?"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e9))
def test_duration_never_shows_a_full_next_unit(seconds: float) -> None:
    text = duration(seconds)
    assert not re.search(r"\b(1000 (µs|ms)|60(\.0)? (s|min)|24 h)", text)


def test_environment_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    monkeypatch.setenv("MATRIXLIB_LIVE", "0")
    assert not progress.interactive()
    monkeypatch.delenv("MATRIXLIB_LIVE")
    assert progress.interactive()
    monkeypatch.setenv("MATRIXLIB_LIVE", "yes")
    with pytest.raises(ValueError, match="set it to 0 or 1"):
        progress.interactive()


@pytest.mark.parametrize(("value", "shown"), [("0", False), ("", True)])
def test_headless_bars_are_text_and_can_be_forbidden(monkeypatch: pytest.MonkeyPatch, value: str, shown: bool) -> None:
    """A stored notebook must not depend on how slow the machine was."""
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setenv("MATRIXLIB_LIVE", value)
    if not value:
        monkeypatch.delenv("MATRIXLIB_LIVE")
    threads = set(threading.enumerate())
    with progress.live_bar(total=3, desc="games") as bar:
        assert bar.disable is not shown
        assert set(threading.enumerate()) <= threads, "tqdm's monitor would outlive it"
    assert progress.live_bar(disable=True).disable


def test_a_bar_into_a_file_is_lines_with_a_time_and_no_carriage_return(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    monkeypatch.delenv("MATRIXLIB_LIVE", raising=False)
    with progress.live_bar(total=100, desc="games", unit="game", leave=False) as bar:
        for _ in range(99):
            clock[0] += 0.5
            bar.update()
            bar.refresh()
        bar.update()
    text = capsys.readouterr().err
    assert "\r" not in text
    lines = text.splitlines()
    assert [re.sub(r" \[.*", "", line.partition("  ")[2]) for line in lines] == [
        f"games: {number}/100" for number in (50, 60, 70, 80, 90, 100)
    ]
    assert all(re.match(r"\d\d:\d\d:\d\d \S+  games", line) for line in lines)


def test_a_long_work_has_rarer_lines() -> None:
    pace = progress.LinePace(0.0, 0.0)
    lines = [second for second in range(1, 12 * 3600) if pace.due(second)]
    assert lines[:3] == [5, 10, 15]
    assert 400 < len(lines) < 600


def test_a_bar_becomes_a_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    outputs: list[Any] = []
    handle = SimpleNamespace(update=lambda data, raw: outputs.append(data))
    monkeypatch.setattr(IPython.display, "display", lambda box, display_id: outputs.append(box) or handle)
    monkeypatch.setenv("MATRIXLIB_LIVE", "1")
    with progress.live_bar(total=3, desc="games", unit="game") as bar:
        bar.update(3)
        bar.set_postfix_str("loss 1.5")
    bar.close()  # twice does no harm
    box, data = outputs
    assert type(box).__module__.startswith(("ipywidgets", "tqdm"))
    assert re.fullmatch(r"games: 3/3 \[00:00, .*game/s, loss 1\.5\]", data["text/plain"])
