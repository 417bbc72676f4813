"""Stockfish labels, and the policy and win-draw-loss targets made from them.

Labels are computed on the oriented position at full move 32 after `ucinewgame`, so that they depend on the position
only: Stockfish 15.1's win-draw-loss depends on the move number, its search on the hash. The rest is integer arithmetic.
Policy level k is exp(-k / 10) times the best move's weight: a softmax with a temperature of 50 centipawns. Of a tree
search (Lc0) the weights are its visits: it has no score of the moves that it does not visit.
"""

from collections.abc import Mapping
from decimal import Decimal
from math import log
from typing import Any, NamedTuple

import chess
import numpy as np
from numpy.typing import ArrayLike, NDArray

from matrixlib.data.shards import Batch
from matrixlib.tasks.chess.importers.notation import legal_moves
from matrixlib.tasks.chess.records import WDL_SUM, policy_index
from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT, MATE, Engine, EngineError, Stockfish
from matrixlib.tasks.chess.stockfish.player import engine_move

FULLMOVE = 32  # where Stockfish 15.1 gives 100 centipawns a win rate of 50 %
DEEP_LINES = 3
ALL_LINES = 500  # MultiPV of all legal moves; the client clips it
TEMPERATURE = 50  # centipawns
LEVEL_CENTIPAWNS = 5
NO_WEIGHT = 81  # first level without weight, more than 400 centipawns behind
DEEP_MARGIN = 10  # centipawns, at least, between the last deep line and other moves
RULES = {"temperature": TEMPERATURE, "step": LEVEL_CENTIPAWNS, "margin": DEEP_MARGIN}  # stored with the data
MAX_CENTIPAWNS = 2000  # scores are clipped here; beyond, the order of winning moves is noise
MATE_VALUE, MATE_STEP, MATE_MOVES = 3000, 50, 15  # a mate in k counts 3000 - 50 min(k, 15) centipawns
EVEN_CENTIPAWNS = 100.0  # advantage that wins half of the games
WDL_SCALE = 18.32  # centipawns; 66.13 of 361 engine units at ply 62
WEIGHTS = np.array(
    [int((Decimal(-k * LEVEL_CENTIPAWNS) / TEMPERATURE).exp() * 10**6) for k in range(NO_WEIGHT)] + [0], dtype=np.int64
)


class Label(NamedTuple):
    """Win-draw-loss per mille of the side to move, and the policy level of each legal move by policy index."""

    wdl: tuple[int, int, int]
    level: list[int]


def label(engine: Stockfish, board: chess.Board, shallow_depth: int, deep_depth: int) -> Label:
    """Label a position: all moves at the shallow depth, the best DEEP_LINES at the deep one; with a limit by visits.
    Where the engine shows no win-draw-loss it is that of its score."""
    ours = board.copy(stack=False) if board.turn else board.mirror()
    ours.fullmove_number = FULLMOVE
    position = "fen " + ours.fen(en_passant="legal")
    engine.new_game()
    if engine.limit:
        best, counts = engine.visits(position, engine.limit)
        visits = {engine_move(engine, ours, move).uci(): n for move, n in counts.items()}  # Lc0 castles as e1h1
        visits[best.move] = max(1, visits.get(best.move, 0))
        most = max(visits.values())
        level = {move: min(round(10 * log(most / (n or 1e-9))), NO_WEIGHT) for move, n in visits.items()}
    else:
        scores = {line.move: line.score for line in engine.search(position, f"depth {shallow_depth}", ALL_LINES)}
        left = [move for move in ours.legal_moves if move.uci() not in scores]  # by an engine with fewer lines
        scores |= {move.uci(): score_after(engine, ours, move, shallow_depth) for move in left}
        best, *others = engine.search(position, f"depth {deep_depth}", DEEP_LINES)
        level = levels(scores, {line.move: line.score for line in (best, *others)})
    moves = sorted(ours.legal_moves, key=lambda move: policy_index(move, chess.WHITE))
    if level.keys() != {move.uci() for move in moves}:
        raise EngineError(f"{engine.name} lists {len(level)} moves in {position}, {len(moves)} are legal")
    win, draw, loss = best.wdl or (wdl_of_score(best.score)[0] / WDL_SUM * 1000).round().astype(int).tolist()
    return Label((win, draw, loss), [level[move.uci()] for move in moves])


