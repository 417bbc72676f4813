"""Data sets generated with Stockfish: games against itself, labelled positions, shards.

A game and its labels are a pure function of (parameters, game number), so interrupted work resumes to the same bytes.
The shipped sample set was made this way; `sample/sample.npz.xz` takes 23 bytes per position.
"""

import io
import json
import lzma
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
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
from matrixlib.tasks.chess.records import LAYOUT, RECORD, SHARD_RECORDS, UNKNOWN, game_id, in_validation, position_keys
from matrixlib.tasks.chess.stockfish.client import EngineError, Stockfish
from matrixlib.tasks.chess.stockfish.labels import RULES, Positions, assemble, label
from matrixlib.tasks.chess.stockfish.player import engine_move
from matrixlib.tasks.shipped import unpack

WORK_FORMAT = 2  # of the work folder and the packing
# One game per line: number, result, ending, PGN, positions (FEN, repetition, win-draw-loss, levels)
GAMES_FILE = "games.jsonl"
FACTS_FILE = "generator.json"
SAMPLE = Path(__file__).parent.parent / "sample"
_SWAP = np.array([*range(6, 12), *range(6), 12], dtype=np.uint8)  # piece class -> class of the other colour
RESULTS = {1: "1-0", -1: "0-1", 0: "1/2-1/2", 2: "*"}


@dataclass(frozen=True)
class Parameters:
    """Parameters of games, position sampling and labels, stored with the data."""

    seed: int = 0
    opening_plies: tuple[int, int] = (2, 8)  # range of plies sampled by score at a high temperature
    opening_temperature: float = 40.0  # centipawns
    random_start: float = 0.1  # fraction of games with uniformly random opening moves
    random_plies: tuple[int, int] = (4, 16)
    nodes: tuple[int, int] = (150, 1500)  # log-uniform, per game and side
    noise: tuple[float, float] = (0.0, 0.08)  # range of the fraction of random moves, per game and side
    plies: int = 200  # maximum; the result of longer games is unknown
    keep: float = 0.7  # fraction of positions that are labelled
    keep_first: float = 0.1  # ... in the first four plies, which many games share
    keep_decided: float = 0.2  # ... with a score of at least `decided` centipawns or a mate
    decided: int = 700
    shallow_depth: int = 4  # all legal moves
    deep_depth: int = 7  # best DEEP_LINES moves


def make_set(
    out: str = "",
    games: int = 4,
    games_per_chunk: int = 2,
    seed: int = 0,
    stockfish: str = "",
    workers: int = 2,
    nodes: tuple[int, int] = (150, 1500),
) -> dict[str, Any]:
    """Generate a data set: play and label games in `work`, pack them into `shards` with a catalogue. Resumable.

    out: folder with these subfolders, "" for reports/sample. nodes: range of the playing engines' nodes. Returns the
    results of `generate` and `pack`, and the folder; errors are theirs.
    """
    if min(games, games_per_chunk, workers, nodes[0]) < 1 or seed < 0 or nodes[0] > nodes[1]:
        raise ValueError(
            f"games is {games}, games_per_chunk {games_per_chunk}, workers {workers}, nodes_low {nodes[0]}, nodes_high "
            f"{nodes[1]}, seed {seed}; give whole numbers from 1, for seed from 0, and nodes_high from nodes_low"
        )
    folder = Path(out) if out else files.reports_root() / "sample"
    shards, work = folder / "shards", folder / "work"
    if found := files.foreign_entry(folder, (), ("shards", "work")):
        raise ValueError(f"{folder} has other files, such as {found!r}: give another folder as `out`")
    with files.writing(folder):
        own = provenance(work)["generator"] if (work / FACTS_FILE).exists() else None
        for path in sorted(shards.rglob("*.npz")):  # do not delete shards of another source
            if own is None or read_info(path).meta["generator"] != own:
                raise ValueError(f"{path} was not made from {work}: give another folder as `out`")
        parameters = Parameters(seed=seed, nodes=nodes)
        figures = generate(work, games, parameters, stockfish or None, workers, games_per_chunk=games_per_chunk)
        if shards.is_dir():  # from fewer games
            catalogue = Catalogue(shards, warn=False)
            catalogue.remove([row.name for row in catalogue.shards(state=None)])
        figures |= pack(work, shards)
        Catalogue(shards, warn=False)
    return {"folder": folder, **figures}


