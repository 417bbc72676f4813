"""TensorBoard events of a run, derived from its metrics.jsonl.

Rewritten when made and after a rollback, so that every update appears once. Needs the extra `tensorboard`
(tensorboardX; for viewing: `pip install tensorboard`).
"""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from matrixlib import files
from matrixlib.engine import metrics
from matrixlib.engine.metrics import flatten

NOT_SCALAR = ("step", "time", "verdict", "messages", "events", "updates")


class Events:
    """Event files of the run in `folder`, with its updates so far. phases: texts. ValueError without tensorboardX."""

    def __init__(self, folder: Path, rows: Iterable[Mapping[str, Any]], phases: Mapping[int, str] = {}) -> None:
        self._run, self._phases = folder, phases
        self.folder = folder / "events"
        self._write(rows)

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError(
                "TensorBoard events need tensorboardX: pip install 'matrixlib[tensorboard]', or leave them out"
            ) from None
        shutil.rmtree(self.folder, ignore_errors=True)
        self._writer = SummaryWriter(str(self.folder), purge_step=0)  # open viewers drop older events
        self._step, self._phase = 0, -1
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl: numbers as scalars; warnings and new phases as text."""
        step, when = int(row["step"]), datetime.fromisoformat(row["time"]).timestamp() if "time" in row else None
        if step <= self._step:  # after a rollback, which truncated the log
            self.close()
            self._write([kept for kept in metrics.read(self._run / "metrics.jsonl") if kept["step"] < step])
        self._step = step
        for name, value in flatten({key: row[key] for key in row if key not in NOT_SCALAR}):
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, step, walltime=when)
        if (phase := row.get("phase")) is not None and phase != self._phase:
            self._phase = phase
            self._writer.add_text("curriculum", self._phases.get(phase, f"phase {phase}"), step, walltime=when)
        for update, _, text in metrics.messages([row]):
            self._writer.add_text("warnings", text, update, walltime=when)

    def close(self) -> None:
        self._writer.close()


def main(arguments: Sequence[str]) -> int:
    """Command line: write events of trained runs, by name or folder."""
    if not arguments:
        print("name a run: python -m matrixlib.runs.tensorboard <run>", file=sys.stderr)
        return 1
    for run in arguments:
        folder = Path(run) if os.path.isdir(run) else files.reports_root() / run
        try:
            if not all(os.path.isfile(folder / name) for name in ("run.json", "metrics.jsonl")):
                raise ValueError(f"no run at '{folder}': expected a folder with run.json and metrics.jsonl")
            with files.writing(folder):
                Events(folder, metrics.read(folder / "metrics.jsonl")).close()
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        print(folder / "events")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
