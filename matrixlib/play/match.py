"""Matches: paired games with sides swapped, Elo with error bars from pairs, SPRT.

Both games of a pair start from one opening, with the players swapped, so a pair's score says little about the
opening and its two games are not independent: statistics count pairs (the pentanomial model) and not games.
Scores are those of the first player.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from matrixlib.play.game import Game, Moves, Played, States
from matrixlib.play.search import Evaluate, Search, SearchOptions

PAIR_SCORES = np.array([0, 0.25, 0.5, 0.75, 1])  # of a pair, as the mean of its two games
Counts: TypeAlias = Sequence[int] | NDArray[np.int64]
"""Pairs (5,) that scored 0, 1/2, 1, 3/2 and 2 points of 2."""
SETTLED = 0.95  # confidence of intervals
TRIES = 50  # random games for each opening, before there are held to be too few


# --- statistics -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rating:
    """Elo difference of the first player to the second, with its 95 % interval; infinite at scores of 0 and 1.

    score: points a game. superiority: likelihood that the first is the stronger one.
    """

    games: int
    score: float
    elo: float
    low: float
    high: float
    superiority: float

    def __str__(self) -> str:
        return f"{self.elo:+.1f} Elo [{self.low:+.1f}, {self.high:+.1f}], {self.games} games, score {self.score:.1%}"


def expected_score(elo: float) -> float:
    """Points a game expected of a player so much stronger (logistic)."""
    return 1 / (1 + 10 ** (-elo / 400))


def elo_of(score: float) -> float:
    """Inverse of `expected_score`; infinite at 0 and 1."""
    if not 0 < score < 1:
        return math.inf if score >= 1 else -math.inf
    return 400 * math.log10(score / (1 - score))


def rating(pairs: Counts) -> Rating:
    """The rating that counts of pair results say.

    The interval is Wilson's, for as many decided games as would have the same variance as the pairs; so it stays
    inside (0, 1) and is of use for few or one-sided games. To the observed variance that of one pair of decided
    games is added, lest a few equal pairs look like certainty. ValueError without pairs.
    """
    counts = _checked(pairs)
    n = int(counts.sum())
    score = float(counts @ PAIR_SCORES) / n
    decided = score * (1 - score)  # variance of a decided game
    spread = float(counts @ (PAIR_SCORES - score) ** 2)
    variance = (spread + decided / 2) / (n + 1) / n  # of the score
    effective = decided / variance if decided > 0 else 2.0 * n
    z = NormalDist().inv_cdf((1 + SETTLED) / 2)
    centre = (score + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z * math.sqrt(decided / effective + z * z / (4 * effective**2)) / (1 + z * z / effective)
    sigma = math.sqrt(variance) if variance > 0 else 0.5 / math.sqrt(2 * n)
    return Rating(
        games=2 * n,
        score=score,
        elo=elo_of(score),
        low=elo_of(max(centre - half, 0.0)) if score > 0 else -math.inf,
        high=elo_of(min(centre + half, 1.0)) if score < 1 else math.inf,
        superiority=NormalDist().cdf((score - 0.5) / sigma),
    )


@dataclass(frozen=True)
class Sprt:
    """Sequential test of "elo1 stronger" (H1) against "elo0 stronger" (H0), Wald 1945, with pairs as observations.

    alpha: share of matches that accept H1 where H0 holds; beta: the reverse.
    """

    elo0: float = 0.0
    elo1: float = 10.0
    alpha: float = 0.05
    beta: float = 0.05

    def __post_init__(self) -> None:
        if not (self.elo0 < self.elo1 and 0 < self.alpha < 0.5 and 0 < self.beta < 0.5):
            raise ValueError(f"elo0 must be below elo1, alpha and beta between 0 and 0.5: {self}")

    def bounds(self) -> tuple[float, float]:
        """Log-likelihood ratios at which H0 and H1 are accepted."""
        return math.log(self.beta / (1 - self.alpha)), math.log((1 - self.beta) / self.alpha)

    def ratio(self, pairs: Counts) -> float:
        """Log-likelihood ratio of H1 to H0, each with the likeliest distribution of its mean (generalised SPRT)."""
        counts = np.maximum(_checked(pairs), 1e-3)  # an outcome not yet seen is not impossible
        return float(counts @ (_fitted(counts, self.elo1) - _fitted(counts, self.elo0)))

    def decision(self, pairs: Counts) -> bool | None:
        """True H1, False H0, None undecided (as without pairs)."""
        if not np.sum(pairs):
            return None
        low, high = self.bounds()
        ratio = self.ratio(pairs)
        return True if ratio >= high else False if ratio <= low else None


def _checked(pairs: Counts) -> NDArray[np.float64]:
    counts = np.asarray(pairs, np.float64)
    if counts.shape != (5,) or (counts < 0).any() or not counts.any():
        raise ValueError(
            f"expected how many pairs scored 0, 1/2, 1, 3/2 and 2 points, at least one, not {pairs}"
        )
    return counts


def _fitted(counts: NDArray[np.float64], elo: float) -> NDArray[np.float64]:
    """Logarithms (5,) of the likeliest probabilities with the mean that belongs to an Elo difference.

    p_i = f_i / (1 + x * d_i), with the observed shares f, the distances d of the scores from that mean, and the x
    for which sum(d_i * p_i) = 0, found by bisection: the sum falls as x grows.
    """
    shares, distance = counts / counts.sum(), PAIR_SCORES - expected_score(elo)
    low, high = -1 / distance[-1], -1 / distance[0]
    for _ in range(100):
        x = (low + high) / 2
        if float((shares * distance / (1 + x * distance)).sum()) > 0:
            low = x
        else:
            high = x
    return np.log(shares / (1 + x * distance))


@dataclass(frozen=True)
class Standing:
    """One row of a rating table: Elo against the mean of all players, with its 95 % interval."""

    name: str
    games: int
    score: float
    elo: float
    low: float
    high: float


def rating_table(
    matches: Mapping[tuple[str, str], Counts], samples: int = 500, seed: int = 0
) -> list[Standing]:
    """Ratings of several players, best first, from the pairs (5,) of each match (first player, second player).

    The likeliest strengths of the Bradley-Terry model (a draw is half a point each), with one drawn pair added
    between players that met, so that they are finite; intervals by the bootstrap over pairs. ValueError where some
    players are linked to the others by no match.
    """
    names = sorted({name for players in matches for name in players})
    row = {name: i for i, name in enumerate(names)}
    rng = np.random.default_rng(seed)
    points = np.zeros((samples + 1, len(names), len(names)))  # of i against j: as it was, then resampled
    for (one, other), pairs in matches.items():
        counts = _checked(pairs)
        n = int(counts.sum())
        scored = np.concatenate([counts[None], rng.multinomial(n, counts / n, samples)]) @ PAIR_SCORES
        points[:, row[one], row[other]] += 2 * scored
        points[:, row[other], row[one]] += 2 * (n - scored)
    games = points[0] + points[0].T
    met = games > 0
    if not np.linalg.matrix_power(met + np.eye(len(names)), len(names)).all():
        raise ValueError(f"no chain of matches links all of {', '.join(names)}: they have no common scale")
    elo = _strengths(points + met)
    low, high = np.quantile(elo[1:], [(1 - SETTLED) / 2, (1 + SETTLED) / 2], axis=0)
    played, score = games.sum(1), points[0].sum(1)
    standings = [
        Standing(
            name, int(played[i]), float(score[i] / played[i]), float(elo[0, i]), float(low[i]), float(high[i])
        )
        for i, name in enumerate(names)
    ]
    return sorted(standings, key=lambda standing: -standing.elo)


def _strengths(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elo (B, n), mean 0, from points (B, n, n) of i against j: minorisation-maximisation (Hunter 2004)."""
    games = points + points.transpose(0, 2, 1)
    strength = np.ones(points.shape[:2])
    for _ in range(5000):
        wanted = points.sum(2) / (games / (strength[:, :, None] + strength[:, None, :])).sum(2)
        wanted /= np.exp(np.log(wanted).mean(1, keepdims=True))
        done = np.abs(np.log(wanted / strength)).max() < 1e-7
        strength = wanted
        if done:
            break
    elo: NDArray[np.float64] = 400 * np.log10(strength)
    return elo


