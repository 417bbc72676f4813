"""Reader of Leela Chess Zero's training data, version 6: .gz files of one game each, and .tar files of those.

A record (leela.py) has the shares of visits as policy, the value of the search as win-draw-loss, and the game's result.
"""

import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from matrixlib.data.entries import ParseResult, Part, Refused
from matrixlib.data.shards import Batch
from matrixlib.tasks.chess.importers.leela import (
    ARMAGEDDON,
    DELETED,
    FORMATS,
    TOLERANCE,
    V6,
    Faults,
    decode,
    numbers_of,
    values_of,
)
from matrixlib.tasks.chess.importers.notation import legal_of
from matrixlib.tasks.chess.importers.parsing import empty
from matrixlib.tasks.chess.keys import game_id
from matrixlib.tasks.chess.lc0.moves import move_name
from matrixlib.tasks.chess.records import Records, to_board

VERSION, VERSIONS = 6, (3, 4, 5, 6, 7)  # what is read, what is known by name
LONGEST = 64 << 20  # bytes of a game: sixteen times what any game of chess takes


# Files


def version_of(data: bytes) -> int:
    """The version in the first record; of less than that, the one that could be read."""
    return int.from_bytes(data[:4], "little") if len(data) >= 4 else VERSION


def entries_of(data: bytes) -> int:
    """How many entries a game's data counts for: its records, with one that is cut short; 1 if there are none."""
    return max(1, -(-len(data) // V6.itemsize)) if version_of(data) == VERSION else 1


def inflate(data: bytes) -> bytes:
    """What is in a .gz file, as far as it goes. One that is cut short or damaged ends within a record.

    ValueError for more than a game can hold.
    """
    out = b""
    while data:
        stream = zlib.decompressobj(31)
        try:
            out += stream.decompress(data, LONGEST)
        except zlib.error:
            break
        if stream.unconsumed_tail or len(out) > LONGEST:
            raise ValueError(f"holds more than {LONGEST >> 20} MiB, which is no game")
        if not stream.eof:
            break
        data = stream.unused_data.lstrip(b"\0")  # some programs pad
    return out + b"\0" * (bool(data) and len(out) % V6.itemsize == 0)


def games_of(path: Path) -> Iterator[bytes]:
    """The data of each game of a file; nothing for a member of a .tar that is no game. ValueError names the file."""
    if ".tar" not in path.suffixes and path.suffix != ".tgz":
        data = inflate(path.read_bytes())
        if version_of(data) not in VERSIONS:
            raise ValueError(f"{path} holds no training data of Leela: its first bytes are {data[:4]!r}")
        yield data
        return
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # or the list of all members grows
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    data = file.read(LONGEST + 1) if member.name.endswith(".gz") else b""
                    if len(data) > LONGEST:
                        raise ValueError(f"'{member.name}' in it has more than {LONGEST >> 20} MiB, which is no game")
                    yield inflate(data)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"{path} is cut short or no .tar file ({error}): restore it from a copy") from error


@dataclass(frozen=True)
class Lc0:
    """value: the search's value of the root, or that of its best move."""

    source: ClassVar[str] = "lc0"
    value: Literal["root", "best"] = "root"

    def parts(self, path: Path) -> Iterator[Part]:
        first = 0
        try:
            for number, data in enumerate(games_of(path)):
                yield Part(number, first, data)
                first += entries_of(data)
        except ValueError as error:
            raise ValueError(str(error) if str(path) in str(error) else f"{path} {error}") from error

    def read(self, part: Part) -> ParseResult:
        if not part.data:
            return ParseResult(empty(), 1, 0, skipped={"not a game": 1})
        version = version_of(part.data)
        if version != VERSION:
            known = version in VERSIONS
            reason = f"version {version} of the format" if known else "not training data"
            detail = "only version 6 is read: convert it with Leela's rescorer" if known else f"{part.data[:4]!r}"
            return ParseResult(empty(), 1, 0, [Refused(part.first, reason, detail, 0, "")])
        count, rest = divmod(len(part.data), V6.itemsize)
        raw = np.frombuffer(part.data, V6, count)
        records, reasons, batch = self._read(raw, game_id("lc0", part.data))
        refused = [
            Refused(part.first + row, *reasons[row], 1, to_board(records[row]).fen())
            for row in np.flatnonzero(raw["flags"] & DELETED == 0).tolist()
            if row in reasons
        ]
        if rest:
            detail = f"{rest} of {V6.itemsize} bytes are there: restore the file from a copy"
            refused.append(Refused(part.first + count, "cut short", detail, 1, ""))
        stored = len(batch["records"])
        skipped = {"marked for deletion": count + (rest > 0) - stored - len(refused)}
        return ParseResult(batch, count + (rest > 0), stored, refused, +Counter(skipped))

    def _read(self, raw: NDArray[np.void], game: int) -> tuple[Records, dict[int, tuple[str, str]], Batch]:
        """All records (N,), reason and detail of those that can't be used, the batch of the others not deleted."""
        kind = raw["input_format"]
        faults: Faults = [
            (raw["version"] != VERSION, "another version within the file"),
            (np.isin(kind, ARMAGEDDON), "Armageddon rules"),
            (~np.isin(kind, (*FORMATS, *ARMAGEDDON)), "unknown input format"),
        ]
        records, transform = decode(raw, faults)
        records["result"], records["wdl"] = values_of(raw, self.value, faults)
        records["game"] = game
        share = raw["probabilities"]
        total = np.where(share > 0, share, 0).sum(1, dtype=np.float64)
        faults.append((~np.isfinite(share).all(1) | ~(np.abs(total - 1) <= TOLERANCE), "policy does not sum to 1"))
        reasons: dict[int, tuple[str, str]] = {}
        for mask, reason in reversed(faults):
            for row in np.flatnonzero(mask).tolist():
                reasons[row] = reason, f"input format {kind[row]}, flags {raw['flags'][row]}"
        rows = np.array([row for row in range(len(raw)) if row not in reasons], np.int64)
        legal = legal_of(records[rows])
        owner = np.repeat(np.arange(len(rows)), np.diff(legal.offset))
        number = numbers_of(legal, records[rows], transform[rows], share[rows])
        listed = share[rows][owner, number]
        both = np.bincount(owner, listed >= 0, len(rows))
        same = (both == np.diff(legal.offset)) & (both == (share[rows] >= 0).sum(1))
        for item in np.flatnonzero(~same).tolist():
            ours = set(number[owner == item].tolist())
            theirs = set(np.flatnonzero(share[rows[item]] >= 0).tolist())
            names = ", ".join(sorted(map(move_name, ours ^ theirs)))
            reasons[int(rows[item])] = (
                "legal moves differ",
                f"(as its mover sees the board) in one list only: {names}",
            )
        good = np.flatnonzero(same & (raw["flags"][rows] & DELETED == 0))
        own, places = legal.rows(good)
        batch = own.batch_of_shares(records[rows[good]], np.maximum(listed[places], 0))
        return records, reasons, batch
