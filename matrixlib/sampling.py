"""Makes a training set with Stockfish: games, labels, shards. The set that ships was made by this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matrixlib import config as configuration


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
    Returns the figures of both stages. Raises EngineError without a working Stockfish.
    """
    from matrixlib.tasks.chess import packing, sources

    folder = Path(out) if out else configuration.reports_root() / "sample"
    parameters = sources.Parameters(seed=seed, games_per_chunk=games_per_chunk, nodes=nodes)
    made = sources.generate(folder / "chunks", games, parameters, stockfish or None, workers)
    packed = packing.pack(folder / "chunks", folder / "shards")
    return {"folder": folder, **made, **packed}
