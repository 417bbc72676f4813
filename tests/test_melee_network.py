"""Melee's networks and losses, and their held-out figures, with the mistakes that these have to show."""

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from melee_games import decisions, melee_batch, melee_task
from test_melee_windows import network

from matrixlib.data.catalogue import Catalogue
from matrixlib.engine.task import Batch, active_terms
from matrixlib.tasks import load_config
from matrixlib.tasks.melee import imitation
from matrixlib.tasks.melee.columns import BUTTONS, MASKS
from matrixlib.tasks.melee.controller import HEADS, LOGITS, NEUTRAL, Head, Statistics
from matrixlib.tasks.melee.imitation import Frames, figures
from matrixlib.tasks.melee.importer import unpack_sample
from matrixlib.tasks.melee.model import MeleeNet, Objective, gumbel
from matrixlib.tasks.melee.spec import TASK, MeleeTask

TRUNKS = ("mlp", "residual", "gru", "lstm", "transformer")


def features(model: MeleeNet, batch: Batch) -> torch.Tensor:
    return model.trunk(model.encode(*inputs(batch)))


def inputs(batch: Batch) -> tuple[torch.Tensor, ...]:
    pair = (batch["action"].long(), batch["character"].long())
    return batch["numeric"], *pair, batch["previous"].long()


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("trunk", TRUNKS)
def test_frame_by_frame_is_as_over_the_whole(trunk: str, norm: str) -> None:
    """Also over three times as many frames as a window has, where the transformer forgets the first ones."""
    model = melee_task(model={"trunk": trunk, "norm": norm}).build_model().eval()
    batch = melee_batch(rows=2, frames=36)
    with torch.inference_mode():
        whole = features(model, batch)
        state, steps = model.trunk.initial(2), []
        for frame in range(36):
            numeric, action, character, previous = (part[:, frame] for part in inputs(batch))
            x, state = model.step(numeric, action, character, previous, state)
            steps.append(x)
    assert torch.allclose(torch.stack(steps, 1), whole, atol=1e-5)


@pytest.mark.parametrize("trunk", TRUNKS)
def test_no_frame_knows_a_later_one(trunk: str) -> None:
    model = melee_task(model={"trunk": trunk}).build_model().eval()
    batch = melee_batch(rows=1)
    changed = {**batch, "numeric": batch["numeric"].clone()}
    changed["numeric"][:, 6] += 1
    with torch.inference_mode():
        difference = (features(model, batch) - features(model, changed)).abs().amax(2)[0]
    assert not difference[:6].any()
    assert difference[6] > 0
    assert bool(difference[7:].any()) is (trunk not in ("mlp", "residual"))


@pytest.mark.parametrize("autoregressive", [True, False])
def test_a_part_knows_the_decisions_before_it_alone(autoregressive: bool) -> None:
    model = melee_task(model={"autoregressive": autoregressive}).build_model().eval()
    batch = melee_batch(rows=1)
    x, choices = features(model, batch), batch["choices"].long()
    before = model.heads(x, choices)
    for number, head in enumerate(HEADS):
        other = choices.clone()
        other[..., head.choices] = (other[..., head.choices] + 1) % (2 if number == 0 else head.classes)
        difference = (model.heads(x, other) - before).abs().amax((0, 1))
        changed = [bool(difference[part.logits].any()) for part in HEADS]
        assert changed == [autoregressive and later > number for later in range(len(HEADS))]


