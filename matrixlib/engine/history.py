"""The history of a run: its metrics.jsonl while that is short; rows by interval, with means over it, of a long one.

history.jsonl lies beside the log of a run of at least `ROWS` updates. Each row stands for the updates of an interval, a
power of two, and ends at a multiple of it; as soon as there are `ROWS`, intervals are merged in pairs. So whoever
draws or sums up a run reads `ROWS` rows at most, however long it is. The log stays the truth: without its history, or
where that is damaged, the log is read once and the history made of it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from matrixlib.engine import rows as files_of_rows
from matrixlib.engine.messages import is_decision
from matrixlib.engine.rows import MetricsError, Row
from matrixlib.files import plain, write_text

NAME = "history.jsonl"
ROWS = 4096
"""Least updates of a run with a history, and most rows of it."""
MEANS = (
    *("loss", "losses", "metrics", "grad_norm", "learning_rate", "gate"),
    *("seconds", "times", "throughput", "share_of_peak"),
)
"""What a row of an interval has means of; of everything else it has the last that there was."""
MESSAGES = 16
"""The latest messages that a row of an interval keeps."""


def read(log: Path) -> list[Row]:
    """Rows of metrics.jsonl, or of a long run those by interval (see `merge`), the last of which may not be whole.

    Raises MetricsError naming a damaged line, FileNotFoundError without a log.
    """
    log = Path(log)
    newest = files_of_rows.last(log)
    if newest is None or newest["step"] < ROWS:
        return files_of_rows.read(log)
    try:
        intervals = [row for row in files_of_rows.read(log.with_name(NAME)) if row["step"] <= newest["step"]]
    except (FileNotFoundError, MetricsError):
        intervals = []
    if not intervals or _behind(intervals[-1], newest["step"]):
        return list(_by_interval(files_of_rows.iterate(log), _interval(newest["step"])))
    rest = files_of_rows.after(log, intervals[-1]["step"])
    return [*intervals, merge(rest)] if rest else intervals


def merge(rows: Sequence[Mapping[str, Any]]) -> Row:
    """One row for those of successive updates or intervals; `updates` says of how many updates.

    Means are over the updates that had a finite value, which `counts` says by "name/part" where they were fewer: a term
    without a target, a phase that did not happen. The verdict is the last that was not "ok". A validation of all rows
    stands over one of a sample. not_finite: updates with a loss or gradient norm that was not finite. message_steps:
    update of each message.
    """
    merged: Row = {}
    for row in rows:
        merged |= row
    merged["updates"] = sum(map(updates, rows))
    merged["counts"] = {}
    for name in MEANS:
        if isinstance(merged.get(name), Mapping):
            parts = dict.fromkeys(part for row in rows for part in row.get(name, ()))
            merged[name] = {part: _mean(rows, merged, name, part) for part in parts}
        elif merged.get(name) is not None:
            merged[name] = _mean(rows, merged, name)
    merged["not_finite"] = sum(not_finite(row) for row in rows)
    verdicts = [row["verdict"] for row in rows if row.get("verdict", "ok") != "ok"]
    if verdicts:
        merged["verdict"] = verdicts[-1]
    full = [row["validation"] for row in rows if row.get("validation", {}).get("kind") == "full"]
    if full:
        merged["validation"] = full[-1]
    said = messages(rows)
    if texts := sorted(sorted(said, key=lambda one: is_decision(one[1]))[-MESSAGES:], key=lambda one: one[0]):
        merged["message_steps"] = [step for step, _ in texts]
        merged["messages"] = [text for _, text in texts]
    return merged


def messages(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """(update, text) of every message."""
    pairs: list[tuple[int, str]] = []
    for row in rows:
        texts = row.get("messages", ())
        pairs += zip(row.get("message_steps", [row["step"]] * len(texts)), texts, strict=True)
    return pairs


def updates(row: Mapping[str, Any], *path: str) -> int:
    """Updates that a row stands for; with a path such as "times", "validation": those that its mean there is of."""
    count = int(row.get("updates", 1))
    return int(row.get("counts", {}).get("/".join(path), count)) if path else count


def not_finite(row: Mapping[str, Any]) -> int:
    """How many of them had a loss or gradient norm that was not finite."""
    if "not_finite" in row:
        return int(row["not_finite"])
    values = [row.get("loss"), row.get("grad_norm"), *row.get("losses", {}).values()]
    return int(any(isinstance(value, float) and not math.isfinite(value) for value in values))


class History:
    """Writes the history of a log, which it is brought up to when it is opened. One process at a time."""

    def __init__(self, log: Path) -> None:
        self.path, self._log = log.with_name(NAME), log
        self._each = 1  # updates of an interval; 1: the log is its own history
        self._row: Row | None = None  # of the interval that is not whole
        self._file: TextIO | None = None
        newest = files_of_rows.last(log)
        if newest is None or newest["step"] < ROWS:
            self.path.unlink(missing_ok=True)
            return
        self._bring_up(newest["step"])

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in a row that the log has just been given, as plain data."""
        if self._each > 1:
            self._take(files_of_rows.unplain(dict(row)))
        elif row["step"] >= ROWS:
            self._bring_up(row["step"])

    def close(self) -> None:
        """Close the file; what is not in it is made of the log's end when it is opened again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _bring_up(self, step: int) -> None:
        """Open the file, whole up to `step`, the log's last one."""
        try:
            files_of_rows.cut_torn_line(self.path)
            if self.path.exists():
                files_of_rows.cut(self.path, step)
            end = files_of_rows.last(self.path)
        except MetricsError:
            end = None
        if end is None or _behind(end, step):
            intervals = list(_by_interval(files_of_rows.iterate(self._log), _interval(step)))
            self._each = _interval(step)
            whole = [row for row in intervals if row["step"] % self._each == 0]
            self._row = intervals[-1] if intervals[-1:] != whole[-1:] else None
            self._rewrite(whole)
            return
        self._each = updates(end)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        for row in files_of_rows.after(self._log, end["step"]):
            self._take(row)

    def _take(self, row: Row) -> None:
        self._row = merge([self._row, row] if self._row is not None else [row])
        if row["step"] % self._each:
            return
        assert self._file is not None
        self._file.write(_line(self._row))
        self._file.flush()
        self._row = None
        if row["step"] // self._each >= ROWS:
            self._each = _interval(row["step"])
            self._rewrite(list(_by_interval(files_of_rows.iterate(self.path), self._each)))

    def _rewrite(self, intervals: Iterable[Mapping[str, Any]]) -> None:
        self.close()
        write_text(self.path, "".join(map(_line, intervals)))
        self._file = self.path.open("a", encoding="utf-8", newline="\n")


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n"


