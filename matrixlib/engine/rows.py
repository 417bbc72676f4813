"""Rows in a file, one JSON object a line: read from its start or its end, and cut back.

A run of a million updates has more than a gigabyte of them, so whoever asks for the last rows is given these without
reading the rest.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
BLOCK = 1 << 16  # bytes read at once from the end
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NAMED = re.compile(rb'"(nan|-?inf)"')


class MetricsError(ValueError):
    """A metrics file that cannot be read; the message names the line."""


def read(path: Path) -> list[Row]:
    """Rows of a file in order; a torn last line is left out.

    Raises MetricsError naming the line where any other line is not a row, FileNotFoundError without a file.
    """
    return list(iterate(path))


def iterate(path: Path) -> Iterator[Row]:
    """`read`, one row after the other."""
    path = Path(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # torn: the crash came in the middle of a write
                return
            yield _parse(line, path, number)


def after(path: Path, step: int) -> list[Row]:
    """Rows beyond `step` in order, read from the end of the file; steps rise in it."""
    late = []
    for row, _ in _backwards(Path(path)):
        if row["step"] <= step:
            break
        late.append(row)
    return late[::-1]


def newer(path: Path, than: tuple[str, int]) -> list[Row]:
    """Rows written after one of this (time, step) in order, read from the end of the file; none without a file.

    For whoever follows a file that another process writes, and cuts back now and then.
    """
    late: list[Row] = []
    for row, _ in _backwards(Path(path)) if Path(path).exists() else ():
        if (row["time"], row["step"]) <= than:
            break
        late.append(row)
    return late[::-1]


def last(path: Path) -> Row | None:
    """The last whole row; None where there is none, or no file."""
    path = Path(path)
    return next((row for row, _ in _backwards(path)), None) if path.exists() else None


def cut(path: Path, step: int) -> int:
    """Cut off every row beyond `step`; returns how many these were. A crash leaves all of them or none."""
    path, count, end = Path(path), 0, 0
    for row, stop in _backwards(path):
        if row["step"] <= step:
            end = stop
            break
        count += 1
    if count:
        _shorten(path, end)
    return count


def cut_torn_line(path: Path) -> None:
    """Shorten a file, if there is one, to its last newline."""
    if not path.exists():
        return
    end = next((place + len(line) + 1 for place, line in _lines_backwards(path)), 0)
    if end < path.stat().st_size:
        _shorten(path, end)


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as ("outer/inner", value)."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def unplain(value: Any) -> Any:
    """What `files.plain` was given: the strings "nan", "inf" and "-inf" are numbers again."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: unplain(inner) for key, inner in value.items()}
    return [unplain(inner) for inner in value] if isinstance(value, list) else value


def _parse(line: bytes, path: Path, number: int) -> Row:
    """number: of the line, from 1."""
    advice = "delete that line to go on without it"
    try:
        row = json.loads(line.decode())
    except ValueError as error:
        raise MetricsError(f"{path.name} line {number} is not JSON ({error}); {advice}") from None
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise MetricsError(f"{path.name} line {number} has no integer 'step'; {advice}")
    return unplain(row) if _NAMED.search(line) else row  # a walk through every row costs more than reading it


def _backwards(path: Path) -> Iterator[tuple[Row, int]]:
    """(row, where its line ends) from the last one to the first."""
    for place, line in _lines_backwards(path):
        try:
            row = _parse(line, path, 0)
        except MetricsError:  # once more, with the line's number
            row = _parse(line, path, _newlines(path, place) + 1)
        yield row, place + len(line) + 1


def _lines_backwards(path: Path) -> Iterator[tuple[int, bytes]]:
    """(where it begins, whole line without its newline) from the last one to the first."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        rest: list[bytes] | None = None  # of the line whose beginning has not been read, its last part first
        while start:
            size = min(BLOCK, start)
            start -= size
            file.seek(start)
            *lines, end = file.read(size).split(b"\n")
            if not lines:
                rest = [*rest, end] if rest is not None else None
                continue
            if rest is not None:
                end = b"".join((end, *reversed(rest)))
            first, *lines = [*lines, end] if rest is not None else lines
            place = start + len(first) + 1 + sum(len(line) + 1 for line in lines)
            for line in reversed(lines):
                place -= len(line) + 1
                yield place, line
            rest = [first]
        if rest is not None:
            yield 0, b"".join(reversed(rest))


def _newlines(path: Path, end: int) -> int:
    """Newlines before byte `end`."""
    count = 0
    with path.open("rb") as file:
        while end > 0 and (block := file.read(min(end, 1 << 20))):
            count += block.count(b"\n")
            end -= len(block)
    return count


def _shorten(path: Path, size: int) -> None:
    os.truncate(path, size)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
