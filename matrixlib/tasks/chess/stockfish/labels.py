"""Labels of positions by Stockfish, and the policy and win-draw-loss targets that they make.

Labels are made on the oriented position with full-move number 32, after `ucinewgame`: Stockfish 15.1's win-draw-loss
depends on the move number and its search on the hash, so only so is a label a function of the position. From there on
all is integer arithmetic. Policy level k means exp(-k / 10) times the best move's weight: a softmax at 50 centipawns.
"""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import chess
import numpy as np
from numpy.typing import ArrayLike, NDArray

from matrixlib.data.shards import Batch
from matrixlib.tasks.chess.importers.notation import legal_moves
from matrixlib.tasks.chess.records import WDL_SUM, policy_index
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT, MATE, EngineError, Stockfish

FULLMOVE = 32  # at which Stockfish 15.1 calls 100 centipawns a win in half of the games
DEEP_LINES = 3
ALL_LINES = 500  # more than any position has legal moves; the client cuts it to what the engine takes
TEMPERATURE = 50  # centipawns
LEVEL_CENTIPAWNS = 5  # centipawns of a level
NO_WEIGHT = 81  # levels from here on (more than 400 centipawns behind) have no weight
DEEP_MARGIN = 10  # centipawns by which a move outside the deep lines is at least behind the last of them
MAX_CENTIPAWNS = 2000  # scores are cut here: beyond, the rank of winning moves is noise
MATE_VALUE, MATE_STEP, MATE_MOVES = 3000, 50, 15  # a mate in k counts 3000 - 50 min(k, 15) centipawns
EVEN_CENTIPAWNS = 100.0  # advantage that wins half of the games
WDL_SCALE = 18.32  # centipawns; 66.13 of 361 engine units at ply 62
WEIGHTS = np.array(
    [int((Decimal(-k * LEVEL_CENTIPAWNS) / TEMPERATURE).exp() * 10**6) for k in range(NO_WEIGHT)] + [0], dtype=np.int64
)


class Label(NamedTuple):
    """Win-draw-loss per mille of the side to move, and a policy level for each legal move, in ascending order of policy
    index."""

    wdl: tuple[int, int, int]
    level: list[int]


def label(engine: Stockfish, board: chess.Board, shallow_depth: int, deep_depth: int) -> Label:
    """The label of a position with a legal move: all moves at one depth, the best ones at a larger one."""
    ours = board.copy(stack=False) if board.turn else board.mirror()
    ours.fullmove_number = FULLMOVE
    position = "fen " + ours.fen(en_passant="legal")
    engine.new_game()
    scores = {line.move: line.score for line in engine.search(position, f"depth {shallow_depth}", ALL_LINES)}
    moves = sorted(ours.legal_moves, key=lambda move: policy_index(move, chess.WHITE))
    if scores.keys() != {move.uci() for move in moves}:
        raise EngineError(f"{engine.name} lists {len(scores)} moves in {position}, {len(moves)} are legal")
    deep = engine.search(position, f"depth {deep_depth}", DEEP_LINES)
    if deep[0].wdl is None:
        raise EngineError(f"{engine.name} shows no win-draw-loss")
    level = levels(scores, {line.move: line.score for line in deep})
    return Label(deep[0].wdl, [level[move.uci()] for move in moves])


