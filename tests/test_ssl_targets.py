"""Self-supervised targets of the numba core against definitions written out with python-chess (oracle.py)."""

from pathlib import Path
from typing import Any

import chess
import numpy as np
import pytest
import torch
from positions import hard_positions, random_positions

from matrixlib.tasks.chess import records
from matrixlib.tasks.chess import ssl_targets as ssl
from matrixlib.tasks.chess.evaluate import oracle
from matrixlib.tasks.chess.planes import planes
from matrixlib.tasks.chess.task import packed_state


def truth(board: chess.Board) -> np.ndarray:
    """(5, 64) bool by oriented square, straight from the definitions."""
    maps = oracle.maps(board)
    control = maps["control"]
    every = (maps["threat"], maps["pin"], maps["fork"], control == 2, control == 0)
    return np.stack(every).reshape(5, 64).astype(bool)


def result(boards: list[chess.Board]) -> np.ndarray:
    maps = ssl.target_maps(records.from_boards(boards))
    assert maps.shape == (len(boards), 5, 8)
    assert maps.dtype == np.uint8
    return np.unpackbits(maps, axis=2, bitorder="little").astype(bool)


def compare(boards: list[chess.Board]) -> np.ndarray:
    """No difference in any map; returns how often each map is set."""
    maps = result(boards)
    for i, board in enumerate(boards):
        expected = truth(board)
        differs = np.argwhere(maps[i] != expected)
        assert not len(differs), (board.fen(), [(ssl.MAPS[m], chess.square_name(s)) for m, s in differs])
    return np.asarray(maps.sum((0, 2)))


def squares(fen: str, name: str) -> set[str]:
    """Names, in real colours, of the squares set in one map."""
    board = chess.Board(fen)
    flags = result([board])[0, ssl.MAPS.index(name)]
    return {chess.square_name(s if board.turn else s ^ 56) for s in np.flatnonzero(flags)}


def test_every_map_is_exact() -> None:
    counts = compare(hard_positions() + random_positions(1500, seed=31))
    assert (counts > 200).all()  # each of them does fire


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_map_is_exact_on_many_positions() -> None:
    compare(random_positions(100_000, seed=32))


@pytest.mark.parametrize("turn", "wb")
def test_pins_fire_for_both_sides(turn: str) -> None:
    """A white knight pinned on the e-file, a black one on a diagonal; Matrix0's pin maps never fired."""
    fen = f"4r1k1/5n2/8/8/2B5/8/4N3/4K3 {turn} - - 0 1"
    assert squares(fen, "pin") == {"e2", "f7"}


@pytest.mark.parametrize(
    "fen, expected",
    [
        ("r3k3/2N5/8/8/8/8/8/4K3 b - - 0 1", {"c7"}),  # king and rook
        ("7k/8/2r1r3/3P4/8/8/8/K7 w - - 0 1", {"d5"}),  # a pawn counts too
        ("7k/8/8/3P4/2r1r3/8/8/K7 w - - 0 1", set()),  # but not backwards; the rooks defend each other
        ("7k/1p6/p1p5/8/1N6/8/8/K7 w - - 0 1", set()),  # defended pawns are no prey of a knight
        ("7k/8/p1p5/8/1N6/8/8/K7 w - - 0 1", {"b4"}),  # undefended ones are
        ("7k/8/8/p7/8/1Q6/8/K2r4 w - - 0 1", set()),  # the queen attacks the rook alone
        ("6k1/8/8/8/8/n1n5/1K6/8 w - - 0 1", {"b2"}),  # a king forks undefended pieces
        ("7k/8/8/8/p7/1B6/8/3B2K1 w - - 0 1", set()),  # one victim is no fork
    ],
)
def test_known_forks(fen: str, expected: set[str]) -> None:
    board = chess.Board(fen)
    by_oracle = {chess.square_name(s if board.turn else s ^ 56) for s in np.flatnonzero(truth(board)[2])}
    assert by_oracle == expected, "the oracle"
    assert squares(fen, "fork") == expected


def test_sixteen_attackers_of_one_square_are_counted() -> None:
    board = chess.Board("7k/8/2N1N3/1NQQBN2/2Q1Q3/1NKQQN2/2N1N3/8 b - - 0 1")
    assert board.attackers_mask(chess.WHITE, chess.D4).bit_count() == 16
    compare([board])


def test_matrix0_truth(shared: Path) -> None:
    """Threat and control of the parity positions (absolute board, row 0 = rank 8)."""
    fens = (shared / "parity" / "positions.fen").read_text().splitlines()
    boards = [chess.Board(fen) for fen in fens]
    expected = np.load(shared / "parity" / "ssl_truth.npz")
    maps = result(boards).reshape(-1, 5, 8, 8).astype(int)
    for i, board in enumerate(boards):
        absolute = maps[i, :, ::-1] if board.turn else maps[i]
        sign = 1 if board.turn else -1
        assert (absolute[0] == expected["gt_threat"][i]).all()
        assert (sign * (absolute[3] - absolute[4]) == expected["gt_control"][i]).all()
        assert (absolute[1] >= expected["gt_pin"][i]).all()  # theirs holds our own pieces only


