"""Losses as sums: against a slow reference in float64, and their traps."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from matrixlib.tasks.chess import losses
from matrixlib.tasks.chess.config import LossConfig

MOVES = 4672
Arrays = dict[str, np.ndarray]


def policy_case(seed: int, rows: int = 6, places: int = 12) -> Arrays:
    """Random rows with 0 to `places` legal moves; some without target, some not to be counted."""
    rng = np.random.default_rng(seed)
    index = np.full((rows, places), -1, np.int16)
    weight = np.zeros((rows, places), np.float32)
    for row in range(rows):
        n = rng.integers(0, places + 1)
        index[row, :n] = np.sort(rng.choice(MOVES, n, replace=False))
        weight[row, :n] = rng.integers(0, 4, n) * rng.integers(0, 2)
    logits = rng.normal(0, 3, (rows, MOVES)).astype(np.float32)
    return {"logits": logits, "index": index, "weight": weight, "rows": rng.random(rows) < 0.8}


def tensors(case: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in case.items()}


def slow_policy(case: Arrays, smoothing: float, temperature: float) -> dict[str, float]:
    """The same, move by move in float64, without pads."""
    out: dict[str, float] = dict.fromkeys(("loss", "count", "top1", "top3", "top5", "kl", "skipped", "floor"), 0.0)
    for row in range(len(case["index"])):
        moves = [k for k in range(case["index"].shape[1]) if case["index"][row, k] >= 0]
        weight = [float(case["weight"][row, k]) for k in moves]
        if not case["rows"][row]:
            continue
        if sum(weight) == 0:
            out["skipped"] += 1
            continue
        target = [w / sum(weight) for w in weight]
        sharp = [t ** (1 / temperature) for t in target]
        soft = [(1 - smoothing) * t / sum(sharp) + smoothing / len(moves) for t in sharp]
        scores = [float(case["logits"][row, case["index"][row, k]]) for k in moves]
        log_z = math.log(sum(math.exp(s) for s in scores))
        log_y = math.log(sum(math.exp(s / temperature) for s in scores))
        out["count"] += 1
        out["loss"] += sum(q * (log_y - s / temperature) for q, s in zip(soft, scores, strict=True))
        out["kl"] += sum(t * (math.log(t) + log_z - s) for t, s in zip(target, scores, strict=True) if t > 0)
        order = sorted(range(len(moves)), key=lambda k: -scores[k])
        for k in (1, 3, 5):
            out[f"top{k}"] += any(target[place] == max(target) for place in order[:k])
        out["floor"] -= sum(q * math.log(q) for q in soft if q > 0)
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    temperature=st.sampled_from([1.0, 0.1, 0.5, 3.0]),
)
def test_policy_equals_a_slow_reference(seed: int, smoothing: float, temperature: float) -> None:
    case = policy_case(seed)
    expected = slow_policy(case, smoothing, temperature)
    options = LossConfig(label_smoothing=smoothing, policy_temperature=temperature)
    loss, metrics = losses.policy_loss(**tensors(case), options=options)
    inputs = [tensors(case)[name] for name in ("index", "weight", "rows")]
    assert int(losses.policy_rows(*inputs).sum()) == expected.pop("count")
    assert loss.dtype == torch.float32
    assert losses.policy_floor(*inputs, options) == pytest.approx(expected.pop("floor"), rel=1e-5, abs=1e-5)
    found = {"loss": float(loss)} | {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 6))
def test_policy_is_additive_over_slices_and_blind_to_illegal_moves(seed: int, cut: int) -> None:
    case, options = policy_case(seed), LossConfig(label_smoothing=0.1)
    whole, metrics = losses.policy_loss(**tensors(case), options=options)
    listed = np.zeros((6, MOVES), bool)
    for row in range(6):
        listed[row, case["index"][row][case["index"][row] >= 0]] = True
    case["logits"] = np.where(listed, case["logits"], 1e4).astype(np.float32)
    halves = [tensors({k: v[part] for k, v in case.items()}) for part in (slice(0, cut), slice(cut, 6))]
    parts = [losses.policy_loss(**half, options=options) for half in halves]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-5, abs=1e-4)
    for name, value in metrics.items():
        assert float(sum(m[name] for _, m in parts)) == pytest.approx(float(value), rel=1e-4, abs=1e-4)


def one_row(weight: list[float], logits: list[float], **options: float) -> tuple[Tensor, dict[str, Tensor]]:
    full = torch.zeros(1, MOVES)
    full[0, : len(logits)] = torch.tensor(logits)
    index = torch.full((1, 8), -1, dtype=torch.int16)
    index[0, : len(weight)] = torch.arange(len(weight), dtype=torch.int16)
    weights = torch.zeros(1, 8)
    weights[0, : len(weight)] = torch.tensor(weight)
    return losses.policy_loss(full, index, weights, torch.tensor([True]), LossConfig(**options))  # type: ignore[arg-type]


def test_smoothing_of_a_one_hot_target_by_hand() -> None:
    """The trap: smoothing over all 4,672 moves, illegal ones masked with -1e9, gave a loss of 5e7."""
    loss, metrics = one_row([1, 0, 0, 0], [math.log(8), 0.0, 0.0, math.log(2)], label_smoothing=0.1)
    # probabilities 8, 1, 1, 2 of 12; target 0.925, 0.025, 0.025, 0.025
    by_hand = -(0.925 * math.log(8 / 12) + 0.05 * math.log(1 / 12) + 0.025 * math.log(2 / 12))
    assert float(loss) == pytest.approx(by_hand, rel=1e-6)
    assert float(metrics["kl"]) == pytest.approx(-math.log(8 / 12), rel=1e-6)  # without smoothing


def test_a_visited_move_is_not_the_only_legal_one() -> None:
    """The trap: with the mask taken from target > 0 a one-hot target gives a loss of exactly 0."""
    assert float(one_row([1, 0, 0], [0.0, 0.0, 0.0])[0]) == pytest.approx(math.log(3))


def test_ties_in_the_target_count_as_right() -> None:
    assert float(one_row([2, 5, 5, 0], [0.0, 0.0, 3.0, 0.0])[1]["top1"]) == 1
    target = torch.tensor([[0.4, 0.2, 0.4], [0.4, 0.4, 0.2]])
    _, metrics = losses.wdl_loss(torch.tensor([[0.0, 0, 9], [0.0, 0, 9]]), target, torch.ones(2, dtype=torch.bool))
    assert float(metrics["accuracy"]) == 1


def test_rows_without_target_or_moves_are_skipped_with_zero_gradient() -> None:
    logits = torch.zeros(3, MOVES, requires_grad=True)
    index = torch.tensor([[0, 1, -1], [0, 1, 2], [-1, -1, -1]], dtype=torch.int16)
    weight = torch.tensor([[1.0, 0.0, 5.0], [0.0, 0.0, 0.0], [0.0, 7.0, 0.0]])  # weight in pads counts nothing
    rows = torch.ones(3, dtype=torch.bool)
    loss, metrics = losses.policy_loss(logits, index, weight, rows, LossConfig(label_smoothing=0.1))
    assert float(loss.detach()) == pytest.approx(math.log(2))
    assert float(metrics["skipped"]) == 2
    loss.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert not logits.grad[1:].any()
    assert set(logits.grad[0].nonzero().squeeze(1).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [0.1, 4.0])
def test_what_a_temperature_learns_is_the_target_itself(temperature: float) -> None:
    """The loss reaches its floor, without a gradient, where the softmax of the logits is the target."""
    weight, options = torch.tensor([[0.6, 0.3, 0.1, 0.0]]), LossConfig(policy_temperature=temperature)
    index, rows = torch.tensor([[0, 1, 2, -1]], dtype=torch.int16), torch.tensor([True])
    logits = torch.zeros(1, MOVES)
    logits[0, :3] = weight[0, :3].log() + 5
    loss, metrics = losses.policy_loss(logits.requires_grad_(), index, weight, rows, options)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(losses.policy_floor(index, weight, rows, options), abs=1e-5)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-5


def test_extreme_logits_stay_finite_and_wrong_ones_are_not_hidden() -> None:
    assert torch.isfinite(one_row([1, 0, 3], [-5e4, 5e4, 0.0], label_smoothing=0.1)[0])
    assert not torch.isfinite(one_row([1, 1], [math.nan, 0.0])[0])
    half, index = torch.full((1, MOVES), 6e4, dtype=torch.float16), torch.tensor([[5, 6, -1]], dtype=torch.int16)
    loss, _ = losses.policy_loss(half, index, torch.tensor([[1.0, 1, 0]]), torch.tensor([True]), LossConfig())
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(2))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_four_cases_of_the_value_target(share: float) -> None:
    wdl = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    target, known = losses.value_target(wdl, torch.tensor([-1, 2, 1, 2], dtype=torch.int8), share)
    both = [0.5 * (1 - share), 0.3 * (1 - share), 0.2 * (1 - share) + share]
    assert target[0].tolist() == pytest.approx(both)
    assert known.tolist() == [True, share < 1, share > 0, False]
    assert target[1].tolist() == pytest.approx([0.5, 0.3, 0.2] if share < 1 else [0, 0, 0])
    assert target[2].tolist() == pytest.approx([1.0, 0, 0] if share > 0 else [0, 0, 0])
    assert target[3].tolist() == [0, 0, 0]
    results, _ = losses.value_target(torch.zeros(3, 3), torch.tensor([1, 0, -1], dtype=torch.int8), 1.0)
    assert torch.equal(results, torch.eye(3))
    assert losses.expected_score(results).tolist() == [1.0, 0.5, 0.0]


def test_a_nan_in_a_target_makes_the_loss_nan_and_not_the_gradient_alone() -> None:
    """A finite loss with a gradient that is not passes for an overflow of the loss scale, which is no fault."""
    broken = torch.tensor([[math.nan, 0.5, 0.5], [1.0, 0, 0]])
    result, rows = torch.tensor([2, 2], dtype=torch.int8), torch.ones(2, dtype=torch.bool)
    target, known = losses.value_target(broken, result, 0.0)
    assert known.all()
    assert losses.wdl_loss(torch.zeros(2, 3), target, known)[0].isnan()
    index = torch.arange(3, dtype=torch.int16).repeat(2, 1)
    assert losses.policy_loss(torch.zeros(2, MOVES), index, broken, rows, LossConfig(label_smoothing=0.1))[0].isnan()
    target, known = losses.value_target(broken, torch.tensor([1, 2], dtype=torch.int8), 1.0)
    assert (target[0].tolist(), known.tolist()) == ([1, 0, 0], [True, False]), "what has no share does not matter"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_wdl_equals_a_slow_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = {"logits": rng.normal(0, 2, (8, 3)).astype(np.float32), "rows": rng.random(8) < 0.7}
    case["target"] = rng.dirichlet([0.5] * 3, 8).astype(np.float32)
    loss, metrics = losses.wdl_loss(**tensors(case))
    expected: dict[str, float] = dict.fromkeys(("loss", "accuracy", "x", "x2", "y", "y2", "xy"), 0.0)
    for row in np.flatnonzero(case["rows"]):
        target = case["target"][row].astype(np.float64)
        exponent = np.exp(case["logits"][row].astype(np.float64))
        p = exponent / exponent.sum()
        x, y = p[0] + p[1] / 2, target[0] + target[1] / 2
        expected["loss"] -= (target * np.log(p)).sum()
        expected["accuracy"] += float(p.argmax() == target.argmax())
        for name, value in (("x", x), ("x2", x * x), ("y", y), ("y2", y * y), ("xy", x * y)):
            expected[name] += value
    found = {"loss": float(loss)} | {name: float(value) for name, value in metrics.items()}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_scalar_loss(kind: Any) -> None:
    target = torch.tensor([[1.0, 0, 0], [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]])
    value, rows = torch.tensor([-1.0, 0.1, 0.5]), torch.tensor([True, True, False])
    loss, metrics = losses.scalar_loss(value, target, rows, LossConfig(scalar=kind, huber_delta=0.5))
    by_hand = [e * e if kind == "mse" else (0.5 * (e - 0.25) if e > 0.5 else e * e / 2) for e in (2.0, 0.2)]
    assert float(loss) == pytest.approx(sum(by_hand), rel=1e-5)
    assert float(metrics["x"]) == pytest.approx(0.0 + 0.55)
    assert float(metrics["y"]) == pytest.approx(1.0 + 0.45)
    assert "accuracy" not in metrics


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_square_losses_equal_a_slow_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (3, 3, 8, 8)).astype(np.float32)
    classes, squares = rng.integers(0, 3, (3, 8, 8)), rng.random((3, 8, 8)) < 0.5
    loss, metrics = losses.class_loss(*map(torch.from_numpy, (logits, classes, squares)))
    wide = logits.astype(np.float64)
    log_p = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    picked = np.take_along_axis(log_p, classes[:, None], 1)[:, 0]
    assert float(loss) == pytest.approx(-picked[squares].sum(), rel=1e-5)
    assert int(metrics["accuracy"]) == (logits.argmax(1) == classes)[squares].sum()

    truth, score = (classes == 1)[squares], wide[:, 0][squares]
    actual = (classes == 1).astype(np.float32)
    loss, metrics = losses.binary_loss(*map(torch.from_numpy, (logits[:, :1], actual, squares)))
    p, guess = 1 / (1 + np.exp(-score)), score > 0
    assert float(loss) == pytest.approx(-np.log(np.where(truth, p, 1 - p)).sum(), rel=1e-5)
    sums = {"accuracy": guess == truth, "hit": guess & truth, "predicted": guess, "actual": truth}
    assert float(metrics.pop("cross_entropy")) == float(loss)  # a 1 counts once: nothing to correct
    assert {name: int(value) for name, value in metrics.items()} == {name: hits.sum() for name, hits in sums.items()}


def test_positive_weights_count_ones_and_leave_the_best_probability_true() -> None:
    """The weighted loss of a constant guess is least where the calibrated logit is that of the base rate."""
    target = torch.zeros(4, 8, 8)
    target[0, 0, :5] = 1  # 5 of 256
    squares = torch.ones(4, 8, 8, dtype=torch.bool)
    grid = torch.linspace(-8, 4, 4001)
    weighted = [float(losses.binary_loss(x.expand(4, 1, 8, 8), target, squares, 20.0)[0]) for x in grid]
    best = grid[int(np.argmin(weighted))]
    assert float(losses.calibrated(best, 20.0).sigmoid()) == pytest.approx(5 / 256, rel=0.02)
    _, metrics = losses.binary_loss(best.expand(4, 1, 8, 8), target, squares, 20.0)
    entropy = -256 * (5 / 256 * math.log(5 / 256) + 251 / 256 * math.log(251 / 256))
    assert float(metrics["cross_entropy"]) == pytest.approx(entropy, rel=1e-3)
    zero, _ = losses.binary_loss(torch.zeros(4, 1, 8, 8), target, squares, 20.0)
    assert float(zero) == pytest.approx((256 + 19 * 5) * math.log(2)), "chance level"
