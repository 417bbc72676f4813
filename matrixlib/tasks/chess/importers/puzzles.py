"""Reader of Lichess puzzles (CSV): a position for each move of the solver, which has all of the policy.

The FEN of a row is the position *before* the opponent's set-up move, which is the first of `Moves`; the solver makes
the second, the fourth and so on. A puzzle says nothing about the result of its game, nor who wins by how much, so
result and win-draw-loss stay unknown. Columns are named by the header; without one they are Lichess's own.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.data.shards import Batch, concat, select
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.keys import game_id, ids_of
from matrixlib.tasks.chess.records import LAYOUT, Records, play

COLUMNS = ("PuzzleId", "FEN", "Moves", "Rating", "RatingDeviation", "Popularity", "NbPlays", "Themes", "GameUrl")
GAME = re.compile(r"lichess\.org/(\w{8})")
PART = 1 << 18  # bytes, about 1,500 puzzles


def fields_of(line: str) -> list[str]:
    """The fields of a line; none where it is not CSV."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


@dataclass(frozen=True)
class Puzzles:
    """min_rating, max_rating: both inclusive. themes: a puzzle must have one of them; none = every puzzle."""

    source: ClassVar[str] = "puzzles"
    min_rating: int = 0
    max_rating: int = 9999
    themes: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns without which a row can't be used."""
        rating = ("Rating",) if (self.min_rating, self.max_rating) != (0, 9999) else ()
        return ("FEN", "Moves", *rating, *(("Themes",) if self.themes else ()))

    def parts(self, path: Path) -> Iterator[Part]:
        with notation.opened(path) as file:
            lines = filter(bytes.strip, notation.text_lines(file))
            first = next(lines, b"")
            header, rest = first, chain([], lines)
            fields = fields_of(first.decode("utf-8-sig", "replace").strip())
            if any(field.count("/") == 7 for field in fields) and len(fields) >= len(COLUMNS) - 1:
                header = ",".join(COLUMNS).encode() + b"\n"  # only a puzzle has a FEN
                rest, fields = chain([first], lines), list(COLUMNS)
            if missing := [name for name in self.needed if name not in fields]:
                raise ValueError(
                    f"{path} is no Lichess puzzle CSV (columns {', '.join(missing)}): "
                    "give one, or name its columns in the first line"
                )
            yield from notation.parts_of(rest, PART, header=header)

    def read(self, part: Part) -> ParseResult:
        header, *lines = notation.lines_of(part)
        names, entries = fields_of(header), Entries(part)

        def parse(line: str) -> tuple[dict[str, str], list[str]]:
            row = dict(zip(names, fields_of(line), strict=False))
            return row, self._solution(row)

        found = list(notation.usable(lines, parse, entries))
        moves = [solution for _, (_, solution) in found]
        records, faults = notation.read_fens([row["FEN"] for _, (row, _) in found], self.source)
        records["game"] = ids_of(records)
        for place, (_, (row, _)) in enumerate(found):
            if game := GAME.search(row.get("GameUrl", "")):
                records["game"][place] = game_id("lichess.org", game[1])
        details = [f"FEN '{row['FEN']}'" for _, (row, _) in found]
        batch = _solve(records, moves, faults, details)
        for place, (number, _) in enumerate(found):
            if faults[place]:
                entries.refuse(number, faults[place], details[place], lines[number], len(moves[place]) // 2)
        return entries.result(batch, len(lines), faults.count(""))

    def _solution(self, row: dict[str, str]) -> list[str]:
        """The moves of a puzzle that is wanted. Raises Unusable, LeftOut."""
        solution = row.get("Moves", "").split()
        positions = len(solution) // 2
        if missing := [name for name in self.needed if not row.get(name)]:
            raise notation.Unusable("missing columns", f"no {', '.join(missing)}: is the line cut off?", positions)
        rated = "Rating" in self.needed
        if rated and not re.fullmatch(r"-?\d{1,5}", row["Rating"]):
            raise notation.Unusable("bad rating", f"'{row['Rating']}' is no number", positions)
        if not positions:
            raise notation.Unusable("no solution", f"'{row['Moves']}' ends before the solver's move", 0)
        if rated and not self.min_rating <= int(row["Rating"]) <= self.max_rating:
            raise notation.LeftOut("rating out of range")
        if self.themes and not set(self.themes) & set(row["Themes"].split()):
            raise notation.LeftOut("other themes")
        return solution


def _solve(records: Records, moves: Sequence[Sequence[str]], faults: list[str], details: list[str]) -> Batch:
    """The solver's positions of the N puzzles that start in `records`, all of them played at the same time.

    A puzzle with an illegal move gives no position; its fault and details are filled in.
    """
    state = records.copy()
    batches, owners = [], [np.zeros(0, np.int64)]
    rows = np.flatnonzero([not fault for fault in faults])
    for step in range(max(map(len, moves), default=0)):
        rows = np.array([row for row in rows.tolist() if step < len(moves[row])], np.int64)
        sides = state["side"][rows].tolist()
        words = [notation.code_of(moves[row][step], side) for row, side in zip(rows.tolist(), sides, strict=True)]
        codes = notation.castled(state["pieces"][rows], words)
        legal = notation.legal_of(state[rows])
        place = legal.find(np.arange(len(rows)), codes)
        for row in rows[place < 0].tolist():
            faults[row] = "illegal move"
            details[row] = f"move {step + 1}, '{moves[row][step]}', is not legal there"
        if step % 2:
            weight = np.zeros(len(legal.index), "<u2")
            weight[place[place >= 0]] = 65535
            batches.append(legal.batch(state[rows], weight))
            owners.append(rows)
        rows, codes = rows[place >= 0], codes[place >= 0]
        state[rows] = play(state[rows], codes.astype(np.uint16))
    owner = np.concatenate(owners)
    solved = np.array([not fault for fault in faults], bool)
    order = np.argsort(owner, kind="stable")  # puzzle by puzzle; within one the steps are in order already
    return select(concat(batches, LAYOUT), order[solved[owner[order]]], LAYOUT)
