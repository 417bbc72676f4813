"""Make a finished run the network that ships with the package (for maintainers): `python -m
matrixlib.tasks.chess.ship RUN`; the model card, README.md, is written by hand."""

import json
import shutil
import sys
from pathlib import Path

from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.files import SHIPPED, write_text
from matrixlib.tasks.spec import find_run, weights

TEXTS = "config.yaml", "run.json", "summary.json"
POINTS = 100  # rows of metrics.jsonl that are kept, beside those with a validation


def ship(run: str | Path, folder: Path = SHIPPED) -> None:
    """Write a run folder that can be loaded but not resumed: configuration, record, summary, thinned metrics, and one
    checkpoint of the weights that evaluation takes."""
    source, _ = find_run(run)
    stored = Checkpoints(source / "checkpoints", 2).pick("newest")
    tensors, texts = weights(stored)[0], {name: (source / name).read_text() for name in TEXTS}
    rows = (source / "metrics.jsonl").read_text().splitlines(keepends=True)
    apart = -(-len(rows) // POINTS)
    kept = [row for i, row in enumerate(rows) if i % apart == 0 or "validation" in json.loads(row)]
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**texts, "metrics.jsonl": "".join(kept)}.items():
        write_text(folder / name, text)
    Checkpoints(folder / "checkpoints", 2).save(stored.step, {"model": tensors}, {}, wait=True)


if __name__ == "__main__":
    ship(sys.argv[1])
