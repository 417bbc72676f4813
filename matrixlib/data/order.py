"""Order of rows: permutations of an epoch (all rows or windows), mixtures of sources, the rows of each rank. No list of
N rows is made; an order's state is a position in its endless stream."""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np

from matrixlib.hardware.kernels import kernel

ROUNDS = 8
ORDER, WINDOW, PREPARE, SAMPLE, SEQUENTIAL = range(5)  # domains of keys, so that no two purposes share a stream
MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SIZE_AT = {"random": 0, "standard_normal": 0, "integers": 2, "normal": 2, "uniform": 2}
"""Generator methods that `prepare` may use -> position of their `size` argument."""
PERIOD = 1000  # places after which a mixture's pattern repeats: weights are rounded to 1/1000


def make_key(*parts: int) -> bytes:
    """64 bytes that depend on every part (signed 64-bit integers)."""
    return hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts)).digest()


def generator(*parts: int) -> np.random.Generator:
    """An independent random stream for these parts (counter-based Philox)."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(make_key(*parts)[:16], "little")))


def permute(index: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """Images of each `index` under a permutation of 0..n-1 chosen by `key` (64 bytes); same shape, int64. A Feistel
    network (Luby and Rackoff 1988; cycle walking: Black and Rogaway 2002) with SplitMix64's finaliser."""
    assert n >= 1
    flat = np.ascontiguousarray(index, np.uint64).ravel()
    assert not len(flat) or int(flat.max()) < n, "cycle walking ends only from inside"
    keys = np.frombuffer(key, "<u8", ROUNDS).astype(np.uint64)
    out = _walk(flat, np.uint64(n), np.uint64(max(2, (n - 1).bit_length())), keys)
    return out.astype(np.int64).reshape(np.shape(index))


