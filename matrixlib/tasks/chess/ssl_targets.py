"""Self-supervised targets of the chess task: tactical bit maps, made on the host, and squares to hide.

Maps follow the definitions in `bitboard.ssl_maps`; they are computed after mirroring, on the oriented board.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from matrixlib.tasks.chess import bitboard

if TYPE_CHECKING:
    from torch import Tensor

SWAPPED_COLOURS = np.array([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 12], np.uint8)
"""Piece classes with the colours exchanged."""
MAPS = ("threat", "pin", "fork", "control_ours", "control_theirs")  # axis 1 of `target_maps`


def target_maps(records: NDArray[np.void]) -> NDArray[np.uint8]:
    """Bit maps (B, 5, 8) uint8 of B records: axis 1 as `MAPS`, a byte a rank, a bit a file (a lowest)."""
    maps = bitboard.ssl_maps(records["pieces"])
    return maps.astype("<u8", copy=False).view(np.uint8).reshape(-1, len(MAPS), 8)


def head_target(batch: Mapping[str, Tensor], head: str) -> Tensor:
    """(B, 8, 8) target of a head on the oriented board, unpacked from a prepared batch: classes 0-12 of `piece` (12
    empty), 0-2 of `control` (sign of our attackers less theirs, + 1), else float 0 and 1.
    """
    from matrixlib.tasks.chess.planes import unpack_maps, unpack_pieces

    if head == "piece":
        return unpack_pieces(batch["pieces"]).unflatten(1, (8, 8))
    names = ("control_ours", "control_theirs") if head == "control" else (head,)
    maps = [unpack_maps(batch["maps"][:, MAPS.index(name)]) for name in names]
    return 1 + maps[0] - maps[1] if head == "control" else maps[0]


def draw_hidden_squares(
    rng: np.random.Generator, rows: int, rows_share: float, squares_share: float
) -> NDArray[np.uint8]:
    """Squares (B, 8) uint8 to hide at the input, bit maps like `target_maps`.

    Each of the B rows has some with probability rows_share: each of its squares with probability squares_share, and
    (unless that is 0) at least one. The other rows are all 0. Rows with hidden squares give only the piece loss.
    """
    # All numbers are drawn whatever the shares, so a row's squares do not depend on the choice of the others.
    row_draws, draws, one = rng.random(rows), rng.random((rows, 64), np.float32), rng.integers(64, size=rows)
    squares = draws < squares_share
    none = ~squares.any(axis=1)
    squares[none, one[none]] = squares_share > 0
    squares &= (row_draws < rows_share)[:, None]
    return np.packbits(squares.reshape(rows, 8, 8), axis=2, bitorder="little")[:, :, 0]