def _interval(step: int) -> int:
    """Updates of an interval of a run of `step` updates: a power of two."""
    each = 1
    while step // each >= ROWS:
        each *= 2
    return each


def _behind(end: Row, step: int) -> bool:
    """Whether the log has more rows beyond the history's end than are read at once."""
    return step - int(end["step"]) > max(ROWS, updates(end))


def _by_interval(rows: Iterable[Row], each: int) -> Iterator[Row]:
    """Merged rows of each interval, in order."""
    interval: list[Row] = []
    for row in rows:
        if interval and (row["step"] - 1) // each != (interval[-1]["step"] - 1) // each:
            yield merge(interval)
            interval = []
        interval.append(row)
    if interval:
        yield merge(interval)


def _mean(rows: Sequence[Mapping[str, Any]], merged: Row, *path: str) -> float:
    """Mean of the finite values at `path`, the last value where none is; `merged` learns of how many updates."""
    key, total, count, last = "/".join(path), 0.0, 0, math.nan
    for row in rows:
        value = row.get(path[0]) if len(path) == 1 else row.get(path[0], {}).get(path[1])
        if value is None:
            continue
        last = value
        if math.isfinite(value):
            each = row.get("counts", {}).get(key, updates(row))
            total, count = total + value * each, count + each
    if count < merged["updates"]:
        merged["counts"][key] = count
    return total / count if count else last