# --- players --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """Games in which a player is to move: their numbers (N,), states (N,), and the keys of the states before each."""

    games: NDArray[np.int64]
    states: States
    history: Sequence[NDArray[np.uint64]]


@dataclass(frozen=True)
class Choice:
    """A move for each game of a turn, and a comment for the record of each (or none at all)."""

    moves: Moves
    comments: Sequence[str] = ()


Player: TypeAlias = Callable[[Turn], Choice]


def random_player(game: Game, seed: int) -> Player:
    """Plays any legal move; in a game of a number always the same ones."""

    def play(turn: Turn) -> Choice:
        moves, offsets = game.legal(turn.states)
        picks = [
            np.random.default_rng([seed, number, len(past)]).integers(offsets[i], offsets[i + 1])
            for i, (number, past) in enumerate(zip(turn.games, turn.history, strict=True))
        ]
        return Choice(moves[picks])

    return play


def search_player(
    game: Game, evaluate: Evaluate, simulations: int, options: SearchOptions | None = None
) -> Player:
    """Plays what a search without noise finds; comments give the value for the side to move and the simulations."""

    def play(turn: Turn) -> Choice:
        search = Search(game, evaluate, options, trees=len(turn.games))
        for tree, past in enumerate(turn.history):
            search.reset(tree, turn.states[tree : tree + 1], past)
        found = search.run(simulations)
        comments = [f"{f.value:+.3f}/{f.simulations}" for f in found]
        return Choice(np.array([f.best for f in found], np.int32), comments)

    return play


# --- openings -------------------------------------------------------------------------------------


