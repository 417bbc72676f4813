"""What the blocks of student and teacher add to their streams, compared by centred kernel alignment.

Shapes: B rows, C and D channels of the two networks, S squares of a row: 64, or 1 that is the mean over the board.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from matrixlib.tasks.chess.config import TeacherConfig

LEAST = 1e-12
"""Norm of features below which they are taken as none."""


def pairs(config: TeacherConfig, own: int, theirs: int) -> Sequence[tuple[int, int]]:
    """(block of the student, block of the teacher), of networks with so many blocks: as given, or the student's blocks
    at the same depths in the teacher. ValueError where there is no such block.
    """
    layers = config.layers or tuple((block, max((block + 1) * theirs // own - 1, 0)) for block in range(own))
    for place, (name, count) in enumerate((("the student", own), ("the teacher", theirs))):
        if wrong := [pair[place] for pair in layers if pair[place] >= count] or [0] * (count == 0):
            raise ValueError(f"teacher.layers: {name} has {count} blocks, counted from 0, so none of number {wrong[0]}")
    return layers


def additions(
    stream: Sequence[Tensor], blocks: Iterable[int], oriented: Callable[[Tensor], Tensor] | None
) -> list[Tensor]:
    """What each of these blocks adds to a network's stream, (B, C, S) in fp32.

    stream: what goes into the blocks, and what comes out of each. oriented: turns maps to the oriented board; None: the
    mean over the squares will do.
    """
    added = [stream[block + 1].float() - stream[block].float() for block in blocks]
    if oriented is None:
        return [maps.mean((2, 3))[:, :, None] for maps in added]
    return [oriented(maps).flatten(2) for maps in added]


def loss(own: Sequence[Tensor], theirs: Sequence[Tensor], rows: Tensor) -> Tensor:
    """1 - `alignment`, the mean over the pairs of blocks, times the number of `rows` (B,) bool.

    Of several micro-batches it is the mean of theirs: alignment is of all their rows together, and does not add up.
    """
    aligned = torch.stack([alignment(x, y, rows) for x, y in zip(own, theirs, strict=True)])
    return rows.sum() * (1 - aligned.mean())


def alignment(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """() linear CKA of features (B, C, S) and (B, D, S), 0 to 1, every square of the `rows` (B,) bool a sample
    (Kornblith et al. 2019, arXiv:1905.00414). Turning or scaling one side as a whole changes nothing, so widths differ.
    """
    x, y = _samples(x, rows), _samples(y, rows)
    spread = (x.T @ x).norm() * (y.T @ y).norm()
    return (x.T @ y).square().sum() / spread.clamp(min=LEAST)


def _samples(features: Tensor, rows: Tensor) -> Tensor:
    """(B * S, C): centred, of norm 1, so that no sum overflows; zeros of other rows."""
    weight = rows.float().repeat_interleave(features.shape[2])[:, None]
    samples = torch.where(weight > 0, features.transpose(1, 2).flatten(0, 1), 0.0)
    centred = (samples - samples.sum(0) / weight.sum().clamp(min=1)) * weight
    return centred / centred.norm().clamp(min=LEAST)
