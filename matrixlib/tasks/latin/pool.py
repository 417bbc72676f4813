"""The pool of squares on disk: one training and one held-out shard for each size, made once.

A square is held out where a hash of its cells says so, about one in eight. So the split is by distinct square,
whatever was generated when, and an augmented square can be told from the held-out ones (see augment.py).

What that means by size: rows, columns and digits permuted in every way turn a square into all others of its isotopy
class, and there are 1, 2, 2, 22 and 564 classes for sizes 3 to 7. Nearly every class is therefore met in training,
and held out means "this square was never seen", not "nothing like it". From size 8 on (1,676,267 classes, and then
astronomically many) a held-out square's class is most likely new too. At size 3 two of the twelve squares are held
out, and a network that has learned the other ten by heart is wrong on them: judge that size by validity alone.
"""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock

from matrixlib.data.shards import Layout, Shard, write_shard
from matrixlib.tasks.latin.squares import COUNTS, every, generate
from matrixlib.tasks.latin.vocabulary import SIDE

PACKED = SIDE * SIDE // 2
LAYOUT = Layout("latin", 1, np.dtype([("size", "u1"), ("cells", "u1", (PACKED,))]), {})
"""A record: size, and the digit indices of a 16 x 16 grid, two cells a byte (low half first), 0 outside."""
HELD_OUT = 8  # one square in so many
PRIME = 2**31 - 1
CREATED = "2026-01-01T00:00:00Z"
"""Creation time in every pool, which is a function of sizes, count and seed alone: the same bytes everywhere."""


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


def distinct(size: int, count: int, seed: int) -> np.ndarray:
    """At most `count` different squares of a size in random order: all of them where there are no more."""
    if size in COUNTS and COUNTS[size] <= count and size <= 5:
        squares = every(size)
    else:
        squares = np.unique(generate(size, count, seed), axis=0)
    return np.random.default_rng([seed, size]).permutation(squares)


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
            squares = distinct(size, count, seed)
            out = held_out(squares)
            rows = {"train": count - count // HELD_OUT, "validation": max(1, count // HELD_OUT)}
            for split, part in (("train", squares[~out]), ("validation", squares[out])):
                if not len(part):
                    raise ValueError(f"data.squares {count} is too few: none of size {size} is in {split}")
                meta = {
                    "source": source(size),
                    "generator": "Jacobson-Matthews",
                    "seed": seed,
                    "split": split,
                    "created": CREATED,
                }
                meta["distinct"] = min(len(part), rows[split])
                records = pack(np.resize(part, (rows[split], size, size)))
                write_shard(paths[split], LAYOUT, {"records": records}, meta)
