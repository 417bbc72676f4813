"""A trained chess network for inference."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import chess
import numpy as np
import torch
from torch import Tensor

from matrixlib.engine.network import Network
from matrixlib.engine.task import Batch, to_device
from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.blocks import AttentionBlock
from matrixlib.tasks.chess.lc0.attention import Encoder
from matrixlib.tasks.chess.records import move_from_index
from matrixlib.tasks.chess.task import ChessTask
from matrixlib.tasks.chess.uci.protocol import read_position, score_text

if TYPE_CHECKING:
    from pathlib import Path

    from IPython.display import HTML

    from matrixlib.play.search import SearchResult

BOARDS_PER_BATCH = 512
POSITION = ("pieces", "state", "policy_index")  # inputs of a prepared batch; networks fill up the history themselves
INPUTS = (*POSITION, "past", "past_state", "known")  # with those of the history, in batches of tasks that have one


@dataclass(frozen=True)
class Evaluation:
    """A network's evaluation of one position, from the side to move.

    moves: UCI -> probability of all legal moves, most probable first. wdl: (win, draw, loss), None for a scalar head.
    value: expected result in [-1, 1]. ssl: head -> probabilities (classes, 8, 8) on the real board (row 0 = rank 1,
    column 0 = a-file); "ours" is the side to move. search: result of `analysis.analyse`. moves_left: plies to the end
    of the game, None without such a head.
    """

    board: chess.Board
    moves: dict[str, float]
    wdl: tuple[float, ...] | None
    value: float
    ssl: dict[str, np.ndarray] = field(default_factory=dict)
    search: SearchResult | None = None
    moves_left: float | None = None

    @property
    def fen(self) -> str:
        return self.board.fen()

    @property
    def best(self) -> str | None:
        """Most probable move in UCI; None without a legal move."""
        return next(iter(self.moves), None)

    @property
    def visits(self) -> dict[str, float]:
        """UCI -> share of the search's visits, visited moves only; empty without a search."""
        shares = zip(self.search.moves, self.search.policy, strict=True) if self.search else ()
        return {move_from_index(int(move), self.board).uci(): float(share) for move, share in shares if share > 0}

    @property
    def line(self) -> tuple[str, ...]:
        """The search's principal variation in SAN."""
        walk, line = self.board.copy(), list[str]()
        for index in self.search.line if self.search else ():
            line.append(walk.san_and_push(move_from_index(index, walk)))
        return tuple(line)

    @property
    def maps(self) -> dict[str, np.ndarray]:
        """Head -> map (8, 8) on the real board: a probability, or the likeliest class."""
        return {head: (p[0] if len(p) == 1 else p.argmax(0)).astype(np.float32) for head, p in self.ssl.items()}

    @property
    def summary(self) -> str:
        side = "White" if self.board.turn else "Black"
        chances = "" if self.wdl is None else "win {:.0%}, draw {:.0%}, loss {:.0%}; ".format(*self.wdl)
        return f"{side} to move, {self.value:+.2f}: {chances}{self._words(self.moves) or 'the game is over'}"

    def __str__(self) -> str:
        """The FEN, the network's evaluation and the search's result."""
        lines = [self.fen, f"network  {self.summary}"]
        if result := self.search:
            plies = int(result.plies[result.moves == result.best][0])
            score = f"{result.value:+.2f}, {score_text(result.value, plies)}, {result.simulations} simulations"
            lines += [f"search   {score}; {self._words(self.visits)}", f"line     {' '.join(self.line)}"]
        return "\n".join(lines) + "\n"

    def _words(self, shares: Mapping[str, float]) -> str:
        """The five moves with the largest shares (UCI -> share), in SAN."""
        best = sorted(shares.items(), key=lambda item: -item[1])[:5]
        return ", ".join(f"{self.board.san(chess.Move.from_uci(move))} {share:.0%}" for move, share in best)

    def boards(self, others: Mapping[str, Mapping[str, float]] = {}, heading: str = "") -> HTML:
        """Boards with the moves of network, search and `others` (title -> UCI -> probability) as arrows, and a map per
        self-supervised head. heading: HTML above them."""
        from matrixlib.tasks.chess.plots import Card, boards, map_fill, map_legend

        moves = {"network": self.moves, **({"search": self.visits} if self.search else {}), **others}
        cards = [Card(self.board, title, shares) for title, shares in moves.items()]
        for head, values in self.maps.items():
            cards.append(Card(self.board, head, fill=map_fill(head, values), note=map_legend(head)))
        return boards(cards, heading=heading)