# Games and labels


def generate(
    folder: Path | str,
    games: int,
    parameters: Parameters,
    stockfish: Path | str | None = None,
    workers: int | None = None,
    progress: bool = True,
    games_per_chunk: int = 10,
) -> dict[str, Any]:
    """Play `games` games (rounded up to whole chunks) and label their positions in `workers` processes.

    stockfish: see `Stockfish`. Games are appended to `games.jsonl` in order. Returns the engine's name and the numbers
    of games and of new games. EngineError without a working engine; ValueError for a folder in use or of other work.
    """
    folder = Path(folder)
    with Stockfish(stockfish) as engine:
        name = engine.title
        label(engine, chess.Board(), parameters.shallow_depth, parameters.deep_depth)  # refuse what fails at once
    files.make_folder(folder)
    busy = ValueError(f"another process generates games in {folder}; wait until it has ended")
    with files.exclusive(FileLock(folder / "lock"), busy), open(folder / GAMES_FILE, "ab+") as file:
        facts = {"format": WORK_FORMAT, "engine": name, "parameters": json.loads(json.dumps(asdict(parameters)))}
        have = files.read_json(folder / FACTS_FILE)
        if have and have != facts:
            raise ValueError(f"{folder} was made with {have}, not {facts}: use another folder or delete it")
        if not have:
            files.write_text(folder / FACTS_FILE, json.dumps(facts, indent=1))
        file.seek(0)
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)  # drop a truncated line
        done, total = data.count(b"\n"), -(-games // games_per_chunk) * games_per_chunk
        starts = range(done, total, games_per_chunk)
        jobs = [(stockfish, parameters, range(start, min(start + games_per_chunk, total))) for start in starts]
        pool = ProcessPoolExecutor(
            max(1, min(workers or os.cpu_count() or 1, len(jobs))),
            multiprocessing.get_context("spawn"),
            files.end_with_parent,
        )
        try:
            with live_bar(total=total, initial=done, desc="games", disable=not progress) as bar:
                for lines in pool.map(_play, jobs):
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                    bar.update(lines.count(b"\n"))
        except BrokenProcessPool as error:
            raise EngineError(f"a worker was killed ({error}); start again to resume") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return {"engine": name, "games": max(done, total), "new games": max(0, total - done)}


def _play(job: tuple[Path | str | None, Parameters, range]) -> bytes:
    stockfish, parameters, numbers = job
    with Stockfish(stockfish) as engine:
        return b"".join(json.dumps(make_game(engine, it, parameters)).encode() + b"\n" for it in numbers)


def make_game(engine: Stockfish, number: int, parameters: Parameters) -> dict[str, Any]:
    """A game with its labelled positions as JSON data, see GAMES_FILE."""
    moves, scores, result, ending = play_game(engine, number, parameters)
    positions = []
    board, times = chess.Board(), Counter[str]()
    for move, chosen in zip(moves, choose_positions(number, scores, parameters), strict=True):
        key = position_key(board)
        if chosen:
            labelled = label(engine, board, parameters.shallow_depth, parameters.deep_depth)
            positions.append([board.fen(en_passant="legal"), min(times[key], 2), *labelled])
        times[key] += 1
        board.push(move)
    pgn = chess.pgn.Game.from_board(board)
    pgn.headers.update(Event="matrixlib", Round=str(number), Result=RESULTS[result], Termination=ending)
    return {"game": number, "result": result, "ending": ending, "pgn": str(pgn), "positions": positions}


def play_game(engine: Stockfish, number: int, parameters: Parameters) -> tuple[list[chess.Move], list[int], int, str]:
    """One game of Stockfish against itself, a pure function of (parameters, number): moves, the mover's score before
    each (at random moves the last known), and `game_outcome`."""
    rng = np.random.default_rng([parameters.seed, number])
    uniform = rng.random() < parameters.random_start
    low, high = parameters.random_plies if uniform else parameters.opening_plies
    opening = int(rng.integers(low, high + 1))
    nodes = np.exp(rng.uniform(np.log(parameters.nodes[0]), np.log(parameters.nodes[1]), size=2)).astype(int)
    noise = rng.uniform(*parameters.noise, size=2)
    board = chess.Board()
    scores: list[int] = []
    times = Counter([position_key(board)])
    line, score = "", 0
    engine.new_game()
    while (end := game_outcome(board, times[position_key(board)], parameters.plies)) is None:
        side = int(board.turn == chess.BLACK)
        position = f"startpos moves{line}" if line else "startpos"
        score = -score
        if board.ply() < opening and not uniform:
            lines = engine.search(position, "nodes 500", 12)
            values = np.array([one.score for one in lines], dtype=float)
            weights = np.exp((values - values.max()) / parameters.opening_temperature)
            uci = lines[int(rng.choice(len(lines), p=weights / weights.sum()))].move
            score = lines[0].score
        elif board.ply() < opening or (blunder := rng.random()) < noise[side] / 4:
            legal = sorted(move.uci() for move in board.legal_moves)
            uci = legal[int(rng.integers(len(legal)))]
        elif blunder < noise[side]:
            lines = engine.search(position, f"nodes {nodes[side]}", 4)
            uci, score = lines[int(rng.integers(len(lines)))].move, lines[0].score
        else:
            lines = engine.search(position, f"nodes {nodes[side]}")
            uci, score = lines[0].move, lines[0].score
        board.push(engine_move(engine, board, uci))
        times[position_key(board)] += 1
        scores.append(score)
        line += f" {uci}"
    return board.move_stack, scores, *end


def position_key(board: chess.Board) -> str:
    """Repetition key: pieces, side, castling rights and legal en passant."""
    return board.epd(en_passant="legal")


def game_outcome(board: chess.Board, occurrences: int, cap: int) -> tuple[int, str] | None:
    """(White's result 1, 0, -1 or 2 unknown, reason), or None while the game goes on.

    Mate precedes the fifty-move rule; threefold repetition and the fifty-move rule need no claim.
    """
    if outcome := board.outcome():
        result = 0 if outcome.winner is None else 1 if outcome.winner else -1
        return result, outcome.termination.name.lower().replace("_", " ")
    if occurrences >= 3:
        return 0, "repetition"
    if board.halfmove_clock >= 100:
        return 0, "fifty moves"
    return (2, "cap") if board.ply() >= cap else None


def choose_positions(number: int, scores: list[int], parameters: Parameters) -> np.ndarray:
    """Mask (plies,) of the positions of a game to label; a pure function of its arguments."""
    rng = np.random.default_rng([parameters.seed, number, 1])
    share = np.where(np.abs(scores) >= parameters.decided, parameters.keep_decided, parameters.keep)
    share[:4] = parameters.keep_first
    return rng.random(len(scores)) < share


# Shards


def read_games(work: Path) -> Iterator[dict[str, Any]]:
    """Finished games of a work folder in order; ValueError for a damaged file."""
    path = work / GAMES_FILE
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                game = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number + 1} is damaged ({error}): cut the file there") from error
            yield game


