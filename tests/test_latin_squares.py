"""Latin squares: uniform, valid, exactly counted, split without overlap; decoding and its baselines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_latin_task import latin_task

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard, write_shard
from matrixlib.tasks.latin import decode, pool
from matrixlib.tasks.latin.losses import inside, violations
from matrixlib.tasks.latin.spec import TASK
from matrixlib.tasks.latin.vocabulary import MODES, PAD, SIDE, TOKENS, digits, token, token_table

# Squares


@pytest.mark.parametrize("size", range(2, 17))
def test_every_generated_square_is_latin(size: int) -> None:
    """A random swap of four cells leaves 0 % of the squares Latin."""
    found = pool.generate(size, 5, seed=1)
    assert found.shape == (5, size, size)
    assert pool.is_latin(found).all()
    swapped = found.copy()
    swapped[:, 0, :2] = swapped[:, 0, 1::-1]
    assert not pool.is_latin(swapped).any()


@pytest.mark.parametrize("size", [3, 4])
def test_generated_squares_are_uniform(size: int) -> None:
    """Chi-square over all squares of the order; 5 standard deviations is one failure in a million."""
    every, each = pool.every(size), 50
    number = {square.tobytes(): i for i, square in enumerate(every)}
    found = pool.generate(size, each * len(every), seed=7)
    hits = np.bincount([number[square.tobytes()] for square in found], minlength=len(every))
    freedom = len(every) - 1
    statistic = ((hits - each) ** 2 / each).sum()
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_squares_of_a_small_order(size: int) -> None:
    found = pool.every(size)
    assert len(np.unique(found, axis=0)) == len(found) == pool.COUNTS[size]
    assert pool.is_latin(found).all()
    with pytest.raises(ValueError, match="too many"):
        pool.every(6)
    with pytest.raises(ValueError, match=r"size must lie in 2\.\.16"):
        pool.generate(17, 1, 0)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 575), st.integers(0, 2**16 - 1))
def test_marginals_are_those_of_the_completions(index: int, mask: int) -> None:
    every = pool.every(4)
    hidden = np.array([mask >> i & 1 for i in range(16)], bool).reshape(4, 4)
    puzzle = np.where(hidden, -1, every[index].astype(int))
    completions = every[((every == puzzle) | hidden).all((1, 2))]
    counts, number = pool.marginals(puzzle)
    assert number == len(completions)
    assert np.array_equal(counts, (completions[..., None] == np.arange(4)).sum(0))
    with pytest.raises(ValueError, match="10 completions or more"):
        pool.marginals(np.full((4, 4), -1), limit=10)


# Vocabulary


def test_tokens_and_digits_are_a_bijection() -> None:
    assert [token(d) for d in (0, 16, -16, -1)] == [2, 18, 19, 34]
    assert sorted(token(d) for d in range(-16, 17)) == list(range(2, TOKENS))
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
    assert [pool.held_out(pool.every(size)).sum() for size in (3, 4)] == [2, 72]
    assert abs(pool.held_out(pool.generate(9, 4000, 0)).mean() - 1 / 8) < 0.03
    pool.build(tmp_path, range(3, 7), 800, seed=0)
    for size in range(3, 7):
        sides = {}
        for split, rows in (("train", 700), ("validation", 100)):
            shard = Shard(tmp_path / f"size{size:02}_{split}.npz", pool.LAYOUT)
            found = pool.unpack(shard.gather(np.arange(len(shard)))["records"], size)
            assert pool.is_latin(found).all()
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


def test_the_odd_shard_of_a_folder_is_marked_within_its_source(tmp_path: Path) -> None:
    """Squares that are none; but the few distinct ones of size 3, beside many of size 6, are honest."""
    for number in range(10):
        for size in (3, 6):
            squares = pool.generate(size, 60, seed=number)
            if (size, number) == (6, 4):
                squares[:30, 0] = 0
            meta = {"source": pool.source(size), "generator": "test", "seed": 0, "split": "train"}
            write_shard(tmp_path / f"{size}-{number}.npz", pool.LAYOUT, {"records": pool.pack(squares)}, meta)
    config = latin_task(data={"source": str(tmp_path)}).config
    for _ in range(2):  # the second time nothing is new
        assert TASK.folder(config) == tmp_path
        rows = {row.name: row.quality for row in Catalogue(tmp_path).shards()}
        marked = {name: set(quality["outliers"]) for name, quality in rows.items() if "outliers" in quality}
        assert marked == {"6-4.npz": {"latin"}}
    assert (rows["6-4.npz"]["latin"], rows["3-4.npz"]["latin"], rows["6-3.npz"]["entropy"]) == (
        0.5,
        1,
        pytest.approx(1),
    )
    assert rows["3-4.npz"]["distinct"] < 0.25 < rows["6-3.npz"]["distinct"]


# Isotopism


def test_permuted_squares_are_latin_and_never_held_out() -> None:
    """The orbit of a square of size 3 is all twelve, those held out among them."""
    keys = np.arange(1, 2001)
    for size in (3, 4, 5, 6):
        start = next(s for s in pool.generate(size, 50, 2) if not pool.held_out(s[None])[0])
        grid = np.zeros((len(keys), 6, 6), np.uint8)
        grid[:, :size, :size] = start
        moved = pool.isotopes(grid, np.full(len(keys), size), keys)
        found = moved[:, :size, :size]
        assert moved.sum() == found.sum(), "nothing outside"
        assert pool.is_latin(found).all()
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


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def empty(count: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count, size, size), -1), torch.full((count,), size)


def valid(decoded: torch.Tensor, cells: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """(G,) bool: which are complete. Those are Latin squares; all keep the givens, and nothing is outside."""
    grid = inside(size, cells.shape[1])
    complete = ~decode.empty(decoded, size).flatten(1).any(1)
    assert not violations(torch.where(grid, decoded, 0).clamp(min=0), size)[complete].any()
    assert torch.equal(decoded[cells >= 0], cells[cells >= 0])
    assert (decoded[~grid] == -1).all()
    return complete


def oracle(target: torch.Tensor) -> decode.Predict:
    """A network that knows the squares; grids of one square stand together."""

    def predict(cells: torch.Tensor) -> torch.Tensor:
        wide = target.repeat_interleave(len(cells) // len(target), 0)
        return (20.0 * torch.nn.functional.one_hot(wide, wide.shape[1]).float()).log_softmax(3)

    return predict


@pytest.mark.parametrize(("size", "low", "high"), [(3, 1, 1), (4, 0.93, 0.99), (5, 0.9, 0.99), (9, 0.6, 0.9)])
def test_the_baseline_without_a_network_is_known(size: int, low: float, high: float) -> None:
    """Fewest candidates first and a random digit give 1.00, .95, .95 and .73 of the empty grids."""
    cells, sizes = empty(300 if size < 9 else 100, size)
    decoded = decode.iterative(cells, sizes, None, generator())
    assert low <= valid(decoded, cells, sizes).double().mean() <= high
    assert torch.equal(decoded, decode.iterative(cells, sizes, None, generator()))


@pytest.mark.parametrize("width", [1, 4])
def test_beam_search_fills_by_the_rules(width: int) -> None:
    made = torch.from_numpy(pool.generate(4, 40, 0).astype(np.int64))
    size = torch.full((40,), 4)
    hidden = torch.rand((40, 4, 4), generator=generator()) < torch.linspace(0, 1, 40)[:, None, None]
    cells = torch.where(hidden, -1, made)
    complete = valid(decode.beam(cells, size, None, generator(), width), cells, size)
    assert complete.all() or width == 1


def test_a_network_that_knows_fills_everything_in_any_way() -> None:
    made = torch.zeros(6, 5, 5, dtype=torch.int64)
    size = torch.tensor([5, 4, 3, 5, 4, 3])
    for i, n in enumerate(size.tolist()):
        made[i, :n, :n] = torch.from_numpy(pool.generate(n, 1, i)[0].astype(np.int64))
    cells, _ = empty(6, 5)
    target = torch.where(inside(size, 5), made, -1)
    one = decode.fill_one(cells, size, oracle(made), generator())
    assert ((one >= 0).flatten(1).sum(1) == 1).all()
    for found in (
        decode.one_pass(cells, size, oracle(made)),
        decode.iterative(cells, size, oracle(made), generator()),
        decode.beam(cells, size, oracle(made), generator(), 3),
    ):
        assert torch.equal(found, target)


def test_a_puzzle_that_has_no_completion_is_not_valid() -> None:
    cells = torch.tensor([[[0, 1, -1], [-1, -1, 2], [-1, -1, -1]]])  # the corner may hold no digit
    for found in (
        decode.iterative(cells, (size := torch.tensor([3])), None, generator()),
        decode.beam(cells, size, None, generator(), 4),
    ):
        assert not valid(found, cells, size).any()


def test_rates_stand_beside_their_baselines() -> None:
    task: Any = latin_task()
    pools = {size: made[pool.held_out(made)] for size in (3, 4) for made in (pool.every(size),)}
    rates = decode.rates(task.build_model(), pools, ("standard", "negative"), grids=60)
    by = {(rate["size"], rate["mode"], rate["fill"]): rate for rate in rates}
    assert len(by) == len(rates) == 2 * 2 * 4
    for (size, _, fill), rate in by.items():
        assert all(0 <= rate[name] <= 1 for name in ("valid", "accuracy", "iterative", "beam", "beam_baseline"))
        assert (rate["exact"] is None) == (fill[0] < 0.5)
        other = by[size, "negative", fill]
        for name in ("exact", "iterative_baseline", "beam_baseline"):
            assert rate[name] == other[name], "the modes have the same puzzles"
    for size, share in ((3, 0.96), (4, 0.89)):
        assert by[size, "standard", (0.5, 0.7)]["exact"] == pytest.approx(share, abs=0.06), "of a perfect network"
    # An argmax of the same probabilities everywhere is never a Latin square.
    assert by[4, "standard", (0.0, 0.0)]["valid"] == 0
    assert by[4, "standard", (0.0, 0.0)]["violations"] > 0