def score_after(engine: Engine, board: chess.Board, move: chess.Move, depth: int) -> int:
    """Score of a move for the mover, see `client.MATE`, by a search of the position after it."""
    after = board.copy(stack=False)
    after.push(move)
    if not any(after.legal_moves):
        return MATE - 1 if after.is_check() else 0
    score = -engine.search("fen " + after.fen(en_passant="legal"), f"depth {max(depth - 1, 1)}")[0].score
    return score - (score > CENTIPAWN_LIMIT)  # a mate takes one move more


def levels(shallow: Mapping[str, int], deep: Mapping[str, int]) -> dict[str, int]:
    """Policy level of each move from shallow scores of all and deep scores of the best moves.

    Others are at least DEEP_MARGIN worse than the last deep line, lest a blunder of the shallow search keeps weight.
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
    """Scores (see `client.MATE`) as centipawns; mates count more, shorter ones most."""
    scores = scores.astype(np.int64)
    moves = np.minimum(MATE - np.abs(scores), MATE_MOVES)
    mates = np.sign(scores) * (MATE_VALUE - MATE_STEP * moves)
    return np.where(np.abs(scores) > CENTIPAWN_LIMIT, mates, np.clip(scores, -MAX_CENTIPAWNS, MAX_CENTIPAWNS))


def level_weights(level: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Policy weights (K,) uint16 of levels (K,) with row offsets (N + 1,), see `integer_shares`."""
    return integer_shares(WEIGHTS[level], offset)


class Positions(NamedTuple):
    """Labelled positions without targets."""

    records: np.ndarray  # (n,) RECORD, wdl still 0
    per_mille: np.ndarray  # (n, 3) u2, win-draw-loss of the side to move
    level: np.ndarray  # (K,) u1, of all legal moves in ascending order of policy index


def assemble(positions: Positions) -> Batch:
    """Shard batch with win-draw-loss and policy targets."""
    records = positions.records.copy()
    records["wdl"] = wdl_of_shares(positions.per_mille)
    legal = legal_moves(records)
    return legal.batch(records, level_weights(positions.level, legal.offset))


# Shares


def integer_shares(amounts: NDArray[Any], offset: NDArray[Any]) -> NDArray[np.uint16]:
    """Shares (K,) uint16 of integer amounts (K,) >= 0, up to 1e14 per row, with offsets (N + 1,) of non-empty rows.

    A row sums to 65535, the first of its largest amounts gets the remainder; zero rows (unknown policy) stay 0.
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
    """Win, draw, loss (N, 3) uint16 with sum 65535 of integer amounts or probabilities, see `integer_shares`."""
    whole = np.rint(shares * 1e9) if shares.dtype.kind == "f" else shares
    return integer_shares(whole.reshape(-1), 3 * np.arange(len(shares) + 1)).reshape(-1, 3)


def wdl_of_score(scores: ArrayLike) -> NDArray[np.uint16]:
    """Win-draw-loss (N, 3) uint16 of a record, from scores (N,) of the side to move (`client.score_of`).

    Stockfish 15.1's model at full move 32, fitted to 17,691 of its lines (RMSE 0.003): for x centipawns
    win = 1 / (1 + exp((EVEN_CENTIPAWNS - x) / WDL_SCALE)), loss = the same of -x, draw = the rest. Mates, scores beyond
    `client.CENTIPAWN_LIMIT`, are certain.
    """
    score = np.atleast_1d(np.asarray(scores, np.float64))
    x = np.clip(score, -MAX_CENTIPAWNS, MAX_CENTIPAWNS)
    win, loss = 1 / (1 + np.exp((EVEN_CENTIPAWNS - x) / WDL_SCALE)), 1 / (1 + np.exp((EVEN_CENTIPAWNS + x) / WDL_SCALE))
    mate = np.abs(score) > CENTIPAWN_LIMIT
    win, loss = np.where(mate, score > 0, win), np.where(mate, score < 0, loss)
    return wdl_of_shares(np.stack([win, 1 - win - loss, loss], axis=1))
