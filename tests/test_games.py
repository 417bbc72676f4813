"""Games and labels: every ending is right, labels are functions of the position alone, targets follow from them."""

import math

import chess
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from positions import random_positions

from matrixlib.tasks.chess.stockfish import labels
from matrixlib.tasks.chess.stockfish.client import MATE
from matrixlib.tasks.chess.stockfish.labels import label, levels, values, weights_of
from matrixlib.tasks.chess.stockfish.sample import Parameters, choose, ending_of

DEPTHS = Parameters.shallow_depth, Parameters.deep_depth


def random_boards(count: int, seed: int = 0) -> list[chess.Board]:
    """Boards with a legal move, by random play."""
    return [board for board in random_positions(2 * count, seed) if any(board.legal_moves)][:count]


@pytest.mark.parametrize(
    "fen, occurrences, expected",
    [
        ("7k/5KQ1/8/8/8/8/8/8 b - - 0 1", 1, (1, "checkmate")),
        ("rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3", 1, (-1, "checkmate")),
        ("7k/5KQ1/8/8/8/8/8/8 b - - 100 90", 1, (1, "checkmate")),
        ("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1", 1, (0, "stalemate")),
        ("8/8/4k3/8/8/2KB4/8/8 w - - 0 1", 1, (0, "insufficient material")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 3 1", 3, (0, "repetition")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 100 90", 1, (0, "fifty moves")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 99 101", 2, (2, "cap")),
        ("8/8/4k3/8/8/2KR4/8/8 w - - 99 90", 2, None),
    ],
)
def test_every_way_a_game_ends(fen, occurrences, expected):
    end = ending_of(chess.Board(fen), occurrences, cap=200)
    assert end == expected


def test_labels_do_not_depend_on_order(engine):
    boards = random_boards(12)
    forwards = [label(engine, board, *DEPTHS) for board in boards]
    backwards = [label(engine, board, *DEPTHS) for board in boards[::-1]]
    assert forwards == backwards[::-1]
    for made, board in zip(forwards, boards, strict=True):
        assert len(made.level) == board.legal_moves.count()
        assert min(made.level) == 0
        assert sum(made.wdl) == 1000


def test_labels_do_not_depend_on_colour_or_move_number(engine):
    raw = set()
    for board in random_boards(4, seed=1):
        late, mirrored = board.copy(stack=False), board.mirror()
        late.fullmove_number = 120
        first = label(engine, board, *DEPTHS)
        assert label(engine, late, *DEPTHS) == first
        assert label(engine, mirrored, *DEPTHS) == first
    quiet = chess.Board("r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3")
    for number in (1, 80):  # the trap: the engine's own answer does depend on it
        quiet.fullmove_number = number
        engine.new_game()
        raw.add(engine.search(f"fen {quiet.fen()}", "depth 6")[0].wdl)
    assert len(raw) == 2 or "15" not in engine.name


def test_the_share_of_labelled_positions():
    parameters = Parameters(keep=0.6, keep_first=0.1, keep_decided=0.2)
    scores = [0] * 50 + [9000] * 50
    chosen = [choose(number, scores, parameters) for number in range(200)]
    share = np.mean(chosen, axis=0)
    np.testing.assert_allclose([share[:4].mean(), share[4:50].mean(), share[50:].mean()], [0.1, 0.6, 0.2], atol=0.05)
    assert (choose(3, scores, parameters) == chosen[3]).all()
    assert (chosen[3] != chosen[4]).any()


# Targets


def test_mates_are_beyond_centipawns_and_shorter_ones_better():
    stored = np.array([-MATE, 1 - MATE, 9 - MATE, -20000, -50, 0, 50, 20000, MATE - 9, MATE - 2, MATE - 1])
    made = values(stored)
    assert (np.diff(made) > 0).all()
    assert made[4:7].tolist() == [-50, 0, 50]
    assert made[8] - made[7] >= labels.TEMPERATURE * 3


def test_weights_are_a_softmax_at_fifty_centipawns():
    level = np.array([0, 10, 20, 81, 0, 0, 7, 0], dtype=np.uint8)  # rows of 4, 3 and 1 moves
    offset = np.array([0, 4, 7, 8])
    weight = weights_of(level, offset).astype(np.int64)
    assert np.add.reduceat(weight, offset[:-1]).tolist() == [65535] * 3
    expected = np.exp(-np.array([0, 50, 100]) / 50)
    np.testing.assert_allclose(weight[:3] / 65535, expected / expected.sum(), atol=3e-5)
    assert (weight[3], weight[7]) == (0, 65535)
    for level in range(labels.NO_WEIGHT):
        assert abs(labels.WEIGHTS[level] - 1e6 * math.exp(-level / 10)) <= 1
    assert labels.WEIGHTS[labels.NO_WEIGHT] == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, labels.NO_WEIGHT), min_size=0, max_size=40), min_size=1, max_size=12))
def test_weights_of_any_levels_sum_to_all_and_keep_the_order(rows):
    rows = [[0, *row] for row in rows]
    offset = np.cumsum([0, *map(len, rows)])
    weight = weights_of(np.concatenate(rows).astype(np.uint8), offset).astype(np.int64)
    for row, start, stop in zip(rows, offset[:-1], offset[1:], strict=True):
        made = weight[start:stop]
        assert made.sum() == 65535
        assert made[0] == made.max()
        order = np.argsort(row[1:], kind="stable")
        assert (np.diff(made[1:][order]) <= 0).all()


@pytest.mark.parametrize(
    "shallow, deep, expected",
    [
        ([500, 100, 90, 80, -40], {1: 60, 2: 40, 3: 10}, [12, 0, 4, 10, 20]),  # the shallow favourite falls behind
        ([30, 20], {1: 50, 0: 0}, [10, 0]),
        ([30], {0: -9}, [0]),
        ([3 - MATE, 1 - MATE], {0: 3 - MATE, 1: 1 - MATE}, [0, 100 // labels.STEP]),
    ],
)
def test_the_deep_search_overrules_the_shallow_one(shallow, deep, expected):
    made = levels(
        {str(move): score for move, score in enumerate(shallow)}, {str(k): score for k, score in deep.items()}
    )
    assert [made[str(move)] for move in range(len(shallow))] == expected
