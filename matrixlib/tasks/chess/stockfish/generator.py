"""Training positions made with Stockfish, in resumable chunks of integers.

A chunk holds `games_per_chunk` games and is a pure function of (parameters, chunk number), so killed work
goes on where it stopped and ends in the same bytes. A chunk keeps the integers that the engine said;
packing.py turns them into training targets, which can be redone without an engine.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import chess
import numpy as np

from matrixlib.files import write_bytes
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish, find_stockfish
from matrixlib.tasks.chess.stockfish.games import (
    DEEP_LINES,
    Label,
    Parameters,
    choose,
    label,
    play_game,
    position_key,
)

FORMAT = 1


def game_id(parameters: Parameters, number: int) -> int:
    """64-bit id of a game: equal for equal parameters and number, else different."""
    text = json.dumps([asdict(parameters), number], sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def move_code(uci: str) -> int:
    """from | to << 6 | promotion << 12 (0 none, 2 knight ... 5 queen), as stored in a chunk."""
    move = chess.Move.from_uci(uci)
    return move.from_square | move.to_square << 6 | (move.promotion or 0) << 12


def make_chunk(
    engine: Stockfish, chunk: int, parameters: Parameters, advance: Callable[[int, int], None]
) -> dict[str, np.ndarray]:
    """The arrays of one chunk. `advance(games, positions)` is called as work is done.

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
        chosen = choose(game, parameters)
        board, seen = chess.Board(), Counter[str]()
        advance(1, 0)
        for ply, move in enumerate(game.moves):
            key = position_key(board)
            if chosen[ply]:
                labels.append(label(engine, board, parameters))
                boards.append(board.copy(stack=False))
                facts.append((row, ply, min(seen[key], 2)))
                advance(0, 1)
            seen[key] += 1
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


def label_columns(labels: Sequence[Label]) -> dict[str, np.ndarray]:
    """The columns of a chunk that labels fill: wdl, legal and score with legal_offset, deep, deep_score."""
    deep = np.full((len(labels), DEEP_LINES), 255, dtype="u1")
    deep_score = np.zeros((len(labels), DEEP_LINES), dtype="<i2")
    for row, made in enumerate(labels):
        count = len(made.deep_moves)
        deep[row, :count] = [made.moves.index(uci) for uci in made.deep_moves]
        deep_score[row, :count] = made.deep_scores
    return {
        "wdl": np.array([made.wdl for made in labels], dtype="<u2").reshape(-1, 3),
        "deep": deep,
        "deep_score": deep_score,
        "legal": np.array([move_code(uci) for made in labels for uci in made.moves], dtype="<u2"),
        "score": np.array([score for made in labels for score in made.scores], dtype="<i2"),
        "legal_offset": np.cumsum([0] + [len(made.moves) for made in labels]).astype("<u4"),
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


def _work(
    folder: Path,
    todo: list[int],
    parameters: Parameters,
    stockfish: Path,
    taken: Any,
    pipe: Connection,
) -> None:
    """A worker process: takes the next chunk until none is left; ends with its parent."""
    parent = multiprocessing.parent_process()

    def advance(games: int, positions: int) -> None:
        pipe.send((games, positions))
        if parent is not None and not parent.is_alive():
            raise SystemExit("the parent process is gone")

    try:
        with Stockfish(stockfish) as engine:
            while True:
                with taken.get_lock():
                    index = taken.value
                    taken.value += 1
                if index >= len(todo):
                    break
                arrays = make_chunk(engine, todo[index], parameters, advance)
                data = io.BytesIO()
                np.savez_compressed(data, **arrays)  # type: ignore[arg-type]
                write_bytes(chunk_path(folder, todo[index]), data.getvalue())
    except EngineError as error:
        pipe.send(str(error))
    finally:
        pipe.close()


def open_folder(folder: Path, parameters: Parameters, engine: str) -> None:
    """Creates the work folder or checks that it belongs to the same parameters and engine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "generator.json"
    want = json.loads(json.dumps({"format": FORMAT, "engine": engine, "parameters": asdict(parameters)}))
    if path.exists():
        have = json.loads(path.read_text())
        if have != want:
            raise ValueError(
                f"{folder} holds other work ({have}, asked for {want}): use another folder or delete it"
            )
        return
    write_bytes(path, json.dumps(want, indent=1).encode())


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
    start, played, labelled = time.monotonic(), 0, 0
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    processes, pipes = [], []
    from matrixlib.progress import live_bar

    bar = live_bar(
        total=total * parameters.games_per_chunk,
        initial=(total - len(todo)) * parameters.games_per_chunk,
        desc="games",
        disable=not progress,
    )
    try:
        for _ in range(workers if todo else 0):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(folder, todo, parameters, path, taken, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        while pipes:
            for pipe in cast("list[Connection]", wait(pipes, 1.0)):
                try:
                    news = pipe.recv()
                except EOFError:
                    pipes.remove(pipe)
                    continue
                if isinstance(news, str):
                    raise EngineError(news)
                played, labelled = played + news[0], labelled + news[1]
                if news[0]:
                    bar.update(news[0])
                    bar.set_postfix(
                        positions=labelled,
                        rate=f"{labelled / (time.monotonic() - start):.0f}/s",
                        refresh=False,
                    )
        for process in processes:
            process.join()
            if process.exitcode:
                raise EngineError(
                    f"a generator process ended with exit status {process.exitcode}; start again to go on"
                )
    finally:
        bar.close()
        for process in processes:
            if process.is_alive():
                process.terminate()
    seconds = time.monotonic() - start
    return {"games": played, "positions": labelled, "seconds": seconds, "engine": name, "chunks": total}
