"""The pool of squares on disk, one training and one held-out shard for each size, and the permutations of its squares.

A square is held out where a hash of its cells says so, about one in eight: the split is by distinct square, whatever
was generated when, and an augmented square can be told from the held-out ones. Permuted rows, columns and digits turn a
square into all others of its isotopy class, of which there are 1, 2, 2, 22 and 564 for sizes 3 to 7: there held out
means "this square was never seen", from size 8 on (1,676,267 classes) most likely "nothing like it". At size 3 two of
the twelve squares are held out, and a network that knows the other ten by heart is wrong on them.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from matrixlib.data.shards import Layout, Shard, write_shard
from matrixlib.tasks.latin.squares import COUNTS, every, generate
from matrixlib.tasks.latin.vocabulary import SIDE

LAYOUT = Layout("latin", 1, np.dtype([("size", "u1"), ("cells", "u1", (SIDE * SIDE // 2,))]), {})
"""A record: size, and the digit indices of a 16 x 16 grid, two cells a byte (low half first), 0 outside."""
HELD_OUT = 8  # one square in so many
PRIME = 2**31 - 1
CREATED = "2026-01-01T00:00:00Z"
"""Creation time in every pool, which is a function of sizes, count and seed alone: the same bytes everywhere."""
SPLITMIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@functools.cache
def hash_weights() -> np.ndarray:
    """(16, 16) int64 random weights below 2**31 of the hash that splits; part of the format."""
    state = np.random.SeedSequence(1).generate_state(SIDE * SIDE, np.uint32)
    return (state >> np.uint32(1)).astype(np.int64).reshape(SIDE, SIDE)


def held_out(squares: np.ndarray) -> np.ndarray:
    """(count,) bool: which squares (count, n, n) are held out; zeros around a square change nothing."""
    n = squares.shape[-1]
    total = (squares.astype(np.int64) * hash_weights()[:n, :n]).sum((1, 2))
    return total % PRIME % HELD_OUT == 0


def random_scores(key: np.ndarray, count: int) -> np.ndarray:
    """(B, count) uint64 random numbers from keys (B,): SplitMix64 (Steele et al. 2014)."""
    golden, first, second = (np.uint64(number) for number in SPLITMIX)
    z = key.astype(np.uint64)[:, None] + golden * np.arange(1, count + 1, dtype=np.uint64)
    z = (z ^ z >> np.uint64(30)) * first
    z = (z ^ z >> np.uint64(27)) * second
    return z ^ z >> np.uint64(31)


def permutations(key: np.ndarray, size: np.ndarray, side: int) -> np.ndarray:
    """(3, B, side) three permutations of 0..size-1, the places from `size` on left alone."""
    scores = random_scores(key, 3 * SIDE).reshape(-1, 3, SIDE)[:, :, :side]
    outside = np.arange(side) >= size[:, None, None]
    order = np.where(outside, np.iinfo(np.uint64).max, scores).argsort(2, kind="stable")
    return np.moveaxis(order, 1, 0)


def isotopes(squares: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Squares (B, N, N) uint8 with rows, columns and digits permuted inside their size (B,), by their keys (B,) alone.
    One that would become a held-out one stays as it is."""
    side = squares.shape[-1]
    rows, columns, digits = permutations(key, size, side)
    moved = np.take_along_axis(np.take_along_axis(squares, rows[:, :, None], 1), columns[:, None], 2)
    moved = np.take_along_axis(digits, moved.reshape(-1, side * side), 1).reshape(squares.shape) * inside(size, side)
    return np.where(held_out(moved)[:, None, None], squares, moved.astype(np.uint8))


def inside(size: np.ndarray, side: int) -> np.ndarray:
    """(B, side, side) bool: cells of the grids of these sizes (B,)."""
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
    """(count, side, side) uint8 digit indices of records; no square may be larger than `side`."""
    cells = records["cells"]
    grid = np.stack([cells & 15, cells >> 4], axis=2).reshape(-1, SIDE, SIDE)
    return np.ascontiguousarray(grid[:, :side, :side])


def read(paths: Iterable[Path | str]) -> dict[int, np.ndarray]:
    """Size -> its different squares (count, n, n) in shards. Raises ShardError."""
    shards = [Shard(path, LAYOUT) for path in paths]
    records = np.concatenate([shard.gather(np.arange(len(shard)))["records"] for shard in shards])
    sizes = np.unique(records["size"]).tolist()
    return {n: np.unique(unpack(records[records["size"] == n], n), axis=0) for n in sizes}


def source(size: int) -> str:
    """What the catalogue says about the shards of a size."""
    return f"size {size}"


def build(folder: Path | str, sizes: Sequence[int], count: int, seed: int) -> None:
    """Write the shards of `sizes` that are not in `folder` yet, each with its share of `count` rows.

    Where there are too few different squares they are repeated, so that every size is drawn equally often.
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
