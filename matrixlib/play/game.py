"""What search, self-play and matches need of a game: rules over batches of states.

States are a structured array (N,) of the game's dtype. Values are the side to move's: 1 win, 0 draw, -1 loss. Moves are
integers in [0, actions), as in a network's policy.
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
EXACT = ("normal", "tables")  # endings whose results are no estimates


@dataclass(frozen=True)
class GameRecord:
    """A game to write down: initial state (1,), moves, and metadata.

    result: 1, 0 or -1 for the side to move at the start, None unknown. tags: names to texts. comments: one a move,
    possibly empty. players: of the first and the second side.
    """

    start: States
    moves: Sequence[int]
    result: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    comments: Sequence[str] = ()
    players: tuple[str, str] = ("?", "?")


@dataclass(frozen=True)
class Trace:
    """A finished self-play game: n positions with search results.

    line (n,): the moves played. policy and moves (K,): targets over the legal moves, row i at offsets[i]:offsets[i +
    1]. values: the search's, simulations: number, full: whether it is a training position, copies: how often, targets:
    values that are learned beside the result, all (n,). result: for the side to move at the first position, None
    unknown. ending: how it came about: "normal" (by the rules), "resignation", "adjudicated", the name of a judge of
    games cut off (chess: "tables", "material"), or "ply limit" (none). gave_up, adjudged: rows where the rules of
    resignation and adjudication were met, -1 never; a game may be played out after them.
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
    copies: NDArray[np.int64]
    targets: NDArray[np.float32]
    result: float | None
    ending: str
    gave_up: int
    adjudged: int = -1

    @property
    def wrongly_given_up(self) -> bool | None:
        """Whether resigning would have been wrong, in a played-out game; None in others."""
        if self.gave_up < 0 or self.ending not in EXACT or self.result is None:
            return None
        return self.result * (-1) ** self.gave_up >= 0

    @property
    def wrongly_adjudged(self) -> bool | None:
        """Whether adjudication would have been wrong, in a played-out game; None in others."""
        if self.adjudged < 0 or self.ending not in EXACT or self.result is None:
            return None
        return self.result * (-1) ** self.adjudged != round(float(self.values[self.adjudged]))

    def results(self) -> NDArray[np.float32]:
        """(n,) result for the side to move at each position, NaN unknown."""
        signs = np.where(np.arange(len(self.states)) % 2, -1, 1)
        return (signs * (np.nan if self.result is None else self.result)).astype(np.float32)


@dataclass(frozen=True)
class Past:
    """History of N states: states (N, H), newest first, of which the first `known` (N,) are valid."""

    states: States
    known: NDArray[np.int64]


@dataclass(frozen=True)
class Openings:
    """Start states (N,), distinct, and for each the keys of its game's earlier states."""

    states: States
    history: Sequence[NDArray[np.uint64]]

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, rows: slice) -> "Openings":
        return Openings(self.states[rows], self.history[rows])


class Game(Protocol):
    """Rules of a two-player game for batches of N states."""

    @property
    def name(self) -> str: ...

    @property
    def actions(self) -> int:
        """Number of distinct moves, the size of a policy."""

    def initial(self, n: int) -> States:
        """n copies of the initial state."""

    def legal(self, states: States) -> tuple[Moves, Offsets]:
        """Legal moves (K,), ascending in each state, and offsets (N + 1,): state i has [o[i]:o[i + 1]]."""

    def play(self, states: States, moves: Moves) -> States:
        """States after one legal move (N,) each, with no repetition counted yet."""

    def terminal(self, states: States, counts: NDArray[np.int64]) -> Values:
        """(N,) value for the side to move if the game is over, else NaN. counts: number of legal moves."""

    def to_move(self, states: States) -> NDArray[np.uint8]:
        """(N,) 0 if the side that starts the game is to move, else 1."""

    def key(self, states: States) -> NDArray[np.uint64]:
        """(N,) hash, equal for states that are repetitions of each other."""

    def repeat(self, states: States, counts: NDArray[np.int32]) -> States:
        """States with the number of earlier occurrences in their game, which `terminal` then uses."""

    def endings(self, states: States, moves: Moves, offsets: Offsets) -> Values:
        """(K,) value for the mover of each legal move that ends the game, else NaN.

        Endings that are expensive to detect may be NaN; they are detected when the move is tried.
        """

    def proven(self, states: States) -> Values:
        """(N,) exact values from elsewhere (tablebases), NaN if unknown."""

    def write(self, game: GameRecord) -> str:
        """The game as text, in its usual format."""


def endings(game: Game, states: States, moves: Moves, offsets: Offsets) -> Values:
    """`Game.endings` for any game, by playing every move."""
    after = game.play(np.repeat(states, np.diff(offsets)), moves)
    _, after_offsets = game.legal(after)
    return -game.terminal(after, np.diff(after_offsets))


def uniform(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
    """A trivial evaluator: equal priors, value 0."""
    counts = np.diff(offsets)
    return np.repeat((1 / np.maximum(counts, 1)).astype(np.float32), counts), np.zeros(len(states), np.float32)
