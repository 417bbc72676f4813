"""Making what ships with the package, for maintainers.

python tests/shipping.py sample WORK     the sample set, from a work folder of sample.ipynb (minutes)
python tests/shipping.py network RUN     the network, from a finished run; its card, README.md, is written by hand

The games of Melee: tests/melee_sample.py.
"""

import hashlib
import io
import json
import lzma
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.shards import ShardInfo
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.files import SHIPPED, write_bytes, write_text
from matrixlib.tasks.chess.records import piece_classes
from matrixlib.tasks.chess.stockfish.labels import Positions, assemble
from matrixlib.tasks.chess.stockfish.sample import SAMPLE, collect, decode, provenance, reorient, write_splits
from matrixlib.tasks.shipped import MANIFEST
from matrixlib.tasks.spec import find_run, weights

SAMPLE_FILE = "sample.npz.xz"
TEXTS = "config.yaml", "run.json", "summary.json"  # of a run
POINTS = 100  # rows of metrics.jsonl that are kept, beside those with a validation


def write_shipped(
    folder: Path, file: str, data: bytes, facts: dict[str, Any], meta: dict[str, Any], infos: Iterable[ShardInfo]
) -> dict[str, Any]:
    """Write file and manifest; returns the manifest. facts: about the whole; meta: of each shard."""
    shards = {info.path.name: {"sha256": info.sha256, "bytes": info.bytes, "count": info.count} for info in infos}
    whole = {"format": 1, "file": file, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    manifest = {**whole, **facts, "meta": meta, "shards": shards}
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / file, data)
    write_bytes(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def encode(positions: Positions) -> bytes:
    """Compress positions, deterministically; `sample.decode` is the inverse."""
    records = positions.records
    pieces, black = records["pieces"], records["side"] == 1
    first = np.flatnonzero(np.diff(records["game"], prepend=~records["game"][:1]))
    columns = {
        "squares": reorient(piece_classes(pieces), black),
        **{name: records[name] for name in ("castling", "en_passant", "halfmove", "repetition", "side", "result")},
        "ply_step": np.diff(records["ply"].astype("<i2"), prepend=np.array([0], "<i2")),
        "source": records["source"],
        "game": records["game"][first],
        "game_first": first.astype("<u4"),
        "win": positions.per_mille[:, 0],
        "loss": positions.per_mille[:, 2],
        "level": positions.level,
    }
    plain = io.BytesIO()
    np.savez(plain, **columns)  # type: ignore[arg-type]
    return lzma.compress(plain.getvalue(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def ship_sample(work: Path | str, folder: Path = SAMPLE) -> dict[str, Any]:
    """Make the shipped sample set from a work folder; returns its manifest."""
    positions, _ = collect(Path(work))
    meta = provenance(Path(work))
    data = encode(positions)
    with tempfile.TemporaryDirectory() as scratch:
        infos = write_splits(Path(scratch), assemble(decode(data)), meta)
    facts = {"positions": len(positions.records), "games": len(np.unique(positions.records["game"]))}
    return write_shipped(folder, SAMPLE_FILE, data, facts, meta, infos)


def ship_network(run: str | Path, folder: Path = SHIPPED) -> None:
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
    {"sample": ship_sample, "network": ship_network}[sys.argv[1]](sys.argv[2])
