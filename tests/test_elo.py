"""Elo, intervals and the sequential test against simulation and plain formulas."""

import math

import numpy as np
import pytest

from matrixlib.play.elo import PAIR_SCORES, Sprt, elo_of, expected_score, rating, rating_table


def shares(elo: float, draws: float = 0.4, opening: float = 0.05) -> np.ndarray:
    """Probabilities (5,) of pair results: games with these draws, in which an opening may favour one side."""
    total = np.zeros(5)
    for bias in (-opening, opening):
        win = [expected_score(elo) + side * bias - draws / 2 for side in (1, -1)]
        games = [np.array([1 - draws - w, draws, w]) for w in win]
        total += np.convolve(*games) / 2
    return total


def test_rating_of_many_pairs_is_the_plain_pentanomial_one() -> None:
    """score +- 1.96 sqrt(variance / pairs), mapped to Elo."""
    counts = np.array([200, 900, 2000, 1200, 300])
    n = counts.sum()
    score = counts @ PAIR_SCORES / n
    half = 1.959964 * math.sqrt(counts @ (PAIR_SCORES - score) ** 2 / n / n)
    many = rating(counts)
    assert (many.games, many.score) == (2 * n, score)
    assert many.elo == pytest.approx(elo_of(score))
    assert many.low == pytest.approx(elo_of(score - half), abs=0.1)
    assert many.high == pytest.approx(elo_of(score + half), abs=0.1)
    assert str(many).startswith("+")


def test_pairs_say_more_than_games_where_openings_decide() -> None:
    """Every pair 1 : 1 by an opening that wins: as games half win and half lose, as pairs nothing varies."""
    decided = rating([0, 0, 100, 0, 0])
    assert decided.elo == 0
    mixed = rating([25, 0, 50, 0, 25])
    assert 0 < decided.high < mixed.high / 5


@pytest.mark.parametrize("elo, pairs", [(0.0, 4), (40.0, 4), (-250.0, 8), (0.0, 30), (40.0, 100), (-250.0, 40)])
def test_intervals_hold_the_truth(elo: float, pairs: int) -> None:
    """A promise of 95 % is kept by few pairs too, which may be wider than they need to be."""
    rng = np.random.default_rng(7)
    samples = rng.multinomial(pairs, shares(elo, draws=0.25), size=1000)
    held = np.mean([r.low <= elo <= r.high for r in map(rating, samples)])
    assert 0.93 <= held <= (0.985 if pairs >= 30 else 1)


def test_one_sided_and_tiny_matches() -> None:
    lost, won = rating([4, 0, 0, 0, 0]), rating([0, 0, 0, 0, 4])
    assert (won.elo, won.high) == (math.inf, math.inf)
    assert 0 < won.low < 400
    assert lost.high == pytest.approx(-won.low)
    even = rating([0, 0, 1, 0, 0])
    assert even.low < -100
    assert even.high > 100
    for counts in ([0, 0, 0, 0, 0], [1, 2, 3]):
        with pytest.raises(ValueError, match="at least one"):
            rating(counts)


def test_swapping_the_players_turns_every_sign() -> None:
    counts = [3, 9, 20, 14, 6]
    a, b = rating(counts), rating(counts[::-1])
    assert (a.elo, a.low, a.high) == pytest.approx((-b.elo, -b.high, -b.low))
    one = Sprt(elo0=-5, elo1=15).ratio(counts)
    assert one == pytest.approx(-Sprt(elo0=-15, elo1=5).ratio(counts[::-1]), abs=1e-6)


@pytest.mark.parametrize("elo, expected", [(0.0, False), (60.0, True)])
def test_sprt_is_wrong_as_rarely_as_it_promises(elo: float, expected: bool) -> None:
    rng, sprt, wrong, runs = np.random.default_rng(3), Sprt(elo0=0, elo1=60), 0, 80
    for _ in range(runs):
        counts = np.zeros(5, np.int64)
        while (decision := sprt.decision(counts)) is None:
            counts += rng.multinomial(8, shares(elo))
        wrong += decision != expected
    assert wrong <= 9  # 5 % of 80 are 4


def test_rating_table_finds_strengths_through_common_opponents() -> None:
    """A chain of matches: 0, 80, 160, 240 Elo, neighbours only; and an intransitive circle is even."""
    rng = np.random.default_rng(5)
    matches = {(f"p{i + 1}", f"p{i}"): rng.multinomial(2000, shares(80)) for i in range(3)}
    table, truth = rating_table(matches), np.array([120, 40, -40, -120])
    assert table.index.tolist() == ["p3", "p2", "p1", "p0"]
    np.testing.assert_allclose(table["elo"], truth, atol=15)
    assert ((table["low"] < truth) & (truth < table["high"])).all()
    over = rating_table(matches, zero="p0")
    np.testing.assert_allclose(over["elo"], table["elo"] - table["elo"]["p0"])
    assert over.loc["p0", ["elo", "low", "high"]].tolist() == [0, 0, 0]
    assert (np.diff((over["high"] - over["low"]).to_numpy()) < 0).all(), "the further, the less certain"
    wins = [0, 1, 4, 5, 10]
    circle = rating_table({("a", "b"): wins, ("b", "c"): wins, ("c", "a"): wins})
    assert circle["elo"].tolist() == pytest.approx([0, 0, 0], abs=1e-3)
    won = rating_table({("a", "b"): [0, 0, 0, 0, 10]}, zero="b")
    assert won.loc["a", ["games", "score"]].tolist() == [20, 1]
    assert 100 < won["low"]["a"] < won["elo"]["a"] - 100 < won["high"]["a"] - 200 < 2000, "wins alone are not certain"
    counts = [100, 300, 800, 500, 200]
    two, alone = rating_table({("a", "b"): counts}), rating(counts)
    assert two["elo"]["a"] - two["elo"]["b"] == pytest.approx(alone.elo, rel=0.01)
    assert 2 * (two["high"] - two["low"])["a"] == pytest.approx(alone.high - alone.low, rel=0.15)
    with pytest.raises(ValueError, match="common scale"):
        rating_table({("a", "b"): wins, ("c", "d"): wins})
