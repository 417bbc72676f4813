"""Makes a training set with Stockfish: games, labels, shards. The set that ships was made by this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matrixlib import files


def make(
    out: str = "",
    games: int = 4,
    games_per_chunk: int = 2,
    seed: int = 0,
    stockfish: str = "",
    workers: int = 2,
    nodes: tuple[int, int] = (150, 1500),
) -> dict[str, Any]:
    """Play and label games, then pack them into shards with a catalogue; resumable, see tasks.chess.sources.

    out: folder, empty = reports/sample. nodes: fewest and most nodes of a playing engine.
    Returns the figures of both stages. Raises EngineError without a working Stockfish, ValueError for a folder with
    other shards.
    """
    from matrixlib.tasks.chess.importers.account import quiet_catalogue
    from matrixlib.tasks.chess.stockfish import generator as sources
    from matrixlib.tasks.chess.stockfish import packing

    folder = Path(out) if out else files.reports_root() / "sample"
    _refuse_others(folder / "shards", folder / "chunks")
    parameters = sources.Parameters(seed=seed, games_per_chunk=games_per_chunk, nodes=nodes)
    made = sources.generate(folder / "chunks", games, parameters, stockfish or None, workers)
    if (folder / "shards").is_dir():  # of fewer games
        catalogue = quiet_catalogue(folder / "shards")
        catalogue.remove([row.name for row in catalogue.shards(state=None)])
    packed = packing.pack(folder / "chunks", folder / "shards")
    return {
        "folder": folder,
        **made,
        **packed,
        "games_in_all": made["chunks"] * games_per_chunk,
        "positions_in_all": packed["train"] + packed["validation"],
        "illegal": _illegal(folder / "shards"),
    }


def report(made: dict[str, Any]) -> str:
    """What `make` made, as text; without the machine's speed."""
    return "\n".join(
        [
            f"engine       {made['engine']}",
            f"games        {made['games_in_all']}",
            f"positions    {made['train']} for training, {made['validation']} held out",
            f"duplicates   {made['duplicates']} left out",
            f"shards       {made['shards']}, {made['bytes_per_position']:.0f} bytes a position",
        ]
    )


def _refuse_others(shards: Path, chunks: Path) -> None:
    """ValueError for a folder with shards that were not packed from these chunks: they are not ours to delete."""
    from matrixlib.data.shards import read_info
    from matrixlib.tasks.chess.stockfish import packing

    made = packing.provenance(chunks)["generator"] if (chunks / "generator.json").exists() else None
    for path in sorted(shards.rglob("*.npz")):
        if made is None or read_info(path).meta["generator"] != made:
            raise ValueError(f"{path} was not made from {chunks}: give another folder as `out`")


def _illegal(folder: Path) -> int:
    """Rows whose list of moves is not exactly that of the legal moves."""
    import numpy as np

    from matrixlib.data.shards import Shard
    from matrixlib.tasks.chess import records
    from matrixlib.tasks.chess.importers.account import quiet_catalogue

    wrong = 0
    for row in quiet_catalogue(folder).shards():
        batch = Shard(row.path, records.LAYOUT).gather(np.arange(row.count))
        index, offset = records.legal_indices(batch["records"])
        if not np.array_equal(offset, batch["policy_offset"]):
            wrong += int((np.diff(offset) != np.diff(batch["policy_offset"])).sum())
        elif differs := np.flatnonzero(index != batch["policy_index"]).size:
            wrong += differs
    return wrong
