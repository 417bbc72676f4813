"""Games of a search against itself, many in lock-step, as material for training.

A game is a pure function of the seed, its number, the options and the evaluator: not of the games beside it, nor
of how many are played at once. So work that was killed goes on at the next number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from matrixlib.play.game import Game, States, Trace
from matrixlib.play.search import Evaluate, Found, Search, SearchOptions


@dataclass(frozen=True)
class SelfPlayOptions:
    """How games are played.

    parallel: games at a time. simulations: of a full search, which explores and is learned from; with probability
    1 - full_share a move gets `quick_simulations` without exploring instead (playout-cap randomisation, Wu 2019).
    temperature: of the draw among visits^(1 / temperature) up to `temperature_plies`, late_temperature after; 0
    plays the best move, and so does a Gumbel search, whose noise explores. random_plies: plies drawn uniformly
    before the search takes over, at least and at most. plies: longer games end with an unknown result.
    resign_below: a side whose value is less in `resign_moves` full or quick searches of its own in a row gives up,
    -1 never; but in a share `play_out` of the games it does not, to measure how often that would be wrong.
    """

    parallel: int = 256
    simulations: int = 32
    quick_simulations: int = 8
    full_share: float = 1.0
    temperature: float = 1.0
    temperature_plies: int = 30
    late_temperature: float = 0.0
    random_plies: tuple[int, int] = (0, 0)
    plies: int = 400
    resign_below: float = -1.0
    resign_moves: int = 3
    play_out: float = 0.1

    def __post_init__(self) -> None:
        if self.parallel < 1 or self.simulations < 1 or self.quick_simulations < 1 or self.plies < 1:
            raise ValueError("parallel, simulations, quick_simulations and plies must be at least 1")
        if not (0 < self.full_share <= 1 and 0 <= self.play_out <= 1 and -1 <= self.resign_below < 0):
            raise ValueError("full_share and play_out are shares, resign_below is between -1 and 0")
        if min(self.temperature, self.late_temperature) < 0 or self.resign_moves < 1:
            raise ValueError("temperatures must not be negative, resign_moves at least 1")


@dataclass
class _Running:
    """A game in progress."""

    number: int
    resigns: bool
    found: list[Found] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    played: list[int] = field(default_factory=list)
    full: list[bool] = field(default_factory=list)
    bad: list[int] = field(
        default_factory=lambda: [0, 0]
    )  # moves in a row with a value below the limit, by side
    gave_up: int = -1


def play_games(
    game: Game,
    evaluate: Evaluate,
    numbers: Iterable[int],
    options: SelfPlayOptions,
    search_options: SearchOptions | None = None,
    seed: int = 0,
    openings: States | None = None,
    until: Callable[[], bool] | None = None,
) -> Iterator[Trace]:
    """Play the games of these numbers and yield each when it is finished.

    openings: (P,) states of which each game draws one; the initial state unless given. until: asked before every
    move whether to stop, leaving the running games unfinished. ValueError if an opening is the end of a game.
    """
    search_options = search_options or SearchOptions()
    search = Search(game, evaluate, search_options, options.parallel, seed)
    openings = game.initial(1) if openings is None else openings
    _, offsets = game.legal(openings)
    if not np.isnan(game.terminal(openings, np.diff(offsets))).all():
        raise ValueError("an opening is the end of a game: leave it out")
    waiting = iter(numbers)
    running: dict[int, _Running] = {}
    free = list(range(options.parallel))
    while until is None or not until():
        while free and (number := next(waiting, None)) is not None:
            rng = _stream(seed, number, 0, 1)
            state, history = _opened(game, openings, rng, options)
            search.reset(free[0], state, history, stream=number)
            running[free.pop(0)] = _Running(number, bool(rng.random() >= options.play_out))
        if not running:
            return
        slots = sorted(running)
        _move(search, running, slots, options, bool(search_options.gumbel), seed)
        states = search.states[slots]
        values = game.terminal(states, np.diff(game.legal(states)[1]))
        for slot, value in zip(slots, values, strict=True):
            trace = _finished(running[slot], float(value), options)
            if trace is not None:
                yield trace
                del running[slot]
                free.append(slot)


def _stream(seed: int, number: int, ply: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, number, ply, purpose])


def _opened(
    game: Game, openings: States, rng: np.random.Generator, options: SelfPlayOptions
) -> tuple[States, NDArray[np.uint64]]:
    """An opening after random plies, as far as the game goes on; and the keys of the states before it."""
    state = openings[[rng.integers(len(openings))]]
    keys: list[np.uint64] = []
    for _ in range(rng.integers(options.random_plies[0], options.random_plies[1] + 1)):
        moves, _ = game.legal(state)
        after = game.play(state, moves[[rng.integers(len(moves))]])
        if not np.isnan(game.terminal(after, np.diff(game.legal(after)[1])))[0]:
            break
        keys.append(game.key(state)[0])
        state = after
    return state, np.array(keys, np.uint64)


def _move(
    search: Search,
    running: dict[int, _Running],
    slots: list[int],
    options: SelfPlayOptions,
    gumbel: bool,
    seed: int,
) -> None:
    """Search and play one move in each game."""
    rngs = [_stream(seed, running[slot].number, len(running[slot].played), 2) for slot in slots]
    full = [bool(rng.random() < options.full_share) for rng in rngs]
    budget = [options.simulations if f else options.quick_simulations for f in full]
    before = search.states[slots]
    chosen = []
    for i, found in enumerate(search.run(budget, slots, noise=full)):
        now = running[slots[i]]
        ply = len(now.played)
        warm = options.temperature if ply < options.temperature_plies else options.late_temperature
        chosen.append(found.best if gumbel or warm == 0 else drawn(found, warm, rngs[i]))
        side = ply % 2
        now.bad[side] = now.bad[side] + 1 if found.value < options.resign_below else 0
        if now.gave_up < 0 and now.bad[side] >= options.resign_moves:
            now.gave_up = ply
        now.states.append(before[i : i + 1])
        now.found.append(found)
        now.full.append(full[i])
        now.played.append(chosen[-1])
    search.advance(slots, chosen)


def drawn(found: Found, temperature: float, rng: np.random.Generator) -> int:
    """A move by its share of the search's policy, to the power 1 / temperature."""
    logits = np.log(np.maximum(found.policy, np.finfo(np.float32).tiny).astype(np.float64)) / temperature
    weights = np.where(found.policy > 0, np.exp(logits - logits.max()), 0)
    return int(rng.choice(found.moves, p=weights / weights.sum()))


def _finished(now: _Running, value: float, options: SelfPlayOptions) -> Trace | None:
    """The game, if it is over; value: for the side to move now, NaN while the rules let it go on."""
    plies = len(now.played)
    result: float | None
    if not np.isnan(value):
        result, ending = value * (-1) ** plies + 0.0, "normal"  # no negative zero
    elif now.resigns and now.gave_up >= 0:
        result, ending = -1.0 * (-1) ** now.gave_up, "resignation"
    elif plies >= options.plies:
        result, ending = None, "ply limit"
    else:
        return None
    return Trace(
        number=now.number,
        states=np.concatenate(now.states),
        played=np.array(now.played, np.int32),
        offsets=np.cumsum([0, *(len(f.moves) for f in now.found)]),
        moves=np.concatenate([f.moves for f in now.found]),
        policy=np.concatenate([f.policy for f in now.found]),
        values=np.array([f.value for f in now.found], np.float32),
        simulations=np.array([f.simulations for f in now.found], np.int32),
        full=np.array(now.full),
        result=result,
        ending=ending,
        gave_up=now.gave_up,
    )
