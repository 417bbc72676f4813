"""Readers of positions a line: EPD suites with what they say, and FENs for Stockfish to label.

EPD: four fields of a FEN and operations, `bm Nf6+; id "WAC.001";`.

`bm`: best moves, all equally good; `am`: moves to avoid, all others are equally good; `ce`: centipawns and `dm`: full
moves to mate, both from the side to move. What a line lacks stays unknown: without bm or am the policy has no weight,
without ce or dm win-draw-loss is 0. Other operations are of no use here. There are no games, so equal positions stand
in for them in the split.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import chess
import numpy as np

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.tasks.chess.importers.notation import legal_of
from matrixlib.tasks.chess.importers.parsing import Unusable, empty, lines_in_parts, lines_of, opened
from matrixlib.tasks.chess.keys import SOURCES, ids_of
from matrixlib.tasks.chess.records import from_boards, parse_fen, policy_index
from matrixlib.tasks.chess.scores import bounded_score, wdl_of_score
from matrixlib.tasks.chess.stockfish.client import Stockfish, find_stockfish
from matrixlib.tasks.chess.stockfish.games import Parameters
from matrixlib.tasks.chess.stockfish.labels import NO_WEIGHT, Positions, assemble, label, weights_of

PART = 1 << 16  # bytes, about 700 positions
LABELLED_PART = 1 << 13  # bytes, about 130 positions: some seconds of the engine
TOKEN = re.compile(r'"([^"]*)"?|(;)|([^\s;"]+)')
OPERATIONS = re.compile(  # for a line that has lost a semicolon; the comments c1 to c8 read like moves of a pawn
    r"acd|acn|acs|am|bm|ce|dm|draw_\w+|eco|fmvn|hmvc|id|nic|noop|pm|pv|rc|resign|sm|tcgs|tcri|tcsi|c[09]|v\d"
)
COUNTERS = re.compile(r"\s*(\d+)\s+(\d+)(?=\s|;|$)")


def parse(line: str) -> tuple[chess.Board, dict[str, list[str]], bool]:
    """(board, operands of each operation, whether a semicolon is missing) of a line of EPD or FEN.

    Move counters come from a FEN's own fields or from the operations hmvc and fmvn. Raises Unusable.
    """
    fields = line.split(maxsplit=4)
    rest = fields[4] if len(fields) > 4 else ""
    counters = COUNTERS.match(rest)
    rest = rest[counters.end() :] if counters else rest
    operations, lost = operations_of(rest)
    clock, full = counters.groups() if counters else ("0", "1")
    numbers = [(operations.get(name) or [old])[0] for name, old in (("hmvc", clock), ("fmvn", full))]
    if len(fields) > 2 and re.search(r"[A-Ha-h]", fields[2]):
        raise Unusable("Chess960 castling", f"'{fields[2]}' is not of standard chess")
    try:
        return parse_fen(" ".join([*fields[:4], *numbers])), operations, lost
    except ValueError as error:
        raise Unusable("not a position of chess", str(error)) from None


def operations_of(text: str) -> tuple[dict[str, list[str]], bool]:
    """Operands by operation, and whether one began before the last had its semicolon, which is mended."""
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


SAN_FAULTS = {
    chess.AmbiguousMoveError: "ambiguous move",
    chess.IllegalMoveError: "illegal move",
    chess.InvalidMoveError: "not a move",
}


def moves_of(board: chess.Board, words: Sequence[str]) -> set[chess.Move]:
    """The moves of a list in SAN. Raises Unusable for one that is illegal, ambiguous or no move."""
    moves = set()
    for word in words:
        try:
            move = board.parse_san(word.rstrip("!?,"))
        except tuple(SAN_FAULTS) as error:
            raise Unusable(SAN_FAULTS[type(error)], str(error)) from None
        if not move:
            raise Unusable("not a move", f"'{word}' passes")
        moves.add(move)
    return moves


def best_of(board: chess.Board, operations: Mapping[str, Sequence[str]]) -> set[chess.Move]:
    """The moves that share the policy; none where neither bm nor am is given. Raises Unusable."""
    best = moves_of(board, operations.get("bm", ()))
    avoided = moves_of(board, operations.get("am", ()))
    if not best and avoided:
        best = set(board.legal_moves) - avoided
        if not best:
            raise Unusable("every move is avoided", f"'{board.fen()}'")
    return best


def score_from(operations: Mapping[str, Sequence[str]]) -> int | None:
    """The score (`stockfish.score_of`) that dm, or else ce, gives. Raises Unusable where it is no number."""
    for name, kind in (("dm", "mate"), ("ce", "cp")):
        if name in operations:
            words = operations[name]
            if len(words) != 1 or not re.fullmatch(r"[+-]?\d{1,9}", words[0]):
                raise Unusable("bad number", f"{name} {' '.join(words)}")
            return bounded_score(kind, int(words[0]))
    return None


def _boards_of(lines: Sequence[str], entries: Entries) -> Iterator[tuple[int, chess.Board, dict[str, list[str]], bool]]:
    """(number, board, operations, whether a semicolon is missing) of each line with a game that is not over."""
    for number, line in enumerate(lines):
        if line.startswith("#"):
            entries.skipped["comment"] += 1
            continue
        try:
            board, operations, lost = parse(line)
        except Unusable as error:
            entries.refuse(number, error.reason, error.detail, line)
            continue
        if any(board.legal_moves):
            yield number, board, operations, lost
        else:
            entries.skipped["game over"] += 1


@dataclass(frozen=True)
class Epd:
    """No options."""

    source: ClassVar[str] = "epd"

    def parts(self, path: Path) -> Iterator[Part]:
        with opened(path) as file:
            head = file.read(1 << 16)
        if head.strip() and not re.search(rb"(?m)^\s*([^\s/]+/){7}\S+\s+[wb]\s", head):
            raise ValueError(f"{path} has no line that starts like a FEN: give an EPD file")
        yield from lines_in_parts(path, PART)

    def read(self, part: Part) -> ParseResult:
        lines = lines_of(part)
        entries = Entries(part)
        boards: list[chess.Board] = []
        best: list[set[chess.Move]] = []
        scores: list[int | None] = []
        for number, board, operations, lost in _boards_of(lines, entries):
            try:
                moves, score = best_of(board, operations), score_from(operations)
            except Unusable as error:
                entries.refuse(number, error.reason, error.detail, lines[number])
                continue
            if not moves and score is None:
                entries.skipped["neither bm, am, ce nor dm"] += 1
            else:
                entries.warned["missing semicolon"] += lost
                boards.append(board)
                best.append(moves)
                scores.append(score)
        records = from_boards(boards, source=SOURCES[self.source])
        records["game"] = ids_of(records)
        known = np.array([score is not None for score in scores], bool)
        records["wdl"][known] = wdl_of_score([score for score in scores if score is not None])
        legal = legal_of(records)
        level = np.full(len(legal.index), NO_WEIGHT)
        for row, (board, moves) in enumerate(zip(boards, best, strict=True)):
            indices = legal.index[legal.offset[row] : legal.offset[row + 1]]
            best_indices = np.array([policy_index(move, board.turn) for move in moves], np.int64)
            level[legal.offset[row] + np.searchsorted(indices, best_indices)] = 0
        batch = legal.batch(records, weights_of(level, legal.offset))
        return entries.result(batch, len(lines))


@dataclass(frozen=True)
class Labelled:
    """Positions alone, FEN or EPD, which Stockfish labels as it labelled the sample set; operations are not used.

    stockfish: path or name of the engine, None: the one on PATH. The depths are those of games.Parameters.
    """

    source: ClassVar[str] = "labelled"
    stockfish: str | None = None
    shallow_depth: int = Parameters.shallow_depth
    deep_depth: int = Parameters.deep_depth

    def parts(self, path: Path) -> Iterator[Part]:
        """EngineError, which says how to install it, where there is no Stockfish."""
        find_stockfish(self.stockfish)
        yield from lines_in_parts(path, LABELLED_PART)

    def read(self, part: Part) -> ParseResult:
        """Starts an engine of its own. Raises EngineError where that fails."""
        lines = lines_of(part)
        entries = Entries(part)
        boards = [board for _, board, *_ in _boards_of(lines, entries)]
        if not boards:
            return entries.result(empty(), len(lines))
        with Stockfish(self.stockfish) as engine:
            labels = [label(engine, board, self.shallow_depth, self.deep_depth) for board in boards]
        records = from_boards(boards, source=SOURCES[self.source])
        records["game"] = ids_of(records)
        level = np.concatenate([np.array(one.level, np.uint8) for one in labels])
        return entries.result(assemble(Positions(records, np.array([one.wdl for one in labels]), level)), len(lines))
