"""Metrics of a run: one JSON object a line of metrics.jsonl, and its history beside it.

Only standard JSON is written. A number that is not finite becomes the string "nan", "inf" or "-inf", so that
a blow-up can be told from a missing value; `read` turns these strings back into floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from matrixlib.engine import rows
from matrixlib.engine.history import History
from matrixlib.engine.rows import MetricsError as MetricsError
from matrixlib.engine.rows import flatten as flatten
from matrixlib.engine.rows import read as read
from matrixlib.files import plain, utc_now


class MetricsLog:
    """Append-only log of one run; each line is flushed, so that a crash loses at most the line being written.

    A torn last line (the crash came in the middle of a write) is cut off when the log is opened. Of a long run only
    the end is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows.cut_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        self._history = History(self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. It must hold `step` (update step); `time` (UTC) and `micro_step` are added.

        Values: numbers, strings, None, and mappings or lists of them; tensors and arrays of one element count
        as numbers. Anything else raises TypeError naming its key.
        """
        assert "step" in row, "a metrics row needs its update step"
        head = {"time": utc_now(), "step": row["step"], "micro_step": None}
        whole = plain(head | dict(row))
        line = json.dumps(whole, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
            self._history.add(whole)
        except OSError as error:
            error.filename = error.filename or str(self.path)  # a failed write does not say of which file
            raise

    def truncate_to(self, step: int) -> int:
        """Cut every row beyond `step` (a resumed run writes them again); returns how many were cut.

        A crash leaves the file as it was or as it is to be.
        """
        self._file.close()
        self._history.close()
        cut = rows.cut(self.path, step)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")
        self._history = History(self.path)
        return cut

    def close(self) -> None:
        """Close the file; a closed log cannot be written to."""
        self._file.close()
        self._history.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NoLog(MetricsLog):
    """The log of a rank that writes none: another writes it at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def write(self, row: Mapping[str, Any]) -> None:
        """Nothing is written."""

    def truncate_to(self, step: int) -> int:
        """Nothing is cut."""
        return 0

    def close(self) -> None:
        """Nothing is open."""
