"""Makes a training set with Stockfish: games and labels, appended to a file game by game, then shards.

A game and its labels are a pure function of (parameters, number of the game), so stopped work is resumed
and ends in the same bytes. The set that ships was made by this.
"""

import itertools
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import numpy as np
from filelock import FileLock

from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import SPLITS, Batch, ShardInfo, read_info, select, write_shard
from matrixlib.progress import live_bar
from matrixlib.tasks.chess.importers.notation import read_fens
from matrixlib.tasks.chess.keys import SHARD, game_id, is_validation, keys_of
from matrixlib.tasks.chess.records import LAYOUT, UNKNOWN
from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish, find_stockfish
from matrixlib.tasks.chess.stockfish.games import Parameters, choose, play_game, position_key
from matrixlib.tasks.chess.stockfish.labels import MARGIN, STEP, TEMPERATURE, Positions, assemble, label

FORMAT = 2  # of the work folder, and of the rules that make shards of it
GAMES = "games.jsonl"  # a game a line: number, result, ending, PGN, positions: FEN, repetition, win-draw-loss, levels
FACTS = "generator.json"
RESULTS = {1: "1-0", -1: "0-1", 0: "1/2-1/2", 2: "*"}


def make_set(
    out: str = "",
    games: int = 4,
    games_per_chunk: int = 2,
    seed: int = 0,
    stockfish: str = "",
    workers: int = 2,
    nodes: tuple[int, int] = (150, 1500),
) -> dict[str, Any]:
    """Play and label games in `work`, a subfolder, then pack them into shards with a catalogue in `shards`; resumable.

    out: folder, empty = reports/sample. nodes: fewest and most nodes of a playing engine. Returns the figures of
    `generate` and `pack`, and the folder. Raises EngineError without a working Stockfish, ValueError for a folder with
    other shards.
    """
    if min(games, games_per_chunk, workers) < 1 or seed < 0:
        raise ValueError(
            f"games is {games}, games_per_chunk {games_per_chunk}, workers {workers}, seed {seed}; give whole numbers "
            "from 1, 1, 1 and 0"
        )
    if not 1 <= nodes[0] <= nodes[1]:
        raise ValueError(
            f"nodes_low is {nodes[0]} and nodes_high {nodes[1]}; give whole numbers from 1, the low one first"
        )
    folder = Path(out) if out else files.reports_root() / "sample"
    shards, work = folder / "shards", folder / "work"
    with files.writing(folder):
        own = provenance(work)["generator"] if (work / FACTS).exists() else None
        for path in sorted(shards.rglob("*.npz")):  # shards of others are not ours to delete
            if own is None or read_info(path).meta["generator"] != own:
                raise ValueError(f"{path} was not made from {work}: give another folder as `out`")
        figures = generate(
            work, games, Parameters(seed=seed, nodes=nodes), stockfish or None, workers, games_per_chunk=games_per_chunk
        )
        if shards.is_dir():  # of fewer games
            catalogue = Catalogue(shards, warn=False)
            catalogue.remove([row.name for row in catalogue.shards(state=None)])
        figures |= pack(work, shards)
        Catalogue(shards, warn=False)
    return {"folder": folder, **figures}


# Games and labels


