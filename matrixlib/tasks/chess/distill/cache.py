"""What a teacher says of stored positions, in a file beside each shard: asked once, then read with the rows.

The files have the format of shards, with rows of `losses.RECORD` and checksums of blocks, and name the shard and the
teacher by their SHA-256.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from matrixlib.data.catalogue import ShardRow
from matrixlib.data.reader import Sidecars
from matrixlib.data.shards import BLOCK, DamagedBlock, Shard, ShardError, file_hash, write_shard
from matrixlib.progress import live_bar
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.distill.losses import LAYOUT, RECORD, packed
from matrixlib.tasks.chess.distill.teacher import ChessTeacher
from matrixlib.tasks.chess.task import ChessTask

ROWS = 256  # asked about at once, from the beginning of a block on, so that a file's bytes depend on nothing else


def sidecars(teacher: ChessTeacher, task: ChessTask, folder: Path, shards: Sequence[ShardRow]) -> Sidecars:
    """The files of these shards in a folder of the data set, each made, or made anew where it is not what it should be.

    A process that is killed loses at most one of them. ValueError for a shard that is not the one that was catalogued,
    and where nothing can be written.
    """
    if any(row.remote for row in shards):
        raise ValueError("a teacher's outputs lie beside the shards: set teacher.cache to false, or copy the data set")
    own = folder / f"teacher-{teacher.sha256[:16]}"
    paths = {row.name: own / f"{row.name}.outputs" for row in shards}
    missing = [row for row in shards if not fits(paths[row.name], row, teacher)]
    if not missing:
        return Sidecars(LAYOUT, paths)
    count = sum(row.count for row in missing)
    try:
        own.mkdir(exist_ok=True)
        with (
            FileLock(own / "lock"),
            live_bar(total=count, desc="asking the teacher", unit="position", leave=False) as bar,
        ):
            for row in missing:
                if not fits(paths[row.name], row, teacher):  # another process may have made it meanwhile
                    _make(paths[row.name], row, teacher, task, bar)
    except OSError as error:
        raise ValueError(
            f"the teacher's outputs cannot be kept in {own} ({error}): make it writable, or set teacher.cache to false"
        ) from error
    return Sidecars(LAYOUT, paths)


def fits(path: Path, row: ShardRow, teacher: ChessTeacher) -> bool:
    """Whether a sidecar can be used: of this teacher and of what the shard now holds, and not known to be damaged.

    As of shards themselves, no block is read before its first row is: a large data set would take minutes to open.
    """
    if not path.exists() or Sidecars.note(path).exists():
        return False
    try:
        file = Shard(path, LAYOUT)
    except ShardError:
        return False
    known: dict[str, Any] = {"shard": row.sha256, "teacher": teacher.sha256, "count": row.count}
    with suppress(ShardError):  # of the shard itself, which the loader tells of
        known["rows"] = Shard(row.path, records.LAYOUT).fingerprint
    return known.items() <= file.meta.items()


def _make(path: Path, row: ShardRow, teacher: ChessTeacher, task: ChessTask, bar: Any) -> None:
    """Ask about the rows of one shard, block by block."""
    if file_hash(row.path) != row.sha256:
        raise ShardError(f"{row.path}: its bytes are not those that were catalogued; import it again")
    shard, blocks = Shard(row.path, records.LAYOUT), []
    for start in range(0, row.count, BLOCK):
        blocks.append(_asked(shard, np.arange(start, min(start + BLOCK, row.count)), teacher, task))
        bar.update(len(blocks[-1]))
    meta = {
        "source": row.source,
        "generator": "teacher",
        "seed": 0,
        "split": row.split,
        "created": shard.meta["created"],  # the shard's own time, so that the same outputs are the same bytes
        "shard": row.sha256,
        "rows": shard.fingerprint,
        "teacher": teacher.sha256,
    }
    write_shard(path, LAYOUT, {"records": np.concatenate(blocks)}, meta)
    Sidecars.note(path).unlink(missing_ok=True)


def _asked(shard: Shard, rows: np.ndarray, teacher: ChessTeacher, task: ChessTask) -> np.ndarray:
    """RECORD rows of one block of a shard; zeros of one that is damaged, which no loader gives."""
    try:
        batch = shard.gather(rows)
    except DamagedBlock:
        return np.zeros(len(rows), RECORD)
    inputs = task.inputs(batch["records"], batch["policy_index"], batch["policy_offset"])
    parts = []
    for start in range(0, len(rows), ROWS):
        part = {name: torch.from_numpy(array[start : start + ROWS]) for name, array in inputs.items()}
        out = {name: value.numpy() for name, value in teacher.ask(part).items()}
        wdl = out.get("teacher_wdl", np.zeros((len(part["pieces"]), 3), np.float32))
        parts.append(packed(out["teacher_policy"], wdl, part["policy_index"].numpy()))
    return np.concatenate(parts)
