"""A trained network for use: load a run, evaluate positions.

`Net.predict` is the one way to its opinion: for `evaluate`, searches, matches, self-play and UCI.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import chess
import numpy as np

from matrixlib.engine.network import Network
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.task import ChessTask
from matrixlib.tasks.chess.uci.protocol import read_position

BATCH = 512  # boards turned into arrays at a time
INPUTS = ("pieces", "state", "policy_index")
"""Of a batch of `prepare`: what networks are asked with. One that looks at history fills it up by its own rule."""


@dataclass(frozen=True)
class Evaluation:
    """A network's evaluation of one position, from the side to move.

    moves: UCI -> probability, most probable first, all legal moves. wdl: (win, draw, loss), None for a scalar head.
    value: expected result in [-1, 1]. ssl: head -> float array (classes, 8, 8) of probabilities on the real board
    (row 0 = rank 1, column 0 = file a); "ours" in them is the side to move.
    """

    fen: str
    moves: dict[str, float]
    wdl: tuple[float, float, float] | None
    value: float
    ssl: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """Most probable move in UCI; None where there is no legal move."""
        return next(iter(self.moves), None)


class Net(Network):
    """A network that plays chess."""

    task: ChessTask

    def evaluate(self, positions: str | Sequence[str]) -> list[Evaluation]:
        """Evaluate FENs, or positions as UCI has them (`startpos moves e2e4 e7e5`, `fen <FEN> moves ...`).

        The moves matter to networks that look at what came before. ValueError names a bad FEN or move.
        """
        texts = [positions] if isinstance(positions, str) else list(positions)
        return list(self.evaluate_boards([read_position(text) for text in texts]))

    def evaluate_boards(self, boards: Sequence[chess.Board]) -> Iterator[Evaluation]:
        """Evaluate boards, with the moves that led to them, in batches of 512."""
        heads: frozenset[str] = frozenset(self.task.config.model.ssl)
        for start in range(0, len(boards), BATCH):
            part = boards[start : start + BATCH]
            batch = self._pack(part)
            out = self.predict(batch, heads)
            probability = np.exp(out["policy"])
            for row, board in enumerate(part):
                index = batch["policy_index"][row]
                keep = index >= 0
                order = np.argsort(-probability[row][keep], kind="stable")
                moves = {
                    move_from_index(int(index[keep][k]), board).uci(): float(probability[row][keep][k]) for k in order
                }
                wdl = out.get("wdl")
                triple = None if wdl is None else (float(wdl[row, 0]), float(wdl[row, 1]), float(wdl[row, 2]))
                ssl = {head: self._upright(out["ssl/" + head][row], board) for head in sorted(heads)}
                yield Evaluation(board.fen(), moves, triple, float(out["value"][row]), ssl)

    def values(self, boards: Sequence[chess.Board]) -> np.ndarray:
        """Expected results (N,) in [-1, 1] from each side to move, without the policy."""
        parts = [
            self.predict(self._pack(boards[start : start + BATCH]))["value"] for start in range(0, len(boards), BATCH)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def _pack(self, boards: Sequence[chess.Board]) -> dict[str, np.ndarray]:
        rows = records.from_boards(list(boards))
        past = (records.past_of(boards, self.task.history),) if self.task.history else ()
        return self.task.inputs(rows, *records.legal_indices(rows), *past)

    @staticmethod
    def _upright(maps: np.ndarray, board: chess.Board) -> np.ndarray:
        return maps if board.turn == chess.WHITE else maps[:, ::-1]
