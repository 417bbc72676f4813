"""Metrics of a run: one JSON object a line, and JSON files that are whole or absent.

Only standard JSON is written. A number that is not finite becomes the string "nan", "inf" or "-inf", so that
a blow-up can be told from a missing value; `read` turns these strings back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from matrixlib.files import plain, utc_now, write_text

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsError(ValueError):
    """A metrics file that cannot be read; the message names the line."""


class MetricsLog:
    """Append-only log of one run; each line is flushed, so that a crash loses at most the line being written.

    A torn last line (the crash came in the middle of a write) is cut off when the log is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. It must hold `step` (update step); `time` (UTC) and `micro_step` are added.

        Values: numbers, strings, None, and mappings or lists of them; tensors and arrays of one element count
        as numbers. Anything else raises TypeError naming its key.
        """
        assert "step" in row, "a metrics row needs its update step"
        head = {"time": utc_now(), "step": row["step"], "micro_step": None}
        line = json.dumps(plain(head | dict(row)), allow_nan=False, ensure_ascii=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            error.filename = str(self.path)  # a failed write does not say of which file
            raise

    def truncate_to(self, step: int) -> int:
        """Cut every row beyond `step` (a resumed run writes them again); returns how many were cut.

        The file is replaced atomically: a crash leaves either the old or the new one.
        """
        self._file.close()
        lines = [(line, row["step"] <= step) for line, row in _lines(self.path)]
        rest = [line for line, keep in lines if keep]
        cut = len(lines) - len(rest)
        if cut:
            write_text(self.path, "".join(rest))
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        return cut

    def close(self) -> None:
        """Close the file; a closed log cannot be written to."""
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file in order; a torn last line is left out.

    Raises MetricsError naming the line where any other line is not a row, FileNotFoundError without a file.
    """
    return [_unplain(row) for _, row in _lines(Path(path))]


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as ("outer/inner", value)."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _unplain(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _unplain(inner) for key, inner in value.items()}
    return [_unplain(inner) for inner in value] if isinstance(value, list) else value


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line with its newline, row). Only a line without a newline at the end of the file is torn."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = raw.decode()
                row = json.loads(line)
            except ValueError as error:
                raise MetricsError(
                    f"{path.name} line {number} is not JSON ({error}); delete that line to go on without it"
                ) from None
            step = row.get("step") if isinstance(row, dict) else None
            if not isinstance(step, int) or isinstance(step, bool):
                raise MetricsError(
                    f"{path.name} line {number} has no integer 'step'; delete that line to go on without it"
                )
            yield line, row


def _cut_torn_line(path: Path) -> None:
    """Shorten the file to its last newline."""
    if path.exists():
        data = path.read_bytes()
        if (end := data.rfind(b"\n") + 1) < len(data):
            os.truncate(path, end)
