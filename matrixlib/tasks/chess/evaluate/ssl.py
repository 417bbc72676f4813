"""What the self-supervised heads of a network say about positions, beside the exact targets of python-chess."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import chess
import numpy as np
import torch
from numpy.typing import NDArray

from matrixlib.data.loader import Loader
from matrixlib.engine.task import Batch
from matrixlib.tasks.chess.evaluate import oracle
from matrixlib.tasks.chess.evaluate.net import INPUTS, Net
from matrixlib.tasks.chess.planes import unpack_maps
from matrixlib.tasks.chess.ssl_targets import hide, target
from matrixlib.tasks.chess.task import boards_of

Classes = NDArray[np.uint8]

BATCH = 128  # positions of one pass


@dataclass(frozen=True)
class HeadOutput:
    """What a head says about N positions of the side to move.

    log_p: (N, c, 8, 8) float32 log-probabilities of the classes, c = 2 for maps of 0 and 1. truth: (N, 8, 8) uint8
    class. squares: (N, 8, 8) bool, those that count. content: (N, 8, 8) uint8, what the network is shown on the square:
    0-11 pieces, 12 nothing.
    """

    log_p: NDArray[np.float32]
    truth: Classes
    squares: NDArray[np.bool_]
    content: Classes

    @property
    def classes(self) -> int:
        """Number of classes; 2 for a map."""
        return self.log_p.shape[1]

    @property
    def likeliest(self) -> Classes:
        """(N, 8, 8) likeliest class."""
        return self.log_p.argmax(1).astype(np.uint8)

    def nats(self, classes: Classes) -> NDArray[np.float64]:
        """(N, 8, 8) minus log-probability of these classes."""
        return -np.take_along_axis(self.log_p, classes[:, None].astype(np.int64), 1)[:, 0].astype(np.float64)

    @staticmethod
    def joined(parts: Sequence[HeadOutput]) -> HeadOutput:
        """The outputs for all positions of the parts."""
        return HeadOutput(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(HeadOutput)))


@dataclass(frozen=True)
class HeadOutputs:
    """Positions, and what each head says about them."""

    boards: tuple[chess.Board, ...]
    heads: dict[str, HeadOutput]

    @cached_property
    def exact(self) -> dict[str, Classes]:
        """Head -> (N, 8, 8) targets by python-chess."""
        maps = [oracle.maps(board) for board in self.boards]
        return {head: np.stack([one[head] for one in maps]) for head in self.heads}

    def wrong_targets(self) -> dict[str, int]:
        """Squares on which the targets that the network is trained on differ from those of python-chess, by head."""
        return {
            head: int(((output.truth != self.exact[head]) & output.squares).sum())
            for head, output in self.heads.items()
        }


def head_outputs(net: Net, loader: Loader, positions: int = 2048, seed: int = 0) -> HeadOutputs:
    """What each head of the network says about `positions` held-out positions, 0: all of them.

    The piece head says it of squares that are hidden from it, as in training. ValueError for a network without heads.
    """
    heads = net.task.config.model.ssl
    if not heads:
        raise ValueError("the network has no self-supervised heads: name some in model.ssl and train it")
    parts: dict[str, list[HeadOutput]] = {head: [] for head in heads}
    boards: list[chess.Board] = []
    hiding = frozenset({"piece"} & set(heads))
    for batch, hidden in batches(net, loader, positions, BATCH, seed):
        boards += boards_of(batch)
        for inputs, names in ((hidden, hiding), (batch, frozenset(heads) - hiding)):
            if names:
                arrays = {name: inputs[name].numpy() for name in INPUTS}
                arrays |= {"hidden": inputs["hidden"].numpy()} if inputs is hidden else {}
                out = net.predict(arrays, names)
                for head in names:
                    parts[head].append(_head_output(head, out[f"ssl/{head}"], inputs))
    joined = {head: HeadOutput.joined(outputs) for head, outputs in parts.items()}
    return HeadOutputs(tuple(boards), joined)


def batches(net: Net, loader: Loader, positions: int, size: int, seed: int) -> Iterator[tuple[Batch, Batch]]:
    """Held-out batches, whole and with squares hidden in every row."""
    share = net.task.config.data.hidden_squares
    rng = np.random.default_rng(seed)
    for batch in loader.sequential(size, sample=positions):
        squares = hide(rng, len(batch["pieces"]), 1.0, share)
        yield batch, batch | {"hidden": torch.from_numpy(squares)}


def _head_output(head: str, probability: np.ndarray, batch: Batch) -> HeadOutput:
    if probability.shape[1] == 1:
        probability = np.concatenate([1 - probability, probability], axis=1)
    truth, content = (target(batch, name).numpy().astype(np.uint8) for name in (head, "piece"))
    squares = np.ones_like(truth, bool)
    if head == "piece":
        squares = unpack_maps(batch["hidden"]).bool().numpy()
        content = np.where(squares, np.uint8(oracle.EMPTY), content)
    return HeadOutput(np.log(np.maximum(probability, 1e-12)), truth, squares, content)
