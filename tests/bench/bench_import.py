"""Games and positions per second of the PGN import on one core, beside python-chess reading the same file.

    python tests/bench/bench_import.py [FILE.pgn] [--games 1200] [--repeats 5]

The import ends with shards on disk: records, legal lists, checks, quality figures, catalogue. python-chess only reads
(`chess.pgn.read_game` to the end of the file). Without a file: random games with comments and evaluations. Medians
after a warm-up; both are measured in the same run, in turns.
"""

import argparse
import io
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import chess
import chess.pgn

from matrixlib.tasks.chess.importers.audit import faults, figures
from matrixlib.tasks.chess.importers.import_files import import_files
from matrixlib.tasks.chess.importers.pgn import Pgn, split


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def random_games(count: int) -> str:
    """Games with tags, clocks and evaluations as Lichess writes them."""
    rng = random.Random(7)
    texts = []
    for number in range(count):
        game = chess.pgn.Game({"Event": f"random {number}", "Result": "*"})
        node: chess.pgn.GameNode = game
        board = game.board()
        for _ in range(rng.randrange(20, 120)):
            moves = list(board.legal_moves)
            if not moves:
                break
            move = rng.choice(moves)
            board.push(move)
            node = node.add_variation(move, comment=f"[%eval {rng.gauss(0, 2):.2f}] [%clk 0:03:00]")
        game.headers["Result"] = board.result()
        texts.append(f"{game}\n\n")
    return "".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--games", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    path = work / "games.pgn"
    if args.file:
        with open(args.file, "rb") as file:
            texts = [tags + moves for (tags, moves), _ in zip(split(file), range(args.games), strict=False)]
        path.write_bytes(b"".join(texts))
    else:
        path.write_text(random_games(args.games))
    text = path.read_text(errors="replace")

    def python_chess() -> None:
        file = io.StringIO(text)
        while chess.pgn.read_game(file):
            pass

    def ours() -> None:
        import_files(path, Path(tempfile.mkdtemp(dir=work)), workers=1, progress=False)

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    reader = Pgn()
    parts = list(reader.parts(path))
    results = [reader.read(part) for part in parts]
    stages: dict[str, Callable[[], object]] = {
        "cut into parts": lambda: list(reader.parts(path)),
        "read (words, replay)": lambda: [reader.read(part) for part in parts],
        "checks": lambda: [faults(result.batch) for result in results],
        "quality figures": lambda: [figures(result.batch) for result in results],
    }
    python_chess()
    report = import_files(path, work / "shards", workers=1, progress=False)
    positions = sum(report.positions.values())
    times: dict[str, list[float]] = {name: [] for name in ("python-chess", "import", *stages)}
    for _ in range(args.repeats):
        for name, stage in {"python-chess": python_chess, "import": ours, **stages}.items():
            times[name].append(seconds(stage))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(report.text())
    print(f"one core, median of {args.repeats}; {len(text):,} bytes of text")
    for name, median in medians.items():
        rates = f"{report.entries / median:9,.0f} games/s {positions / median:11,.0f} positions/s"
        print(f"{name:22} {median:8.3f} s {rates}")
    print(f"import / python-chess: {medians['python-chess'] / medians['import']:.1f} x")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
