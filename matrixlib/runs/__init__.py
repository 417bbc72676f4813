"""A run, and everything that is made of runs."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(root: Path | None = None) -> "DataFrame":
    """All runs under `root` (default: the reports folder), newest first, a row each: see `runs.report.frame`."""
    from matrixlib.runs import report

    return report.frame(root)
