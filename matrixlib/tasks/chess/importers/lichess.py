"""Readers of Lichess databases: puzzles (CSV) and evaluations (JSON lines).

An evaluation is {"fen": four fields, "evals": [{"pvs": [{"cp" or "mate": n, "line": "e2e4 e7e5 ..."}, ...],
"knodes": n, "depth": n}, ...]}. Without games the split is by position.
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from matrixlib.data.imports import ParseResult, Part
from matrixlib.data.shards import Batch, concat, select
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.records import LAYOUT, Records, game_id, play, position_ids
from matrixlib.tasks.chess.stockfish import labels
from matrixlib.tasks.chess.stockfish.client import MATE, score_of

PART_BYTES = 1 << 18  # about 1,500 puzzles or 350 evaluations
GAME = re.compile(r"lichess\.org/(\w{8})")
Found = list[tuple[int, tuple[str, Any]]]  # (entry number, (FEN, other fields))


def _quarantine_faulty(
    entries: ParseResult, lines: Sequence[str], found: Found, faults: Sequence[str], details: Sequence[str]
) -> int:
    """Quarantine faulty entries and skip Chess960; returns the number of good ones."""
    for (number, _), fault, detail in zip(found, faults, details, strict=True):
        if fault == notation.CHESS960:
            entries.skipped[fault] += 1
        elif fault:
            entries.refuse(number, fault, detail, lines[number])
    return faults.count("")


@dataclass(frozen=True)
class Puzzles:
    """A position per move of the solver, with all policy weight on it. FEN is *before* the opponent's set-up move, the
    first of Moves. Columns: FEN, Moves, optionally GameUrl."""

    source: ClassVar[str] = "puzzles"

    def parts(self, path: Path) -> Iterator[Part]:
        with notation.open_compressed(path) as file:
            lines = filter(bytes.strip, notation.read_lines(file))
            header = next(lines, b"")
            if not {"FEN", "Moves"} <= set(fields_of(header.decode("utf-8-sig", "replace").strip())):
                raise ValueError(f"{path} is no Lichess puzzle CSV: its first line must name the columns FEN and Moves")
            yield from notation.split_parts(lines, PART_BYTES, header=header)

    def read(self, part: Part) -> ParseResult:
        header, *lines = notation.part_lines(part)
        names, entries = fields_of(header), ParseResult(part)

        def parse(line: str) -> tuple[str, tuple[list[str], str]]:
            row = dict(zip(names, fields_of(line), strict=False))
            moves = row.get("Moves", "").split()
            if len(moves) < 2:
                raise notation.QuarantinedEntry("no solution", "the line ends before the solver's move", 0)
            return row.get("FEN", ""), (moves, row.get("GameUrl", ""))

        found = list(notation.parse_entries(lines, parse, entries))
        moves = [moves for _, (_, (moves, _)) in found]
        records, faults = notation.read_fens([fen for _, (fen, _) in found], self.source)
        records["game"] = position_ids(records)
        for place, (_, (_, (_, url))) in enumerate(found):
            if game := GAME.search(url):
                records["game"][place] = game_id("lichess.org", game[1])
        details = [f"FEN '{fen}'" for _, (fen, _) in found]
        batch = _solve(records, moves, faults, details)
        return entries.result(batch, len(lines), _quarantine_faulty(entries, lines, found, faults, details))


def fields_of(line: str) -> list[str]:
    """Fields of a CSV line, [] if invalid."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _solve(records: Records, moves: Sequence[Sequence[str]], faults: list[str], details: list[str]) -> Batch:
    """Solver's positions of N puzzles, played in parallel; fills in faults and details of illegal moves."""
    state = records.copy()
    batches, owners = [], [np.zeros(0, np.int64)]
    rows = np.flatnonzero([not fault for fault in faults])
    for step in range(max(map(len, moves), default=0)):
        rows = np.array([row for row in rows.tolist() if step < len(moves[row])], np.int64)
        sides = state["side"][rows].tolist()
        words = [notation.move_code(moves[row][step], side) for row, side in zip(rows.tolist(), sides, strict=True)]
        codes = notation.normalise_castling(state["pieces"][rows], words)
        legal = notation.legal_moves(state[rows])
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
    order = np.argsort(owner, kind="stable")  # by puzzle; the sort keeps the order of moves
    return select(concat(batches, LAYOUT), order[solved[owner[order]]], LAYOUT)


