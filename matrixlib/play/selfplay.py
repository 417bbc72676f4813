"""Self-play games, many in lock-step, as training data.

A game is a pure function of seed, number, options and evaluator, whatever is played beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from matrixlib.config import Count, CountOrZero, Fraction, NonNegative, OpeningOptions, Real, option
from matrixlib.play.game import Game, Openings, States, Trace, Values
from matrixlib.play.search import Evaluate, Search, SearchOptions, SearchResult

Judges: TypeAlias = Mapping[str, Callable[[States], Values]]
"""For games cut off, in order: ending -> function of states (N,) to results (N,) for the side to move, NaN unknown."""
NO_JUDGES: Judges = MappingProxyType({})


def play_games(
    game: Game,
    evaluate: Evaluate,
    numbers: Iterable[int],
    options: SelfPlayOptions,
    search_options: SearchOptions | None = None,
    seed: int = 0,
    openings: Openings | None = None,
    judges: Judges = NO_JUDGES,
) -> Iterator[Trace]:
    """Play the games of these numbers; yields each when finished. openings: game i starts from number i, modulo their
    number; default the game's initial state."""
    search = Search(game, evaluate, search_options, options.parallel, seed)
    starts = Openings(game.initial(1), [np.zeros(0, np.uint64)]) if openings is None else openings
    waiting = iter(numbers)
    running: dict[int, _GameInProgress] = {}
    free = list(range(options.parallel))
    while True:
        while free and (number := next(waiting, None)) is not None:
            rng = np.random.default_rng([seed, number, 0, 1])
            row = number % len(starts)
            state, history = _opening(game, starts[row : row + 1], rng, options)
            search.reset(free[0], state, history, stream=number)
            running[free.pop(0)] = _GameInProgress(number, bool(rng.random() >= options.play_out))
        if not running:
            return
        slots = sorted(running)
        _move(search, slots, [running[slot] for slot in slots], options)
        states = search.states[slots]
        values = game.terminal(states, np.diff(game.legal(states)[1]))
        for i, (slot, value) in enumerate(zip(slots, values, strict=True)):
            trace = _trace(running[slot], float(value), options, states[i : i + 1], judges, seed)
            if trace is not None:
                yield trace
                del running[slot]
                free.append(slot)


def _opening(
    game: Game, start: Openings, rng: np.random.Generator, options: SelfPlayOptions
) -> tuple[States, NDArray[np.uint64]]:
    """A state after random plies from a start, stopping before the game's end; and keys of earlier states."""
    state, keys = start.states, list(start.history[0])
    low, high = options.random_plies
    for _ in range(rng.integers(low, high + 1)):
        moves, _ = game.legal(state)
        after = game.play(state, moves[[rng.integers(len(moves))]])
        if not np.isnan(game.terminal(after, np.diff(game.legal(after)[1])))[0]:
            break
        keys.append(game.key(state)[0])
        state = after
    return state, np.array(keys, np.uint64)


def _move(search: Search, slots: list[int], games: list[_GameInProgress], options: SelfPlayOptions) -> None:
    rngs = [np.random.default_rng([search.seed, game.number, len(game.moves), 2]) for game in games]
    full = [bool(rng.random() < options.full_share) for rng in rngs]
    budget = [options.num_simulations if f else options.num_quick_simulations for f in full]
    before = search.states[slots]
    for i, result in enumerate(search.run(budget, slots, noise=full)):
        game = games[i]
        ply = len(game.moves)
        warm = options.temperature if ply < options.temperature_plies else options.late_temperature
        # Under Gumbel noise `best` is itself drawn
        noisy = full[i] and search.options.max_num_considered_actions
        best = int(result.moves[result.policy.argmax()]) if noisy else result.best
        game.moves.append(best if warm == 0 else draw_move(result, warm, rngs[i]))
        side = ply % 2
        game.weak[side] = game.weak[side] + 1 if result.value < options.resign_below else 0
        if game.gave_up < 0 and game.weak[side] >= options.resign_moves:
            game.gave_up = ply
        game.states.append(before[i : i + 1])
        game.results.append(result)
        game.full.append(full[i])
        if game.adjudged < 0 and _agreed(game.results, options):
            game.adjudged = ply
    search.advance(slots, [game.moves[-1] for game in games])


