"""Positions per second of a network as an evaluator, and simulations per second of searches with it.

    python tests/bench/bench_player.py [--presets demo quick] [--device auto] [--seconds 3]

Random weights, positions of random games, wall-clock time after a warm-up. "host" is the share of the evaluator's time
outside of the network and its transfers. "one tree" is a search of one position, 8 leaves at a time, as over UCI;
"256 trees" is what self-play does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from positions import random_positions

from matrixlib import config as configuration
from matrixlib.net import Net
from matrixlib.play.search import Search
from matrixlib.player import Evaluator
from matrixlib.runtime import resolve
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.task import ChessTask


class Timed(Net):
    """A network that adds up the seconds spent in it."""

    seconds = 0.0

    def predict(self, *arguments: object) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        out = super().predict(*arguments)
        self.seconds += time.perf_counter() - start
        return out


def per_second(seconds: float, work: Callable[..., int], *arguments: object) -> float:
    """What `work` gets done, by its own count."""
    work(*arguments)
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        done += work(*arguments)
    return done / elapsed


def ask(evaluate: Evaluator, states: np.ndarray, moves: np.ndarray, offsets: np.ndarray) -> int:
    """Positions evaluated."""
    return len(evaluate(states, moves, offsets)[1])


def simulate(search: Search, states: np.ndarray) -> int:
    """Simulations done from these states: 800 of one, 32 of each of many."""
    for tree in range(search.trees):
        search.reset(tree, states[tree : tree + 1])
    return sum(found.simulations for found in search.run(800 if search.trees == 1 else 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["demo", "quick"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    game = ChessGame()
    states = from_boards([board for board in random_positions(1500, seed=3) if any(board.legal_moves)])
    moves, offsets = game.legal(states)
    live = states[np.isnan(game.terminal(states, np.diff(offsets)))][:256]
    for preset in args.presets:
        settings = configuration.load(preset, {"runtime": {"device": args.device, "compile": False}})
        runtime = resolve(settings.runtime, settings.train, settings.data)
        runtime.apply()
        net = Timed(ChessTask(settings).build_model(), ChessTask(settings), runtime)
        print(
            f"{preset}: {net.parameters:,} parameters, {runtime.device} {runtime.dtype}, {runtime.threads} threads"
        )
        evaluate = Evaluator(net)
        for batch in (8, 64, 256, 1024):
            net.seconds, start = 0.0, time.perf_counter()
            question = states[:batch], moves[: offsets[batch]], offsets[: batch + 1]
            rate = per_second(args.seconds, ask, evaluate, *question)
            host = 1 - net.seconds / (time.perf_counter() - start)
            print(f"  batches of {batch:5}  {rate:10,.0f} positions/s, host {host:4.0%}")
        for trees in (1, len(live)):
            rate = per_second(args.seconds, simulate, Search(game, evaluate, trees=trees), live)
            print(f"  {trees:5} trees       {rate:10,.0f} simulations/s")


if __name__ == "__main__":
    main()