def test_hidden_squares_follow_their_shares() -> None:
    hidden = ssl.draw_hidden_squares(np.random.default_rng(5), 4000, 0.3, 0.2)
    assert hidden.shape == (4000, 8)
    assert hidden.dtype == np.uint8
    bits = np.bitwise_count(hidden).sum(1)
    assert abs((bits > 0).mean() - 0.3) < 0.03
    assert abs(bits[bits > 0].mean() / 64 - 0.2) < 0.01
    again = ssl.draw_hidden_squares(np.random.default_rng(5), 4000, 0.3, 0.2)
    assert (hidden == again).all()
    rng = np.random.default_rng(6)
    assert not ssl.draw_hidden_squares(rng, 100, 0.0, 0.5).any()
    assert not ssl.draw_hidden_squares(rng, 100, 1.0, 0.0).any()
    assert (np.bitwise_count(ssl.draw_hidden_squares(rng, 500, 1.0, 1e-9)).sum(1) == 1).all()


GIVEN = ["4k3/8/8/8/4P3/8/8/R3K3 w - - 0 1", "4k3/8/8/8/4P3/8/8/R3K3 b - - 0 1"]


def own_planes() -> tuple[np.ndarray, np.ndarray]:
    """One-hot (2, 13, 8, 8) from the input planes of GIVEN, and the computed target (2, 8, 8)."""
    rows = records.from_boards([chess.Board(fen) for fen in GIVEN])
    batch = {"pieces": torch.from_numpy(rows["pieces"]), "state": torch.from_numpy(packed_state(rows))}
    pieces = planes(batch, "oriented")[:, :12]
    one_hot = torch.cat([pieces, 1 - pieces.sum(1, keepdim=True)], dim=1)
    return one_hot.numpy(), ssl.head_target(batch, "piece").numpy()


@pytest.mark.parametrize("kind", ["bool", "uint8", "int16", "uint16", "int64", "float16", "float32", "float64"])
@pytest.mark.parametrize("form", [np.asarray, torch.tensor, lambda it: {"piece": it}, lambda it: it.tolist()])
def test_given_pieces_of_any_form_become_the_computed_classes(kind: str, form: Any) -> None:
    one_hot, computed = own_planes()
    assert (computed[0, 3, 4], computed[1, 4, 4], computed[1, 0, 4]) == (0, 6, 5), "Black's own king is on its rank 1"
    for given in (one_hot, computed) if kind != "bool" else (one_hot,):
        classes = ssl.piece_classes(form(given.astype(kind)))
        assert classes.dtype == torch.int64
        assert classes.tolist() == computed.tolist()
    assert ssl.piece_classes(torch.from_numpy(one_hot).bfloat16()).tolist() == computed.tolist()
    assert ssl.piece_classes(np.zeros((0, 13, 8, 8))).shape == (0, 8, 8)


def changed(form: int, place: tuple[Any, ...], value: float) -> np.ndarray:
    given = own_planes()[form].astype(np.float64)
    given[place] = value
    return given


@pytest.mark.parametrize(
    "given, problem",
    [
        (changed(0, (1, slice(None), 2, 3), 0), "position 1, square d3: one-hot with sum 0, not a single 1"),  # no pawn
        (changed(0, (0, 0, 0, 0), 1), "position 0, square a1: one-hot with sum 2"),
        (changed(0, (0, slice(None), 7, 7), 1 / 13), "position 0, square h8: one-hot with sum 1, not a single 1"),
        (changed(0, (0, 5, 1, 1), np.nan), "position 0, square b2: one-hot with sum nan"),
        (changed(1, (1, 7, 0), 13), "position 1, square a8: class 13, not one of 0-12"),
        (changed(1, (0, 0, 1), -1), "square b1: class -1,"),
        (changed(1, (0, 0, 1), 2.5), "square b1: class 2.5,"),
        (changed(1, (0, 0, 1), np.nan), "square b1: class nan,"),
        (np.zeros((2, 12, 8, 8)), r"one-hot, not \(2, 12, 8, 8\)"),
        (np.zeros((2, 64)), r"one-hot, not \(2, 64\)"),
        (np.float32(3), r"one-hot, not \(\)"),
        ({"threat": np.zeros((2, 8, 8))}, "no key 'piece', only threat"),
    ],
)
def test_given_pieces_that_are_no_classes_are_refused_by_name(given: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"piece targets.*{problem}"):
        ssl.piece_classes(given)
