"""Shared by the readers of chess data: compressed files in parts; batched parsing of FENs and UCI moves.

Ten times as fast as with python-chess boards.
"""

import bz2
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import chess
import numpy as np
import zstandard
from numpy.typing import ArrayLike, NDArray

from matrixlib.data.imports import ParseResult, Part
from matrixlib.data.shards import Batch
from matrixlib.tasks.chess import bitboard
from matrixlib.tasks.chess.bitboard import EMPTY, KING, NO_MOVE, POLICY_INDEX, ROOK
from matrixlib.tasks.chess.records import RECORD, SOURCES, UNKNOWN, Records, piece_classes, valid_positions

MAX_LINE_BYTES = 1 << 26
NOT_A_FEN, NOT_A_POSITION, CHESS960 = "not a FEN", "not a position of chess", "Chess960 castling"
MAX_COUNTER_DIGITS = 1000  # int() refuses more than 4300
EMPTY_RUNS = {ord(str(n)): "." * n for n in range(1, 9)}
CLASS_TABLES = [bytes.maketrans(letters, bytes(range(13))) for letters in (b"PNBRQKpnbrqk.", b"pnbrqkPNBRQK.")]
"""Translation of letters to piece classes, for White and Black to move."""
CASTLING_BITS = {"K": 1, "Q": 2, "k": 4, "q": 8}
SQUARES = {name: square for square, name in enumerate(chess.SQUARE_NAMES)}
PROMOTIONS = {"": 0, "n": 1, "b": 2, "r": 3, "q": 4}
CASTLING_CORNERS = ((7, KING, ROOK, 4), (0, KING, ROOK, 4), (63, KING + 6, ROOK + 6, 60), (56, KING + 6, ROOK + 6, 60))
Text = TypeVar("Text")
Parsed = TypeVar("Parsed")


class QuarantinedEntry(ValueError):
    """An invalid entry. reason: category, detail: of this entry, positions: number lost."""

    def __init__(self, reason: str, detail: str, positions: int = 1) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.positions = reason, detail, positions


class SkippedEntry(Exception):
    """A valid entry without usable positions; the text is the reason."""


class _Zstandard(io.RawIOBase):
    """Reader of Zstandard frames; the package's own does not notice truncated files."""

    def __init__(self, path: Path) -> None:
        self.content, self.chunks = b"", self._decompressed(path)

    def _decompressed(self, path: Path) -> Iterator[bytes]:
        frame = None
        with open(path, "rb") as raw:
            while data := raw.read(1 << 12):  # unpacks to at most 128 MiB
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    yield frame.decompress(data)
                    data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        if frame:
            raise EOFError("it ends in the middle of a frame")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.content = self.content or next(filter(None, self.chunks), b"")
        size = min(len(buffer), len(self.content))
        buffer[:size], self.content = self.content[:size], self.content[size:]
        return size


