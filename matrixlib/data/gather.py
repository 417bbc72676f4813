"""Rows of many mapped shards into one batch: the loader's inner loop, compiled, without a step for each shard."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from matrixlib.data.shards import OFFSET, Batch, Layout, Shard
from matrixlib.hardware.kernels import kernel

Ints = np.ndarray  # (B,) int64
AHEAD = 32  # rows


@cast("Callable[[Any], Callable[[Any], Any]]", intrinsic)  # which binds `context` by itself
def _pointer(context: Any, address: Any) -> Any:
    """The integer `address` as a pointer."""

    def code(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), code


class ChangedRow(Exception):
    """A row whose place in a ragged array lies outside it: the file has changed since its block was checked."""

    def __init__(self, row: int, member: str) -> None:
        super().__init__(row, member)
        self.row, self.member = row, member


@kernel
def _runs(address: Ints, row: Ints, size: Ints, start: Ints, length: Ints) -> int:
    """start and length (B,) of the items of each row, from the offsets (n + 1,) that lie at its `address`.

    Returns the first row whose items are not among the `size` (B,) that there are, -1 where all are. Offsets are read
    from a file that another program may change at any time, and a wrong one would be a wild pointer.
    """
    for i in range(len(row)):
        offset = carray(_pointer(address[i] + 8 * row[i]), (2,), np.int64)
        first, last = offset[0], offset[1]
        if not 0 <= first <= last <= size[i]:
            return i
        start[i], length[i] = first, last - first
    return -1


@kernel
def _copy(address: Ints, length: Ints, place: Ints, target: np.ndarray) -> int:
    """`length` bytes from each `address` to target[place:]. Returns a sum of no meaning.

    The first and last byte of the next AHEAD sources are read before they are copied: the processor then waits for
    many of them at once instead of one after the other, which is three times as fast where nothing is in its caches.
    """
    touched = 0
    for start in range(0, len(address), AHEAD):
        stop = min(start + AHEAD, len(address))
        for i in range(start, stop):
            if length[i]:
                source = carray(_pointer(address[i]), (length[i],), np.uint8)
                touched += source[0] + source[length[i] - 1]
        for i in range(start, stop):
            source = carray(_pointer(address[i]), (length[i],), np.uint8)
            first = place[i]
            for k in range(length[i]):
                target[first + k] = source[k]
    return touched


def addresses(shard: Shard) -> list[int]:
    """Where the arrays of an open shard lie in memory, in the order of its layout's members."""
    return [shard.arrays[name].ctypes.data for name, _ in shard.layout.members()]


def sizes(shard: Shard) -> list[int]:
    """How many items each of those arrays has."""
    return [len(shard.arrays[name]) for name, _ in shard.layout.members()]


def gather(layout: Layout, address: np.ndarray, size: np.ndarray, rows: Ints) -> Batch:
    """The `rows` (B,) of shards whose arrays lie at `address` (members, B), one column a row, as one batch.

    size: items of those arrays, likewise. The caller has checked the rows and their blocks, and keeps the shards open.
    Raises ChangedRow.
    """
    count, out = len(rows), Batch()
    for member, (name, dtype) in enumerate(layout.members()):
        width = dtype.itemsize
        if name == "records":
            source, length, place = (address[member] + rows * width, np.full(count, width), np.arange(count) * width)
            out[name] = np.empty(count, dtype)
        elif name.endswith("_offset"):
            start, items, offset = (np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count + 1, OFFSET))
            of_group = size[member + 1]  # its first member's
            bad = _runs(address[member], rows, of_group, start, items)
            if bad >= 0:
                raise ChangedRow(bad, name)
            np.cumsum(items, out=offset[1:])
            out[name] = offset
            continue
        else:
            source, length, place = address[member] + start * width, items * width, offset[:-1] * width
            out[name] = np.empty(offset[-1], dtype)
        _copy(source, length, place, out[name].view(np.uint8))
    return out