def collect(work: Path) -> tuple[Positions, int]:
    """Positions of all finished games without duplicates (mirrored and colour-swapped ones included), and the number of
    duplicates. ValueError for a damaged file and a folder without games."""
    parameters = json.dumps(provenance(work)["generator"]["parameters"], sort_keys=True)
    known: set[bytes] = set()
    parts, total = [], 0
    for game in read_games(work):
        rows = game["positions"]
        records, faults = read_fens([fen for fen, *_ in rows], "stockfish")
        if fault := next(filter(None, faults), ""):
            raise ValueError(f"{work / GAMES_FILE}, game {game['game']}: {fault}")
        records["repetition"] = [repetition for _, repetition, *_ in rows]
        records["game"] = game_id(parameters, str(game["game"]))
        if game["result"] != UNKNOWN:
            records["result"] = np.where(records["side"] == 1, -game["result"], game["result"])
        new = np.zeros(len(rows), bool)
        for row, key in enumerate(position_keys(records)):
            new[row] = key not in known
            known.add(key)
        per_mille = np.array([wdl for *_, wdl, _ in rows], "<u2").reshape(-1, 3)
        level = [move for (*_, levels), kept in zip(rows, new, strict=True) if kept for move in levels]
        parts.append((records[new], per_mille[new], np.array(level, np.uint8)))
        total += len(rows)
    if not known:
        raise ValueError(f"{work} holds no finished game: call generate first")
    return Positions(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), total - len(known)