@contextmanager
def open_compressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file decompressed by its extension: .gz, .bz2, .zst or none. ValueError if it is damaged."""
    openers: dict[str, Callable[[Path], Any]] = {
        ".gz": gzip.open,
        ".bz2": bz2.open,
        ".zst": lambda path: io.BufferedReader(_Zstandard(path), 1 << 20),
    }
    try:
        with openers.get(path.suffix, lambda path: open(path, "rb"))(path) as file:
            yield cast(BinaryIO, file)
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: damaged or cut short ({error}); get the file again") from error


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of an `open_compressed` file. EOFError for one of MAX_LINE_BYTES: it is no text."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise EOFError(f"it has a line of more than {MAX_LINE_BYTES >> 20} MiB, so it is no text")
        yield line


def split_parts(entries: Iterable[bytes], size: int, limit: int | None = None, header: bytes = b"") -> Iterator[Part]:
    """Parts of about `size` bytes and at most `limit` entries, each starting with the header."""
    some, number, first, left = list[bytes](), 0, 0, size
    for entry in entries:
        some.append(entry)
        left -= len(entry)
        if left < 0 or len(some) == limit:
            yield Part(number, first, header + b"".join(some))
            some, number, first, left = [], number + 1, first + len(some), size
    if some:
        yield Part(number, first, header + b"".join(some))


def line_parts(path: Path, size: int) -> Iterator[Part]:
    """Parts of a text file of about `size` bytes; entries are non-blank lines."""
    with open_compressed(path) as file:
        yield from split_parts(filter(bytes.strip, read_lines(file)), size)


def part_lines(part: Part) -> list[str]:
    """Non-blank lines of a part, stripped; invalid UTF-8 is replaced."""
    return [line.decode("utf-8-sig", "replace").strip() for line in part.data.split(b"\n") if line.strip()]


def parse_entries(
    texts: Iterable[Text], parse: Callable[[Text], Parsed], entries: ParseResult, show: Callable[[Text], str] = str
) -> Iterator[tuple[int, Parsed]]:
    """Parse entries; yields (number, parsed). Quarantined ones are kept as text by `show`, skipped ones counted."""
    for number, text in enumerate(texts):
        try:
            parsed = parse(text)
        except SkippedEntry as reason:
            entries.skipped[str(reason)] += 1
        except QuarantinedEntry as error:
            entries.refuse(number, error.reason, error.detail, show(text), error.positions)
        else:
            yield number, parsed


def empty_records(n: int, source: str) -> np.ndarray:
    """Records (n,) without pieces and en passant, with unknown targets."""
    records = np.zeros(n, RECORD)
    records["en_passant"], records["result"], records["source"] = -1, UNKNOWN, SOURCES[source]
    return records


@lru_cache(maxsize=1024)
def _rights(castling: str, black: bool) -> int | str:
    """Oriented castling rights of a FEN's field, or the fault."""
    if castling == "-":
        return 0
    if set(castling) <= set(CASTLING_BITS):
        rights = sum(CASTLING_BITS[letter] for letter in set(castling))
        return rights >> 2 | (rights & 3) << 2 if black else rights
    return CHESS960 if set(castling.upper()) <= set("KQABCDEFGH") else NOT_A_FEN


@lru_cache(maxsize=1024)
def _read_fen(fen: str) -> tuple[bytes, tuple[int, int, int, int, int]] | str:
    """(piece classes from rank 8 down, (castling, en-passant file, clock, side, ply)), or the fault."""
    fields = fen.split()
    if not 4 <= len(fields) <= 6:
        return NOT_A_FEN
    placement, turn, castling, en_passant, *counters = fields
    text = placement.translate(EMPTY_RUNS)
    if len(text) != 71 or text[8::9] != "///////" or "." in placement or not (text.isascii() and text.isprintable()):
        return NOT_A_FEN
    if turn not in ("w", "b") or not all(it.isdecimal() and len(it) <= MAX_COUNTER_DIGITS for it in counters):
        return NOT_A_FEN
    black = turn == "b"
    rights = _rights(castling, black)
    if isinstance(rights, str):
        return rights
    if en_passant != "-" and en_passant not in SQUARES:
        return NOT_A_FEN
    file = SQUARES[en_passant] & 7 if en_passant[1:] == ("3" if black else "6") else -1
    clock = min(int(counters[0]), 255) if counters else 0
    full = min(int(counters[1]), 40000) if len(counters) > 1 else 1
    squares = text.replace("/", "").encode().translate(CLASS_TABLES[black])
    if len(squares) != 64:
        return NOT_A_FEN  # a misplaced slash
    return squares, (rights, file, clock, int(black), min(max(2 * full - 2, 0) + black, 65535))