def _agreed(results: Sequence[SearchResult], options: SelfPlayOptions) -> bool:
    """Whether the values of the latest plies, of both sides, all say the same result."""
    count = options.adjudicate_plies
    if not 0 < count <= len(results):
        return False
    values = np.array([result.value for result in results[-count:]]) * (-1.0) ** np.arange(count)
    drawn = len(results) > options.adjudicate_draw_ply and bool((np.abs(values) < options.adjudicate_draw).all())
    return drawn or bool((values >= options.adjudicate_win).all() or (values <= -options.adjudicate_win).all())


def draw_move(result: SearchResult, temperature: float, rng: np.random.Generator) -> int:
    """A move drawn from the search's policy to the power 1 / temperature."""
    logits = np.log(np.maximum(result.policy, np.finfo(np.float32).tiny).astype(np.float64)) / temperature
    weights = np.where(result.policy > 0, np.exp(logits - logits.max()), 0)
    return int(rng.choice(result.moves, p=weights / weights.sum()))


def _copies(game: _GameInProgress, rng: np.random.Generator, share: float) -> NDArray[np.int64]:
    """Training rows (n,) of each position, as many in all as fully searched positions on average: this share of them
    in proportion to the KL divergence of the search's policy from the network's (policy surprise weighting,
    https://github.com/lightvector/KataGo/blob/master/docs/KataGoMethods.md)."""
    full = np.array(game.full, np.int64)
    if not share or not full.any():
        return full
    gain = [_surprise(result) * once for result, once in zip(game.results, full, strict=True)]
    mean = sum(gain) / full.sum()
    wanted = full * (1 - share + share * (np.array(gain) / mean if mean > 0 else 1.0))
    return (wanted + rng.random(len(full))).astype(np.int64)


def _surprise(result: SearchResult) -> float:
    """KL divergence of the search's policy from the network's, nats."""
    policy, prior = (values[result.policy > 0].astype(np.float64) for values in (result.policy, result.prior))
    return float((policy * np.log(policy / np.maximum(prior, np.finfo(np.float32).tiny))).sum())


def _averaged(values: Values, end: float, plies: float) -> Values:
    """Values (n,) averaged with later ones, on average `plies` later, with weights that fall exponentially; `end` for
    the side to move at the last position is what follows it (TD(lambda), Sutton 1988)."""
    share, later, out = plies / (plies + 1), -end, np.empty_like(values)
    for i in reversed(range(len(values))):
        later = out[i] = (1 - share) * values[i] - share * later
    return out


def _trace(
    game: _GameInProgress, value: float, options: SelfPlayOptions, state: States, judges: Judges, seed: int
) -> Trace | None:
    """The finished game, or None. value: for the side to move in the state (1,) reached, NaN while the rules let it go
    on."""
    plies = len(game.moves)
    result: float | None
    if not np.isnan(value):
        result, ending = value * (-1) ** plies + 0.0, "normal"  # no negative zero
    elif game.resigns and game.gave_up >= 0:
        result, ending = -1.0 * (-1) ** game.gave_up, "resignation"
    elif game.resigns and game.adjudged >= 0:
        result, ending = round(game.results[game.adjudged].value) * (-1.0) ** game.adjudged + 0.0, "adjudicated"
    elif plies >= options.plies:
        found = ((name, float(judge(state)[0])) for name, judge in judges.items())
        ending, value = next((one for one in found if not np.isnan(one[1])), ("ply limit", np.nan))
        result = None if np.isnan(value) else value * (-1) ** plies + 0.0
    else:
        return None
    values = np.array([r.value for r in game.results], np.float32)
    end = values[-1] if result is None else result * (-1) ** (plies - 1)
    return Trace(
        number=game.number,
        states=np.concatenate(game.states),
        line=np.array(game.moves, np.int32),
        offsets=np.cumsum([0, *(len(r.moves) for r in game.results)]),
        moves=np.concatenate([r.moves for r in game.results]),
        policy=np.concatenate([r.policy for r in game.results]),
        values=values,
        simulations=np.array([r.simulations for r in game.results], np.int32),
        full=np.array(game.full),
        copies=_copies(game, np.random.default_rng([seed, game.number, 0, 3]), options.surprise_share),
        targets=_averaged(values, float(end), options.value_plies),
        result=result,
        ending=ending,
        gave_up=game.gave_up,
        adjudged=game.adjudged,
    )


