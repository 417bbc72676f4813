"""What a Ray cluster costs beside local processes: the same chunks of games, by the same number of processes here.

Run from the repository root: ``python tests/bench/bench_fleet.py [--chunks 8] [--games 16] [--rounds 3]``. Both fleets
play in turn, so that a change in the machine's speed meets both alike. It prints the medians of the seconds until a
fleet can take a part, until it has played all, and until it is gone; what one empty part takes from here and back; and
the seconds that the cluster itself takes to start, with a node for every process.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_cluster import node_options, ray_cluster

from matrixlib.hardware import machine
from matrixlib.runs import cycle, cycle_games
from matrixlib.runs.fleet import Kind, gather, open_fleet

EMPTY = 100
"""Parts that compute nothing, one after the other."""


def timed(kind: Kind, workers: int, chunks: dict[int, cycle_games.Chunk], stored: bytes) -> dict[str, float]:
    """Seconds of one life of a fleet."""
    began = time.perf_counter()
    fleet = open_fleet(kind, workers)
    out = {"open": time.perf_counter() - began}
    began = time.perf_counter()
    games = sum(games.tally.games for _, games in gather(fleet, chunks, stored))
    assert games == sum(chunk.games for chunk in chunks.values())
    out["play"] = time.perf_counter() - began
    list(gather(fleet, {"first": partial(pow, 2, 3)}))
    began = time.perf_counter()
    for number in range(EMPTY):
        list(gather(fleet, {number: partial(pow, 2, 3)}))
    out["empty part"] = (time.perf_counter() - began) / EMPTY
    began = time.perf_counter()
    fleet.close()
    return out | {"close": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--games", type=int, default=16, help="of a chunk")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    workers = machine.facts().cores
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MATRIXLIB_REPORTS"] = folder
        opened = cycle.open_cycle("quick", "cpu", "c")
        place = (opened.name, opened.config, replace(opened.runtime, threads=1), 1, 0, "2026-01-01T00:00:00Z")
        starts = range(0, options.chunks * options.games, options.games)
        chunks = {start: cycle_games.Chunk(*place, start, options.games) for start in starts}
        stored = cycle_games.weights_of(Path(opened.folder), opened.config, 0)
        kinds: tuple[Kind, ...] = ("local", "ray")
        rows: dict[Kind, list[dict[str, float]]] = {kind: [] for kind in kinds}
        began = time.perf_counter()
        with ray_cluster() as cluster:
            for _ in range(workers - 1):
                cluster.add_node(**node_options())
            print(f"cluster of {workers} nodes started in {time.perf_counter() - began:.1f} s", flush=True)
            for number in range(options.rounds):
                for kind in kinds[:: 1 if number % 2 else -1]:
                    rows[kind].append(timed(kind, workers if kind == "local" else 0, chunks, stored))
    print(f"{workers} processes, {options.chunks} chunks of {options.games} games, {len(stored):,} bytes of weights")
    for kind in kinds:
        medians = {name: statistics.median(row[name] for row in rows[kind]) for name in rows[kind][0]}
        print(f"{kind:6}" + "".join(f"  {name} {value:8.4f} s" for name, value in medians.items()), flush=True)


if __name__ == "__main__":
    main()
