"""What search, self-play and matches ask of a game: rules over whole batches of states.

States are one structured array (N,) of a dtype of the game's own. Values are seen from the side to move: 1 a win, 0 a
draw, -1 a loss. Moves are integers in [0, actions), the same as in the policy of a network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

States = NDArray[np.void]
Moves = NDArray[np.int32]
Offsets = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class GameRecord:
    """A game to write down: where it started (a state (1,)), its moves, and what is known about it.

    result: 1, 0 or -1 from the side to move at the start, None unknown. tags: names to texts. comments: one a move,
    empty where there is none. players: names of the side that starts a game from the beginning and of the other.
    """

    start: States
    moves: Sequence[int]
    result: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    comments: Sequence[str] = ()
    players: tuple[str, str] = ("?", "?")


@dataclass(frozen=True)
class Trace:
    """A finished game of self-play: n positions before a searched move, with the results of the searches.

    line (n,): the moves of the game. policy and moves (K,): targets over the legal moves, row i at
    offsets[i]:offsets[i + 1]. values: of the search, simulations: done for it, full: whether it is to be learned from,
    all (n,). result: from the side to move at the first position, None unknown. ending: "normal", "resignation" or
    "ply limit". gave_up: row at which the rule of resignation was met, -1 never; a game may be played out after it.
    """

    number: int
    states: States
    line: NDArray[np.int32]
    offsets: NDArray[np.int64]
    moves: NDArray[np.int32]
    policy: NDArray[np.float32]
    values: NDArray[np.float32]
    simulations: NDArray[np.int32]
    full: NDArray[np.bool_]
    result: float | None
    ending: str
    gave_up: int

    @property
    def wrongly_given_up(self) -> bool | None:
        """Whether resigning would have been wrong, in a game played out to its end; None in others."""
        if self.gave_up < 0 or self.ending != "normal" or self.result is None:
            return None
        return self.result * (-1) ** self.gave_up >= 0

    def results(self) -> NDArray[np.float32]:
        """(n,) the game's result from the side to move at each position, NaN unknown."""
        signs = np.where(np.arange(len(self.states)) % 2, -1, 1)
        return (signs * (np.nan if self.result is None else self.result)).astype(np.float32)


@dataclass(frozen=True)
class Past:
    """What came before N states: states (N, H), the newest first, of which only the first `known` (N,) count."""

    states: States
    known: NDArray[np.int64]


class Game(Protocol):
    """The rules of a game for two, for batches of N states."""

    @property
    def name(self) -> str: ...

    @property
    def actions(self) -> int:
        """Number of different moves: the size of a policy."""

    def initial(self, n: int) -> States:
        """n times the state in which a game starts."""

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        """Legal moves (K,), ascending in each state, and offsets (N + 1,): state i owns [o[i]:o[i + 1]]."""

    def play(self, states: States, moves: Moves) -> States:
        """The states after one legal move (N,) in each; none of them counts as a repetition yet."""

    def terminal(self, states: States, counts: NDArray[np.int64]) -> Values:
        """(N,) the value for the side to move where the game is over, else NaN; counts: legal moves of each."""

    def to_move(self, states: States) -> NDArray[np.uint8]:
        """(N,) 0 where the side that starts the game is to move, 1 where the other is."""

    def key(self, states: States) -> NDArray[np.uint64]:
        """(N,) a hash equal for states that count as a repetition of each other, else different."""

    def repeat(self, states: States, counts: NDArray[np.int32]) -> States:
        """The states, told how often each has occurred before in its game; `terminal` then goes by it."""

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        """(K,) the value for the mover of each legal move that ends the game, NaN where it goes on.

        A move whose ending is dear to recognise may be NaN too; it is then recognised when the move is tried.
        """

    def proven(self, states: States) -> Values:
        """(N,) values known from elsewhere (endgame tables), exact with best play, NaN where unknown."""

    def write(self, game: GameRecord) -> str:
        """The game as text, in the form that people and programs of that game read."""


def endings(game: Game, states: States, moves: Moves, offsets: Offsets) -> Values:
    """`Game.endings` for any game, by playing every move."""
    after = game.play(np.repeat(states, np.diff(offsets)), moves)
    _, after_offsets = game.legal(after)
    return -game.terminal(after, np.diff(after_offsets))


def uniform(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
    """An evaluator that knows nothing: every legal move alike, value 0."""
    counts = np.diff(offsets)
    return np.repeat((1 / np.maximum(counts, 1)).astype(np.float32), counts), np.zeros(len(states), np.float32)
