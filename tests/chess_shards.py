"""Chess shards made by hand, for the tests of the audit and its tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chess
import numpy as np

from matrixlib.data.shards import Batch, ShardInfo, write_shard
from matrixlib.tasks.chess.records import LAYOUT, from_boards, legal_indices

META = {"source": "pgn", "generator": "a test", "seed": 0, "split": "train", "created": "2026-01-02T03:04:05Z"}
QUEEN_UP = "6k1/5ppp/8/8/8/8/5PPP/Q5K1 w - - 0 30"
BARE = "8/8/4k3/8/8/4K3/4P3/8 b - - 0 60"


def batch_of(fens: Sequence[str], weighted: bool = True, **fields: Any) -> Batch:
    """Positions by FEN with all their moves; all weight on the first move, or none. fields: see `from_boards`."""
    records = from_boards([chess.Board(fen) for fen in fens], **fields)
    index, offset = legal_indices(records)
    weight = np.zeros(len(index), "<u2")
    if weighted:
        weight[offset[:-1]] = 65535
    return {
        "records": records,
        "policy_offset": offset.astype("<i8"),
        "policy_index": index.astype("<u2"),
        "policy_weight": weight,
    }


def write(folder: Path, name: str, batch: Batch, **meta: Any) -> ShardInfo:
    folder.mkdir(exist_ok=True)
    return write_shard(folder / f"{name}.npz", LAYOUT, batch, META | meta)


def game(moves: str) -> list[str]:
    """The FEN of every position of a game in SAN, the first one included."""
    board = chess.Board()
    fens = [board.fen()]
    for move in moves.split():
        board.push_san(move)
        fens.append(board.fen())
    return fens
