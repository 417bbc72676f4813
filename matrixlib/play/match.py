"""Matches: game pairs from one opening with colours swapped. Players are functions of their games."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from matrixlib.config import Count, CountOrZero, OpeningOptions, option
from matrixlib.play.elo import Sprt
from matrixlib.play.game import Game, GameRecord, Moves, States
from matrixlib.play.search import Evaluate, Search, SearchOptions

Player: TypeAlias = "Callable[[Turn], Choice]"
T = TypeVar("T")
R = TypeVar("R")
GROUP_GAMES = 16  # most games in which a thread asks a player at once
TRIES = 50  # random games for each opening before giving up


class EngineError(RuntimeError):
    """A program that plays is missing, no engine, lacks an option, died, timed out, or played no legal move."""


def random_player(game: Game, seed: int) -> Player:
    """Plays random legal moves, a function of seed and game number."""

    def play(turn: Turn) -> Choice:
        moves, offsets = game.legal(turn.states)
        picks = [
            np.random.default_rng([seed, number, len(past)]).integers(offsets[i], offsets[i + 1])
            for i, (number, past) in enumerate(zip(turn.games, turn.history, strict=True))
        ]
        return Choice(moves[picks])

    return play


def search_player(game: Game, evaluate: Evaluate, simulations: int, options: SearchOptions | None = None) -> Player:
    """Plays the best move of a noise-free search; comments: value for the side to move, simulations."""

    def play(turn: Turn) -> Choice:
        search = Search(game, evaluate, options, trees=len(turn.games))
        for tree, keys in enumerate(turn.history):
            search.reset(tree, turn.states[tree : tree + 1], keys, past=turn.past[tree])
        results = search.run(simulations, best_alone=True)
        comments = [f"{result.value:+.3f}/{result.simulations}" for result in results]
        return Choice(np.array([result.best for result in results], np.int32), comments)

    return play


def random_openings(game: Game, count: int, seed: int | Sequence[int], plies: int) -> States:
    """(count,) distinct positions after `plies` random moves, none terminal.

    ValueError if the game has too few.
    """
    if not count:
        return game.initial(0)
    rng = np.random.default_rng(seed)
    openings: dict[int, States] = {}
    for _ in range(TRIES * count):
        state = game.initial(1)
        for _ in range(plies):
            moves, _ = game.legal(state)
            if not len(moves):
                break
            state = game.play(state, rng.choice(moves, 1))
        if np.isnan(game.terminal(state, np.diff(game.legal(state)[1])))[0]:
            openings.setdefault(int(game.key(state)[0]), state)
        if len(openings) == count:
            return np.concatenate(list(openings.values()))
    raise ValueError(
        f"{game.name} has hardly {count} different positions after {plies} random plies (only {len(openings)}); "
        "give fewer pairs or more plies"
    )


def spread(function: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """A result for each item, computed by so many threads; 0: in this one."""
    if not threads:
        return list(map(function, items))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def play_pairs(
    game: Game,
    first: Player,
    second: Player,
    openings: States,
    plies: int = 400,
    names: tuple[str, str] = ("first", "second"),
    start: int = 0,
    history: Sequence[NDArray[np.uint64]] = (),
    threads: int = 0,
) -> Match:
    """Two games from each opening (P,), in lock-step; a game of `plies` plies is a draw.

    start: number of the first game. history: keys of the states before each opening, default none. threads: number of
    threads that ask the players, both at once, in groups of games that do not depend on it; 0: each player once a ply,
    in this thread. ValueError for a terminal opening or an illegal move.
    """
    states, count = np.repeat(openings, 2), 2 * len(openings)
    moves: list[list[int]] = [[] for _ in range(count)]
    comments: list[list[str]] = [[] for _ in range(count)]
    before = [np.asarray(keys, np.uint64) for keys in history] or [np.zeros(0, np.uint64)] * len(openings)
    early = max(map(len, before), default=0)
    keys = np.zeros((count, early + plies + 1), np.uint64)
    for i in range(count):
        keys[i, early - len(before[i // 2]) : early] = before[i // 2]
    course = np.empty((count, plies + 1), states.dtype)
    results, endings = np.zeros(count), ["ply limit"] * count
    live = np.arange(count)

    def ask(group: tuple[int, NDArray[np.int64]]) -> Choice:
        side, games = group  # of the ply that is played
        known = [keys[i, early - len(before[i // 2]) : early + ply] for i in games]
        past = [course[i, :ply] for i in games]
        return (first, second)[side](Turn(games + start, states[games], known, past, [moves[i] for i in games]))

    for ply in range(plies + 1):
        keys[live, early + ply], course[live, ply] = game.key(states[live]), states[live]
        legal, offsets = game.legal(states[live])
        values = game.terminal(states[live], np.diff(offsets))
        over = ~np.isnan(values)
        if ply == 0 and over.any():
            raise ValueError(f"opening {over.argmax() // 2} is the end of a game: leave it out")
        for i, value in zip(live[over].tolist(), values[over], strict=True):
            results[i], endings[i] = value * (-1) ** ply + 0.0, "normal"  # no negative zero
        allowed = dict(zip(live.tolist(), np.split(legal, offsets[1:-1]), strict=True))
        live = live[~over]
        if ply == plies or not len(live):
            break
        sides = [live[(live + ply) % 2 == side] for side in (0, 1)]  # the first player starts every other game
        size = GROUP_GAMES if threads else len(live)
        cuts = [slice(i, i + size) for i in range(0, len(live), size)]  # in turns, as an engine answers one at a time
        groups = [(side, games[cut]) for cut in cuts for side, games in enumerate(sides) if len(games[cut])]
        for (side, games), choice in zip(groups, spread(ask, groups, threads), strict=True):
            texts = choice.comments or [""] * len(games)
            for i, move, text in zip(games.tolist(), choice.moves.tolist(), texts, strict=True):
                if move not in allowed[i]:
                    name = names[side]
                    raise ValueError(f"'{name}' plays move {move} in game {i + start}, which is not legal")
                moves[i].append(move)
                comments[i].append(text)
        after = game.play(states[live], np.array([moves[i][-1] for i in live], np.int32))
        times = (keys[live, : early + ply + 1] == game.key(after)[:, None]).sum(1)
        states[live] = game.repeat(after, times.astype(np.int32))
    records = []
    for i, side in enumerate(np.repeat(game.to_move(openings), 2).tolist()):
        players = names if (i + side) % 2 == 0 else names[::-1]
        tags = {"Round": f"{(i + start) // 2 + 1}.{i % 2 + 1}", "Termination": endings[i]}
        opening = openings[i // 2 : i // 2 + 1]
        records.append(GameRecord(opening, moves[i], float(results[i]), tags, comments[i], players))
    return Match(tuple(records))


class MatchOptions(Sprt, OpeningOptions):
    """Matches of a candidate against the best network."""

    pairs: Annotated[int, Field(ge=1, le=1 << 20)] = option(64, "most pairs of games (one opening, colours swapped)")
    batch: Count = option(16, "pairs played at once; SPRT is tested after each batch")
    num_simulations: CountOrZero = option(16, "simulations of a move; 0 = the most probable move, or a mate in one")
    random_plies: Annotated[int, Field(ge=3)] = option(
        6, "random plies of an opening without a file of them; below 3 there are too few"
    )
    plies: Count = option(240, "longer games are drawn")
    anchor_pairs: Annotated[int, Field(ge=0, le=1 << 20)] = option(
        32, "pairs of each candidate against the newest generation not beaten in all games, for the Elo curve"
    )


@dataclass(frozen=True)
class Turn:
    """Games in which a player is to move: numbers (N,), states (N,), keys of earlier states, those states, and their
    moves, in game order."""

    games: NDArray[np.int64]
    states: States
    history: Sequence[NDArray[np.uint64]]
    past: Sequence[States]
    moves: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Choice:
    """A move for each game of a turn, and optionally a comment for each."""

    moves: Moves
    comments: Sequence[str] = ()


@dataclass(frozen=True)
class Match:
    """Games of a match, pairs adjacent: the first player moves first in the first game of a pair."""

    games: tuple[GameRecord, ...]

    def scores(self) -> NDArray[np.float64]:
        """(games,) points of the first player."""
        results = np.array([game.result for game in self.games], np.float64)
        return (1 + results * np.where(np.arange(len(results)) % 2, -1, 1)) / 2

    def pairs(self) -> NDArray[np.int64]:
        """(5,) number of pairs that scored 0, 1/2, 1, 3/2 and 2 points."""
        points = self.scores().reshape(-1, 2).sum(1)
        return np.bincount((2 * points).astype(np.int64), minlength=5)
