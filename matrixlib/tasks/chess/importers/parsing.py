"""What a reader of foreign data gives: positions with their targets, and what became of every entry.

An *entry* is what the input consists of: a game of a PGN file, a row of a table, a position of a training chunk.
A *part* is a run of entries of one file that one process reads in one go; the same file always gives the same parts.
"""

from __future__ import annotations

import bz2
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np

from matrixlib.data.shards import Batch, concat
from matrixlib.tasks.chess.keys import SOURCES
from matrixlib.tasks.chess.records import LAYOUT, RECORD


@dataclass(frozen=True)
class Part:
    """Consecutive entries of a file: number of the part and of its first entry, both from 0, and their bytes."""

    number: int
    first: int
    data: bytes


@dataclass(frozen=True)
class Refused:
    """An entry that goes to quarantine: its number in the file, the kind of fault (the same words for all of its
    kind), the details, how many positions it would have given, and the entry itself as text, to look at or to mend."""

    entry: int
    reason: str
    detail: str
    positions: int
    text: str


@dataclass(frozen=True)
class ParseResult:
    """What one part gave. entries = stored + len(refused) + sum(skipped.values()), else ValueError.

    stored: entries that gave positions. skipped: reason -> entries that were left out on purpose (variants, games
    without a move). warned: remark -> entries that were stored all the same.
    rows: positions of each stored entry (stored,), in order, where an entry is a whole game: lets an import leave
    out a game that is there already. None where entries may share a game.
    """

    batch: Batch
    entries: int
    stored: int
    refused: Sequence[Refused] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    warned: Mapping[str, int] = field(default_factory=dict)
    rows: np.ndarray | None = None

    def __post_init__(self) -> None:
        counted = self.stored + len(self.refused) + sum(self.skipped.values())
        if self.entries != counted:
            raise ValueError(f"{self.entries} entries were read and {counted} are accounted for")
        positions = len(self.batch["records"])
        if self.rows is not None and (len(self.rows) != self.stored or self.rows.sum() != positions):
            raise ValueError(f"the rows of {len(self.rows)} entries do not add up to {positions} positions")


@dataclass
class Entries:
    """What becomes of the entries of a part while it is read."""

    part: Part
    refused: list[Refused] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)

    def refuse(self, number: int, reason: str, detail: str, text: str, positions: int = 1) -> None:
        """Entry `number` of the part, from 0, goes to quarantine."""
        self.refused.append(Refused(self.part.first + number, reason, detail, positions, text))

    def result(
        self, batch: Batch, entries: int, stored: int | None = None, rows: np.ndarray | None = None
    ) -> ParseResult:
        """stored: by default, as many as the batch has positions."""
        stored = len(batch["records"]) if stored is None else stored
        refused = sorted(self.refused, key=lambda entry: entry.entry)
        return ParseResult(batch, entries, stored, refused, +self.skipped, +self.warned, rows)


class Reader(Protocol):
    """One format. A reader is a frozen dataclass whose fields are its options, so that it can be sent to workers."""

    @property
    def source(self) -> str:
        """One of SOURCES; also the catalogue's source."""
        ...

    def parts(self, path: Path) -> Iterator[Part]:
        """The file in parts, in order, one at a time in memory. ValueError names a file that is not of the format."""
        ...

    def read(self, part: Part) -> ParseResult:
        """The positions of a part. A pure function of the options and the part."""
        ...


class _Frames(io.RawIOBase):
    """The content of Zstandard frames. The package's own reader takes a file that was cut short for whole."""

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self.raw, self.decompressor = raw, zstandard.ZstdDecompressor()
        self.frame = self.decompressor.decompressobj()
        self.left = self.content = b""
        self.begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.content:
            data = self.left or self.raw.read(1 << 17)
            if not data:
                if self.begun:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self.begun = True
            self.content, self.left = self.frame.decompress(data), b""
            if self.frame.eof:
                self.left, self.begun = self.frame.unused_data, False
                self.frame = self.decompressor.decompressobj()
        size = min(len(buffer), len(self.content))
        buffer[:size], self.content = self.content[:size], self.content[size:]
        return size


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file, by its ending: .gz, .bz2, .zst or as it is. ValueError if it is damaged."""
    import zstandard

    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                yield cast(BinaryIO, file)
        elif path.suffix == ".bz2":
            with bz2.open(path) as file:
                yield cast(BinaryIO, file)
        elif path.suffix == ".zst":
            with open(path, "rb") as raw:
                yield io.BufferedReader(_Frames(raw), 1 << 20)
        else:
            with open(path, "rb") as raw:
                yield raw
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: damaged or cut short ({error}); get the file again") from error


def lines_in_parts(path: Path, size: int, header: bool = False) -> Iterator[Part]:
    """A text file cut into parts of about `size` bytes at ends of lines; an entry is a line that is not blank.

    `header`: the first line is no entry, and it is put before every part.
    """
    with opened(path) as file:
        head = file.readline() if header else b""
        number = first = 0
        while lines := file.readlines(size):
            yield Part(number, first, head + b"".join(lines))
            number, first = number + 1, first + sum(1 for line in lines if line.strip())


def lines_of(part: Part) -> list[str]:
    """The entries of a part of `lines_in_parts`; what is not UTF-8 is replaced."""
    return [line.decode("utf-8-sig", "replace").strip() for line in part.data.split(b"\n") if line.strip()]


def text_of(data: bytes) -> str:
    """Bytes of a text as it was written: UTF-8, else Latin-1, which takes everything."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def empty() -> Batch:
    """A batch without records."""
    return concat([], LAYOUT)


def blank(n: int, source: str) -> np.ndarray:
    """(n,) RECORD with result and win-draw-loss unknown and no en-passant file."""
    records = np.zeros(n, RECORD)
    records["en_passant"], records["result"], records["source"] = -1, 2, SOURCES[source]
    return records
