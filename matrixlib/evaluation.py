"""Evaluation of a network: held-out positions and puzzles, every figure beside its baselines."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import chess
import numpy as np

if TYPE_CHECKING:
    from matrixlib.data.loader import Loader
    from matrixlib.engine.task import Batch
    from matrixlib.net import Net

BANDS = ((0, 1000), (1000, 1500), (1500, 2000), (2000, 4000))


@dataclass(frozen=True)
class Puzzle:
    """A position to solve: `board` is after the opponent's set-up move, `answer` the first move of the solution."""

    board: chess.Board
    answer: chess.Move
    rating: int


def held_out(net: Net, loader: Loader, sample: int = 0, batch_size: int = 512) -> dict[str, Any]:
    """Figures on held-out positions, each with its baselines.

    top1, top3: agreement of the most probable move(s) with the teacher's best; policy_kl: nats; wdl_accuracy;
    value_correlation: Pearson of expected scores. Baselines: uniform over legal moves, best capture by piece value
    (P1 N3 B3 R5 Q9; no capture on offer = a wrong answer), majority class. sample: 0 = all positions.
    """
    from matrixlib.engine.validation import validate

    base: dict[str, float] = {"rows": 0}

    def batches() -> Iterator[Batch]:
        for batch in loader.sequential(batch_size, sample=sample):
            found = _baselines({name: tensor.numpy() for name, tensor in batch.items()})
            for name, amount in (found | {"rows": len(batch["pieces"])}).items():
                base[name] = base.get(name, 0) + amount
            yield batch

    seen = validate(net.task, net.model, batches(), net.runtime, frozenset({"policy", "value"}), "full")
    if seen is None or not seen.counts["policy"] or not seen.counts["value"]:
        raise ValueError(
            "the held-out positions have no policy or no value target to evaluate on; import others"
        )
    policy, value = seen.counts["policy"], seen.counts["value"]
    moments = {name: seen.metrics[f"value/{name}"] for name in ("x", "y", "x2", "y2", "xy")}
    spread = (moments["x2"] - moments["x"] ** 2) * (moments["y2"] - moments["y"] ** 2)
    figures: dict[str, Any] = {
        "positions": base["rows"],
        "top1": seen.metrics["policy/top1"],
        "top3": seen.metrics["policy/top3"],
        "policy_kl": seen.metrics["policy/kl"],
        "value_correlation": (moments["xy"] - moments["x"] * moments["y"]) / spread**0.5
        if spread > 0
        else 0.0,
        "baselines": {
            "uniform_top1": base["uniform_top1"] / policy,
            "uniform_top3": base["uniform_top3"] / policy,
            "uniform_kl": base["uniform_kl"] / policy,
            "best_capture_top1": base["capture_top1"] / policy,
        },
    }
    if "value/accuracy" in seen.metrics:
        figures["wdl_accuracy"] = seen.metrics["value/accuracy"]
        figures["baselines"]["majority_wdl"] = max(base[f"class_{k}"] for k in range(3)) / value
    return figures


def _baselines(batch: dict[str, np.ndarray]) -> dict[str, float]:
    """Sums of the baselines over a host batch (rows with a policy target; rows with a known result for the classes)."""
    index, weight = batch["policy_index"], batch["policy_weight"].astype(np.float64)
    legal = index >= 0
    total = weight.sum(1)
    known = total > 0
    target = weight[known] / total[known, None]
    n_legal = legal.sum(1)[known]
    best = legal[known] & (target >= target.max(1, keepdims=True))
    entropy = -(target * np.log(np.where(target > 0, target, 1))).sum(1)
    gain = np.where(legal, captured_value(batch["pieces"], index), 0)[known]
    capture = gain.argmax(1)
    right = (gain.max(1) > 0) & best[np.arange(len(best)), capture]
    classes = batch["wdl"].argmax(1)[batch["wdl"].sum(1) > 0]
    ties = best.sum(1)
    # Three of n moves drawn without replacement miss all `ties` best ones with this hypergeometric chance.
    miss = np.prod(
        [np.clip((n_legal - ties - k) / np.maximum(n_legal - k, 1), 0, 1) for k in range(3)], axis=0
    )
    return {
        "uniform_top1": float((ties / n_legal).sum()),
        "uniform_top3": float((1 - miss).sum()),
        "uniform_kl": float((np.log(n_legal) - entropy).sum()),
        "capture_top1": float(right.sum()),
        **{f"class_{k}": float((classes == k).sum()) for k in range(3)},
    }


