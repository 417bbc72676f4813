"""What searches and self-play do with networks: positions, simulations, moves and games per second.

    python tests/bench/bench_player.py [--networks demo:cpu matrix0_53m:cuda] [--seconds 3] [--processes 1]

A network is a preset and a device, with random weights; without any those that this machine can run: small ones on the
CPU, and on a GPU Matrix0's too. Wall-clock time after a warm-up. "alone" is the network asked for positions of random
games in batches; "host" the share of that time outside of the network and its transfers. "one tree" is a search of one
position, 8 leaves at a time, as over UCI. "self-play" is 256 games at a time in each process, 32 simulations a move; a
game is counted as 100 plies. bench_search.py has the same without a network, and the limits.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from positions import random_positions

from matrixlib.hardware import machine
from matrixlib.hardware.runtime import resolve
from matrixlib.play.evaluator import Evaluator
from matrixlib.play.game import States
from matrixlib.play.search import Search, SearchOptions
from matrixlib.play.selfplay import SelfPlayOptions, play_games
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.task import ChessTask

PARALLEL, SIMULATIONS, PLIES = 256, 32, 100
WARM = 2  # moves of all games before the clock starts


class Timed(Net):
    """A network that adds up the seconds spent in it."""

    seconds = 0.0

    def predict(self, *arguments: Any) -> dict[str, np.ndarray]:
        start = time.perf_counter()
        out = super().predict(*arguments)
        self.seconds += time.perf_counter() - start
        return out


def network(preset: str, device: str, threads: int | str = "auto") -> Timed:
    """A network of a preset with random weights; torch's threads are set as for it."""
    chosen = {"device": device, "threads": threads, "compile": False}
    settings = load_config(preset, {"runtime": chosen})
    runtime = resolve(settings.runtime, settings.train, settings.data)
    runtime.apply()
    return Timed(ChessTask(settings).build_model(), ChessTask(settings), runtime)


def per_second(seconds: float, work: Callable[..., int], *arguments: object) -> float:
    """What `work` gets done, by its own count."""
    work(*arguments)
    done, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        done += work(*arguments)
    return done / elapsed


def ask(evaluate: Evaluator, states: States, moves: np.ndarray, offsets: np.ndarray) -> int:
    """Positions evaluated."""
    return len(evaluate(states, moves, offsets)[1])


def simulate(search: Search, state: States) -> int:
    """Simulations done from a position, 800 unless it is proven before."""
    search.reset(0, state)
    return search.run(800)[0].simulations


def self_play(evaluate: Evaluator, seconds: float, begin: Callable[[], object]) -> float:
    """Moves per second. begin: called when all is warm."""
    played, start, elapsed = 0, 0.0, 0.0

    def enough() -> bool:  # asked before each move of all games, of which there are always as many
        nonlocal played, start, elapsed
        played += 1
        if played == WARM + 1:
            begin()
            start = time.perf_counter()
        elapsed = time.perf_counter() - start
        return played > WARM + 1 and elapsed > seconds

    options = SelfPlayOptions(parallel=PARALLEL, num_simulations=SIMULATIONS, plies=200)
    for _ in play_games(
        ChessGame(),
        evaluate,
        itertools.count(),
        options,
        SearchOptions(max_num_considered_actions=16),
        until=enough,
    ):
        pass
    return (played - WARM - 1) * PARALLEL / elapsed


def work(preset: str, device: str, seconds: float, begin: Any, out: Any) -> None:
    """One process of self-play, on one thread as in a cycle: its moves per second go to a queue."""
    out.put(self_play(Evaluator(network(preset, device, 1)), seconds, begin.wait))


def together(processes: int, *what: Any) -> float:
    """Moves per second of several processes that start their clocks at the same moment."""
    context = multiprocessing.get_context("spawn")
    begin, out = context.Barrier(processes), context.Queue()
    started = [context.Process(target=work, args=(*what, begin, out)) for _ in range(processes)]
    for process in started:
        process.start()
    moves = sum(out.get(timeout=600) for _ in started)
    for process in started:
        process.join()
    return moves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    small = ["demo:cpu", "quick:cpu"]
    on_gpu = ["quick:cuda", "matrix0_53m:cuda"] if machine.facts().gpu else []
    parser.add_argument("--networks", nargs="+", default=small + on_gpu)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    game = ChessGame()
    states = from_boards([board for board in random_positions(1500, seed=3) if any(board.legal_moves)])
    moves, offsets = game.legal(states)
    for name in args.networks:
        preset, _, device = name.partition(":")
        net = network(preset, device or "auto")
        runtime = net.runtime
        print(f"{preset}: {net.parameters:,} parameters, {runtime.device} {runtime.dtype}, {runtime.threads} threads")
        evaluate = Evaluator(net)
        for batch in (8, 64, 256, 1024):
            net.seconds, start = 0.0, time.perf_counter()
            question = states[:batch], moves[: offsets[batch]], offsets[: batch + 1]
            rate = per_second(args.seconds, ask, evaluate, *question)
            host = 1 - net.seconds / (time.perf_counter() - start)
            print(f"  alone, batches of {batch:5}  {rate:10,.0f} positions/s, host {host:4.0%}", flush=True)
        rate = per_second(args.seconds, simulate, Search(game, evaluate), game.initial(1))
        print(f"  one tree                {rate:10,.0f} simulations/s", flush=True)
        if args.processes == 1:
            rate = self_play(evaluate, args.seconds, lambda: None)
        else:
            rate = together(args.processes, preset, device or "auto", args.seconds)
        print(
            f"  self-play               {SIMULATIONS * rate:10,.0f} simulations/s, {rate:,.0f} moves/s, "
            f"{rate / PLIES:.2f} games/s, processes: {args.processes}",
            flush=True,
        )


if __name__ == "__main__":
    main()