class Net(Network):
    task: ChessTask

    def evaluate(self, positions: str | Sequence[str]) -> list[Evaluation]:
        """Evaluate FENs or UCI positions (`startpos moves e2e4 e7e5`, `fen <FEN> moves ...`); networks with history use
        the moves. ValueError names a bad FEN or move."""
        return list(self.evaluate_boards(_boards(positions)))

    def evaluate_boards(self, boards: Sequence[chess.Board]) -> Iterator[Evaluation]:
        """Evaluate boards; networks with history use their move stacks."""
        maps: list[str] = sorted(self.task.config.model.ssl)
        left_head = ["moves_left"] if self.task.config.model.moves_left.channels else []
        for start in range(0, len(boards), BOARDS_PER_BATCH):
            part = boards[start : start + BOARDS_PER_BATCH]
            batch = self._pack(part)
            out = self.predict(batch, frozenset(maps + left_head))
            probability = np.exp(out["policy"])
            for row, board in enumerate(part):
                legal = np.flatnonzero(batch["policy_index"][row] >= 0)
                order = legal[np.argsort(-probability[row, legal], kind="stable")]
                names = (move_from_index(int(index), board).uci() for index in batch["policy_index"][row, order])
                moves = dict(zip(names, probability[row, order].tolist(), strict=True))
                wdl = tuple(out["wdl"][row].tolist()) if "wdl" in out else None
                ssl = {head: out["ssl/" + head][row][:, :: 1 if board.turn else -1] for head in maps}
                left = float(out["moves_left"][row]) if "moves_left" in out else None
                yield Evaluation(board, moves, wdl, float(out["value"][row]), ssl, moves_left=left)

    def save_lc0(self, path: Path | str) -> str:
        """Write the network as a weight file of Lc0 (`.pb.gz`), and say so. ValueError for a network that Lc0 cannot
        run, with the options to train with, and for a path that cannot be written."""
        from matrixlib.tasks.chess.lc0.weights import write

        return write(self.model, path, self.updates)

    def values(self, boards: Sequence[chess.Board]) -> np.ndarray:
        """Expected results (N,) in [-1, 1] of the sides to move."""
        parts = [boards[start : start + BOARDS_PER_BATCH] for start in range(0, len(boards), BOARDS_PER_BATCH)]
        values = [self.predict(self._pack(part))["value"] for part in parts]
        return np.concatenate([np.zeros(0, np.float32), *values])

    def attention(self, board: chess.Board) -> np.ndarray:
        """Attention weights (blocks, heads, 64, 64) of a position: what each square (axis 2) looks at (axis 3), sums 1.

        Squares are python-chess's of the real board, a1 = 0. ValueError for a network without attention blocks.
        """
        blocks = [block for block in self.model.modules() if isinstance(block, AttentionBlock | Encoder)]
        if not blocks:
            raise ValueError("this network has no attention blocks: train one with model.attention.every above 0")
        weights: list[Tensor] = []

        def look(block: Any, inputs: Any) -> None:
            tokens = inputs[0] if inputs[0].ndim == 3 else inputs[0].flatten(2).transpose(1, 2)
            weights.append(block.mixed(tokens, torch.eye(64, device=tokens.device).expand(1, block.heads, -1, -1))[0])

        with torch.inference_mode(), ExitStack() as hooks:
            for block in blocks:
                hooks.enter_context(block.register_forward_pre_hook(look))
            packed = {name: torch.from_numpy(array) for name, array in self._pack([board]).items()}
            self.model(self.task.planes(to_device(packed, self.runtime.torch_device)))
        found = torch.stack(weights).cpu().numpy()
        # Row 0 of the planes is rank 1 of the side to move; for Matrix0 always rank 8
        squares = np.arange(64) ^ (56 if self.task.config.model.encoding == "matrix0" or not board.turn else 0)
        return found[:, :, squares][:, :, :, squares]

    def batch(self, positions: str | Sequence[str]) -> Batch:
        """Positions (see `evaluate`) as one packed batch on the network's device, for `net.task.predict(net.model,
        batch)`, which gives `policy` (N, L) log-probabilities of `batch["policy_index"]`, `value` (N,), `wdl` (N, 3).
        """
        tensors = {name: torch.from_numpy(array) for name, array in self._pack(_boards(positions)).items()}
        return to_device(tensors, self.runtime.torch_device)

    def planes(self, positions: str | Sequence[str]) -> Tensor:
        """Positions (see `evaluate`) as float32 planes (N, C, 8, 8) on the network's device, for `net.model(planes,
        heads)`; heads: a frozenset of "policy", "value" and "ssl_<head>"."""
        return self.task.planes(self.batch(positions))

    def _pack(self, boards: Sequence[chess.Board]) -> dict[str, np.ndarray]:
        rows = records.from_boards(list(boards))
        past = (records.batch_history(boards, self.task.history),) if self.task.history else ()
        return self.task.inputs(rows, *records.legal_indices(rows), *past)


def _boards(positions: str | Sequence[str]) -> list[chess.Board]:
    texts = [positions] if isinstance(positions, str) else positions
    if not isinstance(texts, Iterable) or any(not isinstance(text, str) for text in texts):
        raise ValueError(f"give a FEN or a list of them, not {reprlib.repr(positions)}")
    return [read_position(text) for text in texts]
