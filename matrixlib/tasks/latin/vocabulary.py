"""The 35 tokens, and the digits of each mode.

Squares hold digit *indices* 0..n-1; a mode maps them to digits, ascending.
"""

import functools

import numpy as np

PAD, EMPTY = 0, 1  # outside the grid; a hidden cell
TOKENS = 35
NAMES = ("outside", "empty", *map(str, range(17)), *map(str, range(-16, 0)))  # of the tokens
SIDE = 16  # cells of the largest grid's side
MODES = ("standard", "zero_inclusive", "negative")


def token(digit: int) -> int:
    """Token of a digit of -16..16: 0..16 are 2..18, -16..-1 are 19..34."""
    return 2 + digit if digit >= 0 else TOKENS + digit


def digits(mode: str, size: int) -> list[int]:
    """The `size` digits of a mode, ascending: 1..n, 0..n-1, or -(n//2)..n//2 (0 only for odd n)."""
    if mode == "negative":
        return [digit for digit in range(-(size // 2), size // 2 + 1) if digit or size % 2]
    return list(range(1, size + 1) if mode == "standard" else range(size))


@functools.cache
def token_table() -> np.ndarray:
    """(modes, 17, 16) int64: token of each digit index, by mode and size; PAD if none."""
    table = np.full((len(MODES), SIDE + 1, SIDE), PAD, np.int64)
    for number, mode in enumerate(MODES):
        for size in range(1, SIDE + 1):
            table[number, size, :size] = [token(digit) for digit in digits(mode, size)]
    return table
