"""Losses of Melee: the focal loss and its correction, smoothing, rare buttons, chance."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from melee_batches import decisions, melee_batch, melee_task

from matrixlib.engine.task import active_terms
from matrixlib.tasks.melee.controller import HEADS, Head, Statistics
from matrixlib.tasks.melee.losses import Objective

BUTTONS, STICK = HEADS[0], HEADS[1]
ONES = torch.ones(8)


def test_the_focal_loss_spares_what_is_right_and_not_what_is_wrong() -> None:
    """With (1 - p)^gamma in place of p_t, a button that is rightly said to be up counts in full, and one that is
    wrongly said to be down not at all."""
    logits, up = torch.full((8,), 4.0), torch.zeros(8, dtype=torch.int64)
    p = 1 / (1 + math.exp(-4))
    wrong = Objective(ONES, gamma=2.0).losses(BUTTONS, logits, up).item()
    right = Objective(ONES, gamma=2.0).losses(BUTTONS, -logits, up).item()
    assert wrong == pytest.approx(-(p**2) * math.log(1 - p), rel=1e-5)
    assert right == pytest.approx(-((1 - p) ** 2) * math.log(p), rel=1e-3)
    log_p = torch.randn(17).log_softmax(0)
    loss = Objective(ONES, gamma=2.0).losses(STICK, log_p, torch.tensor([3])).item()
    assert loss == pytest.approx(-((1 - log_p[3].exp()) ** 2 * log_p[3]).item(), rel=1e-5)


@pytest.mark.parametrize("gamma, weight", [(2.0, 1.0), (0.5, 1.0), (2.0, 4.0), (0.0, 4.0)])
def test_the_correction_gives_the_true_rate_of_a_button(gamma: float, weight: float) -> None:
    """A rate of 0.05 has its least focal loss of gamma 2 at 0.25."""
    rate, objective = 0.05, Objective(weight * ONES, gamma)
    z = torch.linspace(-6, 4, 20_001).double()[:, None].expand(-1, 8)
    down, up = (objective.losses(BUTTONS, z, torch.full_like(z, held).long()) for held in (1, 0))
    best = z[(rate * down + (1 - rate) * up).argmin()]
    if (gamma, weight) == (2.0, 1.0):
        assert best[0].sigmoid().item() == pytest.approx(0.25, abs=0.01)
    assert best[0].sigmoid() > 0.055
    assert objective.correct(BUTTONS, best)[0].sigmoid().item() == pytest.approx(rate, abs=5e-4)


@pytest.mark.parametrize("gamma, smoothing", [(2.0, 0.0), (0.0, 0.1), (2.0, 0.1)])
def test_the_correction_of_classes_is_where_the_expected_loss_is_least(gamma: float, smoothing: float) -> None:
    objective = Objective(ONES, gamma, smoothing)
    for seed in range(5):
        logits = (
            (0.5 if smoothing else 2) * torch.randn(17, generator=torch.Generator().manual_seed(seed))
        ).requires_grad_()
        shares = objective.correct(STICK, logits.detach()).exp()
        every = objective.losses(STICK, logits.expand(17, -1), torch.arange(17)[:, None])
        (slope,) = torch.autograd.grad((shares * every).sum(), logits)
        assert slope.abs().max() < 1e-5
        assert shares.sum().item() == pytest.approx(1)
        assert (shares - logits.softmax(0)).abs().max() > 0.002


def test_smoothing_is_taken_out_of_what_a_network_says() -> None:
    """Smoothed, a class that is never held is learned with its share; played like that, it would be held."""
    true = torch.tensor([0.7, 0.3] + [0.0] * 15)
    learned = (0.9 * true + 0.1 / 17).log()
    shares = Objective(ONES, smoothing=0.1).correct(STICK, learned).exp()
    assert torch.allclose(shares, true, atol=1e-3)
    assert (shares > 0).all(), "what was done all the same has a log-loss"


def test_smoothing_leaves_the_buttons_alone_and_has_a_floor() -> None:
    plain, smooth = Objective(ONES), Objective(ONES, smoothing=0.1)
    logits, held = torch.randn(5, 8), torch.randint(0, 2, (5, 8))
    assert torch.equal(plain.losses(BUTTONS, logits, held), smooth.losses(BUTTONS, logits, held))
    best = (0.9 * torch.eye(17)[4] + 0.1 / 17).log()
    assert smooth.losses(STICK, best, torch.tensor([4])).item() == pytest.approx(smooth.floor(STICK), rel=1e-5)
    assert smooth.floor(BUTTONS) == plain.floor(STICK) == 0


@pytest.mark.parametrize("options", [{}, {"gamma": 2.0}, {"smoothing": 0.1}])
@pytest.mark.parametrize("head, held", [(BUTTONS, [1] * 8), (STICK, [0])])
def test_huge_logits_stay_finite(options: dict[str, float], head: Head, held: list[int]) -> None:
    objective = Objective(ONES, **options)
    logits = torch.tensor([-3e4] * 4 + [3e4] * (head.classes - 4), dtype=torch.bfloat16, requires_grad=True)
    loss = objective.losses(head, logits, torch.tensor(held))
    loss.backward()
    assert loss.dtype == torch.float32
    for values in (loss, logits.grad, objective.correct(head, logits.detach())):
        assert values.isfinite().all()


def test_frames_without_a_target_count_nowhere() -> None:
    task, batch = melee_task(), melee_batch()
    model, active = task.build_model().eval(), active_terms(task)
    other = {**batch, "choices": batch["choices"].clone()}
    other["choices"][-1, 4:] = 1
    assert task.counts(batch)["shoulder"] == 5 * 12 + 4
    with torch.no_grad():
        for one, two in zip(task.losses(model, batch, active), task.losses(model, other, active), strict=True):
            assert {name: value.item() for name, value in one.items()} == {n: v.item() for n, v in two.items()}
    assert task.bounds(batch) == task.bounds(other)


def test_chance_is_the_entropy_of_the_constant_predictor() -> None:
    targets = decisions(np.random.default_rng(0), 500)
    task, batch = melee_task(), melee_batch(rows=1, frames=500)
    batch["choices"] = torch.from_numpy(targets[None])
    batch["valid"][:] = 1
    chance = task.bounds(batch)
    share = np.bincount(targets[:, 8], minlength=17) / 500
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    assert chance["main_x"][0] / 500 == pytest.approx(entropy, abs=0.02)
    rate = targets[:, :8].mean(0)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)).mean()
    assert chance["buttons"][0] / 500 == pytest.approx(entropy, abs=0.001)


def test_statistics_add_up_and_weigh_rare_buttons() -> None:
    targets = decisions(np.random.default_rng(1), 300)
    targets[:, 0], targets[:, 1], targets[:5, 1] = 1, 0, 1
    whole = Statistics.count(targets)
    assert Statistics.count(targets[:100]) + Statistics.count(targets[100:]) == whole
    assert Statistics(**json.loads(json.dumps(asdict(whole)))) == whole
    assert whole.weights()[:3] == pytest.approx([1, math.sqrt(295 / 5), 2], rel=0.2)
    assert max(Statistics(10**6, (0,) * 81).weights()) == 30
