"""What the readers of chess data share: files that may be compressed, lines in parts, records to begin with."""

import bz2
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from matrixlib.data.entries import Part
from matrixlib.data.shards import Batch, concat
from matrixlib.tasks.chess.keys import SOURCES
from matrixlib.tasks.chess.records import LAYOUT, RECORD

LONGEST = 1 << 26  # bytes of a line


class LongLine(ValueError):
    """A line that no text has."""


class Unusable(ValueError):
    """An entry that goes to quarantine: reason (the same words for all of its kind), detail, and how many positions it
    would have given."""

    def __init__(self, reason: str, detail: str, positions: int = 1) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.positions = reason, detail, positions


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
            data = self.left or self.raw.read(1 << 12)  # which unpacks to 128 MiB at most
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
    except LongLine as error:
        raise ValueError(f"{path}: {error}") from error
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: damaged or cut short ({error}); get the file again") from error


def text_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. LongLine for one that is longer than any of a text: what is packed may have any length."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST and not line.endswith(b"\n"):
            raise LongLine(f"has a line of more than {LONGEST >> 20} MiB, so it is no text")
        yield line


def lines_in_parts(path: Path, size: int, header: bool = False) -> Iterator[Part]:
    """A text file cut into parts of about `size` bytes at ends of lines; an entry is a line that is not blank.

    `header`: the first line is no entry, and it is put before every part.
    """
    with opened(path) as file:
        text = text_lines(file)
        head = next(text, b"") if header else b""
        number = first = 0
        while lines := _some_of(text, size):
            yield Part(number, first, head + b"".join(lines))
            number, first = number + 1, first + sum(1 for line in lines if line.strip())


def _some_of(lines: Iterator[bytes], size: int) -> list[bytes]:
    """The next lines, until they have more than `size` bytes."""
    some, length = list[bytes](), 0
    for line in lines:
        some.append(line)
        length += len(line)
        if length > size:
            break
    return some


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
