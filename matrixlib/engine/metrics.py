"""Metrics of a run: metrics.jsonl, one JSON object a line.

A number that is not finite is written as the string "nan", "inf" or "-inf", which standard JSON can hold, and read as
a float. A long run logs every k-th update (`interval`), so that its log stays small enough to be read whole.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from matrixlib.files import plain, utc_now

Row = dict[str, Any]
MAX_ROWS = 8192
"""Rows of updates in which nothing happened; a longer run logs fewer of them."""
TAIL_BYTES = 1 << 18
RECENT_ROWS = 64
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NAMED = re.compile(rb'"(nan|-?inf)"')


def interval(steps: int) -> int:
    """Updates between two logged ones of a run of `steps` updates."""
    return -(-steps // MAX_ROWS)


def read(path: Path) -> list[Row]:
    """Rows by step, a later one of a step over an earlier; without a torn last line. ValueError naming a bad line."""
    rows: dict[int, Row] = {}
    for row, _ in _rows(Path(path)):
        before = rows.get(row["step"], {})
        extra = before.get("extra", {}) | row.get("extra", {})
        rows[row["step"]] = before | row | ({"extra": extra} if extra else {})
    return [rows[step] for step in sorted(rows)]


def newer(path: Path, than: tuple[str, int]) -> list[Row]:
    """Rows written after one of this (time, step), in order; none without a file. For following another process."""
    if not Path(path).exists():
        return []
    with Path(path).open("rb") as file:
        start = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")[bool(start) : -1]  # neither a cut first line nor a torn last one
    return [row for row in (_parse(line, path, 0) for line in lines) if (row["time"], row["step"]) > than]


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as ("outer/inner", value)."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def messages(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    """(step, id of the event, text) of every message; ids are the values of `stats.Event`."""
    found: list[tuple[int, str, str]] = []
    for row in rows:
        texts = row.get("messages", ())
        found += [(row["step"], *pair) for pair in zip(row.get("events", [""] * len(texts)), texts, strict=True)]
    return found


def not_finite(row: Mapping[str, Any]) -> bool:
    """Whether a loss or the gradient norm of the update was not finite."""
    values = [row.get("loss"), row.get("grad_norm"), *row.get("losses", {}).values()]
    return any(isinstance(value, float) and not math.isfinite(value) for value in values)


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Append-only log of one run. Each line is flushed; a torn last line is cut off when it is opened.

    recent: the latest rows, written or not.
    """

    def __init__(self, path: Path, every: int = 1, writes: bool = True) -> None:
        """every: of so many updates one is written, see `interval`. writes: False where another rank writes it."""
        self.path, self._every, self._writes = Path(path), every, writes
        self.recent = deque[Row](maxlen=RECENT_ROWS)
        self._unwritten = Counter[str]()  # seconds by phase, of updates since the last row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if writes:
            self._shorten(max((end for _, end in _lines(self.path)), default=0))

    def write(self, row: Mapping[str, Any], always: bool = True) -> None:
        """Append one row, which must hold `step`; TypeError naming the key of a value that `files.plain` does not take.
        always: also between the updates that are written, of which the next row has `updates`, the mean of `seconds`
        and the sums of `times`.
        """
        if not self._writes:
            return
        data: Row = plain({"time": utc_now(), "step": row["step"], "micro_step": None} | dict(row))
        self.recent.append(data)
        if self._every > 1:
            self._unwritten.update({**data.get("times", {}), "": data.get("seconds", 0.0), "updates": 1})
            if not always and data["step"] % self._every:
                return
            times, self._unwritten = dict(self._unwritten), Counter()
            count, seconds = times.pop("updates"), times.pop("")
            data |= {"updates": count, "seconds": seconds / count, "times": times}
        line = json.dumps(data, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            error.filename = error.filename or str(self.path)  # a failed write does not say of which file
            raise

    def sync(self) -> None:
        """Make every row safe from a power loss."""
        os.fsync(self._file.fileno())

    def truncate_to(self, step: int) -> int:
        """Cut every row beyond `step`; returns how many. A crash leaves the file as it was or as it is to be."""
        if not self._writes:
            return 0
        ends = [(row["step"], end) for row, end in _rows(self.path)]
        kept = next((i for i, (other, _) in enumerate(ends) if other > step), len(ends))
        self._shorten(ends[kept - 1][1] if kept else 0)
        self._unwritten.clear()
        while self.recent and self.recent[-1]["step"] > step:
            self.recent.pop()
        return len(ends) - kept

    def _shorten(self, size: int) -> None:
        if size < self.path.stat().st_size:
            os.truncate(self.path, size)
            self.sync()

    def close(self) -> None:
        """Close the file; a closed log cannot be written to."""
        self._file.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """(line, where it ends) of every whole line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if line.endswith(b"\n"):
                yield line, end


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """(row, where its line ends) in the file's order."""
    for number, (line, end) in enumerate(_lines(path), 1):
        yield _parse(line, path, number), end


def _parse(line: bytes, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        text = f"{path.name} line {number} is no JSON object with an integer 'step'"
        raise ValueError(f"{text}; delete that line to go on without it")
    return _floats(row) if _NAMED.search(line) else row  # a walk through every row costs more than reading it


def _floats(value: Any) -> Any:
    """The strings "nan", "inf" and "-inf" are numbers again."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    return [_floats(inner) for inner in value] if isinstance(value, list) else value
