"""Targets of the self-supervised heads as tensors: unpacked from a batch's bit maps, or given by somebody else.

Others' targets come with data that is imported, Matrix0's shards for one, and with targets that are tried out. What is
given is cast head by head. One cast for all was the specification's mistake: whole numbers destroyed its
maps of threats, and the largest of thirteen zeros is a pawn (R154, R156).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from matrixlib.config import nearest
from matrixlib.engine.task import Batch
from matrixlib.tasks.chess import ssl_targets as ssl
from matrixlib.tasks.chess.config import SSL_CHANNELS
from matrixlib.tasks.chess.planes import unpack_maps, unpack_pieces

BOARD = (8, 8)
MAP_NUMBERS = {name: number for number, name in enumerate(ssl.MAPS)}


def target(batch: Batch, head: str) -> Tensor:
    """(B, 8, 8) target of a head on the oriented board: classes, or 0 and 1 (DESIGN: chess facts).

    control: 0, 1, 2 = sign(our attackers - theirs) + 1. A target that `given` put into the batch stands before ours.
    """
    if (name := f"target_{head}") in batch:
        return batch[name]
    if head == "piece":
        return unpack_pieces(batch["pieces"]).unflatten(1, BOARD)
    if head == "control":
        ours, theirs = (_map(batch, f"control_{side}") for side in ("ours", "theirs"))
        return 1 + ours - theirs
    return _map(batch, head)


def given(batch: Batch, targets: Tensor | Mapping[str, Tensor], heads: Sequence[str]) -> Batch:
    """The batch with targets of somebody else in the place of ours, for the named heads of the network.

    targets: as `cast_all` takes them, on the host, on the oriented board, a row a position. Raises ValueError.
    """
    found = cast_all(targets, heads)
    rows = len(batch["pieces"])
    for head, value in found.items():
        if len(value) != rows:
            raise ValueError(f"target '{head}' has {len(value)} positions, the batch has {rows}")
    return batch | {f"target_{head}": value for head, value in found.items()}


def cast_all(targets: Tensor | Mapping[str, Tensor], heads: Sequence[str]) -> dict[str, Tensor]:
    """Targets by head, each cast as `cast` does; a tensor by itself is the piece head's.

    heads: what the network has; ValueError for a target of another one.
    """
    if isinstance(targets, Tensor):
        targets = {"piece": targets}
    if not isinstance(targets, Mapping):
        raise ValueError(
            f"targets are a tensor (of the piece head) or a mapping head -> tensor, not {_kind(targets)}"
        )
    for head in targets:
        if head not in heads:
            raise ValueError(
                f"a target for '{head}', which the network has no head for{nearest(str(head), list(heads))} "
                f"(heads: {', '.join(heads) or 'none'}); add it to model.ssl or leave the target out"
            )
    return {head: cast(head, value) for head, value in targets.items()}


def cast(head: str, value: Tensor) -> Tensor:
    """One head's target as its loss takes it; values are read, so it belongs on the host.

    piece, control: int64 (B, 8, 8), from whole numbers 0..12 or 0..2 of any dtype, or from a one-hot (B, 13, 8, 8) or
    (B, 3, 8, 8). threat, pin, fork: float32 (B, 8, 8) of 0 and 1, from (B, 8, 8) or (B, 1, 8, 8). Raises ValueError
    that names the head and what is wrong.
    """
    if not isinstance(value, Tensor):
        raise ValueError(
            f"target '{head}' is {_kind(value)}; give a tensor, for example torch.as_tensor(...)"
        )
    classes = SSL_CHANNELS[head]
    shape = tuple(value.shape)
    planes = shape[1:] == (classes, *BOARD)
    if not planes and shape[1:] != BOARD:
        raise ValueError(f"target '{head}' has shape {shape}; it is (B, 8, 8) or (B, {classes}, 8, 8)")
    if value.dtype.is_complex or (value.dtype.is_floating_point and not value.isfinite().all()):
        raise ValueError(f"target '{head}' of {value.dtype} holds numbers that are none; it needs whole ones")
    if (value != value.to(torch.int64)).any():
        raise ValueError(f"target '{head}' holds fractions; it needs whole numbers, not logits or shares")
    whole = value.to(torch.int64)
    top = classes - 1 if classes > 1 and not planes else 1
    if whole.numel() and (whole.min() < 0 or whole.max() > top):
        hint = "; a signed map needs 1 added" if head == "control" and whole.min() < 0 else ""
        raise ValueError(
            f"target '{head}' runs from {int(whole.min())} to {int(whole.max())}; it needs 0 to {top}{hint}"
        )
    if shape == (classes, *BOARD) and classes > 1 and (whole.sum(0) == 1).all():
        raise ValueError(
            f"target '{head}' looks like the one-hot of one position; add its leading dimension: [None]"
        )
    if classes == 1:
        return whole.reshape(-1, *BOARD).float()
    if not planes:
        return whole
    if (whole.sum(1) != 1).any():
        bad = int((whole.sum(1) != 1).sum())
        hint = "; an empty square is class 12" if head == "piece" else ""
        raise ValueError(
            f"target '{head}' is one-hot, but on {bad} of its squares not exactly one class is set{hint}"
        )
    return whole.argmax(1)


def _map(batch: Batch, name: str) -> Tensor:
    return unpack_maps(batch["maps"][:, MAP_NUMBERS[name]])


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
