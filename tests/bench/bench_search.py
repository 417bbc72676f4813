"""Simulations and games per second of one core with an evaluator that costs nothing, and where the time goes.

    python tests/bench/bench_search.py [--simulations 800] [--repeats 5]

Chess, from positions of random games, uniform priors, value 0. Each figure is the median of several searches after a
warm-up, by CPU time, so that what else the machine does matters little. "rules" is the share of time in the Game
(moves, positions, endings, keys), "look-ahead" the part of it that recognises the moves that mate.
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

from matrixlib.play.game import uniform
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


def measure(trees: int, simulations: int, options: SearchOptions, repeats: int) -> tuple[float, float, float]:
    """(simulations per second, share of time in the rules, share in the look-ahead), medians."""
    game = ChessGame()
    states = from_boards([b for b in random_positions(trees * 2, seed=3) if any(b.legal_moves)])
    counts = np.diff(game.legal(states)[1])
    states = states[np.isnan(game.terminal(states, counts))][:trees]
    rows = []
    for repeat in range(repeats + 1):
        timed = Timed(game)
        search = Search(timed, uniform, options, len(states))
        for tree in range(len(states)):
            search.reset(tree, states[tree : tree + 1])
        timed.seconds.clear()
        start = time.thread_time()
        found = search.run(simulations)
        elapsed = time.thread_time() - start
        if repeat:
            done = sum(f.simulations for f in found)
            rules = sum(timed.seconds.values())
            rows.append((done / elapsed, rules / elapsed, timed.seconds.get("endings", 0.0) / elapsed))
    rate, rules, ahead = (statistics.median(column) for column in zip(*rows, strict=True))
    return rate, rules, ahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"chess, free evaluator, one core; median of {args.repeats}")
    print("trees  leaves  simulations  look-ahead  root      simulations/s   rules  look-ahead")
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
        options = SearchOptions(leaves=leaves, look_ahead=look_ahead, gumbel=gumbel)
        rate, rules, ahead = measure(trees, simulations, options, args.repeats)
        root, looks = ("gumbel" if gumbel else "puct"), ("yes" if look_ahead else "no")
        print(
            f"{trees:5}  {leaves:6}  {simulations:11,}  {looks:10}  {root:6}  {rate:16,.0f}  "
            f"{rules:6.0%}  {ahead:10.0%}",
            flush=True,
        )
    options = SelfPlayOptions(parallel=256, simulations=32, plies=200)
    start, plies, games = time.thread_time(), 0, 512
    for trace in play_games(ChessGame(), uniform, range(games), options, SearchOptions(gumbel=16)):
        plies += len(trace.played)
    elapsed = time.thread_time() - start
    print(
        f"self-play: {games / elapsed:.1f} games/s of 32 simulations a move, {plies / elapsed:,.0f} moves/s,"
    )
    print(f"           {plies / games:.0f} plies a game, 256 games at a time")


if __name__ == "__main__":
    main()