def provenance(work: Path) -> dict[str, Any]:
    """Metadata of a work folder's shards except the split; `created` is the start of the work."""
    path = work / FACTS_FILE
    if not path.exists():
        raise ValueError(f"{work} holds no generated games: call generate first")
    generator = json.loads(path.read_text())
    began = datetime.fromtimestamp(int(path.stat().st_mtime), UTC)
    return {
        "source": "stockfish",
        "generator": {**generator, "packing": RULES},
        "seed": generator["parameters"]["seed"],
        "created": began.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def write_splits(folder: Path, batch: Batch, meta: dict[str, Any]) -> list[ShardInfo]:
    """Write both splits as shards of SHARD_RECORDS in game order. ValueError for a folder with shards: old ones would
    stay in use, and a catalogue would call changed ones damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.npz")):
        raise ValueError(f"{folder} holds shards already: give another folder, or delete it")
    validation = in_validation(batch["records"])
    infos = []
    for split, mask in (("train", ~validation), ("validation", validation)):
        rows = np.flatnonzero(mask)
        for number, start in enumerate(range(0, len(rows), SHARD_RECORDS)):
            part = select(batch, rows[start : start + SHARD_RECORDS], LAYOUT)
            path = folder / f"{meta['source']}_{split}_{number:03d}.npz"
            infos.append(write_shard(path, LAYOUT, part, {**meta, "split": split}))
    return infos


def pack(work: Path | str, out: Path | str) -> dict[str, Any]:
    """Pack the finished games of `work` into shards in `out`, and write them to `games.pgn` in `work`.

    Returns counts of shards, positions per split, duplicates. ValueError for a bad work folder, or shards in `out`.
    """
    work = Path(work)
    positions, duplicates = collect(work)
    infos = write_splits(Path(out), assemble(positions), provenance(work))
    files.write_text(work / "games.pgn", "".join(game["pgn"] + "\n\n" for game in read_games(work)))
    count = {split: sum(info.count for info in infos if info.meta["split"] == split) for split in SPLITS}
    return {"shards": len(infos), **count, "duplicates": duplicates}


# The sample set


def reorient(squares: np.ndarray, black: np.ndarray) -> np.ndarray:
    """Piece classes (N, 64) between oriented and real boards; its own inverse."""
    boards = squares.reshape(-1, 8, 8).copy()
    boards[black] = _SWAP[boards[black][:, ::-1]]
    return boards.reshape(-1, 64)


def decode(data: bytes) -> Positions:
    """Positions of the shipped bytes (tests/shipping.py makes them), which it trusts: the caller checks their checksum.

    Boards are in real colours, which repeat within a game; policy levels need no indices, as the legal moves follow.
    """
    with np.load(io.BytesIO(lzma.decompress(data)), allow_pickle=False) as columns:
        column = {name: columns[name] for name in columns.files}
    n = len(column["side"])
    records = np.zeros(n, RECORD)
    for name in ("castling", "en_passant", "halfmove", "repetition", "side", "result", "source"):
        records[name] = column[name]
    squares = reorient(column["squares"], column["side"] == 1)
    records["pieces"] = squares[:, 0::2] | squares[:, 1::2] << 4
    records["ply"] = np.cumsum(column["ply_step"], dtype=np.int64)
    records["game"] = np.repeat(column["game"], np.diff(column["game_first"].astype(np.int64), append=n))
    win, loss = column["win"], column["loss"]
    return Positions(records, np.stack([win, 1000 - win - loss, loss], axis=1), column["level"])


def unpack_sample(cache: Path | None = None, folder: Path = SAMPLE) -> Path:
    """Folder of the sample set's unpacked shards, see `shipped.unpack`."""
    return unpack(folder, "sample", lambda to, data, meta: write_splits(to, assemble(decode(data)), meta), cache)
