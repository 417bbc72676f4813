"""Figures of a network: puzzles, baselines, one-ply search; python-chess is the oracle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import chess
import numpy as np
import pytest

from matrixlib import evaluation
from matrixlib.evaluation import Puzzle
from matrixlib.tasks.chess import records

MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/3R2K1 w - - 0 1"
FREE_QUEEN = "4k3/8/8/3q4/4P3/2N5/8/4K3 w - - 0 1"


class Material:
    """Stands in for a network: value = material of the side to move, policy = the first legal move."""

    def values(self, boards: list[chess.Board]) -> np.ndarray:
        worth = {1: 1, 2: 3, 3: 3, 4: 5, 5: 9, 6: 0}
        return np.array(
            [
                sum(worth[p.piece_type] * (1 if p.color == b.turn else -1) for p in b.piece_map().values())
                / 40
                for b in boards
            ]
        )

    def evaluate_boards(self, boards: list[chess.Board]) -> list[SimpleNamespace]:
        return [SimpleNamespace(best=next(iter(b.legal_moves)).uci()) for b in boards]


def test_one_ply_search_takes_the_queen_and_prefers_mate() -> None:
    net = Material()
    boards = [chess.Board(FREE_QUEEN), chess.Board(MATE_IN_ONE), chess.Board(FREE_QUEEN).mirror()]
    moves = evaluation.one_ply(net, boards)  # type: ignore[arg-type]
    assert moves[0] in ("e4d5", "c3d5")
    assert moves[1] == "d1d8"
    assert moves[2] in ("e5d4", "c6d4"), (
        "the value is the opponent's: a search that maximises it hangs the queen"
    )


def test_one_ply_knows_stalemate_and_positions_without_moves() -> None:
    stalemate = chess.Board("7k/5Q2/8/8/8/8/8/K7 b - - 0 1")
    trap = chess.Board("k7/8/1Q6/8/8/8/8/7K w - - 0 1")
    net = Material()
    assert evaluation.one_ply(net, [chess.Board("7k/5Q2/6K1/8/8/8/8/8 b - - 0 1")]) == [None]  # type: ignore[arg-type]
    assert evaluation.one_ply(net, [stalemate])[0] is None  # type: ignore[arg-type]
    move = evaluation.one_ply(net, [trap])[0]  # type: ignore[arg-type]
    after = trap.copy()
    after.push_uci(move or "")
    assert not after.is_stalemate()


def test_any_mate_counts_where_the_answer_mates() -> None:
    board = chess.Board("6k1/5ppp/8/8/8/8/5PPP/2RR2K1 w - - 0 1")
    puzzle = Puzzle(board, chess.Move.from_uci("c1c8"), 600)
    assert evaluation._right(puzzle, "d1d8")
    assert not evaluation._right(puzzle, "c1c7")
    assert not evaluation._right(puzzle, None)


def test_best_capture_takes_the_most_valuable_piece() -> None:
    assert evaluation.best_capture(chess.Board(FREE_QUEEN)) in ("c3d5", "e4d5")
    assert evaluation.best_capture(chess.Board()) is None
    passant = chess.Board("4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 1")
    assert evaluation.best_capture(passant) == "e5d6"


def test_captured_value_agrees_with_python_chess() -> None:
    worth = {1: 1, 2: 3, 3: 3, 4: 5, 5: 9}
    for fen in (
        FREE_QUEEN,
        MATE_IN_ONE,
        "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R b KQkq - 0 1",
    ):
        board = chess.Board(fen)
        rows = records.from_boards([board])
        index, _ = records.legal_indices(rows)
        padded = np.full((1, len(index) + 3), -1, np.int16)
        padded[0, : len(index)] = index
        value = evaluation.captured_value(rows["pieces"], padded)
        for k, i in enumerate(index):
            move = records.move_from_index(int(i), board)
            taken = board.piece_at(move.to_square)
            assert value[0, k] == (worth[taken.piece_type] if taken else 0)
        assert (value[0, len(index) :] == 0).all()


def test_baselines_by_hand() -> None:
    pieces = records.from_boards([chess.Board(FREE_QUEEN)])["pieces"]
    index, _ = records.legal_indices(records.from_boards([chess.Board(FREE_QUEEN)]))
    n = len(index)
    takes = [records.move_from_index(int(i), chess.Board(FREE_QUEEN)).uci() for i in index].index("c3d5")
    weight = np.zeros((1, n), np.float32)
    weight[0, takes] = 1
    batch = {
        "pieces": pieces,
        "policy_index": index.astype(np.int16)[None],
        "policy_weight": weight,
        "wdl": np.array([[0.7, 0.2, 0.1]], np.float32),
    }
    sums = evaluation._baselines(batch)
    assert sums["uniform_top1"] == pytest.approx(1 / n)
    assert sums["uniform_top3"] == pytest.approx(3 / n)
    assert sums["uniform_kl"] == pytest.approx(np.log(n))
    assert (sums["class_0"], sums["class_1"], sums["class_2"]) == (1, 0, 0)


def test_puzzles_start_after_the_set_up_move(shared: Path) -> None:
    puzzles = evaluation.read_puzzles(shared / "puzzles" / "lichess_dev.csv", limit=200)
    assert len(puzzles) == 200
    assert all(puzzle.board.is_legal(puzzle.answer) for puzzle in puzzles)


def test_bad_puzzle_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no puzzle file"):
        evaluation.read_puzzles(tmp_path / "none.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="FEN"):
        evaluation.read_puzzles(tmp_path / "other.csv")
    (tmp_path / "bad.csv").write_text(f"FEN,Moves,Rating\n{chess.STARTING_FEN},e2e5 e7e5,900\n")
    with pytest.raises(ValueError, match=r"bad\.csv' line 2"):
        evaluation.read_puzzles(tmp_path / "bad.csv")
