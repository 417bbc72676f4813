"""metrics.jsonl: one JSON object a line, one line an update.

Non-finite numbers are written as "nan", "inf", "-inf", which JSON can hold, and read as floats. Long runs log every
k-th update (`interval`), so that the file stays small enough to read whole.
"""

import json
import math
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from matrixlib.files import plain, utc_now

Row = dict[str, Any]
MAX_ROWS = 8192  # rows of uneventful updates; longer runs log fewer
TAIL_BYTES = 1 << 18
RECENT_ROWS = 64
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NAMED = re.compile(rb'"(nan|-?inf)"')


def interval(steps: int) -> int:
    """Updates between two logged ones in a run of `steps` updates."""
    return -(-steps // MAX_ROWS)


def read(path: Path) -> list[Row]:
    """Rows by step (the last one of a step wins), without a torn last line. ValueError names a bad line."""
    rows: dict[int, Row] = {}
    for row, _ in _rows(Path(path)):
        before = rows.get(row["step"], {})
        extra = before.get("extra", {}) | row.get("extra", {})
        rows[row["step"]] = before | row | ({"extra": extra} if extra else {})
    return [rows[step] for step in sorted(rows)]


def newer(path: Path, than: tuple[str, int]) -> list[Row]:
    """Rows written after (time, step), in order; none without a file. To follow another process."""
    if not Path(path).exists():
        return []
    with Path(path).open("rb") as file:
        start = file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().split(b"\n")[bool(start) : -1]  # drop a partial first and a torn last line
    return [row for row in (_parse(line, path, 0) for line in lines) if (row["time"], row["step"]) > than]


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as ("outer/inner", value)."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def messages(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, str, str]]:
    """(step, event id, text) of every message; ids are `stats.Event` values."""
    found: list[tuple[int, str, str]] = []
    for row in rows:
        texts = row.get("messages", ())
        found += [(row["step"], *pair) for pair in zip(row.get("events", [""] * len(texts)), texts, strict=True)]
    return found


def not_finite(row: Mapping[str, Any]) -> bool:
    """Whether a loss or the gradient norm was not finite."""
    values = [row.get("loss"), row.get("grad_norm"), *row.get("losses", {}).values()]
    return any(isinstance(value, float) and not math.isfinite(value) for value in values)


class MetricsLog:
    """Append-only log of one run. Lines are flushed; a torn last line is truncated on open. recent: the latest rows,
    written or not."""

    def __init__(self, path: Path, every: int = 1, writes: bool = True) -> None:
        """every: log every k-th update, see `interval`. writes: False on ranks other than 0."""
        self.path, self._every, self._writes = Path(path), every, writes
        self.recent = deque[Row](maxlen=RECENT_ROWS)
        self._unwritten = Counter[str]()  # seconds by phase since the last row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        if writes:
            self._shorten(max((end for _, end in _lines(self.path)), default=0))

    def write(self, row: Mapping[str, Any], always: bool = True) -> None:
        """Append one row with a `step`; TypeError names the key of an unsupported value. always: also between logged
        updates, which are then summed up in the next row: `updates`, mean `seconds`, summed `times`."""
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
            error.filename = error.filename or str(self.path)  # write errors do not name the file
            raise

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def truncate_to(self, step: int) -> int:
        """Remove rows beyond `step`, atomically; returns how many."""
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
        self._file.close()


def _lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """(line, end offset) of every complete line."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line)
            if line.endswith(b"\n"):
                yield line, end


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """(row, end offset of its line) in file order."""
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
        raise ValueError(f"{text}; delete that line to continue")
    return _floats(row) if _NAMED.search(line) else row  # walking every row would cost more than parsing it


def _floats(value: Any) -> Any:
    """Converts "nan", "inf" and "-inf" back to floats."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _floats(inner) for key, inner in value.items()}
    return [_floats(inner) for inner in value] if isinstance(value, list) else value
