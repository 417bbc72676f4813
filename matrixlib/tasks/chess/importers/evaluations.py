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
from matrixlib.tasks.chess.importers.notation import CHESS960, castled, code_of, legal_of, read_fens
from matrixlib.tasks.chess.importers.parsing import Unusable, lines_in_parts, lines_of, opened
from matrixlib.tasks.chess.keys import ids_of
from matrixlib.tasks.chess.records import Records
from matrixlib.tasks.chess.scores import bounded_score, wdl_of_score
from matrixlib.tasks.chess.stockfish.client import MATE
from matrixlib.tasks.chess.stockfish.labels import NO_WEIGHT, STEP, values, weights_of

PART = 1 << 19  # bytes, about 700 positions


def parse(line: str) -> tuple[str, int, list[tuple[str, int]]]:
    """(FEN, depth, [(first move, score from White's side), ...]) of a line's deepest evaluation. Raises Unusable."""
    try:
        entry: Any = json.loads(line)
        deepest: Any = max(entry["evals"], key=lambda one: one["depth"], default=None)
        pvs = [(pv["line"].split()[0], _score(pv)) for pv in deepest["pvs"]]
        fen, depth = entry["fen"], deepest["depth"]
    except (ValueError, RecursionError) as error:
        raise Unusable("not JSON", str(error)) from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Unusable("fields are missing", f"{type(error).__name__} {error}") from None
    if not pvs or not isinstance(fen, str) or not isinstance(depth, int):
        raise Unusable("fields are missing", "no variation, or fen or depth of another kind")
    return fen, depth, pvs


def _score(pv: dict[str, Any]) -> int:
    """The score of a variation from White's side as `stockfish.score_of` counts it; KeyError, TypeError without one."""
    kind = "cp" if "cp" in pv else "mate"
    if not isinstance(pv[kind], int):
        raise TypeError(f"{kind} is {pv[kind]!r}")
    return bounded_score(kind, pv[kind])


@dataclass(frozen=True)
class Evaluations:
    """min_depth: shallower positions are left out (and counted)."""

    source: ClassVar[str] = "evaluations"
    min_depth: int = 0

    def parts(self, path: Path) -> Iterator[Part]:
        with opened(path) as file:
            if not file.read(1 << 16).lstrip().startswith(b"{"):
                raise ValueError(f"{path} has no JSON object in its first line: give Lichess's evaluations")
        yield from lines_in_parts(path, PART)

    def read(self, part: Part) -> ParseResult:
        lines = lines_of(part)
        entries = Entries(part)
        numbers, fens, variations = [], [], []
        for number, line in enumerate(lines):
            try:
                fen, depth, pvs = parse(line)
            except Unusable as error:
                entries.refuse(number, error.reason, error.detail, line)
                continue
            if depth < self.min_depth:
                entries.skipped[f"depth below {self.min_depth}"] += 1
                continue
            numbers.append(number)
            fens.append(fen)
            variations.append(pvs)
        records, faults = read_fens(fens, self.source)
        listed = np.array([row for row, pvs in enumerate(variations) for _ in pvs], np.int64)
        side = records["side"][listed]
        flat = [pv for pvs in variations for pv in pvs]
        moves = [code_of(uci, black) for (uci, _), black in zip(flat, side.tolist(), strict=True)]
        codes = castled(records["pieces"][listed], moves)
        wrong = {}
        for item in np.flatnonzero(legal_of(records).find(listed, codes) < 0).tolist():
            wrong[int(listed[item])] = flat[item][0]
        score = np.array([white for _, white in flat], np.int64) * np.where(side == 1, -1, 1)
        good = np.zeros(len(numbers), bool)
        for row, number in enumerate(numbers):
            if faults[row] == CHESS960:
                entries.skipped[CHESS960] += 1
            elif faults[row]:
                entries.refuse(number, faults[row], f"FEN '{fens[row]}'", lines[number])
            elif row in wrong:
                detail = f"'{wrong[row]}' is not legal in '{fens[row]}'"
                entries.refuse(number, "illegal move", detail, lines[number])
            else:
                good[row] = True
        items = good[listed]
        batch = _targets(records[good], (np.cumsum(good) - 1)[listed[items]], codes[items], score[items])
        return entries.result(batch, len(lines))


def _targets(records: Records, row: np.ndarray, codes: np.ndarray, score: np.ndarray) -> Batch:
    """The batch of records (N,), each with a variation at least: of M, the row, the code of the first move and the
    mover's score."""
    legal = legal_of(records)
    best = np.full(len(records), -MATE)
    np.maximum.at(best, row, score)
    level = np.full(len(legal.index), NO_WEIGHT)
    behind = (values(best)[row] - values(score) + STEP // 2) // STEP
    np.minimum.at(level, legal.find(row, codes), np.minimum(behind, NO_WEIGHT))
    records["wdl"] = wdl_of_score(best)
    records["game"] = ids_of(records)
    return legal.batch(records, weights_of(level, legal.offset))
