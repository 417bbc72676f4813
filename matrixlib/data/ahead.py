"""What the next batches read of a data set elsewhere, brought here before they are made.

A batch is a function of its number, so it is known which blocks come next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import numpy as np

from matrixlib.data.cache import CacheError
from matrixlib.data.reader import LoaderError, Reader
from matrixlib.data.remote import RemoteError
from matrixlib.data.shards import BLOCK, ShardError

Batch = TypeVar("Batch")

THREADS = 8  # blocks that are on their way at once


def check_cache(reader: Reader, window: int) -> None:
    """Raises LoaderError where rows come from more blocks (window; 0: all) of a data set elsewhere at a time than its
    cache can hold: each batch would bring anew what the last one had.
    """
    if reader.remote is not None and not _fits(reader, window):
        blocks, cache, size = window or len(reader.first) - 1, reader.remote.cache.bytes, reader.block_bytes
        raise LoaderError(
            f"{reader.remote.url}: rows come from {blocks:,} blocks at a time, {size * blocks / 2**30:.3g} GiB, and "
            f"data.cache is {cache / 2**30:.3g} GiB: raise it, or set data.window_blocks, for two windows of together "
            f"{cache // size:,} blocks"
        )


def _fits(reader: Reader, window: int, windows: int = 1) -> bool:
    assert reader.remote is not None
    blocks = len(reader.first) - 1
    return min(windows * window or blocks, blocks) * reader.block_bytes <= reader.remote.cache.bytes


def with_blocks_ahead(
    batches: Generator[Batch, None, None],
    numbers: range,
    reader: Reader,
    rows: Callable[[int], np.ndarray],
    window: int,
) -> Iterator[Batch]:
    """The batches of these numbers, while the blocks of the next window come, where the cache has room for two. Without
    a window all blocks come.

    rows(i): which rows of the reader batch i is made of. window: blocks from which rows come at a time, or 0.
    """
    ahead = window * BLOCK // max(1, len(rows(numbers.start))) if window else numbers.stop - numbers.start
    walk = Walk(numbers, reader, rows, ahead if _fits(reader, window, 2) else 1)
    threading.Thread(target=walk.run, daemon=True).start()
    with closing(walk), closing(batches):
        for i, batch in zip(numbers, batches, strict=False):
            walk.reach(i + 1)
            yield batch


class Walk:
    """Goes through the batches, `ahead` of the one that is made."""

    def __init__(self, numbers: range, reader: Reader, rows: Callable[[int], np.ndarray], ahead: int) -> None:
        self._numbers, self._reader, self._rows = numbers, reader, rows
        self._end, self._ahead = numbers.start + ahead, ahead
        self._all = len(reader.first) - 1 if _fits(reader, 0) else -1
        self._moved = threading.Condition()

    def reach(self, i: int) -> None:
        """Batch i is wanted next."""
        with self._moved:
            self._end = i + self._ahead
            self._moved.notify()

    def close(self) -> None:
        with self._moved:
            self._end = -1
            self._moved.notify()

    def run(self) -> None:
        """Until everything is here, or nothing more is wanted."""
        before, once = set[int](), set[int]()
        with ThreadPool(THREADS) as pool:  # whose threads, unlike an executor's, a process does not wait for at its end
            for i in self._numbers:
                with self._moved:
                    self._moved.wait_for(partial(self._may_go, i))
                blocks = set(self._reader.blocks(self._rows(i)).tolist())
                if self._end >= 0:
                    pool.map(self._bring, sorted(blocks - before), chunksize=1)
                before, once = blocks, once | blocks
                if self._end < 0 or len(once) == self._all:
                    return

    def _may_go(self, i: int) -> bool:
        return self._end < 0 or i <= self._end

    def _bring(self, block: int) -> None:
        if self._end >= 0:
            with suppress(ShardError, RemoteError, CacheError):  # whoever reads it is told; the next may come
                self._reader.bring(block)
