"""Figures of a network on held-out positions: baselines, reliability; python-chess is the oracle."""

from types import SimpleNamespace
from typing import Any

import chess
import numpy as np
import pytest
import torch
from networks import MATRIX0, random_net
from positions import random_positions

from matrixlib.tasks.chess import records
from matrixlib.tasks.chess.evaluate import held_out
from matrixlib.tasks.chess.evaluate.net import INPUTS, Net
from matrixlib.tasks.chess.spec import TASK

FREE_QUEEN = "4k3/8/8/3q4/4P3/2N5/8/4K3 w - - 0 1"


def test_captured_value_agrees_with_python_chess() -> None:
    for fen in (FREE_QUEEN, "r3k2r/p1ppqpb1/bn2pnp1/3PN3/1p2P3/2N2Q1p/PPPBBPPP/R3K2R b KQkq - 0 1"):
        board = chess.Board(fen)
        rows = records.from_boards([board])
        index, _ = records.legal_indices(rows)
        padded = np.full((1, len(index) + 3), -1, np.int16)
        padded[0, : len(index)] = index
        value = records.captured_value(rows["pieces"], padded)
        for k, i in enumerate(index):
            move = records.move_from_index(int(i), board)
            captured = board.piece_at(move.to_square)
            assert value[0, k] == (records.PIECE_VALUES[captured.piece_type - 1] if captured else 0)
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
        "result": np.array([-1], np.int8),
    }
    sums = held_out.baselines(batch, 0.0)
    assert [sums[f"uniform_top{k}"] for k in (1, 3, 5)] == pytest.approx([1 / n, 3 / n, 5 / n])
    assert sums["uniform_kl"] == pytest.approx(np.log(n))
    assert [sums[f"class_{k}"] for k in range(3)] == [1, 0, 0]
    assert [held_out.baselines(batch, 1.0)[f"class_{k}"] for k in range(3)] == [0, 0, 1]


def test_positions_without_a_value_target_are_evaluated_by_policy_alone() -> None:
    """Puzzles have no value: a run on them ends with its other figures, and says nothing of a value."""
    net = random_net()
    without = loader(net, 24)
    plain = [
        {**b, "wdl": torch.zeros_like(b["wdl"]), "result": torch.full_like(b["result"], 2)}
        for b in without.sequential(8, 0)
    ]
    for batch in plain:
        batch["policy_weight"] = (batch["policy_index"] >= 0).float()
    figures = held_out.held_out(net, SimpleNamespace(sequential=lambda batch_size, sample: iter(plain)))
    assert {"top1", "policy_kl"} <= figures.keys()
    assert isinstance(figures["positions"], int), "a table shows a count"
    assert not {"wdl_accuracy", "value_correlation"} & figures.keys()
    assert "WDL" not in TASK.headline(figures)


def loader(net: Net, count: int) -> SimpleNamespace:
    """Batches of random positions: half of them won, half without any target."""
    boards = random_positions(count, seed=9)
    rows = records.from_boards(boards)
    wdl = np.where(np.arange(count)[:, None] % 2 == 0, [[1, 0, 0]], 0).astype(np.float32)
    batch = net.task.inputs(rows, *records.legal_indices(rows))
    batch |= {"wdl": wdl, "result": rows["result"].copy()}
    batch["policy_weight"] = (batch["policy_index"] >= 0).astype(np.float32)
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    cut = count // 3
    parts = [{name: t[:cut] for name, t in tensors.items()}, {name: t[cut:] for name, t in tensors.items()}]
    return SimpleNamespace(sequential=lambda batch_size, sample: iter(parts))


def test_reliability_counts_known_results_alone() -> None:
    net = random_net()
    actual = held_out.held_out(net, loader(net, 90))["reliability"]  # type: ignore[arg-type]
    assert list(actual) == ["win", "draw", "loss"]
    for name, points in actual.items():
        assert sum(points["count"]) == 45
        assert set(points["share"]) == {1 if name == "win" else 0}
    scalar = random_net(**MATRIX0)
    points = held_out.held_out(scalar, loader(scalar, 90))["reliability"]["score"]  # type: ignore[arg-type]
    assert set(points["share"]) == {1}
    assert sum(points["count"]) == 45


def test_reliability_is_of_what_the_network_predicts() -> None:
    net = random_net()
    batch, _ = loader(net, 90).sequential(0, 0)
    batch["wdl"][:] = torch.tensor([1.0, 0.0, 0.0])
    one: Any = SimpleNamespace(sequential=lambda batch_size, sample: iter([batch]))
    figures = held_out.held_out(net, one)
    said = net.predict({name: batch[name].numpy() for name in INPUTS if name in batch})["wdl"]
    for k, points in enumerate(figures["reliability"].values()):
        assert np.average(points["probability"], weights=points["count"]) == pytest.approx(said[:, k].mean(), rel=1e-5)


def test_bins_hold_what_was_said_and_what_is_so() -> None:
    said = np.array([0.0, 0.04, 0.55, 0.51, 1.0])
    actual = held_out.calibration(said, np.array([0.0, 1.0, 1.0, 0.0, 1.0]))
    assert actual.values.tolist() == [[0.02, 0.5, 2], [pytest.approx(0.53), 0.5, 2], [1.0, 1.0, 1]]
    assert held_out.calibration_error(actual) == pytest.approx((2 * 0.48 + 2 * 0.03) / 5)