def generate(
    folder: Path | str,
    games: int,
    parameters: Parameters | None = None,
    stockfish: Path | str | None = None,
    workers: int | None = None,
    progress: bool = True,
    games_per_chunk: int = 10,
) -> dict[str, Any]:
    """Play `games` games (rounded up to whole chunks) and label their positions, in `workers` processes.

    Finished games are appended to `games.jsonl` in order, `games_per_chunk` at a time. Returns the engine's name, the
    games there are now, and those made by this call. Raises EngineError without a working Stockfish, ValueError for a
    folder made with other parameters or by another engine, or that another process writes.
    """
    parameters, folder = parameters or Parameters(), Path(folder)
    path = find_stockfish(stockfish)
    with Stockfish(path) as engine:
        name = engine.name
    files.make_folder(folder)
    busy = ValueError(f"another process makes games in {folder}; wait until it has ended")
    with files.exclusive(FileLock(folder / "lock"), busy):
        facts = {"format": FORMAT, "engine": name, "parameters": json.loads(json.dumps(asdict(parameters)))}
        have = files.read_json(folder / FACTS)
        if have and have != facts:
            raise ValueError(f"{folder} holds other work ({have}, requested {facts}): use another folder or delete it")
        if not have:
            files.write_text(folder / FACTS, json.dumps(facts, indent=1))
        total = -(-games // games_per_chunk) * games_per_chunk
        with open(folder / GAMES, "ab+") as file:
            done = _cut_to_whole_lines(file)
            starts = range(done, total, games_per_chunk)
            jobs = [(path, parameters, range(start, min(start + games_per_chunk, total))) for start in starts]
            bar = live_bar(total=total, initial=done, desc="games", disable=not progress)
            pool = ProcessPoolExecutor(
                max(1, min(workers or os.cpu_count() or 1, len(jobs))),
                multiprocessing.get_context("spawn"),
                files.end_with_parent,
            )
            begun, labelled = time.monotonic(), 0
            try:
                for lines, positions in pool.map(_play, jobs):
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                    labelled += positions
                    bar.update(lines.count(b"\n"))
                    bar.set_postfix(rate=f"{labelled / (time.monotonic() - begun):.0f} positions/s", refresh=False)
            except BrokenProcessPool as error:
                raise EngineError(f"a generator process was killed ({error}); start again to go on") from error
            finally:
                bar.close()
                pool.shutdown(wait=False, cancel_futures=True)
    return {"engine": name, "games": max(done, total), "new games": max(0, total - done)}


def _cut_to_whole_lines(file: Any) -> int:
    """The number of whole lines of a file, which is cut after the last of them: a kill may leave half a line."""
    file.seek(0)
    data = file.read()
    file.truncate(data.rfind(b"\n") + 1)
    return int(data.count(b"\n"))


def _play(job: tuple[Path, Parameters, range]) -> tuple[bytes, int]:
    """Some games as lines of `games.jsonl`, in a worker process, and the number of their labelled positions."""
    stockfish, parameters, numbers = job
    with Stockfish(stockfish) as engine:
        games = [make_game(engine, number, parameters) for number in numbers]
    return b"".join(json.dumps(game).encode() + b"\n" for game in games), sum(len(it["positions"]) for it in games)


def make_game(engine: Stockfish, number: int, parameters: Parameters) -> dict[str, Any]:
    """A game with the labels of the positions that were chosen, as JSON data (see GAMES)."""
    game = play_game(engine, number, parameters)
    positions = []
    board, times = chess.Board(), Counter[str]()
    for move, chosen in zip(game.moves, choose(game, parameters), strict=True):
        key = position_key(board)
        if chosen:
            labelled = label(engine, board, parameters.shallow_depth, parameters.deep_depth)
            positions.append([board.fen(en_passant="legal"), min(times[key], 2), *labelled])
        times[key] += 1
        board.push(move)
    pgn = chess.pgn.Game.from_board(board)
    pgn.headers.update(Event="matrixlib", Round=str(number), Result=RESULTS[game.result], Termination=game.ending)
    return {
        "game": number,
        "result": game.result,
        "ending": game.ending,
        "pgn": str(pgn),
        "positions": positions,
    }


def read_games(work: Path) -> Iterator[dict[str, Any]]:
    """The finished games of a work folder, in order. ValueError for a damaged file."""
    path = work / GAMES
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                game = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number + 1} is damaged ({error}): cut the file there") from error
            yield game


# Shards


