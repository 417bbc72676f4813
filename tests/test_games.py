"""Games and labels: every ending is right, and labels are functions of the position alone."""

import random
from dataclasses import replace

import chess
import numpy as np
import pytest

from matrixlib.tasks.chess.stockfish import labels
from matrixlib.tasks.chess.stockfish.games import ENDINGS, Game, Parameters, choose, ending_of
from matrixlib.tasks.chess.stockfish.labels import label

LABELS = Parameters()


def random_boards(count: int, seed: int = 0) -> list[chess.Board]:
    """Boards with a legal move, by random play."""
    rng = random.Random(seed)
    boards: list[chess.Board] = []
    while len(boards) < count:
        board = chess.Board()
        for _ in range(rng.randrange(70)):
            if not any(board.legal_moves):
                break
            board.push(rng.choice(list(board.legal_moves)))
        if any(board.legal_moves):
            boards.append(board)
    return boards


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
    assert (end and (end[0], ENDINGS[end[1]])) == expected


def test_labels_do_not_depend_on_order(engine):
    boards = random_boards(12)
    forwards = [label(engine, board, LABELS) for board in boards]
    backwards = [label(engine, board, LABELS) for board in boards[::-1]]
    assert forwards == backwards[::-1]
    for made, board in zip(forwards, boards, strict=True):
        assert len(made.moves) == len(set(made.moves)) == board.legal_moves.count()
        assert len(made.deep_moves) == min(labels.DEEP_LINES, len(made.moves))
        assert sum(made.wdl) == 1000


def test_labels_do_not_depend_on_colour_or_move_number(engine):
    raw = set()
    for board in random_boards(4, seed=1):
        late, mirrored = board.copy(stack=False), board.mirror()
        late.fullmove_number = 120
        first = label(engine, board, LABELS)
        assert label(engine, late, LABELS) == first
        assert label(engine, mirrored, LABELS) == first
    quiet = chess.Board("r1bqkbnr/pppp1ppp/2n5/4p3/4P3/5N2/PPPP1PPP/RNBQKB1R w KQkq - 2 3")
    for number in (1, 80):  # the trap: the engine's own answer does depend on it
        quiet.fullmove_number = number
        engine.new_game()
        raw.add(engine.search(f"fen {quiet.fen()}", "depth 6")[0].wdl)
    assert len(raw) == 2 or "15" not in engine.name


def test_the_board_is_left_alone(engine):
    board = chess.Board("8/8/4k3/8/8/2KR4/8/8 w - - 7 90")
    label(engine, board, replace(LABELS, deep_depth=5))
    assert board.fen() == "8/8/4k3/8/8/2KR4/8/8 w - - 7 90"


def test_the_share_of_labelled_positions():
    parameters = Parameters(keep=0.6, keep_first=0.1, keep_decided=0.2)
    played = [Game(n, (chess.Move.null(),) * 100, (0,) * 50 + (9000,) * 50, 2, 0) for n in range(200)]
    share = np.mean([choose(game, parameters) for game in played], axis=0)
    np.testing.assert_allclose([share[:4].mean(), share[4:50].mean(), share[50:].mean()], [0.1, 0.6, 0.2], atol=0.05)
    assert (choose(played[3], parameters) == choose(played[3], parameters)).all()
    assert (choose(played[3], parameters) != choose(played[4], parameters)).any()


@pytest.mark.parametrize("wrong", [{"games_per_chunk": 0}, {"keep": 0.0}, {"plies": 0}])
def test_senseless_parameters(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        Parameters(**wrong)