def read_fens(fens: Sequence[str], source: str) -> tuple[Records, list[str]]:
    """Records (N,) of FENs with four to six fields, and the fault of each ("" for none).

    An invalid FEN gives an empty board. Impossible castling rights and en-passant squares are dropped.
    """
    records = empty_records(len(fens), source)
    records["pieces"] = EMPTY | EMPTY << 4
    reads = [_read_fen(fen) for fen in fens]
    faults = [read if isinstance(read, str) else "" for read in reads]
    rows = np.flatnonzero([not fault for fault in faults])
    parsed = [read for read in reads if not isinstance(read, str)]
    ranks = np.frombuffer(b"".join(read[0] for read in parsed), np.uint8).reshape(-1, 8, 8)
    columns = np.array([read[1] for read in parsed], np.int64).reshape(-1, 5)
    classes = np.where(columns[:, 3, None, None] == 0, ranks[:, ::-1], ranks).reshape(-1, 64)
    pieces = classes[:, ::2] | classes[:, 1::2] << 4
    letters: NDArray[np.bool_] = classes.max(axis=1) <= EMPTY
    good = letters & valid_positions(bitboard.bitboards(pieces))
    for row, known in zip(rows[~good], letters[~good], strict=True):
        faults[row] = NOT_A_POSITION if known else NOT_A_FEN
    rows, pieces, columns = rows[good], pieces[good], columns[good]
    records["pieces"][rows] = pieces
    records["castling"][rows] = valid_castling(columns[:, 0], pieces)
    records["en_passant"][rows] = bitboard.legal_en_passant(pieces, columns[:, 1])
    for column, name in enumerate(("halfmove", "side", "ply"), start=2):
        records[name][rows] = columns[:, column]
    return records, faults


def valid_castling(castling: NDArray[np.integer[Any]], pieces: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Castling rights (N,) with those removed whose king or rook is not at home. pieces: (N, 32)."""
    classes = piece_classes(pieces)
    standing = np.zeros(len(castling), np.uint8)
    for bit, (corner, king, rook, home) in enumerate(CASTLING_CORNERS):
        there = (classes[:, corner] == rook) & (classes[:, home] == king)
        standing |= np.where(there, castling & 1 << bit, 0).astype(np.uint8)
    return standing


@dataclass(frozen=True)
class LegalMoves:
    """Legal moves of N records: `bitboard` codes (K,), policy indices (K,), ascending in each row, offsets (N + 1,)."""

    moves: NDArray[np.uint16]
    index: NDArray[np.uint16]
    offset: NDArray[np.int64]

    def find(self, rows: ArrayLike, codes: ArrayLike) -> NDArray[np.int64]:
        """Positions (M,) in `moves` of the moves `codes` (M,) of rows (M,), -1 for illegal ones."""
        row, code = np.asarray(rows, np.int64), np.asarray(codes, np.int64)
        if not len(self.moves):
            return np.full(len(code), -1, np.int64)
        length = np.diff(self.offset)
        keys = np.repeat(np.arange(len(length)), length) * bitboard.POLICY_SIZE + self.index
        key = row * bitboard.POLICY_SIZE + POLICY_INDEX[code]
        place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        # A promotion to a queen shares its index with the plain move, so compare codes too
        right = (keys[place] == key) & (self.moves[place] == code)
        return np.where(right & (POLICY_INDEX[code] >= 0), place, -1)

    def batch(self, records: Records, weight: NDArray[np.uint16]) -> Batch:
        """Shard batch of the N records with policy weights (K,)."""
        return {
            "records": records,
            "policy_offset": self.offset.astype("<i8"),
            "policy_index": self.index.astype("<u2"),
            "policy_weight": weight,
        }


def legal_moves(records: Records) -> LegalMoves:
    return LegalMoves(*bitboard.legal_moves(records["pieces"], records["castling"], records["en_passant"]))


def move_code(uci: str, black: int) -> int:
    """Code of a UCI move on the mover's board, NO_MOVE if invalid."""
    try:
        origin, target = SQUARES[uci[:2]], SQUARES[uci[2:4]]
        promotion = PROMOTIONS[uci[4:]]
    except KeyError:
        return NO_MOVE
    flip = 56 if black else 0
    return origin ^ flip | (target ^ flip) << 6 | promotion << 12


def normalise_castling(pieces: NDArray[np.uint8], codes: ArrayLike) -> NDArray[np.int64]:
    """Codes (M,) with castling as king takes rook (e1h1) converted to the king's move (e1g1). pieces: (M, 32)."""
    code = np.asarray(codes, np.int64)
    king = pieces[:, 2] & 15 == KING  # e1
    short = king & (pieces[:, 3] >> 4 == ROOK) & (code == (4 | 7 << 6))
    long = king & (pieces[:, 0] & 15 == ROOK) & (code == (4 | 0 << 6))
    return np.where(short, 4 | 6 << 6, np.where(long, 4 | 2 << 6, code))