@kernel
def _walk(index: np.ndarray, n: np.uint64, bits: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Each `index` (B,), uint64, sent through the network on 0..2**bits-1 until below n."""
    one = np.uint64(1)
    low_bits = bits >> one
    low_mask, high_mask = (one << low_bits) - one, (one << bits - low_bits) - one
    out = np.empty_like(index)
    for i, value in enumerate(index):
        while True:
            low, high = value & low_mask, value >> low_bits
            for pair in range(0, len(keys), 2):  # a round xors one half with a hash of the other
                low ^= _mix(high, keys[pair]) & low_mask
                high ^= _mix(low, keys[pair + 1]) & high_mask
            value = low | high << low_bits
            if value < n:
                break
        out[i] = value
    return out


@kernel
def _mix(value: np.uint64, key: np.uint64) -> np.uint64:
    value = (value + key) * MIX[0]
    value = (value ^ value >> np.uint64(30)) * MIX[1]
    value = (value ^ value >> np.uint64(27)) * MIX[2]
    return value ^ value >> np.uint64(31)


@dataclass(frozen=True, eq=False)
class Order:
    """Rows by position of the endless stream. first (blocks+1,): first row of each block, then N. window 0: an epoch
    permutes all rows; else the blocks, and the rows of each `window` blocks."""

    first: np.ndarray
    seed: int
    phase: int
    window: int
    _blocks: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Rows (B,) at the ascending `places` (B,) of the stream: t is position t % N of epoch t // N."""
        n = int(self.first[-1])
        epochs = places // n
        return np.concatenate([self._epoch(int(e), places[epochs == e] % n) for e in np.unique(epochs)])

    def _epoch(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        if not self.window:
            key = make_key(ORDER, self.seed, self.phase, epoch)
            return permute(positions, int(self.first[-1]), key)
        order, start = self._permuted_blocks(epoch)
        edges = np.append(start[:-1][:: self.window], start[-1])
        windows = np.searchsorted(edges, positions, side="right") - 1
        out = np.empty(len(positions), np.int64)
        for w in np.unique(windows):
            mine, size = windows == w, int(edges[w + 1] - edges[w])
            key = make_key(WINDOW, self.seed, self.phase, epoch, int(w))
            inside = edges[w] + permute(positions[mine] - edges[w], size, key)
            place = np.searchsorted(start, inside, side="right") - 1
            out[mine] = self.first[order[place]] + inside - start[place]
        return out

    def _permuted_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in the order of an epoch, and the position where each starts; recent epochs are cached."""
        known = self._blocks.get(epoch)
        if known is None:
            blocks = len(self.first) - 1
            order = permute(np.arange(blocks), blocks, make_key(ORDER, self.seed, self.phase, epoch))
            if len(self._blocks) > 1:  # another thread may do the same
                self._blocks.clear()
            known = order, np.concatenate([[0], np.cumsum(np.diff(self.first)[order])])
            self._blocks[epoch] = known
        return known


def merge_ranges(skip: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges (start, stop) sorted and merged. ValueError unless 0 <= start < stop."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted((int(a), int(b)) for a, b in skip):
        if not 0 <= start < stop:
            raise ValueError(f"cannot skip batches ({start}, {stop}): start must be at least 0 and below stop")
        if out and start <= out[-1][1]:
            start, stop = out[-1][0], max(stop, out.pop()[1])
        out.append((start, stop))
    return tuple(out)


def places_of(weights: Mapping[str, float]) -> dict[str, int]:
    """Number of PERIOD places of each source, by largest remainder. ValueError if a weight is too small."""
    total = sum(weights.values())
    exact = {name: weight / total * PERIOD for name, weight in weights.items()}
    places = {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: places[name] - exact[name])
    for name in by_rest[: PERIOD - sum(places.values())]:
        places[name] += 1
    if small := [name for name, count in places.items() if count < 1]:
        raise ValueError(f"the weight of source '{small[0]}' is under a thousandth of all; raise it or leave it out")
    return places


@dataclass(frozen=True, eq=False)
class Mixture:
    """A weighted mixture of sources. parts: their orders, with consecutive rows. places: of PERIOD, spread evenly."""

    parts: tuple[Order, ...]
    places: tuple[int, ...]

    @cached_property
    def _pattern(self) -> tuple[np.ndarray, np.ndarray]:
        """(PERIOD,) source of each place, and the number of earlier places of that source."""
        which = np.repeat(np.arange(len(self.places)), self.places)
        rank = np.concatenate([np.arange(count) for count in self.places])
        spread = np.argsort((rank + 0.5) / np.array(self.places)[which], kind="stable")
        return which[spread], rank[spread]

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Rows (B,) at the ascending `places` (B,) of the stream."""
        which, rank = self._pattern
        turn, place = np.divmod(places, PERIOD)
        out = np.empty(len(places), np.int64)
        first = 0
        for source, order in enumerate(self.parts):
            mine = which[place] == source
            if mine.any():
                out[mine] = first + order.rows(turn[mine] * self.places[source] + rank[place[mine]])
            first += int(order.first[-1])
        return out


@dataclass(frozen=True)
class RankSlice:
    """Every `size`-th row of a batch from row `rank` on, so that batches do not depend on the number of ranks."""

    rank: int = 0
    size: int = 1

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """This rank's rows of (B, ...)."""
        return rows[self.rank :: self.size]

    def stream(self, generator: np.random.Generator, rows: int) -> np.random.Generator:
        """Generator of a batch of `rows` rows that returns this rank's numbers only."""
        return generator if self.size == 1 else cast(np.random.Generator, RowGenerator(generator, rows, self))


class RowGenerator:
    """Draws for every row of a batch and returns one rank's: results do not depend on the number of ranks."""

    def __init__(self, generator: np.random.Generator, rows: int, ranks: RankSlice) -> None:
        self._generator, self._rows, self._ranks = generator, rows, ranks
        self._own = len(range(ranks.rank, rows, ranks.size))

    def __getattr__(self, name: str) -> Callable[..., np.ndarray]:
        if name not in SIZE_AT:
            raise ValueError(f"prepare: with several ranks it cannot draw with `{name}`, but with {', '.join(SIZE_AT)}")

        def draw(*args: Any, **options: Any) -> np.ndarray:
            place, before = SIZE_AT[name], args
            given = options.pop("size", None) if len(args) <= place else args[place]
            size = (given,) if isinstance(given, (int, np.integer)) else tuple(given or ())
            if not size or size[0] != self._own:
                raise ValueError(f"prepare: `{name}` draws for its {self._own} rows, so its first size is not {given}")
            if len(args) <= place:  # integers(64, size=rows), say
                options["size"] = (self._rows, *size[1:])
            else:
                before = (*args[:place], (self._rows, *size[1:]), *args[place + 1 :])
            return self._ranks.rows(getattr(self._generator, name)(*before, **options))

        return draw