def random_openings(game: Game, count: int, seed: int | Sequence[int], plies: int) -> States:
    """(count,) different positions after so many random moves, none of them the end of a game.

    ValueError where a game is too small for so many.
    """
    if not count:
        return game.initial(0)
    rng = np.random.default_rng(seed)
    found: dict[int, States] = {}
    for _ in range(TRIES * count):
        state = game.initial(1)
        for _ in range(plies):
            moves, _ = game.legal(state)
            if not len(moves):
                break
            state = game.play(state, rng.choice(moves, 1))
        if np.isnan(game.terminal(state, np.diff(game.legal(state)[1])))[0]:
            found.setdefault(int(game.key(state)[0]), state)
        if len(found) == count:
            return np.concatenate(list(found.values()))
    raise ValueError(
        f"{game.name} has hardly {count} different positions after {plies} random plies (found: {len(found)}); "
        "ask for fewer pairs or for more plies"
    )


# --- matches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """The games of a match, two of a pair after each other: in the first of them the first player moves first."""

    games: tuple[Played, ...]

    def scores(self) -> NDArray[np.float64]:
        """Points (games,) of the first player."""
        results = np.array([game.result for game in self.games], np.float64)
        return (1 + results * np.where(np.arange(len(results)) % 2, -1, 1)) / 2

    def pairs(self) -> NDArray[np.int64]:
        """(5,) how many pairs scored 0, 1/2, 1, 3/2 and 2 points."""
        points = self.scores().reshape(-1, 2).sum(1)
        return np.bincount((2 * points).astype(np.int64), minlength=5)


def play_pairs(
    game: Game,
    first: Player,
    second: Player,
    openings: States,
    plies: int = 400,
    names: tuple[str, str] = ("first", "second"),
    start: int = 0,
) -> Match:
    """Two games from each opening (P,), all in lock-step; a game of `plies` half moves is a draw.

    start: number of the first game. ValueError if an opening is the end of a game, or a move is not legal.
    """
    states = np.repeat(openings, 2)
    count = len(states)
    mover_first = np.arange(count) % 2 == 0  # whether the first player is to move
    moves: list[list[int]] = [[] for _ in range(count)]
    comments: list[list[str]] = [[] for _ in range(count)]
    keys = np.zeros((count, plies + 1), np.uint64)
    results, endings = np.zeros(count), ["ply limit"] * count
    live = np.arange(count)
    for ply in range(plies + 1):
        keys[live, ply] = game.key(states[live])
        legal, offsets = game.legal(states[live])
        values = game.terminal(states[live], np.diff(offsets))
        for i, value in zip(live.tolist(), values, strict=True):
            if not np.isnan(value):
                results[i], endings[i] = value * (-1) ** ply + 0.0, "normal"  # no negative zero
                if ply == 0:
                    raise ValueError(f"opening {i // 2} is the end of a game: leave it out")
        allowed = dict(zip(live.tolist(), np.split(legal, offsets[1:-1]), strict=True))
        live = live[np.isnan(values)]
        if ply == plies or not len(live):
            break
        chosen = np.zeros(count, np.int32)
        for player, name, theirs in (
            (first, names[0], live[mover_first[live]]),
            (second, names[1], live[~mover_first[live]]),
        ):
            if not len(theirs):
                continue
            choice = player(Turn(theirs + start, states[theirs], [keys[i, :ply] for i in theirs]))
            chosen[theirs] = choice.moves
            for j, i in enumerate(theirs.tolist()):
                if chosen[i] not in allowed[i]:
                    raise ValueError(
                        f"'{name}' played move {chosen[i]} in game {i + start}, which is not legal"
                    )
                moves[i].append(int(chosen[i]))
                comments[i].append(choice.comments[j] if choice.comments else "")
        after = game.play(states[live], chosen[live])
        before = (keys[live, : ply + 1] == game.key(after)[:, None]).sum(1)
        states[live] = game.repeat(after, before.astype(np.int32))
        mover_first[live] = ~mover_first[live]
    sides = game.to_move(openings)
    played = []
    for i in range(count):
        players = names if (i + sides[i // 2]) % 2 == 0 else names[::-1]
        tags = {"Round": f"{(i + start) // 2 + 1}.{i % 2 + 1}", "Termination": endings[i]}
        at = openings[i // 2 : i // 2 + 1]
        played.append(Played(at, moves[i], float(results[i]), tags, comments[i], players))
    return Match(tuple(played))


def play_match(
    game: Game,
    first: Player,
    second: Player,
    openings: States,
    batch: int = 64,
    stop: Sprt | None = None,
    plies: int = 400,
    names: tuple[str, str] = ("first", "second"),
) -> Iterator[Match]:
    """Play the openings (P,) in batches of pairs until SPRT decides; yields the match so far after each batch."""
    games: tuple[Played, ...] = ()
    for begin in range(0, len(openings), batch):
        part = play_pairs(game, first, second, openings[begin : begin + batch], plies, names, 2 * begin)
        games += part.games
        match = Match(games)
        yield match
        if stop is not None and stop.decision(match.pairs()) is not None:
            return
