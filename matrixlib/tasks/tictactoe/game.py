"""Tic-tac-toe as a game of self-play: rules, stored positions, and the solution by minimax without the rules.

States are two bit maps, moves the squares 0 to 8, row by row.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from matrixlib.data.shards import Batch, Layout
from matrixlib.play import match
from matrixlib.play.game import GameRecord, Moves, Offsets, States, Trace, Values, endings

SQUARES = 9
STATE = np.dtype([("ours", "<u2"), ("theirs", "<u2"), ("side", "u1")])  # bit = square, side 0 = X
LINES = np.array([0o7, 0o70, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124], np.uint16)
UNKNOWN = 2  # result
RECORD = np.dtype(
    [
        *((name, STATE[name]) for name in STATE.names or ()),
        ("policy", "<u2", SQUARES),  # shares of the moves, sum about 65535; 0 on taken squares
        ("result", "i1"),  # of the game, from the side to move: 1 win, 0 draw, -1 loss, 2 unknown
        ("game", "<u8"),  # id of the game
    ]
)
LAYOUT = Layout("tictactoe", 1, RECORD, {})


class TicTacToe:
    """The rules. X starts; three in a row win."""

    name = "tic-tac-toe"
    actions = SQUARES

    def initial(self, n: int) -> States:
        return np.zeros(n, STATE)

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        """Empty squares (K,), none where a side has won, and offsets (N + 1,)."""
        taken = states["ours"] | states["theirs"]
        free = taken[:, None] >> np.arange(SQUARES) & 1 == 0
        free &= ~_won(states)[:, None]
        return np.nonzero(free)[1].astype(np.int32), np.concatenate([[0], free.sum(1).cumsum()])

    def play(self, states: States, moves: Moves) -> States:
        after = np.empty(len(states), STATE)
        after["ours"] = states["theirs"]
        after["theirs"] = states["ours"] | np.left_shift(1, moves)
        after["side"] = 1 - states["side"]
        return after

    def terminal(self, states: States, counts: NDArray[np.int64]) -> Values:
        """(N,) -1 where the opponent has three in a row, 0 on a full board, else NaN."""
        return np.where(_won(states), -1, np.where(counts == 0, 0, np.nan)).astype(np.float32)

    def to_move(self, states: States) -> NDArray[np.uint8]:
        return states["side"]

    def key(self, states: States) -> NDArray[np.uint64]:
        """(N,) the state itself in 19 bits."""
        high = states["theirs"].astype(np.uint64) | states["side"].astype(np.uint64) << np.uint64(SQUARES)
        return states["ours"].astype(np.uint64) | high << np.uint64(SQUARES)

    def repeat(self, states: States, counts: NDArray[np.int32]) -> States:
        """The states: every move fills a square, so nothing is repeated."""
        return states

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        return endings(self, states, moves, offsets)

    def proven(self, states: States) -> Values:
        """Nothing: a search finds out for itself."""
        return np.full(len(states), np.nan, np.float32)

    def write(self, game: GameRecord) -> str:
        """The game in a line: X and O by name, the board at the start, the squares played, the points of both."""
        (start,) = game.start
        us, them = "xo" if start["side"] == 0 else "ox"
        signs = ((us if start["ours"] >> s & 1 else them if start["theirs"] >> s & 1 else ".") for s in range(SQUARES))
        x = 1.0 if us == "x" else -1.0
        points: dict[float | None, str] = {None: "*", 0.0: "1/2-1/2", x: "1-0", -x: "0-1"}
        return f"{' - '.join(game.players)}: {''.join(signs)} {' '.join(map(str, game.moves))} {points[game.result]}"


def _won(states: States) -> NDArray[np.bool_]:
    """Whether the side that has just moved has three in a row."""
    return ((states["theirs"][:, None] & LINES) == LINES).any(1)


def training_batch(traces: Sequence[Trace], ids: Mapping[int, int]) -> Batch:
    """The positions of games that were fully searched, with the search's policy; ids: game number -> its id."""
    parts = [np.empty(0, RECORD)]
    for trace in traces:
        records, result = np.zeros(len(trace.states), RECORD), trace.results()
        for name in STATE.names or ():
            records[name] = trace.states[name]
        owner = np.repeat(np.arange(len(records)), np.diff(trace.offsets))
        records["policy"][owner, trace.moves] = np.rint(trace.policy * 65535)
        records["result"] = np.where(np.isnan(result), UNKNOWN, result)
        records["game"] = ids[trace.number]
        parts.append(records[trace.full])
    return {"records": np.concatenate(parts)}


@cache
def best_moves(ours: int, theirs: int) -> tuple[int, tuple[int, ...]]:
    """(value for the side to move, every move that keeps it) of two bit maps; no move where the game is over."""
    if any(theirs & line == line for line in LINES.tolist()):
        return -1, ()
    values = _move_values(ours, theirs)
    best = max(values.values(), default=0)
    return best, tuple(square for square, value in values.items() if value == best)


def _move_values(ours: int, theirs: int) -> dict[int, int]:
    """Move -> its value for the mover."""
    free = (square for square in range(SQUARES) if not (ours | theirs) >> square & 1)
    return {square: -best_moves(theirs, ours | 1 << square)[0] for square in free}


@cache
def solve() -> tuple[States, NDArray[np.int8]]:
    """The 4,520 positions (N,) that can arise and have a move, and the value for the mover of each move (N, 9), -2
    where the square is taken."""
    states, values = [], []
    reached, side = {(0, 0)}, 0
    while level := sorted(pair for pair in reached if best_moves(*pair)[1]):
        states += [(*pair, side) for pair in level]
        values += [[_move_values(*pair).get(square, -2) for square in range(SQUARES)] for pair in level]
        reached = {(theirs, ours | 1 << square) for ours, theirs in level for square in _move_values(ours, theirs)}
        side = 1 - side
    return np.array(states, STATE), np.array(values, np.int8)


def perfect_player(seed: int) -> match.Player:
    """Plays any move that keeps what the position is worth; in a game of a number always the same."""

    def play(turn: match.Turn) -> match.Choice:
        options = [best_moves(int(state["ours"]), int(state["theirs"]))[1] for state in turn.states]
        numbers = zip(turn.games, turn.history, options, strict=True)
        picks = [np.random.default_rng([seed, n, len(past)]).choice(moves) for n, past, moves in numbers]
        return match.Choice(np.array(picks, np.int32))

    return play