def captured_value(pieces: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Value (P1 N3 B3 R5 Q9) of what each move takes: packed pieces (B,32), indices (B,L) -> (B,L).

    En passant counts as taking nothing.
    """
    from matrixlib.tasks.chess.bitboard import POLICY_MOVE

    board = np.stack([pieces & 15, pieces >> 4], axis=-1).reshape(len(pieces), 64)
    value = np.array([0, 0, 0, 0, 0, 0, 1, 3, 3, 5, 9, 0, 0, 0, 0, 0])[board]
    to = POLICY_MOVE[np.maximum(index, 0)] >> 6 & 63
    return np.where(index >= 0, np.take_along_axis(value, to.astype(np.int64), axis=1), 0)


def read_puzzles(path: str | Path, limit: int = 0) -> list[Puzzle]:
    """Lichess puzzles of a CSV file (columns FEN, Moves, Rating; FEN is before the set-up move); limit 0 = all.

    Raises ValueError naming the file, and the line of a puzzle that is not legal chess.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no puzzle file at '{path}': give the path of a Lichess puzzle CSV")
    puzzles: list[Puzzle] = []
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        missing = {"FEN", "Moves", "Rating"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"'{file.name}' lacks the columns {sorted(missing)}; a Lichess puzzle CSV has them"
            )
        for line, row in enumerate(reader, start=2):
            try:
                board = chess.Board(row["FEN"])
                setup, answer, *_ = row["Moves"].split()
                board.push_uci(setup)
                puzzles.append(Puzzle(board, board.parse_uci(answer), int(row["Rating"])))
            except (ValueError, TypeError, AttributeError) as error:  # the last two: a short row
                raise ValueError(f"'{file.name}' line {line}: {error}") from None
            if limit and len(puzzles) == limit:
                break
    return puzzles


def solve(net: Net, puzzles: Iterable[Puzzle]) -> dict[str, Any]:
    """First moves solved, in all and by rating band: by the policy alone and by a one-ply search of the value.

    Any move that mates counts as right where the answer mates. Baseline: best capture.
    """
    items = list(puzzles)
    policy = [
        _right(p, e.best) for p, e in zip(items, net.evaluate_boards([p.board for p in items]), strict=True)
    ]
    value = [_right(p, move) for p, move in zip(items, one_ply(net, [p.board for p in items]), strict=True)]
    capture = [_right(p, best_capture(p.board)) for p in items]
    ratings = np.array([p.rating for p in items])
    table = []
    for low, high in ((0, 4000), *BANDS):
        rows = np.flatnonzero((ratings >= low) & (ratings < high))
        if len(rows):
            table.append(
                {
                    "rating": "all" if (low, high) == (0, 4000) else f"{low}-{high}",
                    "puzzles": len(rows),
                    "policy": float(np.mean([policy[k] for k in rows])),
                    "one_ply_value": float(np.mean([value[k] for k in rows])),
                    "best_capture": float(np.mean([capture[k] for k in rows])),
                }
            )
    return {"puzzles": len(items), "bands": table}


def puzzle_table(solved: Mapping[str, Any]) -> str:
    """Text table of what `solve` found."""
    head = f"{'rating':12}{'puzzles':>9}{'policy':>9}{'one-ply value':>15}{'best capture':>14}\n"
    return head + "".join(
        f"{row['rating']:12}{row['puzzles']:>9}{row['policy']:>9.1%}{row['one_ply_value']:>15.1%}"
        f"{row['best_capture']:>14.1%}\n"
        for row in solved["bands"]
    )


def _right(puzzle: Puzzle, move: str | None) -> bool:
    if move is None:
        return False
    if move == puzzle.answer.uci():
        return True
    return _mates(puzzle.board, puzzle.answer) and _mates(puzzle.board, chess.Move.from_uci(move))


def _mates(board: chess.Board, move: chess.Move) -> bool:
    after = board.copy(stack=False)
    after.push(move)
    return after.is_checkmate()


def best_capture(board: chess.Board) -> str | None:
    """The capture of the most valuable piece (P1 N3 B3 R5 Q9), lowest UCI among equals; None without one."""
    worth = {chess.PAWN: 1, chess.KNIGHT: 3, chess.BISHOP: 3, chess.ROOK: 5, chess.QUEEN: 9}
    moves = [
        (-worth.get(board.piece_type_at(m.to_square) or chess.PAWN, 0), m.uci())
        for m in board.generate_legal_captures()
    ]
    return min(moves)[1] if moves else None


def one_ply(net: Net, boards: list[chess.Board]) -> list[str | None]:
    """For each board the move after which the opponent's expected result is lowest; mates and draws by rule exact."""
    children: list[chess.Board] = []
    plans: list[
        list[tuple[str, float | int]]
    ] = []  # a float is an exact value for us, an int a row of `children`
    for board in boards:
        plan: list[tuple[str, float | int]] = []
        for move in board.legal_moves:
            after = board.copy(stack=False)
            after.push(move)
            if after.is_checkmate():
                plan.append((move.uci(), 1.0))
            elif after.is_stalemate() or after.is_insufficient_material():
                plan.append((move.uci(), 0.0))
            else:
                plan.append((move.uci(), len(children)))
                children.append(after)
        plans.append(plan)
    values = net.values(children)
    best: list[str | None] = []
    for plan in plans:
        scored = [(move, v if isinstance(v, float) else -float(values[v])) for move, v in plan]
        best.append(max(scored, key=lambda item: item[1])[0] if scored else None)
    return best
