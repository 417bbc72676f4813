"""Latin squares: random ones, all of a small order, all completions of a puzzle; and their pool on disk.

A square is an (n, n) array of digits 0..n-1, each once in every row and column. About one in eight is held out, by a
hash of its cells, so by distinct square. Permuting rows, columns and digits gives all others of its isotopy class (1,
2, 2, 22, 564 classes for sizes 3 to 7): there held out means "this square was never seen", from size 8 (1,676,267
classes) most likely "nothing like it". At size 3 two of twelve are held out, and a network that memorised the other ten
is wrong on them.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from filelock import FileLock
from numba import uint64
from numpy.typing import NDArray

from matrixlib.data.catalogue import Catalogue, mark_outliers
from matrixlib.data.order import MIX
from matrixlib.data.shards import Layout, Shard, ShardError, write_shard
from matrixlib.hardware.kernels import kernel
from matrixlib.tasks.latin.vocabulary import SIDE

Int: TypeAlias = Any  # inside a kernel: int64
U8: TypeAlias = NDArray[np.uint8]
I8: TypeAlias = NDArray[np.int8]
I64: TypeAlias = NDArray[np.int64]
U64: TypeAlias = NDArray[np.uint64]

COUNTS = {1: 1, 2: 2, 3: 12, 4: 576, 5: 161_280}  # Latin squares of an order, in `every` (OEIS A002860)


@kernel
def _below(state: U64, n: Int) -> Int:
    """A random integer in 0..n-1; SplitMix64 on the one-element `state`."""
    state[0] += uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    z = z ^ (z >> uint64(31))
    return np.int64((z >> uint64(32)) * uint64(n) >> uint64(32))


@kernel
def _one(line: I8, state: U64, proper: bool) -> Int:
    """Index of a 1 in `line`: the only one, or a random one of two if the square is improper."""
    first = -1
    for i in range(len(line)):
        if line[i] == 1:
            if proper:
                return i
            if first < 0:
                first = i
            else:
                return i if _below(state, 2) else first
    return first


@kernel
def _walk(cube: I8, bad: I64, visits: Int, state: U64) -> None:
    """Moves on the incidence cube until `visits` proper squares were met. bad: place of the -1."""
    n = len(cube)
    proper: Any = True
    while visits:
        if proper:
            r, c, s = _below(state, n), _below(state, n), _below(state, n)
            while cube[r, c, s]:
                r, c, s = _below(state, n), _below(state, n), _below(state, n)
        else:
            r, c, s = bad[0], bad[1], bad[2]
        r1 = _one(cube[:, c, s], state, proper)
        c1 = _one(cube[r, :, s], state, proper)
        s1 = _one(cube[r, c, :], state, proper)
        cube[r, c, s] += 1
        cube[r, c1, s1] += 1
        cube[r1, c, s1] += 1
        cube[r1, c1, s] += 1
        cube[r1, c, s] -= 1
        cube[r, c1, s] -= 1
        cube[r, c, s1] -= 1
        cube[r1, c1, s1] -= 1
        proper = cube[r1, c1, s1] >= 0
        bad[0], bad[1], bad[2] = r1, c1, s1
        visits -= proper


@kernel
def _chain(n: Int, count: Int, state: U64, out: U8) -> None:
    """`count` squares of one chain, 2 n**2 proper squares apart, after a burn-in of 10 n**3 from the cyclic square."""
    cube = np.zeros((n, n, n), np.int8)
    for r, c in np.ndindex(n, n):
        cube[r, c, (r + c) % n] = 1
    bad = np.zeros(3, np.int64)
    _walk(cube, bad, 10 * n**3, state)
    for i in range(count):
        _walk(cube, bad, 2 * n**2, state)
        for r, c in np.ndindex(n, n):
            out[i, r, c] = _one(cube[r, c], state, True)


def generate(size: int, count: int, seed: int) -> np.ndarray:
    """(count, size, size) uint8 random Latin squares, uniform over the order; repeats are possible.

    Jacobson and Matthews, "Generating uniformly distributed random Latin squares" (1996): a chain through improper
    squares (one cell of the incidence cube at -1) with uniform stationary distribution; only proper squares are
    counted. Deterministic. ValueError for a size outside 2..16.
    """
    if not 2 <= size <= 16:
        raise ValueError(f"size must lie in 2..16, not {size}")
    out = np.empty((count, size, size), np.uint8)
    state: U64 = np.random.SeedSequence([seed, size]).generate_state(1, np.uint64).astype(np.uint64)
    _chain(size, count, state, out)
    return out


def is_latin(squares: np.ndarray) -> np.ndarray:
    """(count,) bool: which (count, n, n) are Latin squares."""
    n = squares.shape[-1]
    digits = np.arange(n)
    rows, columns = (np.sort(squares, axis=axis) for axis in (2, 1))
    return (rows == digits).all((1, 2)) & (columns == digits[:, None]).all((1, 2))


@kernel
def _search(cells: I8, rows: I64, columns: I64, counts: I64, limit: Int, grids: I8, found: Int) -> Int:
    """`found` plus the completions of `cells` (n, n), up to `limit`, depth first, most constrained cell next. rows,
    columns (n,): bits of their digits. The first are written to `grids`; counts (n, n, n): completions with each digit
    in each cell."""
    n = len(cells)
    row, column, fewest = -1, -1, n + 1
    left: Int = 0
    for r, c in np.ndindex(n, n):
        if cells[r, c] < 0:
            options: Int = ~(rows[r] | columns[c])
            number: Int = 0
            for digit in range(n):
                number += options >> digit & 1
            if number < fewest:
                row, column, fewest, left = r, c, number, options
    if row < 0:
        if found < len(grids):
            grids[found] = cells
        for r, c in np.ndindex(n, n):
            counts[r, c, cells[r, c]] += 1
        return found + 1
    for digit in range(n):
        if left >> digit & 1 and found < limit:
            rows[row] ^= 1 << digit
            columns[column] ^= 1 << digit
            cells[row, column] = digit
            found = _search(cells, rows, columns, counts, limit, grids, found)
            rows[row] ^= 1 << digit
            columns[column] ^= 1 << digit
    cells[row, column] = -1
    return found


def _complete(puzzle: np.ndarray, limit: int, grids: np.ndarray) -> tuple[np.ndarray, int]:
    """(counts, number) of `_search`."""
    n = len(puzzle)
    bits = np.where(puzzle < 0, 0, 1 << np.maximum(puzzle, 0).astype(np.int64))
    counts, rows, columns = np.zeros((n, n, n), np.int64), np.bitwise_or.reduce(bits, 1), np.bitwise_or.reduce(bits, 0)
    return counts, int(_search(puzzle.astype(np.int8), rows, columns, counts, limit, grids, 0))


def every(size: int) -> np.ndarray:
    """All Latin squares of an order up to 5, (count, size, size) uint8."""
    if not 1 <= size <= 5:
        raise ValueError(f"there are too many squares of size {size} to list; generate some")
    grids = np.empty((COUNTS[size], size, size), np.int8)
    _complete(np.full((size, size), -1), 1 << 62, grids)
    return grids.astype(np.uint8)


def marginals(puzzle: np.ndarray, limit: int = 1_000_000) -> tuple[np.ndarray, int]:
    """Completions of `puzzle` (n, n), -1 = empty, with each digit in each cell, (n, n, n) int64, and their number; the
    ratio is the perfect prediction. ValueError at `limit` completions."""
    counts, number = _complete(puzzle, limit, np.empty((0, *puzzle.shape), np.int8))
    if number >= limit:
        raise ValueError(f"this puzzle has {limit:,} completions or more; reveal more cells")
    return counts, number


# The pool

LAYOUT = Layout("latin", 1, np.dtype([("size", "u1"), ("cells", "u1", (SIDE * SIDE // 2,))]), {})
"""A record: size, and digit indices of a 16 x 16 grid, two cells a byte (low half first), 0 outside."""
HELD_OUT = 8  # one square in so many
PRIME = 2**31 - 1
CREATED = "2026-01-01T00:00:00Z"  # creation time of every pool: pools are a function of sizes, count and seed


@functools.cache
def hash_weights() -> np.ndarray:
    """(16, 16) int64 weights below 2**31 of the splitting hash; part of the format."""
    state = np.random.SeedSequence(1).generate_state(SIDE * SIDE, np.uint32)
    return (state >> np.uint32(1)).astype(np.int64).reshape(SIDE, SIDE)


def held_out(squares: np.ndarray) -> np.ndarray:
    """(count,) bool: which squares (count, n, n) are held out; zero padding has no effect."""
    n = squares.shape[-1]
    total = (squares.astype(np.int64) * hash_weights()[:n, :n]).sum((1, 2))
    return total % PRIME % HELD_OUT == 0


def permutations(key: np.ndarray, size: np.ndarray, side: int) -> np.ndarray:
    """(3, B, side) three permutations of 0..size-1 from keys (B,), by SplitMix64 (Steele et al. 2014); places from
    `size` on are fixed."""
    z = key.astype(np.uint64)[:, None] + MIX[0] * np.arange(1, 3 * SIDE + 1, dtype=np.uint64)
    z = (z ^ z >> np.uint64(30)) * MIX[1]
    z = (z ^ z >> np.uint64(27)) * MIX[2]
    scores = (z ^ z >> np.uint64(31)).reshape(-1, 3, SIDE)[:, :, :side]
    outside = np.arange(side) >= size[:, None, None]
    order = np.where(outside, np.iinfo(np.uint64).max, scores).argsort(2, kind="stable")
    return np.moveaxis(order, 1, 0)


def isotopes(squares: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Squares (B, N, N) with rows, columns, digits permuted inside size (B,) by keys (B,), unless then held out."""
    side = squares.shape[-1]
    rows, columns, digits = permutations(key, size, side)
    moved = np.take_along_axis(np.take_along_axis(squares, rows[:, :, None], 1), columns[:, None], 2)
    moved = np.take_along_axis(digits, moved.reshape(-1, side * side), 1).reshape(squares.shape) * inside(size, side)
    return np.where(held_out(moved)[:, None, None], squares, moved.astype(np.uint8))


