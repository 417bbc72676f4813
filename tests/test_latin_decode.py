"""Decoding, rates and their baselines."""

from typing import Any

import numpy as np
import pytest
import torch
from test_latin_task import latin_task

from matrixlib.tasks.latin import decode, pool, squares
from matrixlib.tasks.latin.losses import inside, violations


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


def test_candidates_by_hand() -> None:
    wide = torch.full((1, 4, 4), -1)
    wide[0, 0, 0], wide[0, 1, 1] = 0, 1
    found = decode.candidates(wide, torch.tensor([3]))[0]
    assert not found[0, 0].any()
    assert [found[place].tolist() for place in ((0, 1), (2, 2), (2, 0))] == [
        [False, False, True, False],
        [True, True, True, False],
        [False, True, True, False],
    ]
    assert not found[3].any()
    assert not found[:, 3].any()


@pytest.mark.parametrize(("size", "low", "high"), [(3, 1, 1), (4, 0.93, 0.99), (5, 0.9, 0.99), (9, 0.6, 0.9)])
def test_the_baseline_without_a_network_is_known(size: int, low: float, high: float) -> None:
    """Fewest candidates first and a random digit give 1.00, .95, .95 and .73 of the empty grids."""
    cells, sizes = empty(300 if size < 9 else 100, size)
    decoded = decode.iterative(cells, sizes, None, generator())
    assert low <= valid(decoded, cells, sizes).double().mean() <= high
    assert torch.equal(decoded, decode.iterative(cells, sizes, None, generator()))


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("known", [False, True])
def test_beam_search_fills_by_the_rules(width: int, known: bool) -> None:
    made = torch.from_numpy(squares.generate(4, 40, 0).astype(np.int64))
    size = torch.full((40,), 4)
    hidden = torch.rand((40, 4, 4), generator=generator()) < torch.linspace(0, 1, 40)[:, None, None]
    cells = torch.where(hidden, -1, made)
    decoded = decode.beam(cells, size, oracle(made) if known else None, generator(), width)
    complete = valid(decoded, cells, size)
    if known:
        assert torch.equal(decoded, made)
    elif width == 4:
        assert complete.all()


def test_a_network_that_knows_fills_everything_in_any_way() -> None:
    made = torch.zeros(6, 5, 5, dtype=torch.int64)
    size = torch.tensor([5, 4, 3, 5, 4, 3])
    for i, n in enumerate(size.tolist()):
        made[i, :n, :n] = torch.from_numpy(squares.generate(n, 1, i)[0].astype(np.int64))
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
    pools = {size: made[pool.held_out(made)] for size in (3, 4) for made in (squares.every(size),)}
    rates = decode.rates(task.build_model(), pools, ("standard", "negative"), grids=60)
    by = {(rate["size"], rate["mode"], rate["fill"]): rate for rate in rates}
    assert len(by) == len(rates) == 2 * 2 * 4
    for (size, _, fill), rate in by.items():
        assert all(0 <= rate[name] <= 1 for name in ("valid", "accuracy", "iterative", "beam", "beam_baseline"))
        assert (rate["exact"] is None) == (fill[0] < 0.5)
        other = by[size, "negative", fill]
        for name in ("exact", "iterative_baseline", "beam_baseline"):
            assert rate[name] == other[name], "the modes have the same puzzles"
    # An argmax of the same probabilities everywhere is never a Latin square.
    assert by[4, "standard", (0.0, 0.0)]["valid"] == 0
    assert by[4, "standard", (0.0, 0.0)]["violations"] > 0


@pytest.mark.parametrize(("size", "share"), [(3, 0.96), (4, 0.89), (5, 0.84)])
def test_what_a_perfect_network_reaches_at_half_to_seven_tenths(size: int, share: float) -> None:
    rng = np.random.default_rng(0)
    made = squares.generate(size, 400, 0)
    hidden = rng.random(made.shape) >= rng.uniform(0.5, 0.7, 400)[:, None, None]
    assert decode.exact_rate(made, hidden) == pytest.approx(share, abs=0.06)
