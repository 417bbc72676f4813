"""What a Ray cluster costs beside local processes: the same chunks of games, by the same number of processes here.

Run from the repository root: ``python tests/bench/bench_fleet.py [--chunks 8] [--games 16] [--rounds 3]``. Both fleets
play in turn, so that a change in the machine's speed meets both alike. It prints the medians of the seconds until the
first chunk has been played, until all have, and until the processes are gone, and the seconds that the cluster itself
takes to start, with a node for every process.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ray_cluster import node_options, ray_cluster

from matrixlib.hardware import machine
from matrixlib.runs import cycle, cycle_games
from matrixlib.runs.fleet import Kind, compute


def timed(kind: Kind, workers: int, chunks: dict[int, cycle_games.Chunk], stored: bytes) -> dict[str, float]:
    """Seconds until the first and the last chunk are here, and all is gone."""
    began, out = time.perf_counter(), {}
    for _, games in compute(chunks.items(), [stored], kind=kind, workers=workers):
        out["first"] = out.get("first", time.perf_counter() - began)
        assert games.tally.games
        out["all"] = time.perf_counter() - began
    return out | {"gone": time.perf_counter() - began}


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
            for _ in range(workers):
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