def inside(size: np.ndarray, side: int) -> np.ndarray:
    """(B, side, side) bool: cells inside grids of these sizes (B,)."""
    places = np.arange(side) < size[:, None]
    return places[:, :, None] & places[:, None, :]


def pack(squares: np.ndarray) -> np.ndarray:
    """Squares (count, n, n) of digit indices to records of LAYOUT."""
    count, n, _ = squares.shape
    grid = np.zeros((count, SIDE, SIDE), np.uint8)
    grid[:, :n, :n] = squares
    flat = grid.reshape(count, -1)
    records = np.zeros(count, LAYOUT.record)
    records["size"] = n
    records["cells"] = flat[:, ::2] | flat[:, 1::2] << 4
    return records


def unpack(records: np.ndarray, side: int = SIDE) -> np.ndarray:
    """(count, side, side) uint8 digit indices of records; squares must fit into `side`."""
    cells = records["cells"]
    grid = np.stack([cells & 15, cells >> 4], axis=2).reshape(-1, SIDE, SIDE)
    return np.ascontiguousarray(grid[:, :side, :side])


def read(paths: Iterable[Path | str]) -> dict[int, np.ndarray]:
    """Size -> distinct squares (count, n, n) in shards. Raises ShardError."""
    shards = [Shard(path, LAYOUT) for path in paths]
    records = np.concatenate([shard.gather(np.arange(len(shard)))["records"] for shard in shards])
    sizes = np.unique(records["size"]).tolist()
    return {n: np.unique(unpack(records[records["size"] == n], n), axis=0) for n in sizes}


