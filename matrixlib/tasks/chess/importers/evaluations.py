"""Reader of Lichess evaluations (`lichess_db_eval.jsonl`): a position a line, with what Stockfish said in browsers.

A line is {"fen": four fields, "evals": [{"pvs": [{"cp" or "mate": n, "line": "e2e4 e7e5 ..."}, ...], "knodes": n,
"depth": n}, ...]}. Scores are White's, whoever is to move, which the order of the variations shows; castling is written
as king takes rook (e1h1). Of several evaluations the deepest counts. The policy is the softmax that stockfish/labels.py
makes of scores, over the first moves of its variations: what Stockfish has not listed has no weight. Win-draw-loss is
that of the best score (scores.py). There are no games, so equal positions stand in for them in the split.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from matrixlib.data.entries import Entries, ParseResult, Part
from matrixlib.data.shards import Batch
from matrixlib.tasks.chess.importers import notation
from matrixlib.tasks.chess.keys import ids_of
from matrixlib.tasks.chess.records import Records
from matrixlib.tasks.chess.scores import wdl_of_score
from matrixlib.tasks.chess.stockfish.client import MATE, score_of
from matrixlib.tasks.chess.stockfish.labels import NO_WEIGHT, STEP, values, weights_of

PART = 1 << 19  # bytes, about 700 positions


def _score(pv: dict[str, Any]) -> int:
    """The score of a variation from White's side; KeyError, TypeError without one."""
    kind = "cp" if "cp" in pv else "mate"
    if not isinstance(pv[kind], int):
        raise TypeError(f"{kind} is {pv[kind]!r}")
    return score_of(kind, pv[kind])


@dataclass(frozen=True)
class Evaluations:
    """min_depth: shallower positions are left out (and counted)."""

    source: ClassVar[str] = "evaluations"
    min_depth: int = 0

    def parts(self, path: Path) -> Iterator[Part]:
        with notation.opened(path) as file:
            if not file.read(1 << 16).lstrip().startswith(b"{"):
                raise ValueError(f"{path} has no JSON object in its first line: give Lichess's evaluations")
        yield from notation.lines_in_parts(path, PART)

    def parse(self, line: str) -> tuple[str, list[tuple[str, int]]]:
        """(FEN, [(first move, score from White's side), ...]) of a line's deepest evaluation. Raises Unusable."""
        try:
            entry: Any = json.loads(line)
            deepest: Any = max(entry["evals"], key=lambda one: one["depth"], default=None)
            pvs = [(pv["line"].split()[0], _score(pv)) for pv in deepest["pvs"]]
            fen, depth = entry["fen"], deepest["depth"]
        except (ValueError, RecursionError) as error:
            raise notation.Unusable("not JSON", str(error)) from None
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise notation.Unusable("fields are missing", f"{type(error).__name__} {error}") from None
        if not pvs or not isinstance(fen, str) or not isinstance(depth, int):
            raise notation.Unusable("fields are missing", "no variation, or fen or depth of another kind")
        if depth < self.min_depth:
            raise notation.LeftOut(f"depth below {self.min_depth}")
        return fen, pvs

    def read(self, part: Part) -> ParseResult:
        lines, entries = notation.lines_of(part), Entries(part)
        found = list(notation.usable(lines, self.parse, entries))
        records, faults = notation.read_fens([fen for _, (fen, _) in found], self.source)
        listed = np.array([row for row, (_, (_, pvs)) in enumerate(found) for _ in pvs], np.int64)
        side = records["side"][listed]
        flat = [pv for _, (_, pvs) in found for pv in pvs]
        moves = [notation.code_of(uci, black) for (uci, _), black in zip(flat, side.tolist(), strict=True)]
        codes = notation.castled(records["pieces"][listed], moves)
        illegal = np.flatnonzero(notation.legal_of(records).find(listed, codes) < 0).tolist()
        wrong = {int(listed[item]): flat[item][0] for item in illegal}
        for row, (number, (fen, _)) in enumerate(found):
            if faults[row] == notation.CHESS960:
                entries.skipped[notation.CHESS960] += 1
            elif faults[row]:
                entries.refuse(number, faults[row], f"FEN '{fen}'", lines[number])
            elif row in wrong:
                entries.refuse(number, "illegal move", f"'{wrong[row]}' is not legal in '{fen}'", lines[number])
        good = np.array([not fault and row not in wrong for row, fault in enumerate(faults)], bool)
        items = good[listed]
        score = np.array([white for _, white in flat], np.int64) * np.where(side == 1, -1, 1)
        batch = _targets(records[good], (np.cumsum(good) - 1)[listed[items]], codes[items], score[items])
        return entries.result(batch, len(lines))


def _targets(records: Records, row: np.ndarray, codes: np.ndarray, score: np.ndarray) -> Batch:
    """The batch of records (N,), each with a variation at least: of M, the row, the code of the first move and the
    mover's score."""
    legal = notation.legal_of(records)
    best = np.full(len(records), -MATE)
    np.maximum.at(best, row, score)
    level = np.full(len(legal.index), NO_WEIGHT)
    behind = (values(best)[row] - values(score) + STEP // 2) // STEP
    np.minimum.at(level, legal.find(row, codes), np.minimum(behind, NO_WEIGHT))
    records["wdl"] = wdl_of_score(best)
    records["game"] = ids_of(records)
    return legal.batch(records, weights_of(level, legal.offset))
