"""Reader of lists of positions (FEN or EPD, one a line) that Stockfish labels: policy and win-draw-loss.

The labels are those of the sample set (stockfish/labels.py): all legal moves at a small depth, the best ones deeper,
each position as after `ucinewgame`, so that they follow from the position alone. Operations of EPD are not used.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import chess
import numpy as np

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.tasks.chess.importers.epd import Unusable, parse
from matrixlib.tasks.chess.importers.parsing import empty, lines_in_parts, lines_of
from matrixlib.tasks.chess.keys import SOURCES, ids_of
from matrixlib.tasks.chess.records import from_boards
from matrixlib.tasks.chess.stockfish.client import Stockfish, find_stockfish
from matrixlib.tasks.chess.stockfish.games import Parameters
from matrixlib.tasks.chess.stockfish.labels import BOARD, Positions, assemble, label, label_columns, levels, ordered

PART = 1 << 13  # bytes, about 130 positions: some seconds of the engine


@dataclass(frozen=True)
class Labelled:
    """stockfish: path or name of the engine, None: the one on PATH. The depths are those of games.Parameters."""

    source: ClassVar[str] = "labelled"
    stockfish: str | None = None
    shallow_depth: int = Parameters.shallow_depth
    deep_depth: int = Parameters.deep_depth

    def parts(self, path: Path) -> Iterator[Part]:
        """EngineError, which says how to install it, where there is no Stockfish."""
        find_stockfish(self.stockfish)
        yield from lines_in_parts(path, PART)

    def read(self, part: Part) -> ParseResult:
        """Starts an engine of its own. Raises EngineError where that fails."""
        lines = lines_of(part)
        entries = Entries(part)
        boards: list[chess.Board] = []
        for number, line in enumerate(lines):
            if line.startswith("#"):
                entries.skipped["comment"] += 1
                continue
            try:
                board, _, _ = parse(line)
            except Unusable as error:
                entries.refuse(number, error.reason, error.detail, line)
                continue
            if any(board.legal_moves):
                boards.append(board)
            else:
                entries.skipped["game over"] += 1
        if not boards:
            return entries.result(empty(), len(lines))
        parameters = Parameters(shallow_depth=self.shallow_depth, deep_depth=self.deep_depth)
        with Stockfish(self.stockfish) as engine:
            columns = label_columns([label(engine, board, parameters) for board in boards])
        records = from_boards(boards, source=SOURCES[self.source])
        records["game"] = ids_of(records)
        chunk = columns | {name: records[name] for name in BOARD}
        level, _ = ordered(chunk, levels(chunk))
        batch = assemble(Positions(records, columns["wdl"], np.asarray(level)))
        return entries.result(batch, len(lines))
