"""Mistaken targets are what their names say; test_ssl_targets.py holds the exact ones against the fast core."""

import chess
import numpy as np

from matrixlib.tasks.chess.evaluate import oracle


def test_pawns_attack_backwards() -> None:
    """Matrix0's mistake, seen from both sides."""
    for fen in ("4k3/8/8/8/4p3/8/8/4K3 w - - 0 1", "4k3/8/8/4P3/8/8/8/4K3 b - - 0 1"):
        board = chess.Board(fen)
        exact, backwards = (oracle.maps(board, wrong)["threat"] for wrong in (False, True))
        assert set(zip(*np.nonzero(exact != backwards), strict=True)) == {(2, 3), (2, 5), (4, 3), (4, 5)}
        assert exact[2, 3]
        assert backwards[4, 3]


def test_attacked_by_the_side_to_move() -> None:
    for fen in ("4k3/8/8/8/8/8/8/R3K3 w - - 0 1", "r3k3/8/8/8/8/8/8/4K3 b - - 0 1"):
        named = oracle.alternatives([chess.Board(fen)])["threat"]
        assert named["attacked by the side to move"][0, :, 0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_a_copy_shows_what_stands_there() -> None:
    named = oracle.alternatives([chess.Board()])
    assert named["fork"][oracle.COPY].sum() == 32
    assert named["control"][oracle.COPY][0, :, 0].tolist() == [2, 2, 1, 1, 1, 1, 0, 0]
    assert oracle.COPY not in named["piece"]


def test_a_mistake_that_differs_nowhere_is_left_out() -> None:
    named = oracle.alternatives([chess.Board("4k3/8/8/8/8/8/8/4K3 w - - 0 1")])["pin"]
    assert set(named) == {oracle.EXACT, oracle.COPY}
