"""Readers of EPD suites, and of FEN lists that Stockfish labels.

Without games the split is by position.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import chess
import numpy as np

from matrixlib.data.imports import ParseResult, Part
from matrixlib.data.shards import concat
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.records import LAYOUT, SOURCES, from_boards, parse_fen, policy_index, position_ids
from matrixlib.tasks.chess.stockfish.client import Stockfish, score_of
from matrixlib.tasks.chess.stockfish.labels import NO_WEIGHT, Positions, assemble, label, level_weights, wdl_of_score
from matrixlib.tasks.chess.stockfish.sample import Parameters

PART_BYTES = 1 << 16  # about 700 positions
LABELLED_PART_BYTES = 1 << 13  # about 130 positions, seconds of engine time
TOKEN = re.compile(r'"([^"]*)"?|(;)|([^\s;"]+)')
OPERATIONS = re.compile(  # to repair missing semicolons; c1 to c8 are excluded, as they look like pawn moves
    r"acd|acn|acs|am|bm|ce|dm|draw_\w+|eco|fmvn|hmvc|id|nic|noop|pm|pv|rc|resign|sm|tcgs|tcri|tcsi|c[09]|v\d"
)
COUNTERS = re.compile(r"\s*(\d+)\s+(\d+)(?=\s|;|$)")
Operations = Mapping[str, Sequence[str]]  # operands by operation


def parse(line: str) -> tuple[chess.Board, dict[str, list[str]], bool]:
    """Parse a line of EPD or FEN: (board, operation -> operands, whether a semicolon is missing).

    Move counters are taken from hmvc and fmvn, else from the FEN. Raises QuarantinedEntry.
    """
    fields = line.split(maxsplit=4)
    rest = fields[4] if len(fields) > 4 else ""
    counters = COUNTERS.match(rest)
    operations, lost = operations_of(rest[counters.end() :] if counters else rest)
    clock, full = counters.groups() if counters else ("0", "1")
    numbers = [(operations.get(name) or [old])[0] for name, old in (("hmvc", clock), ("fmvn", full))]
    if len(fields) > 2 and re.search(r"[A-Ha-h]", fields[2]):
        raise notation.QuarantinedEntry("Chess960 castling", f"'{fields[2]}' is not of standard chess")
    try:
        return parse_fen(" ".join([*fields[:4], *numbers])), operations, lost
    except ValueError as error:
        raise notation.QuarantinedEntry("not a position of chess", str(error)) from None


def operations_of(text: str) -> tuple[dict[str, list[str]], bool]:
    """Parse operations: (operation -> operands, whether a missing semicolon was repaired)."""
    operations: dict[str, list[str]] = {}
    operands: list[str] | None = None
    lost = False
    for quoted, end, word in TOKEN.findall(text):
        if end:
            operands = None
        elif operands is None or (word and OPERATIONS.fullmatch(word)):
            lost |= operands is not None
            operands = operations.setdefault(word or quoted, [])
        else:
            operands.append(word or quoted)
    return operations, lost


def best_moves(board: chess.Board, operations: Operations) -> set[chess.Move]:
    """Best moves by bm or am, empty without either. Raises QuarantinedEntry."""
    best, avoided = ({_move(board, word) for word in operations.get(name, ())} for name in ("bm", "am"))
    if not best and avoided:
        best = set(board.legal_moves) - avoided
        if not best:
            raise notation.QuarantinedEntry("every move is avoided", f"'{board.fen()}'")
    return best


def _move(board: chess.Board, word: str) -> chess.Move:
    try:
        move = board.parse_san(word.rstrip("!?,"))
    except ValueError as error:
        reasons = {chess.AmbiguousMoveError: "ambiguous move", chess.IllegalMoveError: "illegal move"}
        raise notation.QuarantinedEntry(reasons.get(type(error), "not a move"), str(error)) from None
    if not move:
        raise notation.QuarantinedEntry("not a move", f"'{word}' is a null move")
    return move


def score_from(operations: Operations) -> int | None:
    """Score (`stockfish.client.score_of`) by dm, else ce, else None. Raises QuarantinedEntry for a bad number."""
    for name, kind in (("dm", "mate"), ("ce", "cp")):
        if name in operations:
            words = operations[name]
            if len(words) != 1 or not re.fullmatch(r"[+-]?\d{1,9}", words[0]):
                raise notation.QuarantinedEntry("bad number", f"{name} {' '.join(words)}")
            return score_of(kind, int(words[0]))
    return None


def _position(line: str) -> tuple[chess.Board, dict[str, list[str]], bool]:
    """`parse` a line; comments and finished games are skipped."""
    if line.startswith("#"):
        raise notation.SkippedEntry("comment")
    parsed = parse(line)
    if not any(parsed[0].legal_moves):
        raise notation.SkippedEntry("game over")
    return parsed


def _exercise(line: str) -> tuple[chess.Board, set[chess.Move], int | None, bool]:
    """Parse an exercise: (board, best moves, score, whether a semicolon is missing)."""
    board, operations, lost = _position(line)
    best, score = best_moves(board, operations), score_from(operations)
    if not best and score is None:
        raise notation.SkippedEntry("neither bm, am, ce nor dm")
    return board, best, score, lost


@dataclass(frozen=True)
class Epd:
    """EPD: four FEN fields and operations, `bm Nf6+; id "WAC.001";`. bm: best moves, equal weights. am: moves to avoid.
    ce: centipawns, dm: full moves to mate, for the side to move. Missing targets stay unknown."""

    source: ClassVar[str] = "epd"

    def parts(self, path: Path) -> Iterator[Part]:
        with notation.open_compressed(path) as file:
            head = file.read(1 << 16)
        if head.strip() and not re.search(rb"(?m)^\s*([^\s/]+/){7}\S+\s+[wb]\s", head):
            raise ValueError(f"{path} has no line that starts like a FEN: give an EPD file")
        yield from notation.line_parts(path, PART_BYTES)

    def read(self, part: Part) -> ParseResult:
        lines, entries = notation.part_lines(part), ParseResult(part)
        exercises = [exercise for _, exercise in notation.parse_entries(lines, _exercise, entries)]
        entries.warned["missing semicolon"] = sum(lost for *_, lost in exercises)
        records = from_boards([board for board, *_ in exercises], source=SOURCES[self.source])
        records["game"] = position_ids(records)
        legal = notation.legal_moves(records)
        level = np.full(len(legal.index), NO_WEIGHT)
        for row, (board, best, score, _) in enumerate(exercises):
            if score is not None:
                records["wdl"][row] = wdl_of_score(score)[0]
            indices = legal.index[legal.offset[row] : legal.offset[row + 1]]
            best_indices = np.array([policy_index(move, board.turn) for move in best], np.int64)
            level[legal.offset[row] + np.searchsorted(indices, best_indices)] = 0
        return entries.result(legal.batch(records, level_weights(level, legal.offset)), len(lines))


@dataclass(frozen=True)
class Labelled:
    """FEN or EPD positions, labelled by Stockfish like the sample set; operations are ignored.

    stockfish: the engine, see `client.Stockfish`; default the one on PATH. Depths: see `sample.Parameters`.
    """

    source: ClassVar[str] = "labelled"
    stockfish: str | None = None
    shallow_depth: int = Parameters.shallow_depth
    deep_depth: int = Parameters.deep_depth

    def parts(self, path: Path) -> Iterator[Part]:
        """Raises EngineError without Stockfish."""
        Stockfish(self.stockfish).close()
        yield from notation.line_parts(path, LABELLED_PART_BYTES)

    def read(self, part: Part) -> ParseResult:
        """Label the part with a new engine process; raises EngineError."""
        lines, entries = notation.part_lines(part), ParseResult(part)
        boards = [board for _, (board, *_) in notation.parse_entries(lines, _position, entries)]
        if not boards:
            return entries.result(concat([], LAYOUT), len(lines))
        with Stockfish(self.stockfish) as engine:
            labels = [label(engine, board, self.shallow_depth, self.deep_depth) for board in boards]
        records = from_boards(boards, source=SOURCES[self.source])
        records["game"] = position_ids(records)
        level = np.concatenate([np.array(one.level, np.uint8) for one in labels])
        return entries.result(assemble(Positions(records, np.array([one.wdl for one in labels]), level)), len(lines))
