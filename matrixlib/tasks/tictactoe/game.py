"""Tic-tac-toe as a Game: states are two bit maps, moves the squares 0 to 8, row by row."""

import numpy as np
from numpy.typing import NDArray

from matrixlib.play.game import GameRecord, Moves, Offsets, States, Values, endings, unknown

SQUARES = 9
STATE = np.dtype([("ours", "<u2"), ("theirs", "<u2"), ("side", "u1")])  # bit = square, side 0 = X
LINES = np.array([0o7, 0o70, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124], np.uint16)


class TicTacToe:
    """The rules. X starts; three in a row win."""

    name = "tic-tac-toe"
    actions = SQUARES

    def initial(self, n: int) -> States:
        """n times the empty board."""
        return np.zeros(n, STATE)

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        """Empty squares (K,), none where a side has won, and offsets (N + 1,)."""
        taken = states["ours"] | states["theirs"]
        free = taken[:, None] >> np.arange(SQUARES) & 1 == 0
        free &= ~_won(states)[:, None]
        return np.nonzero(free)[1].astype(np.int32), np.concatenate([[0], free.sum(1).cumsum()])

    def play(self, states: States, moves: Moves) -> States:
        """The boards after a move in each."""
        after = np.empty(len(states), STATE)
        after["ours"] = states["theirs"]
        after["theirs"] = states["ours"] | np.left_shift(1, moves)
        after["side"] = 1 - states["side"]
        return after

    def terminal(self, states: States, counts: NDArray[np.int64]) -> Values:
        """(N,) -1 where the opponent has three in a row, 0 on a full board, else NaN."""
        return np.where(_won(states), -1, np.where(counts == 0, 0, np.nan)).astype(np.float32)

    def to_move(self, states: States) -> NDArray[np.uint8]:
        """(N,) 0 X, 1 O."""
        return states["side"]

    def key(self, states: States) -> NDArray[np.uint64]:
        """(N,) the state itself in 19 bits."""
        high = states["theirs"].astype(np.uint64) | states["side"].astype(np.uint64) << np.uint64(SQUARES)
        return states["ours"].astype(np.uint64) | high << np.uint64(SQUARES)

    def repeat(self, states: States, counts: NDArray[np.int32]) -> States:
        """The states: every move fills a square, so nothing is repeated."""
        return states

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        """Values (K,) of the moves that end the game, for their mover."""
        return endings(self, states, moves, offsets)

    def proven(self, states: States) -> Values:
        """Nothing: a search finds out for itself."""
        return unknown(states)

    def write(self, game: GameRecord) -> str:
        """The game in a line: X and O by name, the board at the start, the squares played, the points of both."""
        (start,) = game.start
        marks = ("x", "o") if start["side"] == 0 else ("o", "x")
        of = {(1, 0): marks[0], (0, 1): marks[1], (0, 0): "."}
        board = "".join(of[start["ours"] >> s & 1, start["theirs"] >> s & 1] for s in range(SQUARES))
        points = "*"
        if game.result is not None:
            points = {1: "1-0", 0: "1/2-1/2", -1: "0-1"}[int(game.result if marks[0] == "x" else -game.result)]
        return f"{' - '.join(game.players)}: {board} {' '.join(map(str, game.moves))} {points}"


def _won(states: States) -> NDArray[np.bool_]:
    """Whether the side that has just moved has three in a row."""
    return ((states["theirs"][:, None] & LINES) == LINES).any(1)
