"""What every reader of foreign data must do, for the tests of each of them; python-chess is the oracle."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import chess
import numpy as np

from matrixlib.data import shards
from matrixlib.data.imports import Reader, Refused
from matrixlib.tasks.chess.records import LAYOUT, SOURCES, policy_index, to_board


@dataclass(frozen=True)
class Whole:
    """What a file gave, all parts together."""

    batch: shards.Batch
    entries: int
    stored: int
    refused: list[Refused]
    skipped: Counter[str]
    warned: Counter[str]
    parts: int

    @property
    def reasons(self) -> Counter[str]:
        return Counter(item.reason for item in self.refused)

    def policy(self, row: int) -> dict[str, int]:
        """The weights of a row above 0, by UCI move."""
        board = to_board(self.batch["records"][row])
        start, stop = self.batch["policy_offset"][row : row + 2]
        weights = dict(
            zip(self.batch["policy_index"][start:stop], self.batch["policy_weight"][start:stop], strict=True)
        )
        named = {move.uci(): int(weights[policy_index(move, board.turn)]) for move in board.legal_moves}
        return {uci: weight for uci, weight in named.items() if weight}

    def boards(self) -> list[chess.Board]:
        return [to_board(record) for record in self.batch["records"]]


def read_file(reader: Reader, path: Path) -> Whole:
    """Reads all parts of a file as a worker would, and checks what holds for every reader."""
    reader = copy.deepcopy(reader)
    results, first = [], 0
    for number, part in enumerate(reader.parts(path)):
        assert (part.number, part.first) == (number, first)
        result = reader.read(part)
        first += result.entries
        numbers = [item.entry for item in result.refused]
        assert numbers == sorted(set(numbers))
        assert all(part.first <= n < first for n in numbers)
        assert all(item.reason and item.detail for item in result.refused)
        assert all(count > 0 for count in (*result.skipped.values(), *result.warned.values()))
        results.append(result)
    batch = shards.concat([result.batch for result in results], LAYOUT)
    check_batch(batch, reader.source)
    return Whole(
        batch,
        first,
        sum(result.stored for result in results),
        [item for result in results for item in result.refused],
        sum((Counter(result.skipped) for result in results), Counter()),
        sum((Counter(result.warned) for result in results), Counter()),
        len(results),
    )


def check_batch(batch: shards.Batch, source: str) -> None:
    """Every record is a position with all its legal moves in order; weights and win-draw-loss are whole or absent."""
    shards.check(batch, LAYOUT)
    assert (batch["records"]["source"] == SOURCES[source]).all()
    offset = batch["policy_offset"]
    for row, record in enumerate(batch["records"]):
        board = to_board(record)
        legal = sorted(policy_index(move, board.turn) for move in board.legal_moves)
        assert legal
        assert batch["policy_index"][offset[row] : offset[row + 1]].tolist() == legal
        assert int(batch["policy_weight"][offset[row] : offset[row + 1]].astype(int).sum()) in (0, 65535)
        assert int(record["wdl"].astype(int).sum()) in (0, 65535)
        assert record["ply"] % 2 == record["side"]


def accounted(whole: Whole, entries: Sequence[str], refused: Mapping[str, str], left_out: Mapping[str, str]) -> None:
    """Every entry is stored, refused for its reason with its text, or left out and counted."""
    assert whole.parts > 1
    assert whole.entries == len(entries)
    wrong = [(number, refused[entry], entry) for number, entry in enumerate(entries) if entry in refused]
    assert [(item.entry, item.reason, item.text) for item in whole.refused] == wrong
    assert whole.skipped == Counter(left_out[entry] for entry in entries if entry in left_out)
    assert whole.stored == len(entries) - len(wrong) - whole.skipped.total()


def same(one: shards.Batch, other: shards.Batch) -> bool:
    """Whether two batches are equal, bit by bit."""
    return all(np.array_equal(one[name], other[name]) for name in one)
