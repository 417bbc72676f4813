"""Win-draw-loss of centipawns: the formula, its limits, and Stockfish itself where it is installed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matrixlib.tasks.chess.stockfish.client import CENTIPAWN_LIMIT, MATE, Stockfish, score_of
from matrixlib.tasks.chess.stockfish.labels import wdl_of_score, whole_shares

SCORES = st.integers(-CENTIPAWN_LIMIT, CENTIPAWN_LIMIT) | st.integers(-300, 300)


@given(st.lists(SCORES, min_size=1, max_size=20))
def test_rows_are_whole_and_symmetric(values):
    ours, theirs = wdl_of_score(values), wdl_of_score([-x for x in values])
    assert ours.dtype == np.dtype("<u2")
    assert (ours.astype(int).sum(1) == 65535).all()
    assert (np.abs(ours.astype(int) - theirs[:, ::-1]) <= 2).all()


def test_mates_are_certain():
    won, lost, mated = score_of("mate", 12), score_of("mate", -1), score_of("mate", 0)
    assert wdl_of_score([won, lost, mated, MATE]).tolist() == [
        [65535, 0, 0],
        [0, 0, 65535],
        [0, 0, 65535],
        [65535, 0, 0],
    ]
    assert wdl_of_score(CENTIPAWN_LIMIT).tolist() == [[65535, 0, 0]]


def test_the_engine_shows_the_same(engine: Stockfish):
    """What Stockfish 15 prints at full move 32; its wdl comes from a finer score than the centipawns it prints."""
    if not engine.name.startswith("Stockfish 15.1"):
        pytest.skip(f"{engine.name} has another model than Stockfish 15.1")
    fens = ["4k3/8/8/8/8/8/4P3/4K3", "rnbqkbnr/pppp1ppp/8/4p3/4P3/8/PPPP1PPP/RNBQKBNR"]
    fens += ["r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5Q2/PPPP1PPP/RNB1K1NR", "6k1/5ppp/8/8/8/1P6/5PPP/6K1"]
    seen = 0
    for fen in fens:
        for depth in range(1, 13):
            for line in engine.search(f"fen {fen} w - - 0 32", f"depth {depth}", 4):
                if abs(line.score) <= CENTIPAWN_LIMIT:
                    near = wdl_of_score([line.score - 1, line.score, line.score + 1]) / 65.535
                    assert (near.min(0) - 6 <= line.wdl).all(), line
                    assert (near.max(0) + 6 >= line.wdl).all(), line
                    seen += 1
    assert seen > 100


def test_shares_of_rows_stay_whole() -> None:
    rng = np.random.default_rng(4)
    offset = np.concatenate([[0], np.cumsum(rng.integers(1, 9, 400))])
    amounts = np.where(rng.random(offset[-1]) < 0.5, rng.random(offset[-1]) * 1e9, 0).astype(np.int64)
    shares = whole_shares(amounts, offset).astype(int)
    for begin, end in pairwise(offset):
        own, sums = shares[begin:end], amounts[begin:end]
        assert own.sum() == (65535 if sums.sum() else 0)
        if sums.sum():
            assert np.abs(own - sums / sums.sum() * 65535).max() <= 9
            assert (own[sums == 0] == 0).all()
