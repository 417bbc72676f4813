"""Rows of many mapped shards into one batch: the loader's inner loop, compiled, without a step for each shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from matrixlib.data.shards import OFFSET, Batch, Layout, Shard

Ints = np.ndarray  # (B,) int64


@cast("Callable[[Any], Callable[[Any], Any]]", intrinsic)  # which binds `context` by itself
def _pointer(context: Any, address: Any) -> Any:
    """The integer `address` as a pointer."""

    def code(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(address), code


@njit(cache=True)
def _runs(address: Ints, row: Ints, start: Ints, length: Ints) -> None:
    """start and length (B,) of the items of each row, from the offsets (n + 1,) that lie at its `address`."""
    for i in range(len(row)):
        offset = carray(_pointer(address[i] + 8 * row[i]), (2,), np.int64)
        start[i], length[i] = offset[0], offset[1] - offset[0]


@njit(cache=True)
def _copy(address: Ints, length: Ints, place: Ints, target: np.ndarray) -> None:
    """`length` bytes from each `address` to target[place:]."""
    for i in range(len(address)):
        source = carray(_pointer(address[i]), (length[i],), np.uint8)
        first = place[i]
        for k in range(length[i]):
            target[first + k] = source[k]


def addresses(shard: Shard) -> list[int]:
    """Where the arrays of an open shard lie in memory, in the order of its layout's members."""
    return [shard.arrays[name].ctypes.data for name, _ in shard.layout.members()]


def gather(layout: Layout, address: np.ndarray, rows: Ints) -> Batch:
    """The `rows` (B,) of shards whose arrays lie at `address` (members, B), one column a row, as one batch.

    The caller has checked the rows and their blocks, and keeps the shards open: nothing is checked here.
    """
    count, out = len(rows), Batch()
    for member, (name, dtype) in enumerate(layout.members()):
        size = dtype.itemsize
        if name == "records":
            source, length, place = (
                address[member] + rows * size,
                np.full(count, size),
                np.arange(count) * size,
            )
            out[name] = np.empty(count, dtype)
        elif name.endswith("_offset"):
            start, items, offset = (
                np.empty(count, np.int64),
                np.empty(count, np.int64),
                np.zeros(count + 1, OFFSET),
            )
            _runs(address[member], rows, start, items)
            np.cumsum(items, out=offset[1:])
            out[name] = offset
            continue
        else:
            source, length, place = address[member] + start * size, items * size, offset[:-1] * size
            out[name] = np.empty(offset[-1], dtype)
        _copy(source, length, place, out[name].view(np.uint8))
    return out
