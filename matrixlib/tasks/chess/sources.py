"""Training positions made with Stockfish: games, sampled positions, labels, in resumable chunks of integers.

A chunk holds `games_per_chunk` games and is a pure function of (parameters, chunk number), so killed work
goes on where it stopped and ends in the same bytes. A chunk keeps the engine's integers; packing.py turns
them into training targets, which can be redone without an engine.

Labels are made on the oriented position (side to move = White) with full-move number 32, after `ucinewgame`:
Stockfish 15.1's win-draw-loss depends on the move number and its search on what the hash remembers, so only
in this way is a label a pure function of the position (pieces, castling, en passant, half-move clock).
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chess
import numpy as np
from tqdm.auto import tqdm

from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.stockfish import EngineError, Stockfish, find_stockfish

FORMAT = 1
FULLMOVE = 32  # at which Stockfish 15.1 calls 100 centipawns a win in half of the games
DEEP_LINES = 3
ENDINGS = ("cap", "checkmate", "stalemate", "insufficient material", "repetition", "fifty moves")


@dataclass(frozen=True)
class Parameters:
    """How games are played, positions chosen and labelled. Every value is stored beside the data."""

    seed: int = 0
    games_per_chunk: int = 10
    opening_plies: tuple[int, int] = (2, 8)  # plies drawn by score at a high temperature, inclusive
    opening_temperature: float = 40.0  # centipawns
    random_start: float = 0.1  # share of games that start with uniformly random moves instead
    random_plies: tuple[int, int] = (4, 16)
    nodes: tuple[int, int] = (150, 1500)  # log-uniform, drawn for each game and side
    noise: tuple[float, float] = (0.0, 0.08)  # share of random moves, drawn for each game and side
    plies: int = 200  # longer games end with an unknown result
    keep: float = 0.7  # share of the positions that are labelled
    keep_first: float = 0.1  # ... of the first four plies, which many games share
    keep_decided: float = 0.2  # ... where one side is ahead by `decided` centipawns or sees a mate
    decided: int = 700
    shallow_depth: int = 4  # all legal moves
    deep_depth: int = 7  # the best DEEP_LINES moves

    def __post_init__(self) -> None:
        for name in ("opening_plies", "random_plies", "nodes", "noise"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.games_per_chunk < 1 or self.plies < 1 or not 0 < self.keep <= 1:
            raise ValueError("games_per_chunk and plies must be at least 1, keep between 0 and 1")


@dataclass(frozen=True)
class Game:
    """Moves from the initial position, result from White's side (1, 0, -1, 2 unknown), index into ENDINGS."""

    number: int
    moves: tuple[chess.Move, ...]
    scores: tuple[
        int, ...
    ]  # of the player before each move, mover's side; the last known one at random moves
    result: int
    ending: int


@dataclass(frozen=True)
class Label:
    """Scores of the legal moves (mover's side, see MATE), deeper ones of the best, wdl per mille."""

    moves: tuple[str, ...]
    scores: tuple[int, ...]
    deep_moves: tuple[str, ...]
    deep_scores: tuple[int, ...]
    wdl: tuple[int, int, int]


def position_key(board: chess.Board) -> str:
    """Pieces, side, castling rights and en passant where it is legal: what two equal positions share."""
    return board.epd(en_passant="legal")


def oriented(board: chess.Board) -> chess.Board:
    """The position with White to move: for Black the ranks are mirrored and the colours swapped."""
    return board if board.turn == chess.WHITE else board.mirror()


def ending_of(board: chess.Board, occurrences: int, cap: int) -> tuple[int, int] | None:
    """(result from White's side, index into ENDINGS), or None while the game goes on.

    Mate comes before fifty moves, as in the rules; repetition and fifty moves end the game without a claim.
    """
    if not any(board.generate_legal_moves()):
        if board.is_check():
            return (-1 if board.turn == chess.WHITE else 1), 1
        return 0, 2
    if board.is_insufficient_material():
        return 0, 3
    if occurrences >= 3:
        return 0, 4
    if board.halfmove_clock >= 100:
        return 0, 5
    return (2, 0) if board.ply() >= cap else None


def draw(rng: np.random.Generator, moves: list[str], scores: np.ndarray, temperature: float) -> str:
    """A move by softmax of its score (centipawns)."""
    weights = np.exp((scores - scores.max()) / temperature)
    return moves[int(rng.choice(len(moves), p=weights / weights.sum()))]


