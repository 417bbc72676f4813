"""Reader of Lichess puzzles (CSV): a position for each move of the solver, which has all of the policy.

The FEN of a row is the position *before* the opponent's set-up move, which is the first of `Moves`; the solver makes
the second, the fourth and so on. A puzzle says nothing about the result of its game, nor who wins by how much, so
result and win-draw-loss stay unknown. Columns are named by the header; without one they are Lichess's own.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.data.shards import Batch, concat, select
from matrixlib.tasks.chess.importers.notation import castled, code_of, legal_of, read_fens
from matrixlib.tasks.chess.importers.parsing import Unusable, lines_in_parts, lines_of, opened, text_lines
from matrixlib.tasks.chess.keys import game_id, ids_of
from matrixlib.tasks.chess.records import LAYOUT, Records, play

COLUMNS = ("PuzzleId", "FEN", "Moves", "Rating", "RatingDeviation", "Popularity", "NbPlays", "Themes", "GameUrl")
GAME = re.compile(r"lichess\.org/(\w{8})")
PART = 1 << 18  # bytes, about 1,500 puzzles


HEADER = ",".join(COLUMNS).encode() + b"\n"


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
        with opened(path) as file:
            fields = fields_of(next(text_lines(file), b"").decode("utf-8-sig", "replace"))
        header = not any(field.count("/") == 7 for field in fields)  # only a puzzle has a FEN
        standard = len(fields) >= len(COLUMNS) - 1
        missing = [name for name in self.needed if name not in (fields if header else COLUMNS)]
        if missing or not (header or standard):
            raise ValueError(
                f"{path} is no Lichess puzzle CSV (columns {', '.join(missing or self.needed)}): "
                "give one, or name its columns in the first line"
            )
        for part in lines_in_parts(path, PART, header):
            yield part if header else Part(part.number, part.first, HEADER + part.data)

    def read(self, part: Part) -> ParseResult:
        lines = lines_of(part)
        names, lines = fields_of(lines[0]), lines[1:]
        entries = Entries(part)
        numbers: list[int] = []  # numbers in `lines` of the puzzles that are played through
        rows: list[dict[str, str]] = []
        for number, line in enumerate(lines):
            row = dict(zip(names, fields_of(line), strict=False))
            try:
                if reason := self._unwanted(row):
                    entries.skipped[reason] += 1
                else:
                    numbers.append(number)
                    rows.append(row)
            except Unusable as error:
                entries.refuse(number, error.reason, error.detail, line, error.positions)
        fens, moves = [row["FEN"] for row in rows], [row["Moves"].split() for row in rows]
        records, faults = read_fens(fens, self.source)
        records["game"] = ids_of(records)
        for place, row in enumerate(rows):
            if game := GAME.search(row.get("GameUrl", "")):
                records["game"][place] = game_id("lichess.org", game[1])
        details = [f"FEN '{fen}'" for fen in fens]
        batch = _solve(records, moves, faults, details)
        for place, number in enumerate(numbers):
            if faults[place]:
                entries.refuse(number, faults[place], details[place], lines[number], len(moves[place]) // 2)
        return entries.result(batch, len(lines), faults.count(""))

    def _unwanted(self, row: dict[str, str]) -> str:
        """Why a puzzle is left out on purpose, "" where it is wanted. Raises Unusable."""
        solution = row.get("Moves", "").split()
        if missing := [name for name in self.needed if not row.get(name)]:
            raise Unusable("missing columns", f"no {', '.join(missing)}: is the line cut off?", len(solution) // 2)
        rated = "Rating" in self.needed
        if rated and not re.fullmatch(r"-?\d{1,5}", row["Rating"]):
            raise Unusable("bad rating", f"'{row['Rating']}' is no number", len(solution) // 2)
        if len(solution) < 2:
            raise Unusable("no solution", f"'{row['Moves']}' ends before the solver's move", 0)
        if rated and not self.min_rating <= int(row["Rating"]) <= self.max_rating:
            return "rating out of range"
        return "other themes" if self.themes and not set(self.themes) & set(row["Themes"].split()) else ""


def _solve(records: Records, moves: Sequence[Sequence[str]], faults: list[str], details: list[str]) -> Batch:
    """The solver's positions of the N puzzles that start in `records`, all of them played at the same time.

    A puzzle with an illegal move gives no position; its fault and details are filled in.
    """
    state = records.copy()
    batches, owners = [], []
    rows = np.flatnonzero([not fault for fault in faults])
    for step in range(max(map(len, moves), default=0)):
        rows = np.array([row for row in rows.tolist() if step < len(moves[row])], np.int64)
        uci_codes = [
            code_of(moves[row][step], side) for row, side in zip(rows.tolist(), state["side"][rows], strict=True)
        ]
        codes = castled(state["pieces"][rows], uci_codes)
        legal = legal_of(state[rows])
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
    owner = np.concatenate([np.zeros(0, np.int64), *owners])
    solved = np.array([not fault for fault in faults], bool)
    order = np.argsort(owner, kind="stable")  # puzzle by puzzle; within one the steps are in order already
    return select(concat(batches, LAYOUT), order[solved[owner[order]]], LAYOUT)