def levels(shallow: Mapping[str, int], deep: Mapping[str, int]) -> dict[str, int]:
    """Policy level of each move, from the scores of all moves and the deeper ones of the best.

    The deep search decides about its own lines, and that every other move is worse than the last of them by MARGIN:
    without that, a blunder that only the shallow search likes would keep its weight.
    """
    deeper = dict(zip(deep, to_centipawns(np.array(list(deep.values()))).tolist(), strict=True))
    last = min(deeper.values()) - DEEP_MARGIN
    cut = np.minimum(to_centipawns(np.array(list(shallow.values()))), last).tolist()
    value = dict(zip(shallow, cut, strict=True)) | deeper
    best = max(value.values())
    return {
        move: min((best - one + LEVEL_CENTIPAWNS // 2) // LEVEL_CENTIPAWNS, NO_WEIGHT) for move, one in value.items()
    }


def to_centipawns(scores: np.ndarray) -> np.ndarray:
    """Stored scores (see `client.MATE`) as centipawns: a shorter mate is better, any mate best."""
    scores = scores.astype(np.int64)
    moves = np.minimum(MATE - np.abs(scores), MATE_MOVES)
    mates = np.sign(scores) * (MATE_VALUE - MATE_STEP * moves)
    return np.where(np.abs(scores) > CENTIPAWN_LIMIT, mates, np.clip(scores, -MAX_CENTIPAWNS, MAX_CENTIPAWNS))


def level_weights(level: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Levels (K,) of rows `offset` (n+1,) to weights (K,) u2; see `integer_shares`."""
    return integer_shares(WEIGHTS[level], offset)


class Positions(NamedTuple):
    """Before their targets are filled in."""

    records: np.ndarray  # (n,) RECORD, wdl still 0
    per_mille: np.ndarray  # (n, 3) u2, win-draw-loss of the side to move
    level: np.ndarray  # (K,) u1, of all legal moves in ascending order of policy index


def assemble(positions: Positions) -> Batch:
    """The batch that is stored: win-draw-loss and policy targets filled in."""
    records = positions.records.copy()
    records["wdl"] = wdl_of_shares(positions.per_mille)
    legal = legal_moves(records)
    return legal.batch(records, level_weights(positions.level, legal.offset))


# Shares


def integer_shares(amounts: NDArray[Any], offset: NDArray[Any]) -> NDArray[np.uint16]:
    """Whole amounts (K,) >= 0, up to 1e14 a row, of rows `offset` (n+1,), none of them empty, to shares (K,) u2.

    The shares of a row sum to 65535, the first of its greatest amounts gets the remainder; a row of zeros, an unknown
    policy, stays 0.
    """
    if not len(amounts):
        return np.zeros(0, "<u2")
    amounts, starts, length = amounts.astype(np.int64), offset[:-1], np.diff(offset)
    total = np.add.reduceat(amounts, starts)
    shares = amounts * WDL_SUM // np.repeat(np.maximum(total, 1), length)
    greatest = np.flatnonzero(amounts == np.repeat(np.maximum.reduceat(amounts, starts), length))
    first = greatest[np.searchsorted(greatest, starts)]
    shares[first] += np.where(total > 0, WDL_SUM - np.add.reduceat(shares, starts), 0)
    return shares.astype("<u2")


def wdl_of_shares(shares: NDArray[Any]) -> NDArray[np.uint16]:
    """Win, draw, loss (n, 3), whole amounts or shares of 1, as (n, 3) u2 that sum to 65535; see `integer_shares`."""
    whole = np.rint(shares * 1e9) if shares.dtype.kind == "f" else shares
    return integer_shares(whole.reshape(-1), 3 * np.arange(len(shares) + 1)).reshape(-1, 3)


def wdl_of_score(scores: ArrayLike) -> NDArray[np.uint16]:
    """Win-draw-loss (n, 3) u2 as a record stores it, of scores (n,) from the mover's side (`client.score_of`).

    Stockfish 15.1's own model at full move 32, fitted to 17,691 lines of it to 0.003 (root mean square): for x
    centipawns win = 1 / (1 + exp((EVEN - x) / SCALE)), loss = 1 / (1 + exp((EVEN + x) / SCALE)), draw = the
    rest. A mate, that is a score beyond `client.CENTIPAWN_LIMIT`, is won or lost for certain.
    """
    score = np.atleast_1d(np.asarray(scores, np.float64))
    x = np.clip(score, -MAX_CENTIPAWNS, MAX_CENTIPAWNS)
    win, loss = 1 / (1 + np.exp((EVEN_CENTIPAWNS - x) / WDL_SCALE)), 1 / (1 + np.exp((EVEN_CENTIPAWNS + x) / WDL_SCALE))
    mate = np.abs(score) > CENTIPAWN_LIMIT
    win, loss = np.where(mate, score > 0, win), np.where(mate, score < 0, loss)
    return wdl_of_shares(np.stack([win, 1 - win - loss, loss], axis=1))
