"""Squares, vocabulary and pool: uniform, valid, exactly counted, split without overlap."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from matrixlib.data.shards import Shard
from matrixlib.tasks.latin import augment, pool, squares
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


def test_cells_of_larger_squares_have_every_digit_equally_often() -> None:
    found = squares.generate(7, 1400, seed=3)
    for cell in ((0, 0), (3, 5), (6, 6)):
        hits = np.bincount(found[:, *cell], minlength=7)
        assert ((hits - 200) ** 2 / 200).sum() < 6 + 5 * np.sqrt(12)


def test_isotopy_classes_of_size_4_come_as_often_as_they_are() -> None:
    """Squares of the Klein group have 12 intercalates, the others 4: 144 and 432 of the 576."""

    def intercalates(square: np.ndarray) -> int:
        pairs = list(itertools.combinations(range(4), 2))
        return sum(square[r, c] == square[s, d] and square[r, d] == square[s, c] for r, s in pairs for c, d in pairs)

    found = [intercalates(square) for square in squares.generate(4, 2000, seed=5)]
    assert set(found) == {4, 12}
    assert abs(found.count(12) / 2000 - 144 / 576) < 0.05


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


def test_too_many_completions_are_refused() -> None:
    with pytest.raises(ValueError, match="1,000 completions or more"):
        squares.marginals(np.full((6, 6), -1), limit=1000)


# Vocabulary


def test_tokens_and_digits_are_a_bijection() -> None:
    assert [token(d) for d in (0, 16, -16, -1)] == [2, 18, 19, 34]
    assert sorted(token(d) for d in range(-16, 17)) == list(range(2, TOKENS))
    for far in (17, -17):
        with pytest.raises(ValueError, match="digits lie in"):
            token(far)


def test_digits_of_the_modes() -> None:
    assert digits("standard", 4) == [1, 2, 3, 4]
    assert digits("zero_inclusive", 4) == [0, 1, 2, 3]
    assert digits("negative", 5) == [-2, -1, 0, 1, 2]
    assert digits("negative", 4) == [-2, -1, 1, 2]
    with pytest.raises(ValueError, match="unknown mode 'cages'"):
        digits("cages", 4)
    table = token_table()
    for number, mode in enumerate(MODES):
        for size in range(1, SIDE + 1):
            row = table[number, size]
            assert row[:size].tolist() == [token(digit) for digit in sorted(digits(mode, size))]
            assert (row[size:] == PAD).all()


# Pool


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(3, 16), st.integers(0, 100))
def test_records_hold_the_squares(size: int, seed: int) -> None:
    found = np.random.default_rng(seed).integers(0, size, (3, size, size)).astype(np.uint8)
    records = pool.pack(found)
    assert (records["size"] == size).all()
    assert np.array_equal(pool.unpack(records, size), found)
    whole = pool.unpack(records)
    assert whole.shape == (3, SIDE, SIDE)
    assert whole.sum() == found.sum()
    assert np.array_equal(pool.held_out(whole), pool.held_out(found))


def test_one_square_in_eight_is_held_out() -> None:
    assert pool.held_out(squares.every(3)).sum() == 2
    assert pool.held_out(squares.every(4)).sum() == 72
    assert abs(pool.held_out(squares.generate(9, 4000, 0)).mean() - 1 / 8) < 0.03
    found = squares.generate(9, 200, 1)
    there = augment.held_out(torch.from_numpy(found.astype(np.int64)))
    assert np.array_equal(there.numpy(), pool.held_out(found))


def test_training_and_held_out_squares_have_nothing_in_common(tmp_path: Path) -> None:
    """A split of an array of indices puts equal squares of small orders on both sides."""
    pool.build(tmp_path, range(3, 7), 800, seed=0)
    for size in range(3, 7):
        sides = {}
        for split, rows in (("train", 700), ("validation", 100)):
            shard = Shard(tmp_path / f"size{size:02}_{split}.npz", pool.LAYOUT)
            found = pool.unpack(shard.gather(np.arange(len(shard)))["records"], size)
            assert squares.is_latin(found).all()
            assert len(found) == rows
            assert shard.meta["source"] == pool.source(size)
            sides[split] = {square.tobytes() for square in found}
            assert len(sides[split]) == shard.meta["distinct"]
        assert not sides["train"] & sides["validation"]
        if size == 4:
            assert len(sides["train"]) == 576 - 72
    found = pool.read(sorted(tmp_path.glob("*_validation.npz")))
    assert [(size, len(made)) for size, made in found.items()][:2] == [(3, 2), (4, 72)]
    assert all(pool.held_out(made).all() and squares.is_latin(made).all() for made in found.values())
    before = {path: path.read_bytes() for path in tmp_path.glob("*.npz")}
    pool.build(tmp_path, range(3, 7), 800, seed=0)  # nothing is made twice
    other = tmp_path / "again"
    pool.build(other, [6], 800, seed=0)
    again = Shard(other / "size06_train.npz", pool.LAYOUT).arrays["records"]
    assert np.array_equal(again, Shard(tmp_path / "size06_train.npz", pool.LAYOUT).arrays["records"])
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.npz")}


def test_too_few_squares_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.squares 1 is too few"):
        pool.build(tmp_path, [9], 1, seed=0)


# Isotopism


def moved(square: np.ndarray, keys: range) -> np.ndarray:
    """One square (n, n) under the permutations of many keys, in a grid of 6 x 6."""
    grid = torch.zeros(len(keys), 6, 6, dtype=torch.int64)
    grid[:, : len(square), : len(square)] = torch.from_numpy(square.astype(np.int64))
    size = torch.full((len(keys),), len(square))
    found = augment.isotope(grid, size, torch.tensor(list(keys)))
    assert not found[:, len(square) :].any()
    assert not found[:, :, len(square) :].any()
    return found[:, : len(square), : len(square)].numpy()


def test_permuted_squares_are_latin_and_never_held_out() -> None:
    """The orbit of a square of size 3 is all twelve, those held out among them."""
    for size in (3, 4, 5, 6):
        start = next(s for s in squares.generate(size, 50, 2) if not pool.held_out(s[None])[0])
        found = moved(start, range(1, 2001))
        assert squares.is_latin(found).all()
        assert not pool.held_out(found).any()
        distinct = len(np.unique(found, axis=0))
        assert distinct == 10 if size == 3 else distinct > 100


def test_permutations_are_uniform() -> None:
    keys = torch.arange(1, 6001)
    for order in augment.permutations(keys, torch.full((6000,), 3), 5):
        assert (order[:, 3:] == torch.tensor([3, 4])).all()
        hits = torch.bincount(order[:, 0] * 3 + order[:, 1], minlength=9)
        hits = hits[hits > 0]
        assert len(hits) == 6
        assert ((hits - 1000).double().square() / 1000).sum() < 5 + 5 * np.sqrt(10)
    rows, columns, digit = augment.permutations(keys, torch.full((6000,), 3), 3)
    assert abs((rows[:, 0] == columns[:, 0]).double().mean() - 1 / 3) < 0.03  # independent of each other
    assert abs((rows[:, 0] == digit[:, 0]).double().mean() - 1 / 3) < 0.03


def test_a_sample_s_stream_is_its_own() -> None:
    """It depends on the key, and not on the place in the batch, the batch or the grid around it."""
    found = squares.generate(5, 8, 0).astype(np.int64)
    keys, size = torch.arange(11, 19), torch.full((8,), 5)
    whole = augment.isotope(torch.from_numpy(found), size, keys)
    for i in range(8):
        wide = torch.zeros(1, 9, 9, dtype=torch.int64)
        wide[0, :5, :5] = torch.from_numpy(found[i])
        alone = augment.isotope(wide, size[:1], keys[i : i + 1])
        assert torch.equal(alone[0, :5, :5], whole[i])
    none = augment.isotope(torch.from_numpy(found), size, torch.zeros(8, dtype=torch.int64))
    assert torch.equal(none, torch.from_numpy(found))


def test_the_stream_is_splitmix() -> None:
    """Known answers of SplitMix64 with seed 1234567 (Steele, Lea and Flood; as Rosetta Code gives them)."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = augment.random_scores(torch.tensor([1234567]), 3)[0].tolist()
    assert found == [value >> 2 for value in known]