def source(size: int) -> str:
    return f"size {size}"


def quality(records: np.ndarray) -> dict[str, float]:
    """Figures of a shard: shares of Latin squares and of distinct ones; entropy of the digits over ln n, 1 if Latin."""
    from scipy.stats import entropy  # takes a second to import

    kinds = [(n, records[records["size"] == n]) for n in np.unique(records["size"]).tolist()]
    shown = [unpack(part, min(max(1, n), SIDE)) for n, part in kinds]
    spread = [float(entropy(np.bincount(squares.ravel()))) / np.log(max(2, squares.shape[1])) for squares in shown]
    return {
        "latin": float(np.concatenate([is_latin(squares) for squares in shown]).mean()),
        "distinct": len(np.unique(records)) / len(records),
        "entropy": float(np.average(spread, weights=list(map(len, shown)))),
    }


def compared(figures: Mapping[str, Any]) -> dict[str, float]:
    """Those of `quality` for `mark_outliers`."""
    return {name: figures.get(name, np.nan) for name in ("latin", "distinct", "entropy")}


def mark_suspicious(folder: Path) -> None:
    """Measure the new shards of a folder and mark outliers of each source and split (`build` writes one of each)."""
    catalogue = Catalogue(folder)
    new = [row for row in catalogue.shards() if not (row.quality or row.remote)]
    for row in new:
        with suppress(ShardError):  # the loader names it
            catalogue.set_quality(row.name, quality(np.asarray(Shard(row.path, LAYOUT).arrays["records"])))
    mark_outliers(catalogue, [row.name for row in new], compared)


def build(folder: Path | str, sizes: Sequence[int], count: int, seed: int) -> None:
    """Write missing shards of `sizes` to `folder`, each with its share of `count` rows.

    Few distinct squares are repeated, so that every size is drawn equally often.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        for size in sizes:
            paths = {split: folder / f"size{size:02}_{split}.npz" for split in ("train", "validation")}
            if all(path.exists() for path in paths.values()):
                continue
            all_of_them = size <= 5 and COUNTS[size] <= count
            squares = every(size) if all_of_them else np.unique(generate(size, count, seed), axis=0)
            squares = np.random.default_rng([seed, size]).permutation(squares)
            out = held_out(squares)
            rows = {"train": count - count // HELD_OUT, "validation": max(1, count // HELD_OUT)}
            for split, part in (("train", squares[~out]), ("validation", squares[out])):
                if not len(part):
                    raise ValueError(f"data.squares {count} is too few: none of size {size} is in {split}")
                meta = {"source": source(size), "generator": "Jacobson-Matthews", "seed": seed, "split": split}
                meta |= {"created": CREATED, "distinct": min(len(part), rows[split])}
                records = pack(np.resize(part, (rows[split], size, size)))
                write_shard(paths[split], LAYOUT, {"records": records}, meta)