def play_game(engine: Stockfish, number: int, parameters: Parameters) -> Game:
    """One game of Stockfish against itself; a pure function of (parameters, number)."""
    rng = np.random.default_rng([parameters.seed, number])
    uniform = rng.random() < parameters.random_start
    low, high = parameters.random_plies if uniform else parameters.opening_plies
    opening = int(rng.integers(low, high + 1))
    nodes = np.exp(rng.uniform(np.log(parameters.nodes[0]), np.log(parameters.nodes[1]), size=2)).astype(int)
    noise = rng.uniform(*parameters.noise, size=2)
    board = chess.Board()
    moves: list[chess.Move] = []
    scores: list[int] = []
    seen = Counter([position_key(board)])
    played, score = "", 0
    engine.new_game()
    while (end := ending_of(board, seen[position_key(board)], parameters.plies)) is None:
        ply, side = len(moves), int(board.turn == chess.BLACK)
        position = f"startpos moves{played}" if played else "startpos"
        score = -score
        if ply < opening and not uniform:
            found = engine.search(position, "nodes 500", 12)
            values = np.array([line.score for line in found], dtype=float)
            uci = draw(rng, [line.move for line in found], values, parameters.opening_temperature)
            score = found[0].score
        elif ply < opening or (blunder := rng.random()) < noise[side] / 4:
            legal = sorted(move.uci() for move in board.legal_moves)
            uci = legal[int(rng.integers(len(legal)))]
        elif blunder < noise[side]:
            found = engine.search(position, f"nodes {nodes[side]}", 4)
            uci, score = found[int(rng.integers(len(found)))].move, found[0].score
        else:
            found = engine.search(position, f"nodes {nodes[side]}")
            uci, score = found[0].move, found[0].score
        move = chess.Move.from_uci(uci)
        board.push(move)
        seen[position_key(board)] += 1
        moves.append(move)
        scores.append(score)
        played += f" {uci}"
    return Game(number, tuple(moves), tuple(scores), *end)


def choose(game: Game, parameters: Parameters) -> np.ndarray:
    """(plies,) bool: which positions before a move are labelled; a pure function of (parameters, game)."""
    rng = np.random.default_rng([parameters.seed, game.number, 1])
    share = np.full(len(game.moves), parameters.keep)
    share[np.abs(np.array(game.scores, dtype=int)) >= parameters.decided] = parameters.keep_decided
    share[:4] = parameters.keep_first
    return rng.random(len(game.moves)) < share


def label(engine: Stockfish, board: chess.Board, parameters: Parameters) -> Label:
    """Labels of a position with a legal move; its moves are those of the oriented board."""
    seen = oriented(board)
    seen = seen.copy(stack=False) if seen is board else seen
    seen.fullmove_number = FULLMOVE
    position = "fen " + seen.fen(en_passant="legal")
    engine.new_game()
    shallow = engine.search(position, f"depth {parameters.shallow_depth}", 500)
    legal = seen.legal_moves.count()
    if len(shallow) != legal:
        raise EngineError(f"{engine.name} lists {len(shallow)} of {legal} moves in {position}")
    deep = engine.search(position, f"depth {parameters.deep_depth}", DEEP_LINES)
    wdl = deep[0].wdl
    if wdl is None:
        raise EngineError(f"{engine.name} shows no win-draw-loss")
    return Label(
        tuple(line.move for line in shallow),
        tuple(line.score for line in shallow),
        tuple(line.move for line in deep),
        tuple(line.score for line in deep),
        wdl,
    )


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
    legal_offset = np.cumsum([0] + [len(made.moves) for made in labels])
    deep = np.full((len(labels), DEEP_LINES), 255, dtype="u1")
    deep_score = np.zeros((len(labels), DEEP_LINES), dtype="<i2")
    for row, made in enumerate(labels):
        count = len(made.deep_moves)
        deep[row, :count] = [made.moves.index(uci) for uci in made.deep_moves]
        deep_score[row, :count] = made.deep_scores
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
        "wdl": np.array([made.wdl for made in labels], dtype="<u2").reshape(-1, 3),
        "deep": deep,
        "deep_score": deep_score,
        "legal": np.array([move_code(uci) for made in labels for uci in made.moves], dtype="<u2"),
        "score": np.array([score for made in labels for score in made.scores], dtype="<i2"),
        "legal_offset": legal_offset.astype("<u4"),
    }


def chunk_path(folder: Path, chunk: int) -> Path:
    """Where a chunk lies in the work folder."""
    return folder / f"chunk_{chunk:06d}.npz"


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: temporary name, fsync, rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_chunk(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a chunk. Raises ValueError for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it and generate again") from error


def chunks(folder: Path, stop: int | None = None) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """(number, arrays) of the finished chunks below `stop`, in order."""
    for path in sorted(folder.glob("chunk_*.npz")):
        number = int(path.stem[6:])
        if stop is None or number < stop:
            yield number, read_chunk(path)


def _work(
    folder: Path,
    todo: list[int],
    parameters: Parameters,
    stockfish: Path,
    taken: Any,
    pipe: multiprocessing.connection.Connection,
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
                write_atomically(chunk_path(folder, todo[index]), data.getvalue())
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
    write_atomically(path, json.dumps(want, indent=1).encode())


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
    bar = tqdm(
        total=total * parameters.games_per_chunk,
        initial=(total - len(todo)) * parameters.games_per_chunk,
        desc="games",
        disable=not progress,
        mininterval=1.0,
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
            for pipe in multiprocessing.connection.wait(pipes, 1.0):
                assert isinstance(pipe, multiprocessing.connection.Connection)
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
                    bar.set_postfix(positions=labelled, rate=f"{labelled / (time.monotonic() - start):.0f}/s")
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
