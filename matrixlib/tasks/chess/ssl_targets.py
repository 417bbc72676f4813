"""Self-supervised targets: tactical bit maps (defined in `bitboard.ssl_maps`) and hidden squares.

They are computed on the host, after mirroring, on the oriented board.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess import bitboard

if TYPE_CHECKING:
    from torch import Tensor

SWAPPED_COLOURS = np.array([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 12], np.uint8)  # piece class -> other colour's
MAPS = ("threat", "pin", "fork", "control_ours", "control_theirs")  # axis 1 of `target_maps`


def target_maps(records: NDArray[np.void]) -> NDArray[np.uint8]:
    """Bit maps (B, 5, 8) uint8 of B records: axis 1 as `MAPS`, a byte per rank, bit 0 the a-file."""
    maps = bitboard.ssl_maps(records["pieces"])
    return maps.astype("<u8", copy=False).view(np.uint8).reshape(-1, len(MAPS), 8)


def head_target(batch: "Mapping[str, Tensor]", head: str) -> "Tensor":
    """Target (B, 8, 8) of a head on the oriented board, from a prepared batch.

    `piece`: classes 0-12 (12 empty). `control`: 0-2, sign(our attackers - theirs) + 1. Others: float 0 and 1.
    """
    from matrixlib.tasks.chess.planes import unpack_maps, unpack_pieces

    if head == "piece":
        return unpack_pieces(batch["pieces"]).unflatten(1, (8, 8))
    names = ("control_ours", "control_theirs") if head == "control" else (head,)
    maps = [unpack_maps(batch["maps"][:, MAPS.index(name)]) for name in names]
    return 1 + maps[0] - maps[1] if head == "control" else maps[0]


def piece_classes(given: Any) -> "Tensor":
    """Checked class map (B, 8, 8) int64 of piece targets from elsewhere, on their device.

    given: classes (B, 8, 8), 0-5 our P N B R Q K, 6-11 theirs, 12 empty; or one-hot (B, 13, 8, 8); a tensor or array of
    any numeric type, or a mapping with one as `piece`. On the oriented board, as the input planes: row 0 is rank 1 of
    the side to move, so Black's positions are mirrored and "ours" are Black's. ValueError names position and square.
    """
    import torch

    if isinstance(given, Mapping):
        if "piece" not in given:
            raise ValueError(f"piece targets: the mapping has no key 'piece', only {', '.join(map(str, given))}")
        given = given["piece"]
    values = (given if isinstance(given, torch.Tensor) else torch.from_numpy(np.array(given, np.float32))).float()
    one_hot = values.ndim == 4
    if values.shape[1:] != ((13, 8, 8) if one_hot else (8, 8)):
        raise ValueError(f"piece targets must be (B, 8, 8) classes or (B, 13, 8, 8) one-hot, not {tuple(values.shape)}")
    if one_hot:  # argmax alone would call a square without any class a pawn, class 0
        classes, valid = values.argmax(1), (values == 1).sum(1).eq(1) & (values == 0).sum(1).eq(12)
    else:
        classes = values.nan_to_num().long()
        valid = (values == classes) & (classes >= 0) & (classes <= 12)
    if not valid.all():
        row, rank, file = (~valid).nonzero()[0].tolist()
        found = float(values[row, ..., rank, file].sum())
        problem = f"one-hot with sum {found:g}, not a single 1" if one_hot else f"class {found:g}, not one of 0-12"
        raise ValueError(f"piece targets: position {row}, square {'abcdefgh'[file]}{rank + 1}: {problem}")
    return classes


def draw_hidden_squares(
    rng: np.random.Generator, rows: int, rows_share: float, squares_share: float
) -> NDArray[np.uint8]:
    """Bit maps (B, 8) uint8 of the squares to hide at the input.

    A row is chosen with probability rows_share; each of its squares is hidden with probability squares_share, at least
    one unless that is 0. Rows with hidden squares train only the piece head.
    """
    # All numbers are drawn in any case, so that a row's squares do not depend on those of other rows
    row_draws, draws, one = rng.random(rows), rng.random((rows, 64), np.float32), rng.integers(64, size=rows)
    squares = draws < squares_share
    none = ~squares.any(axis=1)
    squares[none, one[none]] = squares_share > 0
    squares &= (row_draws < rows_share)[:, None]
    return np.packbits(squares.reshape(rows, 8, 8), axis=2, bitorder="little")[:, :, 0]
