"""What is kept of a blow-up: the rows of the updates in question, their batches and the records of these."""

from pathlib import Path
from typing import Any

from matrixlib.engine import rows
from matrixlib.engine.health import Health
from matrixlib.engine.stats import Action
from matrixlib.engine.task import Data
from matrixlib.files import write_json

LAST = 16
"""Updates at most whose records are kept, and rows of metrics from before the trouble."""


def keep(run: Path, action: Action, step: int, health: Health, log: Path, source: Any, data: Data) -> Path:
    """Write down in the run's folder what led to `action` at the update that made `step`; the folder of it.

    log: its metrics.jsonl. source: of its batches (`Data.batches`).
    """
    folder = run / "evidence" / f"{action}_{health.rollbacks + 1}_update_{step:08d}"
    batches = [source.unskipped_index(i) for i in range(max(health.onset, step - LAST), step)]
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "verdict": action,
        "last": health.last,
        "batches": batches,
        "health": health.to_dict(),
        "rows": rows.after(log, health.onset - LAST),
    }
    write_json(folder / "evidence.json", record)
    data.records(source, batches, folder)
    return folder
