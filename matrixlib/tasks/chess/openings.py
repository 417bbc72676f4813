"""Reader of opening books: PGN games, lists of EPD or FEN lines, Polyglot files."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import chess
import chess.polyglot
import numpy as np
from numpy.typing import NDArray

from matrixlib.data.imports import COMPRESSED
from matrixlib.data.shards import file_hash
from matrixlib.files import from_home
from matrixlib.play.game import Openings
from matrixlib.tasks.chess.game import ChessGame
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.importers.epd import COUNTERS
from matrixlib.tasks.chess.importers.pgn import Pgn
from matrixlib.tasks.chess.records import UNKNOWN, Records, policy_index, to_board

GAME = ChessGame()
Line = tuple[str, Records, NDArray[np.uint64]]  # where it stands, its last state (1,), keys of the states before


def read_openings(file: str, plies: int, count: int, seed: int | Sequence[int]) -> Openings:
    """`count` distinct openings of a book, in an order that the seed decides; fewer if it has no more.

    .pgn: the first `plies` plies of each game. .epd, .fen: a position a line. .bin (Polyglot): every position after
    `plies` plies from the initial one, or where the book ends; weights only tell whether a move counts. All may be
    compressed (.gz, .bz2, .zst) but .bin. ValueError names the file and the game or line that is unusable.
    """
    path = from_home(file)
    try:
        states, history = _read(path, plies, file_hash(path))
    except OSError as error:
        raise ValueError(f"openings '{file}' cannot be read: {error.strerror}") from error
    chosen = np.random.default_rng(seed).permutation(len(states))[:count]
    return Openings(states[chosen], [history[row] for row in chosen])


@lru_cache(1)
def _read(path: Path, plies: int, sha256: str) -> tuple[Records, list[NDArray[np.uint64]]]:
    """All distinct openings of a book. sha256: of the file, for the cache."""
    kind = Path(path.stem if path.suffix in COMPRESSED else path.name).suffix
    readers = {".pgn": _games, ".epd": _positions, ".fen": _positions, ".bin": _polyglot}
    if kind not in readers:
        raise ValueError(f"openings '{path}': give a file whose name ends with {', '.join(readers)}")
    lines = list(readers[kind](path, plies))
    if not lines:
        raise ValueError(f"openings '{path}': there is none in it")
    states = np.concatenate([state for _, state, _ in lines])
    states["result"], states["wdl"], states["source"], states["game"] = UNKNOWN, 0, 0, 0
    over = ~np.isnan(GAME.terminal(states, np.diff(GAME.legal(states)[1])))
    if over.any():
        row = int(over.argmax())
        raise ValueError(f"openings '{path}', {lines[row][0]}: the game is over in '{to_board(states[row]).fen()}'")
    first = np.sort(np.unique(GAME.key(states), return_index=True)[1])
    return states[first], [lines[row][2] for row in first]


def _games(path: Path, plies: int) -> Iterator[Line]:
    reader = Pgn(repair=True)
    for part in reader.parts(path):
        found = reader.read(part)
        for bad in found.refused:
            raise ValueError(f"openings '{path}', game {bad.entry + 1}: {bad.reason}, {bad.detail}")
        assert found.rows is not None
        records, moves = found.batch["records"], found.batch["policy_index"][found.batch["policy_weight"] > 0]
        keys, ends = GAME.key(records), found.rows.cumsum()
        for number, (end, length) in enumerate(zip(ends, found.rows, strict=True), part.first + 1):
            rows = slice(end - length, end - length + min(plies, length))
            after = GAME.play(records[rows][-1:], moves[rows][-1:].astype(np.int32))
            yield f"game {number}", _repeated(after, keys[rows][None]), keys[rows]


def _positions(path: Path, plies: int) -> Iterator[Line]:
    with notation.open_compressed(path) as file:
        texts = [line.decode("utf-8-sig", "replace").strip() for line in notation.read_lines(file)]
    numbers = [number for number, text in enumerate(texts) if text and not text.startswith("#")]
    fens = []
    for fields in (texts[number].split(maxsplit=4) for number in numbers):
        counters = COUNTERS.match(" ".join(fields[4:]))
        fens.append(" ".join([*fields[:4], *(counters.groups() if counters else ())]))
    states, faults = notation.read_fens(fens, "epd")
    for row, number in enumerate(numbers):
        if faults[row]:
            raise ValueError(f"openings '{path}', line {number + 1}: {faults[row]}: '{texts[number][:100]}'")
        yield f"line {number + 1}", states[row : row + 1], np.zeros(0, np.uint64)


def _polyglot(path: Path, plies: int) -> Iterator[Line]:
    data = path.read_bytes()
    keys = np.frombuffer(data[: len(data) // 16 * 16], ">u8")[::2]  # an entry: key, move, weight, learning
    if len(data) % 16 or (keys[1:] < keys[:-1]).any():
        raise ValueError(f"openings '{path}': no Polyglot book, which has entries of 16 bytes by ascending keys")
    states, past = GAME.initial(1), np.zeros((1, 0), np.uint64)
    with chess.polyglot.open_reader(path) as book:
        for ply in range(plies):
            moves = [_book_moves(book, to_board(state), path) for state in states]
            for row in np.flatnonzero([ply > 0 and not some for some in moves]).tolist():
                yield f"after {ply} plies", states[row : row + 1], past[row]
            rows = np.repeat(np.arange(len(states)), list(map(len, moves)))
            past = np.column_stack([past, GAME.key(states)])[rows]
            after = GAME.play(states[rows], np.array([move for some in moves for move in some], np.int32))
            first = np.unique(GAME.key(after), return_index=True)[1]
            states, past = _repeated(after[first], past[first]), past[first]
    for row in range(len(states)):
        yield f"after {plies} plies", states[row : row + 1], past[row]


def _book_moves(book: chess.polyglot.MemoryMappedReader, board: chess.Board, path: Path) -> list[int]:
    try:
        moves = [board.parse_uci(entry.move.uci()) for entry in book.find_all(chess.polyglot.zobrist_hash(board))]
    except ValueError as error:
        raise ValueError(f"openings '{path}': {error}") from error
    return [policy_index(move, board.turn) for move in moves]


def _repeated(states: Records, past: NDArray[np.uint64]) -> Records:
    """States (N,) with their repetitions among the keys (N, H) before them."""
    return GAME.repeat(states, (past == GAME.key(states)[:, None]).sum(1).astype(np.int32))
