"""The order of rows: permutations that keep no list, and mixtures whose every batch has its shares."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from matrixlib.data.order import PERIOD, Mixture, Order, make_key, permute, places_of


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63 - 1))
@example(n=1, seed=0)
@example(n=2, seed=0)
@example(n=1024, seed=0)
@example(n=1025, seed=0)
def test_permute_is_a_bijection(n: int, seed: int) -> None:
    out = permute(np.arange(n), n, make_key(seed))
    assert out.dtype == np.int64
    assert (np.sort(out) == np.arange(n)).all()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), seed=st.integers(0, 999), data=st.data())
def test_permute_of_any_size_stays_inside_and_keeps_apart(n: int, seed: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50)), np.int64)
    out = permute(index, n, make_key(seed))
    assert len(np.unique(out)) == len(index)
    assert ((out >= 0) & (out < n)).all()
    assert [int(permute(np.array(i), n, make_key(seed))) for i in index[:5]] == out[:5].tolist()


def test_permute_sends_numbers_where_it_always_has() -> None:
    """A run that is resumed by a later version goes on in its order; an index outside would walk for ever."""
    key = make_key(3)
    assert permute(np.arange(10), 10, key).tolist() == [3, 0, 2, 1, 8, 7, 6, 5, 9, 4]
    assert permute(np.array([0, 1, 10**9]), 10**9 + 1, key).tolist() == [22857056, 867218677, 198080896]
    with pytest.raises(AssertionError, match="inside"):
        permute(np.array([10]), 10, key)


def test_permute_looks_random() -> None:
    """Every place is about equally likely for each index, and neighbours do not stay together."""
    places = np.array([permute(np.arange(7), 7, make_key(k)) for k in range(2100)])
    for column in places.T:
        assert stats.chisquare(np.bincount(column, minlength=7)).pvalue > 4e-5
    out = permute(np.arange(100_000), 100_000, make_key(5))
    assert abs(np.corrcoef(out, np.arange(100_000))[0, 1]) < 0.01
    assert abs(np.corrcoef(out[1:], out[:-1])[0, 1]) < 0.01
    assert (np.abs(np.diff(out)) == 1).sum() < 15  # 2 expected


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10), min_size=1))
def test_places_are_the_weights_in_thousandths(weights: dict[str, float]) -> None:
    places, total = places_of(weights), sum(weights.values())
    assert list(places) == list(weights)
    assert sum(places.values()) == PERIOD
    for name, weight in weights.items():
        assert abs(places[name] - PERIOD * weight / total) < 1


def test_a_weight_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="source 'few' is under a thousandth"):
        places_of({"many": 1.0, "few": 1e-4})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.05, 10)), min_size=1, max_size=4),
    st.integers(1, 700),
    st.integers(0, 10**9),
)
def test_a_mixture_is_a_function_of_the_place(sources: list[tuple[int, float]], size: int, start: int) -> None:
    """Any batch has each source's share to within two rows, and one batch is the same as two halves."""
    weights = {str(i): weight for i, (_, weight) in enumerate(sources)}
    edges = np.cumsum([0, *(count for count, _ in sources)])
    orders = tuple(Order(np.array([0, count]), 1, 0, 0) for count, _ in sources)
    mixture = Mixture(orders, tuple(places_of(weights).values()))
    places = np.arange(start, start + size)
    rows = mixture.rows(places)
    cut = size // 2
    assert (np.concatenate([mixture.rows(places[:cut]), mixture.rows(places[cut:])]) == rows).all()
    counts = np.histogram(rows, edges)[0]
    expected = np.array(mixture.places) / PERIOD * size
    assert (np.abs(counts - expected) <= len(sources)).all()