@dataclass(frozen=True)
class Evaluations:
    """The deepest evaluation of a position: policy softmax over its variations' first moves, win-draw-loss of the best.
    Scores are White's; castling is king takes rook (e1h1)."""

    source: ClassVar[str] = "evaluations"

    def parts(self, path: Path) -> Iterator[Part]:
        with notation.open_compressed(path) as file:
            if not file.read(1 << 16).lstrip().startswith(b"{"):
                raise ValueError(f"{path} has no JSON object in its first line: give Lichess evaluations")
        yield from notation.line_parts(path, PART_BYTES)

    def read(self, part: Part) -> ParseResult:
        lines, entries = notation.part_lines(part), ParseResult(part)
        found = list(notation.parse_entries(lines, deepest, entries))
        records, faults = notation.read_fens([fen for _, (fen, _) in found], self.source)
        row = np.array([row for row, (_, (_, pvs)) in enumerate(found) for _ in pvs], np.int64)
        pvs = [pv for _, (_, pvs) in found for pv in pvs]
        side = records["side"][row]
        words = [notation.move_code(uci, black) for (uci, _), black in zip(pvs, side.tolist(), strict=True)]
        codes = notation.normalise_castling(records["pieces"][row], words)
        details = [f"FEN '{fen}'" for _, (fen, _) in found]
        for item in np.flatnonzero(notation.legal_moves(records).find(row, codes) < 0).tolist():
            if not faults[row[item]]:
                faults[row[item]] = "illegal move"
                details[row[item]] = f"'{pvs[item][0]}' is not legal in '{found[row[item]][1][0]}'"
        stored = _quarantine_faulty(entries, lines, found, faults, details)
        good = np.array([not fault for fault in faults], bool)
        items = good[row]
        score = (np.array([white for _, white in pvs], np.int64) * np.where(side == 1, -1, 1))[items]
        records, row = records[good], (np.cumsum(good) - 1)[row[items]]
        legal, best = notation.legal_moves(records), np.full(len(records), -MATE)
        np.maximum.at(best, row, score)
        level = np.full(len(legal.index), labels.NO_WEIGHT)
        lost, unit = labels.to_centipawns(best)[row] - labels.to_centipawns(score), labels.LEVEL_CENTIPAWNS
        behind = (lost + unit // 2) // unit
        np.minimum.at(level, legal.find(row, codes[items]), np.minimum(behind, labels.NO_WEIGHT))
        records["wdl"] = labels.wdl_of_score(best)
        records["game"] = position_ids(records)
        return entries.result(legal.batch(records, labels.level_weights(level, legal.offset)), len(lines), stored)


def deepest(line: str) -> tuple[str, list[tuple[str, int]]]:
    """(FEN, [(first move, White's score), ...]) of a line's deepest evaluation. Raises QuarantinedEntry."""
    try:
        entry: Any = json.loads(line)
        evaluation: Any = max(entry["evals"], key=lambda one: one["depth"], default=None)
        pvs = [(pv["line"].split()[0], _score(pv)) for pv in evaluation["pvs"]]
        fen = entry["fen"]
    except (ValueError, RecursionError) as error:
        raise notation.QuarantinedEntry("not JSON", str(error)) from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise notation.QuarantinedEntry("fields are missing", f"{type(error).__name__} {error}") from None
    if not pvs or not isinstance(fen, str):
        raise notation.QuarantinedEntry("fields are missing", "no variation, or a FEN of another kind")
    return fen, pvs


def _score(pv: dict[str, Any]) -> int:
    """Score of a variation; KeyError or TypeError without one."""
    kind = "cp" if "cp" in pv else "mate"
    if not isinstance(pv[kind], int):
        raise TypeError(f"{kind} is {pv[kind]!r}")
    return score_of(kind, pv[kind])
