"""Positions per second that the readers of foreign data hand over on one core, beside python-chess on the same input.

    python tests/bench/bench_readers.py [--positions 20000] [--repeats 5]

"cut" is the reading of a file in parts, "read" the rest: bytes of a part to records with legal lists and targets.
python-chess only parses the FENs and plays the moves that the input holds (Leela's and Matrix0's have neither; there
the figure is for as many FENs). Medians after a warm-up, in turns.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import chess
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import test_lc0
import test_matrix0_data
from positions import random_positions

from matrixlib.data.entries import Reader
from matrixlib.tasks.chess.importers.evaluations import Evaluations
from matrixlib.tasks.chess.importers.lc0 import Lc0
from matrixlib.tasks.chess.importers.matrix0_data import Matrix0Data
from matrixlib.tasks.chess.importers.puzzles import Puzzles

Case = tuple[Reader, Path, Callable[[], None]]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def play(games: list[tuple[str, list[str]]]) -> None:
    for fen, moves in games:
        board = chess.Board(fen)
        for uci in moves:
            board.push_uci(uci)


def puzzles(folder: Path, boards: list[chess.Board]) -> Case:
    """Rows of four moves each."""
    games = []
    for board in boards:
        after, moves = board.copy(stack=False), list[str]()
        while len(moves) < 4 and (move := next(iter(after.legal_moves), None)):
            moves.append(move.uci())
            after.push(move)
        if len(moves) == 4:
            games.append((board.fen(), moves))
    path = folder / "puzzles.csv"
    path.write_text("FEN,Moves\n" + "".join(f"{fen},{' '.join(moves)}\n" for fen, moves in games))
    return Puzzles(), path, lambda: play(games)


def evaluations(folder: Path, boards: list[chess.Board]) -> Case:
    """Lines of up to three variations."""
    path, games = folder / "evaluations.jsonl", []
    with path.open("w") as file:
        for board in boards:
            moves = [move.uci() for move in board.legal_moves if not board.is_castling(move)][:3]
            if moves:
                pvs = [{"cp": 10 * k, "line": " ".join([uci] * 10)} for k, uci in enumerate(moves)]
                fen = " ".join(board.fen().split()[:4])
                file.write(json.dumps({"fen": fen, "evals": [{"pvs": pvs, "knodes": 1, "depth": 30}]}) + "\n")
                games.append((f"{fen} 0 1", moves[:1]))
    return Evaluations(), path, lambda: play(games)


def leela(folder: Path, boards: list[chess.Board]) -> Case:
    """One game; its positions stand alone."""
    path = folder / "training.1.gz"
    chosen = [board for board in boards if any(board.legal_moves)][:200]
    policies = [{next(iter(board.legal_moves)).uci(): 1.0} for board in chosen]
    data = [test_lc0.pack([board], 3, policy) for board, policy in zip(chosen, policies, strict=True)]
    path.write_bytes(gzip.compress(b"".join(data)))
    return Lc0(), path, lambda: play([(board.fen(), []) for board in chosen])


def matrix0(folder: Path, boards: list[chess.Board]) -> Case:
    path = folder / "selfplay.npz"
    chosen = [board for board in boards if any(board.legal_moves)][:512]
    np.savez_compressed(path, **test_matrix0_data.arrays_of(chosen))
    return Matrix0Data(), path, lambda: play([(board.fen(), []) for board in chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=20000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    boards = random_positions(args.positions, 1)
    with tempfile.TemporaryDirectory() as folder:
        for make in (puzzles, evaluations, leela, matrix0):
            reader, path, plain = make(Path(folder), boards)
            parts = list(reader.parts(path))
            found = [reader.read(part) for part in parts]
            n = sum(len(result.batch["records"]) for result in found)
            times = [
                (
                    seconds(lambda r=reader, p=path: list(r.parts(p))),
                    seconds(lambda r=reader, p=parts: [r.read(part) for part in p]),
                    seconds(plain),
                )
                for _ in range(args.repeats)
            ]
            cut, read, other = (n / statistics.median(column) for column in zip(*times, strict=True))
            rates = f"cut {cut:11,.0f}/s  read {read:9,.0f}/s  python-chess {other:9,.0f}/s"
            print(f"{reader.source:12} {n:7} positions  {rates}")


if __name__ == "__main__":
    main()
