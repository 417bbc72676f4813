"""Positions per second of the bitboard core on one core, beside python-chess in the same run.

    python tests/bench/bench_bitboard.py [--positions 20000] [--repeats 9]

Each figure is the median of several runs after a warm-up; the ratio is to python-chess on the same positions.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from positions import random_positions
from test_ssl_targets import truth

from matrixlib.tasks.chess import bitboard, records


def rate(work: Callable[[], object], items: int, repeats: int) -> float:
    """Items per second: the median of several runs after one warm-up run."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return items / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    boards = random_positions(args.positions, seed=51)
    rows = records.from_boards(boards)
    few, n = boards[:300], len(boards)
    pieces, castling, file, clock = (rows[k].copy() for k in ("pieces", "castling", "en_passant", "halfmove"))
    codes, _, offsets = bitboard.legal_moves(pieces, castling, file)
    alive = offsets[:-1] < offsets[1:]  # mates and stalemates have no first move
    first = codes[offsets[:-1][alive]]
    state = [column[alive] for column in (pieces, castling, file, clock)]
    firsts = [next(iter(b.legal_moves)) for b in few if any(b.legal_moves)]
    movable = [b for b in few if any(b.legal_moves)]

    def push() -> None:
        for board, move in zip(movable, firsts, strict=True):
            board.copy(stack=False).push(move)

    def indices() -> None:
        for board in few:
            sorted(records.policy_index(m, board.turn) for m in board.legal_moves)

    def targets() -> None:
        for board in few:
            truth(board)

    table = (
        ("legal policy indices", lambda: bitboard.legal_policy_indices(pieces, castling, file), n, indices, len(few)),
        ("make move", lambda: bitboard.make_moves(*state, first), len(first), push, len(movable)),
        ("ssl maps", lambda: bitboard.ssl_maps(pieces), n, targets, len(few)),
        ("records from boards", lambda: records.from_boards(boards), n, None, 0),
    )
    print(f"{n:,} random positions, {len(codes) / n:.1f} legal moves each; one core, median of {args.repeats}")
    for name, work, items, reference, reference_items in table:
        ours = rate(work, items, args.repeats)
        line = f"{name:22} {ours:14,.0f} /s"
        if reference is not None:
            theirs = rate(reference, reference_items, 3)
            line += f"   python-chess {theirs:9,.0f} /s   {ours / theirs:8,.0f} x"
        print(line)


if __name__ == "__main__":
    main()
