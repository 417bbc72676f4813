"""What a reader of foreign data gives: rows, and what became of every entry (a game, a row of a table, a replay).

A *part* is a run of entries of one file that one process reads in one go; the same file always gives the same parts.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from matrixlib.data.shards import Batch


@dataclass(frozen=True)
class Part:
    """Consecutive entries of a file: number of the part and of its first entry, both from 0, and their bytes. name: of
    the file, below the folder that is imported; set by the import."""

    number: int
    first: int
    data: bytes
    name: str = ""


@dataclass(frozen=True)
class Refused:
    """An entry that goes to quarantine: its number in the file, the kind of fault (the same words for all of its
    kind), the details, how many positions it would have given, and the entry itself as text, to look at or to mend."""

    entry: int
    reason: str
    detail: str
    positions: int
    text: str


@dataclass
class ParseResult:
    """What became of the entries of a part: entries = stored + len(refused) + skipped.total().

    skipped: reason -> entries left out on purpose. warned: remark -> entries stored all the same. rows: positions of
    each stored entry (stored,) where an entry is a whole game: lets an import leave out what is there already.
    """

    part: Part
    refused: list[Refused] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    warned: Counter[str] = field(default_factory=Counter)
    batch: Batch = field(default_factory=dict)
    entries: int = 0
    stored: int = 0
    rows: np.ndarray | None = None

    def refuse(self, number: int, reason: str, detail: str, text: str, positions: int = 1) -> None:
        """Entry `number` of the part, from 0, goes to quarantine."""
        self.refused.append(Refused(self.part.first + number, reason, detail, positions, text))

    def result(
        self, batch: Batch, entries: int, stored: int | None = None, rows: np.ndarray | None = None
    ) -> "ParseResult":
        """All of it. stored: by default, as many as the batch has positions. ValueError where it does not add up."""
        positions = len(batch["records"])
        self.batch, self.entries, self.rows = batch, entries, rows
        self.part = replace(self.part, data=b"")  # of which a worker need not send anything back
        self.stored = positions if stored is None else stored
        self.refused.sort(key=lambda entry: entry.entry)
        self.skipped, self.warned = +self.skipped, +self.warned
        counted = self.stored + len(self.refused) + self.skipped.total()
        if entries != counted:
            raise ValueError(f"{entries} entries were read and {counted} are accounted for")
        if rows is not None and (len(rows) != self.stored or rows.sum() != positions):
            raise ValueError(f"the rows of {len(rows)} entries do not add up to {positions} positions")
        return self


class Reader(Protocol):
    """One format. A reader is a frozen dataclass whose fields are its options, so that it can be sent to workers."""

    @property
    def source(self) -> str:
        """The catalogue's source; the task knows which there are."""

    def parts(self, path: Path) -> Iterator[Part]:
        """The file in parts, in order, one at a time in memory. ValueError names a file that is not of the format."""

    def read(self, part: Part) -> ParseResult:
        """The positions of a part. A pure function of the options and the part."""
