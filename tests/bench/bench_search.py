"""Simulations and games per second of one core with an evaluator that costs nothing, and where the time goes.

    python tests/bench/bench_search.py [--simulations 800] [--repeats 5]

Chess, from positions of random games, uniform priors, value 0. Each figure is the median of several searches after a
warm-up, by CPU time, so that what else the machine does matters little. "rules" is the share of time in the Game
(moves, positions, endings, keys), "look-ahead" the part of it that recognises the moves that mate. "evaluated" is how
many positions are evaluated for a simulation: one, unless it ends where the result is known.

Two limits stand beside: board work alone, the rules without a search, in batches; and the design of Matrix0's batched
search, which evaluates 33 positions for 300 simulations and leaves the values of 32 of them unused.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from positions import random_positions

from matrixlib.play.game import Moves, Offsets, States, Values, uniform
from matrixlib.play.search import Search, SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards


class Timed:
    """A Game that adds up the seconds spent in each of its methods."""

    def __init__(self, game: Any) -> None:
        self.game = game
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        inner = getattr(self.game, name)

        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            result = inner(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start
            return result

        return timed


def positions(game: ChessGame, count: int) -> States:
    """(count,) positions of random games in which the game goes on."""
    states = from_boards([b for b in random_positions(count * 2, seed=3) if any(b.legal_moves)])
    counts = np.diff(game.legal(states)[1])
    return states[np.isnan(game.terminal(states, counts))][:count]


def measure(trees: int, simulations: int, options: SearchOptions, repeats: int) -> list[float]:
    """Medians: simulations per second, positions evaluated for each, shares of time in rules and look-ahead."""
    game, rows, asked = ChessGame(), [], 0

    def evaluate(states: States, moves: Moves, offsets: Offsets) -> tuple[Values, Values]:
        nonlocal asked
        asked += len(states)
        return uniform(states, moves, offsets)

    states = positions(game, trees)
    for repeat in range(repeats + 1):
        timed = Timed(game)
        search = Search(timed, evaluate, options, len(states))
        for tree in range(len(states)):
            search.reset(tree, states[tree : tree + 1])
        timed.seconds.clear()
        asked, start = 0, time.thread_time()
        found = search.run(simulations)
        elapsed = time.thread_time() - start
        if repeat:
            done = sum(f.simulations for f in found)
            rules, ahead = sum(timed.seconds.values()), timed.seconds.get("endings", 0.0)
            rows.append((done / elapsed, asked / done, rules / elapsed, ahead / elapsed))
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def board_work(repeats: int, batch: int = 2048, plies: int = 10) -> float:
    """Positions per second of the rules alone, median: legal moves, endings and keys, then a random move in each."""
    game, rates = ChessGame(), []
    for repeat in range(repeats + 1):
        states, rng = positions(game, batch), np.random.default_rng(repeat)
        start, done = time.thread_time(), 0
        for _ in range(plies):
            moves, offsets = game.legal(states)
            live = np.isnan(game.terminal(states, np.diff(offsets)))
            game.key(states)
            done += len(states)
            chosen = moves[(offsets[:-1] + rng.random(len(states)) * np.diff(offsets))[live].astype(np.int64)]
            states = game.play(states[live], chosen)
        rates.append(done / (time.thread_time() - start))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"chess, free evaluator, one core; median of {args.repeats}")
    print("trees  leaves  simulations  look-ahead  root      simulations/s  evaluated   rules  look-ahead")
    for trees, leaves, simulations, look_ahead, gumbel in (
        (1, 1, args.simulations, True, 0),
        (1, 16, 20 * args.simulations, True, 0),
        (1, 128, 20 * args.simulations, True, 0),
        (256, 1, args.simulations, True, 0),
        (256, 1, args.simulations, False, 0),
        (256, 8, args.simulations, True, 0),
        (256, 8, args.simulations, False, 0),
        (256, 8, 32, True, 16),
    ):
        options = SearchOptions(leaves=leaves, look_ahead=look_ahead, max_num_considered_actions=gumbel)
        rate, evaluated, rules, ahead = measure(trees, simulations, options, args.repeats)
        root, looks = ("gumbel" if gumbel else "puct"), ("yes" if look_ahead else "no")
        print(
            f"{trees:5}  {leaves:6}  {simulations:11,}  {looks:10}  {root:6}  {rate:16,.0f}  "
            f"{evaluated:9.2f}  {rules:6.0%}  {ahead:10.0%}",
            flush=True,
        )
    options = SelfPlayOptions(parallel=256, num_simulations=32, plies=200)
    start, plies, games = time.thread_time(), 0, 512
    for trace in play_games(ChessGame(), uniform, range(games), options, SearchOptions(max_num_considered_actions=16)):
        plies += len(trace.line)
    elapsed = time.thread_time() - start
    print(f"self-play: {games / elapsed:.1f} games/s of 32 simulations a move, {plies / elapsed:,.0f} moves/s,")
    print(f"           {plies / games:.0f} plies a game, 256 games at a time")
    print(f"limits: board work alone {board_work(args.repeats):,.0f} positions/s;")
    print(f"        Matrix0's design {33 / 300:.2f} positions evaluated for a simulation")


if __name__ == "__main__":
    main()
