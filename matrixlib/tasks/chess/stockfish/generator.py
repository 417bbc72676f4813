"""Training positions made with Stockfish, in resumable chunks of integers.

A chunk holds `games_per_chunk` games and is a pure function of (parameters, chunk number), so killed work
goes on where it stopped and ends in the same bytes. A chunk holds the integers that the engine gave;
labels.py turns them into training targets, which can be done again without an engine.
"""

import hashlib
import io
import json
import multiprocessing
import os
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import chess
import numpy as np

from matrixlib.files import end_with_parent, write_bytes
from matrixlib.progress import live_bar
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish, find_stockfish
from matrixlib.tasks.chess.stockfish.games import Parameters, choose, play_game, position_key
from matrixlib.tasks.chess.stockfish.labels import Label, label, label_columns, move_code

FORMAT = 1


def game_id(parameters: Parameters, number: int) -> int:
    """64-bit id of a game: equal for equal parameters and number, else different."""
    text = json.dumps([asdict(parameters), number], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def make_chunk(engine: Stockfish, chunk: int, parameters: Parameters) -> dict[str, np.ndarray]:
    """The arrays of one chunk.

    Per game: game_id u8, game_number u4, result i1 (White's side), ending u1, moves u2 with move_offset. Per
    position: game u2 (row), ply u2, side u1, repetition u1, halfmove u1, castling u1, en_passant i1,
    pieces u1 (32,), wdl u2 (3,) per mille, legal u2 and score i2 with legal_offset (best first), deep u1 (3,)
    (ranks in `legal`, 255 none) and deep_score i2 (3,).
    """
    games: list[tuple[int, int, int, int]] = []
    boards: list[chess.Board] = []
    labels: list[Label] = []
    facts: list[tuple[int, int, int]] = []  # row of the game, ply, repetition
    moves: list[int] = []
    move_offset = [0]
    first = chunk * parameters.games_per_chunk
    for row in range(parameters.games_per_chunk):
        game = play_game(engine, first + row, parameters)
        labelled = choose(game, parameters)
        board, times = chess.Board(), Counter[str]()
        for ply, move in enumerate(game.moves):
            key = position_key(board)
            if labelled[ply]:
                labels.append(label(engine, board, parameters))
                boards.append(board.copy(stack=False))
                facts.append((row, ply, min(times[key], 2)))
            times[key] += 1
            board.push(move)
        moves += [move_code(move.uci()) for move in game.moves]
        move_offset.append(len(moves))
        games.append((game_id(parameters, game.number), game.number, game.result, game.ending))
    ids, numbers, results, endings = zip(*games, strict=True)
    fact = np.array(facts, dtype="<u2").reshape(-1, 3)
    records = from_boards(boards)
    return {
        "game_id": np.array(ids, dtype="<u8"),
        "game_number": np.array(numbers, dtype="<u4"),
        "result": np.array(results, dtype="i1"),
        "ending": np.array(endings, dtype="u1"),
        "moves": np.array(moves, dtype="<u2"),
        "move_offset": np.array(move_offset, dtype="<u4"),
        "game": fact[:, 0].copy(),
        "ply": fact[:, 1].copy(),
        "side": records["side"].copy(),
        "repetition": fact[:, 2].astype("u1"),
        **{name: records[name].copy() for name in ("halfmove", "castling", "en_passant", "pieces")},
        **label_columns(labels),
    }


def chunk_path(folder: Path, chunk: int) -> Path:
    """Where a chunk lies in the work folder."""
    return folder / f"chunk_{chunk:06d}.npz"


def read_chunk(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a chunk. Raises ValueError for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and generate again") from error


def chunks(folder: Path) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """(number, arrays) of the finished chunks, in order."""
    for path in sorted(folder.glob("chunk_*.npz")):
        yield int(path.stem.removeprefix("chunk_")), read_chunk(path)


def _write_chunk(folder: Path, chunk: int, parameters: Parameters, stockfish: Path) -> tuple[int, int]:
    """Make a chunk, in a worker process. Returns its numbers of games and positions."""
    with Stockfish(stockfish) as engine:
        arrays = make_chunk(engine, chunk, parameters)
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)  # type: ignore[arg-type]
    write_bytes(chunk_path(folder, chunk), data.getvalue())
    return parameters.games_per_chunk, len(arrays["side"])


def open_folder(folder: Path, parameters: Parameters, engine: str) -> None:
    """Creates the work folder or checks that it belongs to the same parameters and engine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "generator.json"
    own = json.loads(json.dumps({"format": FORMAT, "engine": engine, "parameters": asdict(parameters)}))
    if path.exists():
        have = json.loads(path.read_text())
        if have != own:
            raise ValueError(f"{folder} holds other work ({have}, requested {own}): use another folder or delete it")
        return
    write_bytes(path, json.dumps(own, indent=1).encode())


def generate(
    folder: Path | str,
    games: int,
    parameters: Parameters | None = None,
    stockfish: Path | str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Plays `games` games (rounded up to whole chunks) and labels their positions, in `workers` processes.

    Work that is there is not done again. Shows a progress bar on stderr. Returns games, positions, seconds of
    this call and the engine's name. Raises EngineError without a working Stockfish, ValueError for a folder
    made with other parameters.
    """
    parameters = parameters or Parameters()
    folder = Path(folder)
    path = find_stockfish(stockfish)
    with Stockfish(path) as engine:
        name = engine.name
    open_folder(folder, parameters, name)
    for left in folder.glob("chunk_*.tmp"):
        left.unlink()  # of a killed worker
    total = -(-games // parameters.games_per_chunk)
    todo = [chunk for chunk in range(total) if not chunk_path(folder, chunk).exists()]
    workers = max(1, min(workers or os.cpu_count() or 1, len(todo)))
    start, games_made, labelled = time.monotonic(), 0, 0
    bar = live_bar(
        total=total * parameters.games_per_chunk,
        initial=(total - len(todo)) * parameters.games_per_chunk,
        desc="games",
        disable=not progress,
    )
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent)
    try:
        jobs = [pool.submit(_write_chunk, folder, chunk, parameters, path) for chunk in todo]
        for job in as_completed(jobs):
            games_done, positions = job.result()
            games_made, labelled = games_made + games_done, labelled + positions
            bar.update(games_done)
            rate = f"{labelled / (time.monotonic() - start):.0f}/s"
            bar.set_postfix(positions=labelled, rate=rate, refresh=False)
    except BrokenProcessPool as error:
        raise EngineError(f"a generator process was killed ({error}); start again to go on") from error
    finally:
        bar.close()
        pool.shutdown(wait=False, cancel_futures=True)  # after an error, what is being made is made to its end
    seconds = time.monotonic() - start
    return {"games": games_made, "positions": labelled, "seconds": seconds, "engine": name, "chunks": total}