def collect(work: Path) -> tuple[Positions, int]:
    """The positions of all finished games of a work folder in order, without duplicates, and how many were left out.

    A position is there once, its mirror image and its colour-swapped image included. ValueError for a damaged file and
    for a folder without a game.
    """
    facts = provenance(work)["generator"]
    known: set[bytes] = set()
    parts, total = [], 0
    games = read_games(work)
    while some := list(itertools.islice(games, 1000)):  # text of so many games at a time
        rows = [(game, *position) for game in some for position in game["positions"]]
        records, faults = read_fens([fen for _, fen, *_ in rows], "stockfish")
        if fault := next(filter(None, faults), ""):
            raise ValueError(f"{work / GAMES}: {fault}")
        records["repetition"] = [repetition for _, _, repetition, *_ in rows]
        ids = {it["game"]: game_id(json.dumps(facts["parameters"], sort_keys=True), str(it["game"])) for it in some}
        records["game"] = [ids[game["game"]] for game, *_ in rows]
        white = np.array([game["result"] for game, *_ in rows], np.int64)
        records["result"] = np.where((records["side"] == 1) & (white != UNKNOWN), -white, white)
        new = np.zeros(len(rows), bool)
        for row, key in enumerate(keys_of(records)):
            new[row] = key not in known
            known.add(key)
        per_mille = np.array([wdl for *_, wdl, _ in rows], "<u2").reshape(-1, 3)
        level = [np.array(level, np.uint8) for (*_, level), kept in zip(rows, new, strict=True) if kept]
        parts.append((records[new], per_mille[new], np.concatenate([np.zeros(0, np.uint8), *level])))
        total += len(rows)
    if not known:
        raise ValueError(f"{work} holds no finished game: call generate first")
    return Positions(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), total - len(known)


def provenance(work: Path) -> dict[str, Any]:
    """The meta data of shards made from a work folder, but the split; `created` is when the work began."""
    path = work / FACTS
    if not path.exists():
        raise ValueError(f"{work} holds no generated games: call generate first")
    generator = json.loads(path.read_text())
    began = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    rules = {"temperature": TEMPERATURE, "step": STEP, "margin": MARGIN}
    return {
        "source": "stockfish",
        "generator": {**generator, "packing": rules},
        "seed": generator["parameters"]["seed"],
        "created": began.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def write_splits(folder: Path, batch: Batch, meta: dict[str, Any]) -> list[ShardInfo]:
    """Write both splits as shards of SHARD records, game order kept (the loader shuffles).

    ValueError where the folder holds shards: a catalogue would take those that grew for damaged, and those that there
    are fewer of now would stay in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.npz")):
        raise ValueError(f"{folder} holds shards already: give another folder, or delete that one")
    validation = is_validation(batch["records"]["game"])
    infos = []
    for split, mask in (("train", ~validation), ("validation", validation)):
        rows = np.flatnonzero(mask)
        for number, start in enumerate(range(0, len(rows), SHARD)):
            part = select(batch, rows[start : start + SHARD], LAYOUT)
            path = folder / f"{meta['source']}_{split}_{number:03d}.npz"
            infos.append(write_shard(path, LAYOUT, part, {**meta, "split": split}))
    return infos


def pack(work: Path | str, out: Path | str) -> dict[str, Any]:
    """Pack the finished games of `work` into shards in `out`, and write them as `games.pgn` in `work`.

    Games are whole in one split, about 5 % of them in validation. Returns the numbers of shards, of train and
    validation positions, of duplicates left out, and bytes a position. Raises ValueError for an empty or damaged work
    folder, and where `out` holds shards.
    """
    work = Path(work)
    positions, duplicates = collect(work)
    infos = write_splits(Path(out), assemble(positions), provenance(work))
    files.write_text(work / "games.pgn", "".join(game["pgn"] + "\n\n" for game in read_games(work)))
    count = {split: sum(info.count for info in infos if info.meta["split"] == split) for split in SPLITS}
    size = sum(info.bytes for info in infos) / sum(count.values())
    return {"shards": len(infos), **count, "duplicates": duplicates, "bytes_per_position": size}
