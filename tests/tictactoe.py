"""Tic-tac-toe as a Game: the second game of the tests, small enough to be solved."""

from __future__ import annotations

from functools import cache

import numpy as np

from matrixlib.play.game import Moves, Offsets, Played, States, Values, endings, unknown

STATE = np.dtype(
    [("ours", "<u2"), ("theirs", "<u2"), ("side", "u1")]
)  # 9-bit maps, square = 3 * row + column
LINES = np.array([0o7, 0o70, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124], np.uint16)


class TicTacToe:
    """Moves are squares 0-8; X starts."""

    name = "tic-tac-toe"
    actions = 9

    def initial(self, n: int) -> States:
        return np.zeros(n, STATE)

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        taken = states["ours"] | states["theirs"]
        free = taken[:, None] >> np.arange(9) & 1 == 0
        free &= ~self._won(states)[:, None]
        return np.nonzero(free)[1].astype(np.int32), np.concatenate([[0], free.sum(1).cumsum()])

    def play(self, states: States, moves: Moves) -> States:
        after = np.empty(len(states), STATE)
        after["ours"] = states["theirs"]
        after["theirs"] = states["ours"] | np.left_shift(1, moves)
        after["side"] = 1 - states["side"]
        return after

    def terminal(self, states: States, counts: np.ndarray) -> Values:
        return np.where(self._won(states), -1, np.where(counts == 0, 0, np.nan)).astype(np.float32)

    def to_move(self, states: States) -> np.ndarray:
        return states["side"]

    def key(self, states: States) -> np.ndarray:
        high = states["theirs"].astype(np.uint64) | states["side"].astype(np.uint64) << np.uint64(9)
        return states["ours"].astype(np.uint64) | high << np.uint64(9)

    def repeat(self, states: States, counts: np.ndarray) -> States:
        return states  # every move fills a square

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        return endings(self, states, moves, offsets)

    def proven(self, states: States) -> Values:
        return unknown(states)

    def write(self, game: Played) -> str:
        return " ".join(map(str, game.moves))

    @staticmethod
    def _won(states: States) -> np.ndarray:
        """Whether the side that has just moved has a line."""
        return ((states["theirs"][:, None] & LINES) == LINES).any(1)


@cache
def best_moves(ours: int, theirs: int) -> tuple[int, tuple[int, ...]]:
    """(value for the side to move, every move that keeps it), by minimax without the Game above."""
    lines = [int(line) for line in LINES]
    if any(theirs & line == line for line in lines):
        return -1, ()
    values = {s: -best_moves(theirs, ours | 1 << s)[0] for s in range(9) if not (ours | theirs) >> s & 1}
    if not values:
        return 0, ()
    best = max(values.values())
    return best, tuple(s for s, value in values.items() if value == best)