def test_decisions_are_samples_of_what_the_heads_say() -> None:
    """By noise that is added before the greatest is taken; without noise it is the likeliest."""
    heads = melee_task(model={"autoregressive": False}).build_model().heads
    for layer in heads.outer:
        torch.nn.init.normal_(layer.get_parameter("bias"))
    x = torch.zeros(1, 16).expand(20_000, -1)
    noise = gumbel(torch.rand(len(x), LOGITS, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        logits, choices = heads.decide(x, noise, lambda head, logits: logits)
        best = heads.decide(x[:1], torch.zeros(1, LOGITS), lambda head, logits: logits)[1][0]
    assert torch.allclose(choices[:, :8].float().mean(0), logits[0, :8].sigmoid(), atol=0.015)
    assert torch.equal(best[:8], (logits[0, :8] > 0).long())
    for head in HEADS[1:]:
        counts = torch.bincount(choices[:, head.choices][:, 0], minlength=head.classes)
        assert torch.allclose(counts / len(x), logits[0, head.logits].softmax(0), atol=0.015)
        assert best[head.choices] == logits[0, head.logits].argmax()


PRESSES, STICK = HEADS[0], HEADS[1]
ONES = torch.ones(8)


def test_the_focal_loss_spares_what_is_right_and_not_what_is_wrong() -> None:
    """With (1 - p)^gamma in place of p_t, a button that is rightly said to be up counts in full, and one that is
    wrongly said to be down not at all."""
    logits, up = torch.full((8,), 4.0), torch.zeros(8, dtype=torch.int64)
    p = 1 / (1 + math.exp(-4))
    wrong = Objective(ONES, gamma=2.0).losses(PRESSES, logits, up).item()
    right = Objective(ONES, gamma=2.0).losses(PRESSES, -logits, up).item()
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
    down, up = (objective.losses(PRESSES, z, torch.full_like(z, held).long()) for held in (1, 0))
    best = z[(rate * down + (1 - rate) * up).argmin()]
    if (gamma, weight) == (2.0, 1.0):
        assert best[0].sigmoid().item() == pytest.approx(0.25, abs=0.01)
    assert best[0].sigmoid() > 0.055
    assert objective.correct(PRESSES, best)[0].sigmoid().item() == pytest.approx(rate, abs=5e-4)


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
    assert torch.equal(plain.losses(PRESSES, logits, held), smooth.losses(PRESSES, logits, held))
    best = (0.9 * torch.eye(17)[4] + 0.1 / 17).log()
    assert smooth.losses(STICK, best, torch.tensor([4])).item() == pytest.approx(smooth.floor(STICK), rel=1e-5)
    assert smooth.floor(PRESSES) == plain.floor(STICK) == 0


@pytest.mark.parametrize("options", [{}, {"gamma": 2.0}, {"smoothing": 0.1}])
@pytest.mark.parametrize("head, held", [(PRESSES, [1] * 8), (STICK, [0])])
def test_huge_logits_stay_finite(options: dict[str, float], head: Head, held: list[int]) -> None:
    objective = Objective(ONES, **options)
    logits = torch.tensor([-3e4] * 4 + [3e4] * (head.classes - 4), dtype=torch.bfloat16, requires_grad=True)
    loss = objective.losses(head, logits, torch.tensor(held))
    loss.backward()
    assert loss.dtype == torch.float32
    for values in (loss, logits.grad, objective.correct(head, logits.detach())):
        assert values.isfinite().all()


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


def test_characters_are_balanced_by_loss_weights_and_never_beside_rare_buttons_at_full_strength() -> None:
    targets, character = decisions(np.random.default_rng(1), 1000), np.repeat([1, 9], [900, 100])
    whole = Statistics.count(targets, character)
    assert Statistics.count(targets[:99], character[:99]) + Statistics.count(targets[99:], character[99:]) == whole
    assert (whole + Statistics.count(targets)).characters == [], "of an older import"
    for strength, ratio in ((0.0, 1), (0.5, 3), (1.0, 9)):
        weights = whole.character_weights(strength)
        assert weights[9] / weights[1] == pytest.approx(ratio)
        assert 900 * weights[1] + 100 * weights[9] == pytest.approx(1000), "the loss keeps its scale"
        assert weights[0] == 1
    assert Statistics(10**6, [0] * 81, [10**6 - 1, 1]).character_weights(1.0)[1] == 30
    plain, batch = melee_task(), melee_batch()
    batch["character"][:2, :, 0], batch["character"][2:, :, 0] = 1, 9
    task = MeleeTask(
        melee_task(loss={"characters": 1.0}).config, replace(plain.statistics, characters=whole.characters)
    )
    model, terms = plain.build_model().eval(), active_terms(plain)
    parts = [
        plain.losses(model, {name: a[rows] for name, a in batch.items()}, terms)[0] for rows in (slice(2), slice(2, 6))
    ]
    sums, metrics = task.losses(model, batch, terms)
    for term in terms:
        assert sums[term].item() == pytest.approx((parts[0][term] / 1.8 + parts[1][term] * 5).item(), rel=1e-5)
        assert task.bounds(batch)[term][0] == pytest.approx(sums[term].item(), rel=0.02), "chance of a fresh network"
    assert metrics == plain.losses(model, batch, terms)[1], "metrics count every frame once"
    with pytest.raises(ValueError, match=r"rare 0\.6 and characters 0\.5 are more than 1 together"):
        melee_task(loss={"rare": 0.6, "characters": 0.5})


def test_characters_of_a_data_set_are_counted_also_where_its_import_did_not(tmp_path: Path) -> None:
    folder: Any = shutil.copytree(unpack_sample(), tmp_path / "set")
    config: Any = load_config("melee_demo", {"data": {"source": str(folder)}, "loss": {"characters": 0.5}})
    found: Any = TASK.statistics(config)
    assert sum(found.characters) == found.frames > 0
    catalogue = Catalogue(folder)
    for row in catalogue.shards("train"):
        old = {name: value for name, value in row.quality["classes"].items() if name != "characters"}
        catalogue.set_quality(row.name, {**row.quality, "classes": old})
    assert TASK.statistics(config) == found


def frames(count: int, **changes: np.ndarray) -> Frames:
    """Of a controller that nobody touches, predicted with certainty, but for `changes`."""
    names = ("target", "repeated", "sampled", "likeliest")
    still: Any = {name: np.tile(NEUTRAL, (count, 1)) for name in names}
    return still | {"nll": np.zeros((count, len(HEADS))), "new_action": np.zeros(count, bool)} | changes


def sticky(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(target, held) (n, 13) of a controller that changes in one frame of twelve."""
    rng = np.random.default_rng(seed)
    fresh = decisions(rng, count).astype(np.int64)
    last = np.maximum.accumulate(np.where(rng.random(count) < 1 / 12, np.arange(count), 0))
    target = fresh[last]
    return target, np.concatenate([target[:1], target[:-1]])


def test_onsets_by_hand() -> None:
    """Held in six frames of ten, pressed in two of them; the sample meets one onset and makes up another."""
    given = frames(10)
    a = BUTTONS.index("A")
    given["target"][:, a] = [0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    given["repeated"][1:, a] = given["target"][:-1, a]
    given["sampled"][:, a] = [1, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    # Two frames with the button up in which the player does not press it, and in one of them the sample does.
    assert figures(given)["onsets"] == {"number": 2, "recall": 0.5, "false": 0.5}
    found = {decision: buttons["A"] for decision, buttons in figures(given)["buttons"].items()}
    held = {"players": 0.6, "rate": 0.5, "accuracy": 0.7, "precision": 4 / 5, "recall": 4 / 6, "f1": 8 / 11}
    onset = {"onset_precision": 0.5, "onset_recall": 0.5, "onset_f1": 0.5, "false_onsets": 0.5, "onsets": 2}
    assert found["sampled"] == pytest.approx(held | onset)
    never, repeated = found["likeliest"], found["repeated"]
    assert (never["accuracy"], never["precision"], never["recall"]) == (0.4, None, 0), "None: nothing to divide by"
    assert (repeated["accuracy"], repeated["onset_precision"], repeated["onset_recall"]) == (0.6, None, 0)


def test_rare_buttons_and_d_up_have_figures_of_their_own() -> None:
    """ExPhil's metrics call the eighth button Start, but its label is D-up; a rare button drowns in a mean of all."""
    assert (BUTTONS[7], MASKS[7]) == ("D-up", 0x08)
    given = frames(1000)
    for button in ("Z", "L", "R", "D-up"):
        given["target"][500, BUTTONS.index(button)] = 1
    given["sampled"][500, BUTTONS.index("L")] = 1
    found = figures(given)["buttons"]["sampled"]
    assert list(found) == list(BUTTONS)
    recalls = {button: scores["recall"] for button, scores in found.items()}
    assert recalls == dict.fromkeys("ABXY") | {"Z": 0, "L": 1, "R": 0, "D-up": 0}, "None: never held"
    assert (found["Z"]["accuracy"], found["L"]["false_onsets"]) == (0.999, 0)


def test_the_error_of_a_stick_is_between_decoded_class_centres() -> None:
    given = frames(4)
    x, c_y = HEADS[1].choices, HEADS[4].choices
    given["target"][:, x] = [[8], [16], [16], [0]]
    given["repeated"][1:, x] = given["target"][:-1, x]
    given["sampled"][:, x] = [[8], [12], [16], [16]]
    given["sampled"][0, c_y] = 10
    given["likeliest"][0, HEADS[-1].choices] = 4  # the shoulder is no stick
    found = figures(given)["stick_mse"]
    assert found["sampled"] == {"main_x": (0.5**2 + 2**2) / 4, "main_y": 0, "c_x": 0, "c_y": 0.25**2 / 4}
    assert found["repeated"]["main_x"] == (1 + 2**2) / 4
    assert found["likeliest"] == {"main_x": (1 + 1 + 1) / 4, "main_y": 0, "c_x": 0, "c_y": 0}


def test_the_confusion_of_onsets_tells_samples_from_the_likeliest() -> None:
    """Rows: what the player newly presses; what is held on from the frame before is in no cell."""
    given = frames(6)
    a, b, z = (BUTTONS.index(name) for name in ("A", "B", "Z"))
    given["target"][[0, 1, 2, 3], a] = given["target"][4, z] = 1
    given["repeated"][[3, 4], a] = 1
    given["sampled"][[0, 3, 5], a] = given["sampled"][[1, 4], b] = given["sampled"][0, z] = 1
    expected = np.zeros((8, 9), int)
    expected[a, [a, z, b, 8]] = 1  # frame 0: A and Z, frame 1: B, frame 2: nothing
    expected[z, b] = 1
    assert np.array_equal(imitation.confusion(given, "sampled"), expected)
    expected[:] = 0
    expected[a, 8], expected[z, 8] = 3, 1
    assert np.array_equal(imitation.confusion(given, "likeliest"), expected)


def test_the_stick_map_counts_frames_by_y_and_x_and_modes_look_collapsed() -> None:
    given = frames(5)
    given["target"][:, 8:10] = given["sampled"][:, 8:10] = [[16, 8], [16, 8], [8, 0], [0, 8], [8, 8]]
    given["sampled"][0, 8:10] = (16, 16)
    for decision, cells in (
        ("target", {(8, 16): 2, (0, 8): 1, (8, 0): 1, (8, 8): 1}),
        ("sampled", {(16, 16): 1, (8, 16): 1, (0, 8): 1, (8, 0): 1, (8, 8): 1}),
        ("likeliest", {(8, 8): 5}),
    ):
        found = imitation.stick_map(given, decision)
        assert found.shape == (17, 17)
        assert {(int(y), int(x)): found[y, x] for y, x in np.argwhere(found)} == cells


def test_repeating_looks_good_by_accuracy_and_meets_no_onset() -> None:
    target, held = sticky(4000)
    assert (held == target).mean() > 0.9
    found = figures(frames(4000, target=target, repeated=held, sampled=held))
    assert found["onsets"]["recall"] == 0
    for scores in found["buttons"]["repeated"].values():
        assert scores["accuracy"] > 0.9
        assert scores["onset_recall"] == 0


def test_the_baselines_are_probabilities_and_the_best_of_their_kind() -> None:
    target, held = sticky(4000)
    for head in HEADS:
        now, before = target[:, head.choices], held[:, head.choices]
        entropy, repeating = imitation.constant_nll(head, now), imitation.repeating_nll(head, now, before)
        stay = (now == before).all(1)
        assert repeating[stay].max() < 0.25 < entropy[stay].mean()
        assert repeating[~stay].mean() > entropy[~stay].mean()
    share = target[:, :8].mean(0)
    eight = -(share * np.log(share) + (1 - share) * np.log(1 - share)).sum()
    assert imitation.constant_nll(HEADS[0], target[:, :8]).mean() == pytest.approx(eight), "not the mean of the eight"
    # By hand: it stays three times of four; a class that it never changes to counts as half a time.
    nll = imitation.repeating_nll(HEADS[-1], np.array([[0], [0], [0], [1]]), np.zeros((4, 1), int))
    assert np.exp(-nll) == pytest.approx([0.7, 0.7, 0.7, 0.3 * (1 / 3) / (1 - 1 / 6)])


@pytest.mark.parametrize("shift, honest", [(1, True), (0, False)])
def test_a_state_from_after_the_target_is_seen(shift: int, honest: bool) -> None:
    """A leak: a button that goes down shows as a new action in the state that it is predicted from."""
    given, onsets = frames(1000), np.arange(0, 1000, 20)
    given["target"][onsets, BUTTONS.index("B")] = 1
    given["new_action"][(onsets + shift) % 1000] = True
    given["new_action"][7::30] = True
    below, (_, no_leak, _) = TASK.checks(figures(given))
    assert no_leak is honest
    assert below[1], "certain of what is true"


def test_what_is_always_the_same_passes_no_verdict() -> None:
    """Not even where it is fitted on the changes alone, knows which parts go together, and beats repeating there."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 2, (6, 13))
    target, held = kinds[rng.integers(0, 6, 4000)], kinds[rng.integers(0, 6, 4000)]
    stay = rng.random(4000) < 0.95
    held[stay] = target[stay]
    change = (target != held).any(1)
    _, which, counts = np.unique(target[change], axis=0, return_inverse=True, return_counts=True)
    nll = np.zeros((4000, len(HEADS)))
    nll[change, 0] = -np.log(counts / counts.sum())[which.reshape(-1)] + 1e-9  # more than rounding
    found = figures(frames(4000, target=target, repeated=held, sampled=target, nll=nll))
    total = found["total"]
    assert total["change_entropy"] < total["change_nll"] < total["change_repeating"]


def test_samples_vary_where_the_likeliest_decisions_are_one() -> None:
    """A fresh network's are those of a constant predictor: judged by its argmax alone it would look collapsed."""
    batch = melee_batch(rows=20, frames=30)
    found = imitation.judge(network(), [batch])
    assert len(found["target"]) == batch["valid"].sum() == len(found["ranks"])
    different = {name: len(np.unique(found[name], axis=0)) for name in ("target", "sampled", "likeliest")}
    assert different["likeliest"] < 10 < different["sampled"]
    before, after = batch["action"][:, :-1, 0], batch["action"][:, 1:, 0]
    assert found["new_action"][1:30].tolist() == (before != after)[0].tolist()
    with pytest.raises(ValueError, match="nothing is held out"):
        imitation.judge(network(), [])


def test_frames_without_a_target_count_nowhere() -> None:
    task, batch = melee_task(), melee_batch()
    model, other = task.build_model().eval(), {**batch, "choices": batch["choices"].clone()}
    other["choices"][-1, 4:] = 1
    assert task.counts(batch)["shoulder"] == 5 * 12 + 4
    assert task.bounds(batch) == task.bounds(other)
    assert task.losses(model, batch, active_terms(task)) == task.losses(model, other, active_terms(task))
