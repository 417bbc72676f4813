"""Latin squares, exactly: random ones, all of a small order, all completions of a puzzle.

A square is an (n, n) array of digits 0..n-1, each once in every row and column. All compiled kernels stay in this
file, because numba's cache does not see changes made elsewhere.
"""

from typing import Any, TypeAlias

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from matrixlib.hardware.kernels import kernel

Int: TypeAlias = Any  # inside a kernel: int64
U8: TypeAlias = NDArray[np.uint8]
I8: TypeAlias = NDArray[np.int8]
I64: TypeAlias = NDArray[np.int64]
U64: TypeAlias = NDArray[np.uint64]

COUNTS = {1: 1, 2: 2, 3: 12, 4: 576, 5: 161_280}
"""Number of Latin squares of an order (OEIS A002860), of those that `every` lists."""


@kernel
def _below(state: U64, n: Int) -> Int:
    """A random integer of 0..n-1; SplitMix64 on the one-element `state`."""
    state[0] += uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    z = z ^ (z >> uint64(31))
    return np.int64((z >> uint64(32)) * uint64(n) >> uint64(32))


@kernel
def _one(line: I8, state: U64, proper: bool) -> Int:
    """Index of a 1 in `line`: the only one, or one of two at random where the square is improper."""
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
    """Moves of Jacobson and Matthews on the incidence cube, from a proper square until `visits` others have been met.

    bad: room for (row, column, digit) of the -1 of an improper square.
    """
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
    """`count` squares from one chain, 2 n**2 proper squares apart, after 10 n**3 from the cyclic one."""
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
    """(count, size, size) uint8 random Latin squares, uniform over all of that order; repeats are possible.

    The chain of Jacobson and Matthews, "Generating uniformly distributed random Latin squares" (1996), whose moves pass
    through improper squares (one cell of the incidence cube at -1). Its stationary distribution is uniform; only proper
    squares are counted and taken. The same arguments give the same squares. Raises ValueError for a size outside 2..16.
    """
    if not 2 <= size <= 16:
        raise ValueError(f"size must lie in 2..16, not {size}")
    out = np.empty((count, size, size), np.uint8)
    state: U64 = np.random.SeedSequence([seed, size]).generate_state(1, np.uint64).astype(np.uint64)
    _chain(size, count, state, out)
    return out


def is_latin(squares: np.ndarray) -> np.ndarray:
    """(count,) bool: which of (count, n, n) hold each of 0..n-1 once in every row and column."""
    n = squares.shape[-1]
    digits = np.arange(n)
    rows, columns = (np.sort(squares, axis=axis) for axis in (2, 1))
    return (rows == digits).all((1, 2)) & (columns == digits[:, None]).all((1, 2))


@kernel
def _search(cells: I8, counts: I64, limit: Int, grids: I8) -> Int:
    """Count completions of `cells` (n, n), -1 empty: depth first, the cell with the fewest candidates next.

    counts (n, n, n): how many completions have each digit in each cell. The first len(grids) completions are
    written to `grids`. Stops at `limit`. Returns their number.
    """
    n = len(cells)
    rows, columns = np.zeros(n, np.int64), np.zeros(n, np.int64)
    empty = 0
    for r, c in np.ndindex(n, n):
        if cells[r, c] < 0:
            empty += 1
        else:
            rows[r] |= 1 << cells[r, c]
            columns[c] |= 1 << cells[r, c]
    full = (1 << n) - 1
    at = np.zeros((empty + 1, 2), np.int64)  # the cell filled at each depth
    left = np.zeros(empty + 1, np.int64)  # its digits that are not tried yet
    solutions, depth = 0, 0
    while depth >= 0:
        if depth == empty:
            if solutions < len(grids):
                grids[solutions] = cells
            solutions += 1
            for r, c in np.ndindex(n, n):
                counts[r, c, cells[r, c]] += 1
            depth -= 1
            if solutions >= limit:
                return solutions
        else:
            fewest = n + 1
            for r, c in np.ndindex(n, n):
                if cells[r, c] < 0:
                    options = full & ~(rows[r] | columns[c])
                    number = 0
                    while options:
                        options &= options - 1
                        number += 1
                    if number < fewest:
                        fewest = number
                        at[depth, 0], at[depth, 1] = r, c
            left[depth] = full & ~(rows[at[depth, 0]] | columns[at[depth, 1]])
        while depth >= 0:  # the next digit at this depth, or back
            r, c = at[depth]
            if cells[r, c] >= 0:
                rows[r] &= ~(1 << cells[r, c])
                columns[c] &= ~(1 << cells[r, c])
                cells[r, c] = -1
            if left[depth]:
                digit = 0
                while not left[depth] >> digit & 1:
                    digit += 1
                left[depth] &= left[depth] - 1
                cells[r, c] = digit
                rows[r] |= 1 << digit
                columns[c] |= 1 << digit
                depth += 1
                break
            depth -= 1
    return solutions


def every(size: int) -> np.ndarray:
    """All Latin squares of an order up to 5, (count, size, size) uint8."""
    if not 1 <= size <= 5:
        raise ValueError(f"there are too many squares of size {size} to list; generate some")
    grids = np.empty((COUNTS[size], size, size), np.int8)
    _search(np.full((size, size), -1, np.int8), np.zeros((size, size, size), np.int64), 1 << 62, grids)
    return grids.astype(np.uint8)


def marginals(puzzle: np.ndarray, limit: int = 1_000_000) -> tuple[np.ndarray, int]:
    """How many completions of `puzzle` (n, n), -1 = empty, have each digit in each cell: (n, n, n) int64.

    Also their number. Divided by it, this is what a perfect network predicts from squares drawn uniformly. The
    givens must not contradict each other. Raises ValueError at `limit` completions.
    """
    n = len(puzzle)
    counts = np.zeros((n, n, n), np.int64)
    number = int(_search(puzzle.astype(np.int8), counts, limit, np.empty((0, n, n), np.int8)))
    if number >= limit:
        raise ValueError(f"this puzzle has {limit:,} completions or more; reveal more cells")
    return counts, number
