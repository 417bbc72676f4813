"""Tic-tac-toe solved: what each position is worth and which moves keep that, by minimax without the Game."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from matrixlib.play.game import States
from matrixlib.tasks.tictactoe.game import LINES, SQUARES, STATE


@cache
def best_moves(ours: int, theirs: int) -> tuple[int, tuple[int, ...]]:
    """(value for the side to move, every move that keeps it) of two bit maps; no move where the game is over."""
    values = move_values(ours, theirs)
    if values is None:
        return -1, ()
    if not values:
        return 0, ()
    best = max(values.values())
    return best, tuple(square for square, value in values.items() if value == best)


def move_values(ours: int, theirs: int) -> dict[int, int] | None:
    """Move -> its value for the mover; None where the opponent has won."""
    if any(theirs & line == line for line in LINES.tolist()):
        return None
    free = (square for square in range(SQUARES) if not (ours | theirs) >> square & 1)
    return {square: -best_moves(theirs, ours | 1 << square)[0] for square in free}


@dataclass(frozen=True)
class Solution:
    """Every position (N,) that can arise and in which there is a move: its value for the side to move (N,), and the
    value for the mover of each move (N, 9), -2 where the square is taken."""

    states: States
    value: NDArray[np.int8]
    moves: NDArray[np.int8]


@cache
def solve() -> Solution:
    """The 4,520 positions; X has played as often as O, or once more."""
    positions: dict[tuple[int, int], int] = {}
    level, side = {(0, 0)}, 0
    while level:
        level = {pair for pair in level if move_values(*pair)}
        positions |= dict.fromkeys(sorted(level), side)
        level = {(theirs, ours | 1 << s) for ours, theirs in level for s in move_values(ours, theirs) or ()}
        side = 1 - side
    moves = np.full((len(positions), SQUARES), -2, np.int8)
    for row, pair in zip(moves, positions, strict=True):
        for square, value in (move_values(*pair) or {}).items():
            row[square] = value
    states = np.array([(*pair, side) for pair, side in positions.items()], STATE)
    return Solution(states, moves.max(1), moves)
