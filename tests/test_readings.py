"""The slow targets by python-chess agree with the fast ones; mistaken readings are what their names say."""

from __future__ import annotations

import chess
import numpy as np
from positions import hard_positions, random_positions

from matrixlib.tasks.chess import readings, records, ssl

NOTHING = np.zeros((1, 8, 8), bool)


def test_slow_and_fast_targets_agree() -> None:
    boards = [*hard_positions(), *random_positions(150, 8)]
    fast = np.unpackbits(ssl.targets(records.from_boards(boards)), axis=2, bitorder="little")
    for board, bits in zip(boards, fast.reshape(-1, 5, 8, 8).astype(int), strict=True):
        slow = readings.maps(board)
        for head in ("threat", "pin", "fork"):
            assert np.array_equal(slow[head], bits[ssl.MAPS.index(head)]), (head, board.fen())
        assert np.array_equal(slow["control"], 1 + bits[3] - bits[4]), board.fen()


def test_pawns_attack_backwards() -> None:
    """Matrix0's mistake, seen from both sides."""
    for fen in ("4k3/8/8/8/4p3/8/8/4K3 w - - 0 1", "4k3/8/8/4P3/8/8/8/4K3 b - - 0 1"):
        board = chess.Board(fen)
        exact, backwards = (readings.maps(board, wrong)["threat"] for wrong in (False, True))
        assert set(zip(*np.nonzero(exact != backwards), strict=True)) == {(2, 3), (2, 5), (4, 3), (4, 5)}
        assert exact[2, 3]
        assert backwards[4, 3]


def test_attacked_by_the_side_to_move() -> None:
    for fen in ("4k3/8/8/8/8/8/8/R3K3 w - - 0 1", "r3k3/8/8/8/8/8/8/4K3 b - - 0 1"):
        found = readings.readings([chess.Board(fen)], "threat", NOTHING)
        assert found["attacked by the side to move"][0, :, 0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_hidden_squares_look_empty_to_a_copy() -> None:
    hidden = NOTHING.copy()
    hidden[0, 0, 4] = True  # our king
    found = readings.readings([chess.Board()], "piece", hidden)
    copied, exact = found[readings.COPY][0], found[readings.EXACT][0]
    assert (copied[0, 4], exact[0, 4]) == (readings.EMPTY, 5)
    assert (copied != exact).sum() == 1


def test_a_reading_that_differs_nowhere_is_left_out() -> None:
    found = readings.readings([chess.Board("4k3/8/8/8/8/8/8/4K3 w - - 0 1")], "pin", NOTHING)
    assert set(found) == {readings.EXACT, readings.COPY}
