"""Squares, vocabulary and pool: uniform, valid, exactly counted, split without overlap."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.data.shards import Shard
from matrixlib.tasks.latin import pool, squares
from matrixlib.tasks.latin.vocabulary import MODES, PAD, SIDE, TOKENS, digits, token, token_table

# Squares


@pytest.mark.parametrize("size", range(2, 17))
def test_every_generated_square_is_latin(size: int) -> None:
    """A random swap of four cells leaves 0 % of the squares Latin."""
    found = squares.generate(size, 5, seed=1)
    assert found.shape == (5, size, size)
    assert squares.is_latin(found).all()
    swapped = found.copy()
    swapped[:, 0, :2] = swapped[:, 0, 1::-1]
    assert not squares.is_latin(swapped).any()


@pytest.mark.parametrize("size", [3, 4])
def test_generated_squares_are_uniform(size: int) -> None:
    """Chi-square over all squares of the order; 5 standard deviations is one failure in a million."""
    every, each = squares.every(size), 50
    number = {square.tobytes(): i for i, square in enumerate(every)}
    found = squares.generate(size, each * len(every), seed=7)
    hits = np.bincount([number[square.tobytes()] for square in found], minlength=len(every))
    freedom = len(every) - 1
    statistic = ((hits - each) ** 2 / each).sum()
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_the_same_seed_gives_the_same_squares_and_another_gives_others() -> None:
    one, two = squares.generate(6, 20, 0), squares.generate(6, 20, 1)
    assert np.array_equal(one, squares.generate(6, 20, 0))
    assert not (one == two).all((1, 2)).any()
    with pytest.raises(ValueError, match=r"size must lie in 2\.\.16"):
        squares.generate(17, 1, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_squares_of_a_small_order(size: int) -> None:
    found = squares.every(size)
    assert len(np.unique(found, axis=0)) == len(found) == squares.COUNTS[size]
    assert squares.is_latin(found).all()
    with pytest.raises(ValueError, match="too many"):
        squares.every(6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 575), st.integers(0, 2**16 - 1))
def test_marginals_are_those_of_the_completions(index: int, mask: int) -> None:
    every = squares.every(4)
    hidden = np.array([mask >> i & 1 for i in range(16)], bool).reshape(4, 4)
    puzzle = np.where(hidden, -1, every[index].astype(int))
    completions = every[((every == puzzle) | hidden).all((1, 2))]
    counts, number = squares.marginals(puzzle)
    assert number == len(completions)
    assert np.array_equal(counts, (completions[..., None] == np.arange(4)).sum(0))
    with pytest.raises(ValueError, match="10 completions or more"):
        squares.marginals(np.full((4, 4), -1), limit=10)


# Vocabulary


def test_tokens_and_digits_are_a_bijection() -> None:
    assert [token(d) for d in (0, 16, -16, -1)] == [2, 18, 19, 34]
    assert sorted(token(d) for d in range(-16, 17)) == list(range(2, TOKENS))
    with pytest.raises(ValueError, match="digits lie in"):
        token(17)


def test_digits_of_the_modes() -> None:
    assert digits("standard", 4) == [1, 2, 3, 4]
    assert digits("zero_inclusive", 4) == [0, 1, 2, 3]
    assert digits("negative", 5) == [-2, -1, 0, 1, 2]
    assert digits("negative", 4) == [-2, -1, 1, 2]
    for number, mode in enumerate(MODES):
        row = token_table()[number, 6]
        assert row[:6].tolist() == [token(digit) for digit in sorted(digits(mode, 6))]
        assert (row[6:] == PAD).all()


# Pool


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(3, 16), st.integers(0, 100))
def test_records_hold_the_squares(size: int, seed: int) -> None:
    found = np.random.default_rng(seed).integers(0, size, (3, size, size)).astype(np.uint8)
    records, whole = pool.pack(found), pool.unpack(pool.pack(found))
    assert (records["size"] == size).all()
    assert np.array_equal(whole, np.pad(found, [(0, 0), (0, SIDE - size), (0, SIDE - size)]))
    assert np.array_equal(pool.unpack(records, size), found)
    assert np.array_equal(pool.held_out(whole), pool.held_out(found))


def test_training_and_held_out_squares_have_nothing_in_common(tmp_path: Path) -> None:
    """A split of an array of indices puts equal squares of small orders on both sides."""
    assert [pool.held_out(squares.every(size)).sum() for size in (3, 4)] == [2, 72]
    assert abs(pool.held_out(squares.generate(9, 4000, 0)).mean() - 1 / 8) < 0.03
    pool.build(tmp_path, range(3, 7), 800, seed=0)
    for size in range(3, 7):
        sides = {}
        for split, rows in (("train", 700), ("validation", 100)):
            shard = Shard(tmp_path / f"size{size:02}_{split}.npz", pool.LAYOUT)
            found = pool.unpack(shard.gather(np.arange(len(shard)))["records"], size)
            assert squares.is_latin(found).all()
            assert (len(found), shard.meta["source"]) == (rows, pool.source(size))
            sides[split] = {square.tobytes() for square in found}
            assert len(sides[split]) == shard.meta["distinct"]
        assert not sides["train"] & sides["validation"]
    held = pool.read(sorted(tmp_path.glob("*_validation.npz")))
    assert [(size, len(made)) for size, made in held.items()][:2] == [(3, 2), (4, 72)]
    assert all(pool.held_out(made).all() for made in held.values())
    before = {path: path.read_bytes() for path in tmp_path.glob("*.npz")}
    pool.build(tmp_path, range(3, 7), 800, seed=0)  # nothing is made twice
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.npz")}
    pool.build(tmp_path / "again", [6], 800, seed=0)
    assert (tmp_path / "again" / "size06_train.npz").read_bytes() == before[tmp_path / "size06_train.npz"]
    with pytest.raises(ValueError, match=r"data\.squares 1 is too few"):
        pool.build(tmp_path, [9], 1, seed=0)


# Isotopism


def test_permuted_squares_are_latin_and_never_held_out() -> None:
    """The orbit of a square of size 3 is all twelve, those held out among them."""
    keys = np.arange(1, 2001)
    for size in (3, 4, 5, 6):
        start = next(s for s in squares.generate(size, 50, 2) if not pool.held_out(s[None])[0])
        grid = np.zeros((len(keys), 6, 6), np.uint8)
        grid[:, :size, :size] = start
        moved = pool.isotopes(grid, np.full(len(keys), size), keys)
        found = moved[:, :size, :size]
        assert moved.sum() == found.sum(), "nothing outside"
        assert squares.is_latin(found).all()
        assert not pool.held_out(found).any()
        distinct = len(np.unique(found, axis=0))
        assert distinct == 10 if size == 3 else distinct > 100


def test_permutations_are_uniform_and_independent() -> None:
    keys = np.arange(1, 6001)
    orders = pool.permutations(keys, np.full(6000, 3), 5)
    for order in orders:
        assert (order[:, 3:] == [3, 4]).all()
        hits = np.bincount(order[:, 0] * 3 + order[:, 1])
        assert (hits > 0).sum() == 6
        assert ((hits[hits > 0] - 1000) ** 2 / 1000).sum() < 5 + 5 * np.sqrt(10)
    for one, other in ((0, 1), (0, 2)):
        assert abs((orders[one][:, 0] == orders[other][:, 0]).mean() - 1 / 3) < 0.03


def test_a_square_s_stream_depends_on_its_key_alone() -> None:
    """Not on the place in the batch, or on the grid around it; known answers of SplitMix64 with seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert pool.random_scores(np.array([1234567]), 3)[0].tolist() == known
    found, keys, size = squares.generate(5, 8, 0), np.arange(11, 19), np.full(8, 5)
    whole = pool.isotopes(found, size, keys)
    for i in range(8):
        wide = np.zeros((1, 9, 9), np.uint8)
        wide[0, :5, :5] = found[i]
        assert np.array_equal(pool.isotopes(wide, size[:1], keys[i : i + 1])[0, :5, :5], whole[i])