class SelfPlayOptions(OpeningOptions):
    """How games are played.

    A full search explores and is a training position; with probability 1 - full_share a move gets a quick search
    without noise (playout cap randomisation, Wu 2019). Moves are drawn from the search's policy, visits (PUCT) or
    improved policy (Gumbel), to the power 1 / temperature.
    """

    parallel: Count = option(256, "games at a time")
    num_simulations: Count = option(32, "simulations of a full search (a training position)")
    num_quick_simulations: Count = option(8, "simulations of a quick search (not a training position)")
    full_share: Annotated[Real, Field(gt=0, le=1)] = option(1.0, "share of the moves with a full search")
    temperature: NonNegative = option(
        1.0, "temperature of the first plies: moves are drawn from policy^(1 / temperature); 0 = best move"
    )
    temperature_plies: CountOrZero = option(30, "number of first plies")
    late_temperature: NonNegative = option(0.0, "temperature of later plies")
    random_plies: tuple[CountOrZero, CountOrZero] = option(
        (0, 0), "fewest and most random plies at the start, after the opening"
    )
    surprise_share: Fraction = option(
        0.0, "share of the training rows by how much the search changed the policy (KataGo: 0.5), the rest evenly"
    )
    value_plies: NonNegative = option(
        0.0, "value targets average the search's values of so many plies ahead, exponentially; 0 = the position's own"
    )
    plies: Count = option(400, "longer games are cut off, without a result unless they can be judged")
    resign_below: Annotated[Real, Field(ge=-1, lt=0)] = option(-1.0, "resign below this value; -1 = never")
    resign_moves: Count = option(3, "own moves in a row below it before resigning")
    adjudicate_plies: CountOrZero = option(0, "latest plies whose values must agree to end a game; 0 = never")
    adjudicate_win: Annotated[Real, Field(gt=0.5, le=1)] = option(0.95, "a win if all are at least this")
    adjudicate_draw: Annotated[Real, Field(ge=0, lt=0.5)] = option(
        0.0, "a draw if all are closer to 0 than this; 0 = never, as untrained networks find everything drawn"
    )
    adjudicate_draw_ply: CountOrZero = option(80, "no draw is adjudicated before this ply")
    play_out: Fraction = option(0.1, "share of games without resignation and adjudication, to measure their errors")
    syzygy: str = option("", "folder of Syzygy tables, which judge games cut off; chess only")
    material: NonNegative = option(
        0.0, "material that wins a game cut off, in pawns, where less draws it (a weak label); 0 = off; chess only"
    )

    @model_validator(mode="after")
    def _range(self) -> SelfPlayOptions:
        low, high = self.random_plies
        if low > high:
            raise ValueError(f"random_plies runs from low to high, not {[low, high]}")
        if self.adjudicate_plies == 1:
            raise ValueError("adjudicate_plies is 1, which asks one side alone: take 2 or more, or 0")
        return self


@dataclass
class _GameInProgress:
    """One game. weak: streak of values below the resignation limit, by side; gave_up, adjudged: plies of resignation
    and adjudication, -1 never."""

    number: int
    resigns: bool
    results: list[SearchResult] = field(default_factory=list)
    states: list[States] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)
    full: list[bool] = field(default_factory=list)
    weak: list[int] = field(default_factory=lambda: [0, 0])
    gave_up: int = -1
    adjudged: int = -1


def tally(game: Game, traces: Sequence[Trace]) -> dict[str, Any]:
    """wins, draws, losses: of the side that starts; unknown: games without a result; `by <ending>`: games by how they
    ended; played_out: games continued although a side would have resigned, wrong: of these, not lost by that side;
    played_on, misjudged: the same of adjudication."""
    # trace results are the first mover's
    starters = [-1 if game.to_move(trace.states[:1])[0] else 1 for trace in traces]
    points = Counter(None if t.result is None else t.result * side for t, side in zip(traces, starters, strict=True))
    results = {"wins": points[1.0], "draws": points[0.0], "losses": points[-1.0], "unknown": points[None]}
    plies = sum(len(trace.line) for trace in traces)
    given_up = [trace.wrongly_given_up for trace in traces if trace.wrongly_given_up is not None]
    adjudged = [trace.wrongly_adjudged for trace in traces if trace.wrongly_adjudged is not None]
    errors = {"wrong": sum(given_up), "played_out": len(given_up)}
    errors |= {"misjudged": sum(adjudged), "played_on": len(adjudged)}
    endings = Counter(f"by {trace.ending}" for trace in traces)
    return {"games": len(traces), "plies": plies, **results, **errors, **endings}
