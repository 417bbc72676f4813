"""From generated chunks to shards: duplicates out, split by game. The same chunks give the same bytes everywhere."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from matrixlib.data.shards import SPLITS, Batch, ShardInfo, select, write_shard
from matrixlib.tasks.chess.keys import SOURCES, is_validation, keys_of
from matrixlib.tasks.chess.records import LAYOUT, RECORD, UNKNOWN
from matrixlib.tasks.chess.stockfish.generator import chunks
from matrixlib.tasks.chess.stockfish.labels import MARGIN, STEP, TEMPERATURE, Positions, assemble, levels, ordered

PACKING = 1  # version of the rules in this file
SHARD = 32768  # records in a shard


def convert(chunk: Batch, known: set[bytes]) -> Positions:
    """The positions of a chunk whose keys are not `known` yet; adds them.

    Raises ValueError where the engine's moves are not the legal ones.
    """
    game = chunk["game"].astype(np.int64)
    records = np.zeros(len(game), RECORD)
    for name in ("pieces", "castling", "en_passant", "halfmove", "repetition", "side", "ply"):
        records[name] = chunk[name]
    white = chunk["result"][game]
    records["result"] = np.where((chunk["side"] == 1) & (white != UNKNOWN), -white, white)
    records["source"] = SOURCES["stockfish"]
    records["game"] = chunk["game_id"][game]
    level, offset = ordered(chunk, levels(chunk))
    new = np.zeros(len(records), bool)
    for row, key in enumerate(keys_of(records)):
        new[row] = key not in known
        known.add(key)
    return Positions(records[new], chunk["wdl"][new], level[np.repeat(new, np.diff(offset))])


def collect(work: Path) -> tuple[Positions, int]:
    """The positions of all finished chunks of a work folder in order, without duplicates, and how many were left out.

    Raises ValueError for a damaged chunk and for a folder without any.
    """
    known: set[bytes] = set()
    parts: list[Positions] = []
    total = 0
    for number, chunk in chunks(work):
        try:
            parts.append(convert(chunk, known))
        except ValueError as error:
            raise ValueError(f"chunk {number} of {work}: {error}") from error
        total += len(chunk["side"])
    if not known:
        raise ValueError(f"{work} holds no finished chunk: call generator.generate first")
    return Positions(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), total - len(known)


def provenance(work: Path) -> dict[str, Any]:
    """The meta data of shards made from a work folder, but the split; `created` is when the work began."""
    path = work / "generator.json"
    if not path.exists():
        raise ValueError(f"{work} holds no generated games: call generator.generate first")
    generator = json.loads(path.read_text())
    began = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    rules = {"version": PACKING, "temperature": TEMPERATURE, "step": STEP, "margin": MARGIN}
    return {
        "source": "stockfish",
        "generator": {**generator, "packing": rules},
        "seed": generator["parameters"]["seed"],
        "created": began.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def write_splits(folder: Path, batch: Batch, meta: dict[str, Any]) -> list[ShardInfo]:
    """Writes both splits as shards of SHARD records, game order kept (the loader shuffles).

    ValueError where the folder holds shards: a catalogue would take those that grew for damaged, and those that there
    are fewer of now would stay in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.npz")):
        raise ValueError(f"{folder} holds shards already: give another folder, or delete that one")
    validation = is_validation(batch["records"]["game"])
    infos = []
    for split, mask in (("train", ~validation), ("validation", validation)):
        rows = np.flatnonzero(mask)
        for number, start in enumerate(range(0, len(rows), SHARD)):
            part = select(batch, rows[start : start + SHARD], LAYOUT)
            path = folder / f"{meta['source']}_{split}_{number:03d}.npz"
            infos.append(write_shard(path, LAYOUT, part, {**meta, "split": split}))
    return infos


def pack(work: Path | str, out: Path | str) -> dict[str, Any]:
    """Packs the finished chunks of `work` into shards in `out`.

    A position is in one split only and there once, its mirror image and its colour-swapped image included;
    games are whole in one split, about 5 % of them in validation. Opening the folder as a catalogue takes the
    shards in. Returns the numbers of shards, of train and validation positions, of duplicates left out, and
    bytes a position. Raises ValueError for an empty or damaged work folder, and where `out` holds shards.
    """
    meta = provenance(Path(work))
    positions, duplicates = collect(Path(work))
    infos = write_splits(Path(out), assemble(positions), meta)
    count = {split: sum(info.count for info in infos if info.meta["split"] == split) for split in SPLITS}
    size = sum(info.bytes for info in infos) / sum(count.values())
    return {"shards": len(infos), **count, "duplicates": duplicates, "bytes_per_position": size}
