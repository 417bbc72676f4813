"""Labels of positions by Stockfish, and the policy and win-draw-loss targets that they make.

Labels are made on the oriented position (side to move = White) with full-move number 32, after `ucinewgame`: Stockfish
15.1's win-draw-loss depends on the move number and its search on what the hash remembers, so only in this way is a
label a function of the position (pieces, castling, en passant, half-move clock) and not of what came before.

From there on everything is integer arithmetic, so the same labels give the same bytes everywhere. The policy target is
held as levels: level k means exp(-k / 10) times the best move's weight, that is a softmax at 50 centipawns in steps of
5; levels are also what the shipped sample set stores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

import chess
import numpy as np

from matrixlib.data.shards import Batch
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.records import legal_indices
from matrixlib.tasks.chess.scores import wdl_of_shares, whole_shares
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT, MATE, EngineError, Stockfish
from matrixlib.tasks.chess.stockfish.games import Parameters

FULLMOVE = 32  # at which Stockfish 15.1 calls 100 centipawns a win in half of the games
DEEP_LINES = 3
TEMPERATURE = 50  # centipawns
STEP = 5  # centipawns of a level
NO_WEIGHT = 81  # levels from here on (more than 400 centipawns behind) have no weight
MARGIN = 10  # centipawns by which a move outside the deep lines is at least behind the last of them
CENTIPAWNS = 2000  # scores are cut here: beyond, the rank of winning moves is noise
MATE_VALUE, MATE_STEP, MATE_MOVES = 3000, 50, 15  # a mate in k counts 3000 - 50 min(k, 15) centipawns
WEIGHTS = np.array(
    [int((Decimal(-k * STEP) / TEMPERATURE).exp() * 10**6) for k in range(NO_WEIGHT)] + [0], dtype=np.int64
)


BOARD = ("pieces", "castling", "en_passant")  # what decides about legal moves


# Labels


@dataclass(frozen=True)
class Label:
    """Scores of the legal moves (mover's side, see MATE), deeper ones of the best, wdl per mille."""

    moves: tuple[str, ...]
    scores: tuple[int, ...]
    deep_moves: tuple[str, ...]
    deep_scores: tuple[int, ...]
    wdl: tuple[int, int, int]


def oriented(board: chess.Board) -> chess.Board:
    """The position with White to move: for Black the ranks are mirrored and the colours swapped."""
    return board if board.turn == chess.WHITE else board.mirror()


def label(engine: Stockfish, board: chess.Board, parameters: Parameters) -> Label:
    """Labels of a position with a legal move; its moves are those of the oriented board."""
    ours = oriented(board).copy(stack=False)
    ours.fullmove_number = FULLMOVE
    position = "fen " + ours.fen(en_passant="legal")
    engine.new_game()
    shallow = engine.search(position, f"depth {parameters.shallow_depth}", 500)
    legal = ours.legal_moves.count()
    if len(shallow) != legal:
        raise EngineError(f"{engine.name} lists {len(shallow)} of {legal} moves in {position}")
    deep = engine.search(position, f"depth {parameters.deep_depth}", DEEP_LINES)
    wdl = deep[0].wdl
    if wdl is None:
        raise EngineError(f"{engine.name} shows no win-draw-loss")
    return Label(
        tuple(line.move for line in shallow),
        tuple(line.score for line in shallow),
        tuple(line.move for line in deep),
        tuple(line.score for line in deep),
        wdl,
    )


def move_code(uci: str) -> int:
    """from | to << 6 | promotion << 12 (0 none, 2 knight ... 5 queen), as stored in a chunk."""
    move = chess.Move.from_uci(uci)
    return move.from_square | move.to_square << 6 | (move.promotion or 0) << 12


def label_columns(labels: Sequence[Label]) -> dict[str, np.ndarray]:
    """The columns of a chunk that labels fill: wdl, legal and score with legal_offset, deep, deep_score."""
    deep = np.full((len(labels), DEEP_LINES), 255, dtype="u1")
    deep_score = np.zeros((len(labels), DEEP_LINES), dtype="<i2")
    for row, one in enumerate(labels):
        count = len(one.deep_moves)
        deep[row, :count] = [one.moves.index(uci) for uci in one.deep_moves]
        deep_score[row, :count] = one.deep_scores
    return {
        "wdl": np.array([one.wdl for one in labels], dtype="<u2").reshape(-1, 3),
        "deep": deep,
        "deep_score": deep_score,
        "legal": np.array([move_code(uci) for one in labels for uci in one.moves], dtype="<u2"),
        "score": np.array([score for one in labels for score in one.scores], dtype="<i2"),
        "legal_offset": np.cumsum([0] + [len(one.moves) for one in labels]).astype("<u4"),
    }


# Targets


class Positions(NamedTuple):
    """Positions before their targets are filled in."""

    records: np.ndarray  # (n,) RECORD, wdl still 0
    per_mille: np.ndarray  # (n, 3) u2, win-draw-loss of the side to move
    level: np.ndarray  # (K,) u1, of all legal moves in ascending order of policy index


def values(scores: np.ndarray) -> np.ndarray:
    """Stored scores (see stockfish.MATE) as centipawns: a shorter mate is better, any mate best."""
    scores = scores.astype(np.int64)
    moves = np.minimum(MATE - np.abs(scores), MATE_MOVES)
    mates = np.sign(scores) * (MATE_VALUE - MATE_STEP * moves)
    return np.where(np.abs(scores) > CENTIPAWN_LIMIT, mates, np.clip(scores, -CENTIPAWNS, CENTIPAWNS))


def levels(chunk: Batch) -> np.ndarray:
    """(K,) u1 policy levels of all legal moves, in the order of the chunk's `legal`.

    The deep search decides about its own lines. It also says that every other move is worse than the last of
    them, so the shallow score of the others is cut there (less MARGIN): without that, a blunder that only
    the shallow search likes would keep its weight.
    """
    offset = chunk["legal_offset"].astype(np.int64)
    value = values(chunk["score"])
    rows = np.repeat(np.arange(len(offset) - 1), np.diff(offset))
    deep, deep_value = chunk["deep"].astype(np.int64), values(chunk["deep_score"])
    valid = deep != 255
    last = np.where(valid, deep_value, np.iinfo(np.int64).max).min(axis=1)
    value = np.minimum(value, (last - MARGIN)[rows])
    for line in range(deep.shape[1]):
        mask = valid[:, line]
        value[offset[:-1][mask] + deep[mask, line]] = deep_value[mask, line]
    best = np.maximum.reduceat(value, offset[:-1]) if len(rows) else value
    return np.minimum((best[rows] - value + STEP // 2) // STEP, NO_WEIGHT).astype(np.uint8)


def weights_of(level: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Levels (K,) of rows `offset` (n+1,) to weights (K,) u2; see `whole_shares`."""
    return whole_shares(WEIGHTS[level], offset)


def ordered(chunk: Batch, level: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The levels (K,) in ascending order of policy index in each row, and offsets (n+1,) int64.

    Raises ValueError where the engine's moves are not the legal moves.
    """
    moves, _, offset = bitboard.legal_moves(*(chunk[name] for name in BOARD))
    if not np.array_equal(offset, chunk["legal_offset"]):
        raise ValueError("the engine lists other numbers of moves than are legal: delete the chunk")
    rows = np.repeat(np.arange(len(offset) - 1), np.diff(offset)) << 16
    code = chunk["legal"].astype(np.int64)
    code -= np.where(code >> 12, 1 << 12, 0)  # python-chess counts the knight as 2, bitboard as 1
    ours, theirs = np.argsort(rows + moves), np.argsort(rows + code)
    if not np.array_equal((rows + moves)[ours], (rows + code)[theirs]):
        raise ValueError("the engine lists moves that are not legal: delete the chunk")
    placed = np.empty_like(level)
    placed[ours] = level[theirs]
    return placed, offset


def assemble(positions: Positions) -> Batch:
    """The batch that is stored: win-draw-loss and policy targets filled in."""
    records = positions.records.copy()
    records["wdl"] = wdl_of_shares(positions.per_mille)
    index, offset = legal_indices(records)
    if len(index) != len(positions.level):
        raise ValueError(f"{len(positions.level)} policy levels for {len(index)} legal moves")
    weight = weights_of(positions.level, offset)
    return {
        "records": records,
        "policy_offset": offset.astype("<i8"),
        "policy_index": index.astype("<u2"),
        "policy_weight": weight,
    }
