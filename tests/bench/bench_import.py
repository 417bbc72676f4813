"""Games and positions per second of the PGN import on one core, beside python-chess reading the same file.

    python tests/bench/bench_import.py FILE.pgn [--repeats 5]

The import ends with shards on disk: records, legal lists, checks, quality figures, catalogue. python-chess only reads
(`chess.pgn.read_game` to the end of the file). Medians after a warm-up; both are measured in the same run, in turns.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import chess.pgn

from matrixlib.tasks.chess.importers.import_files import import_files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ours, theirs = [], []
    for _ in range(args.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            report = import_files(args.file, Path(folder) / "shards", workers=1, progress=False)
            ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        with open(args.file, encoding="utf-8", errors="replace") as file:
            while chess.pgn.read_game(file):
                pass
        theirs.append(time.perf_counter() - start)
    for name, seconds in (("import", statistics.median(ours[1:])), ("python-chess", statistics.median(theirs[1:]))):
        positions = sum(report.positions.values())
        print(f"{name:12} {report.entries / seconds:8,.0f} games/s {positions / seconds:10,.0f} positions/s")


if __name__ == "__main__":
    main()
