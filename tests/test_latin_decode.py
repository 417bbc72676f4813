"""Decoding, rates and their baselines, pictures."""

from typing import Any

import numpy as np
import pytest
import torch
from test_latin_task import latin_task

from matrixlib.tasks.latin import decode, filling, pool, rates, squares
from matrixlib.tasks.latin.augment import inside
from matrixlib.tasks.latin.losses import violations


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def empty(count: int, size: int, side: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count, side or size, side or size), -1), torch.full((count,), size)


def check(filled: decode.Decoded, cells: torch.Tensor, size: torch.Tensor) -> None:
    """What is called valid is a Latin square that keeps the givens, and nothing else."""
    grid = inside(size, cells.shape[1])
    whole = torch.where(grid, filled.cells, 0)
    complete = ((whole >= 0) | ~grid).flatten(1).all(1)
    right = complete & (violations(whole.clamp(min=0), size) == 0)
    assert torch.equal(filled.valid, right)
    given = cells >= 0
    assert torch.equal(filled.cells[given], cells[given])
    assert (filled.cells[~grid] == -1).all()


def oracle(target: torch.Tensor) -> decode.Predict:
    """A network that knows the squares; grids of one square stand together."""

    def predict(cells: torch.Tensor) -> torch.Tensor:
        wide = target.repeat_interleave(len(cells) // len(target), 0)
        return (20.0 * torch.nn.functional.one_hot(wide, wide.shape[1]).float()).log_softmax(3)

    return predict


def test_candidates_by_hand() -> None:
    cells = torch.tensor([[[0, -1, -1], [-1, 1, -1], [-1, -1, -1]]])
    found = decode.candidates(cells, torch.tensor([3]))[0]
    assert not found[0, 0].any()
    assert found[0, 1].tolist() == [False, False, True]
    assert found[2, 2].tolist() == [True, True, True]
    assert found[2, 0].tolist() == [False, True, True]
    wide = torch.full((1, 4, 4), -1)
    wide[:, :3, :3] = cells
    found = decode.candidates(wide, torch.tensor([3]))[0]
    assert not found[3].any()
    assert not found[:, 3].any()
    assert not found[..., 3].any()


@pytest.mark.parametrize(("size", "low", "high"), [(3, 1, 1), (4, 0.93, 0.99), (5, 0.9, 0.99), (9, 0.6, 0.9)])
def test_the_baseline_without_a_network_is_known(size: int, low: float, high: float) -> None:
    """Fewest candidates first and a random digit give 1.00, .95, .95 and .73 of the empty grids."""
    cells, sizes = empty(300 if size < 9 else 100, size)
    found = decode.iterative(cells, sizes, None, generator())
    check(found, cells, sizes)
    assert low <= found.valid.double().mean() <= high


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("known", [False, True])
def test_beam_search_fills_by_the_rules(width: int, known: bool) -> None:
    made = torch.from_numpy(squares.generate(4, 40, 0).astype(np.int64))
    size = torch.full((40,), 4)
    hidden = torch.rand((40, 4, 4), generator=generator()) < torch.linspace(0, 1, 40)[:, None, None]
    cells = decode.puzzle(made, hidden, size)
    found = decode.beam(cells, size, oracle(made) if known else None, generator(), width)
    check(found, cells, size)
    if known:
        assert torch.equal(found.cells, made)
    elif width == 4:
        assert found.valid.all()


def test_a_network_that_knows_fills_everything_in_any_way() -> None:
    made = torch.zeros(6, 5, 5, dtype=torch.int64)
    size = torch.tensor([5, 4, 3, 5, 4, 3])
    for i, n in enumerate(size.tolist()):
        made[i, :n, :n] = torch.from_numpy(squares.generate(n, 1, i)[0].astype(np.int64))
    cells, _ = empty(6, 5)
    target = torch.where(inside(size, 5), made, -1)
    for found in (
        decode.one_pass(cells, size, oracle(made)),
        decode.iterative(cells, size, oracle(made), generator()).cells,
        decode.beam(cells, size, oracle(made), generator(), 3).cells,
    ):
        assert torch.equal(found, target)


def test_a_puzzle_that_has_no_completion_is_not_valid() -> None:
    cells = torch.tensor([[[0, 1, -1], [-1, -1, 2], [-1, -1, -1]]])  # the corner may hold no digit
    for found in (
        decode.iterative(cells, torch.tensor([3]), None, generator()),
        decode.beam(cells, torch.tensor([3]), None, generator(), 4),
    ):
        assert not found.valid.any()
        check(found, cells, torch.tensor([3]))


def test_steps_are_kept_when_asked_for() -> None:
    cells, size = empty(3, 4)
    found = decode.iterative(cells, size, None, generator(), keep_steps=True)
    assert torch.equal(found.steps[0], cells)
    for before, after in zip(found.steps, found.steps[1:], strict=False):
        assert ((after >= 0).sum((1, 2)) - (before >= 0).sum((1, 2)) <= 1).all()
    assert torch.equal(found.steps[-1], found.cells)
    assert decode.iterative(cells, size, None, generator()).steps == ()


def test_the_same_stream_decodes_the_same() -> None:
    cells, size = empty(5, 5)
    one, two = (decode.iterative(cells, size, None, generator(3)).cells for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, decode.iterative(cells, size, None, generator(4)).cells)


def held_out(size: int) -> np.ndarray:
    made = squares.every(size)
    return made[pool.held_out(made)]


@pytest.fixture(scope="module")
def measured() -> list[rates.Rate]:
    task: Any = latin_task()
    fills = ((0.0, 0.0), (0.5, 0.7))
    return rates.measure(
        task,
        task.build_model(),
        {3: held_out(3), 4: held_out(4)},
        grids=60,
        fills=fills,
        modes=("standard", "negative"),
    )


def test_rates_stand_beside_their_baselines(measured: list[rates.Rate]) -> None:
    kinds = [(rate.size, rate.mode, rate.fill) for rate in measured]
    assert len(set(kinds)) == 2 * 2 * 2
    by = dict(zip(kinds, measured, strict=True))
    for rate in measured:
        shares = (rate.valid, rate.accuracy, rate.iterative, rate.iterative_baseline, rate.beam_baseline)
        assert all(0 <= share <= 1 for share in shares)
        assert (rate.exact is None) == (rate.fill[0] == 0)
        other = by[rate.size, "negative", rate.fill]
        assert rate.exact == other.exact  # the modes have the same puzzles
        assert rate.of_exact == (rate.valid / rate.exact if rate.exact else None)
        assert rate.to_dict()["beam"] == rate.beam
    # An argmax of the same probabilities everywhere is never a Latin square.
    assert by[4, "standard", (0.0, 0.0)].valid == 0
    assert by[4, "standard", (0.0, 0.0)].violations > 0


@pytest.mark.parametrize(("size", "share"), [(3, 0.96), (4, 0.89), (5, 0.84)])
def test_what_a_perfect_network_reaches_at_half_to_seven_tenths(size: int, share: float) -> None:
    rng = np.random.default_rng(0)
    made = squares.generate(size, 400, 0)
    hidden = rng.random(made.shape) >= rng.uniform(0.5, 0.7, 400)[:, None, None]
    assert rates.exact_rate(made, hidden) == pytest.approx(share, abs=0.06)


def test_pictures() -> None:
    cells, size = empty(1, 4)
    steps = [step[0].numpy() for step in decode.iterative(cells, size, None, generator(1), True).steps]
    figure = filling.filling_figure(steps, "negative", count=6)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert len(shown) == 6
    assert shown[0].get_title() == "puzzle"
    assert len(shown[0].texts) == 0
    assert len(shown[-1].texts) == (steps[-1] >= 0).sum()
    assert {text.get_text() for text in shown[-1].texts} <= {"-2", "-1", "1", "2"}
    figure.canvas.draw()
    with pytest.raises(ValueError, match="keep_steps"):
        filling.filling_figure([], "standard")
