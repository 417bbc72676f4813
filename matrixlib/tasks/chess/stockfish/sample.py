"""Makes a training set with Stockfish: games, labels, shards. The set that ships was made by this."""

from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame

from matrixlib import files
from matrixlib.data.account import quiet_catalogue
from matrixlib.data.shards import Shard, read_info
from matrixlib.tasks.chess.importers.audit import unlike_legal
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.stockfish import generator, packing


def make_set(
    out: str = "",
    games: int = 4,
    games_per_chunk: int = 2,
    seed: int = 0,
    stockfish: str = "",
    workers: int = 2,
    nodes: tuple[int, int] = (150, 1500),
) -> dict[str, Any]:
    """Play and label games, then pack them into shards with a catalogue; resumable, see generator.py.

    out: folder, empty = reports/sample. nodes: fewest and most nodes of a playing engine. Returns the figures of both
    stages. Raises EngineError without a working Stockfish, ValueError for a folder with other shards.
    """
    if games < 1 or workers < 1 or seed < 0:
        raise ValueError(f"games is {games}, workers {workers}, seed {seed}; give whole numbers from 1, 1 and 0")
    if not 1 <= nodes[0] <= nodes[1]:
        raise ValueError(
            f"nodes_low is {nodes[0]} and nodes_high {nodes[1]}; give whole numbers from 1, the low one first"
        )
    folder = Path(out) if out else files.reports_root() / "sample"
    shards, chunks = folder / "shards", folder / "chunks"
    with files.writing(folder):
        _refuse_others(shards, chunks)
    parameters = generator.Parameters(seed=seed, games_per_chunk=games_per_chunk, nodes=nodes)
    with files.writing(folder):
        figures = generator.generate(chunks, games, parameters, stockfish or None, workers)
    if shards.is_dir():  # of fewer games
        catalogue = quiet_catalogue(shards)
        catalogue.remove([row.name for row in catalogue.shards(state=None)])
    figures |= packing.pack(chunks, shards)
    illegal = 0
    for row in quiet_catalogue(shards).shards():
        illegal += int(unlike_legal(Shard(row.path, LAYOUT).gather(np.arange(row.count))).sum())
    return {
        "folder": folder,
        **figures,
        "games_in_all": figures["chunks"] * games_per_chunk,
        "positions_in_all": figures["train"] + figures["validation"],
        "illegal": illegal,
    }


def summary(figures: dict[str, Any]) -> DataFrame:
    """What `make_set` made; without the machine's speed."""
    rows = {
        "engine": figures["engine"],
        "games": figures["games_in_all"],
        "positions for training": figures["train"],
        "positions held out": figures["validation"],
        "duplicates left out": figures["duplicates"],
        "shards": figures["shards"],
        "bytes a position": round(figures["bytes_per_position"]),
    }
    return DataFrame({"sample": rows})


def _refuse_others(shards: Path, chunks: Path) -> None:
    """ValueError for a folder with shards that were not packed from these chunks: they are not ours to delete."""
    own = packing.provenance(chunks)["generator"] if (chunks / "generator.json").exists() else None
    for path in sorted(shards.rglob("*.npz")):
        if own is None or read_info(path).meta["generator"] != own:
            raise ValueError(f"{path} was not made from {chunks}: give another folder as `out`")
