"""Held-out figures of Melee by hand, and the mistakes that they have to show."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from melee_batches import decisions

from matrixlib.tasks.melee import imitation
from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.controller import HEADS, NEUTRAL
from matrixlib.tasks.melee.imitation import Frames


def figures_of(given: Frames) -> dict[str, Any]:
    return imitation.figures(given, autoregressive=True)


def frames(count: int) -> Frames:
    """Of a controller that nobody touches, predicted with certainty."""
    still = np.tile(NEUTRAL, (count, 1))
    nothing = np.zeros((count, len(HEADS)))
    return Frames(
        still, still.copy(), still.copy(), still.copy(), nothing, nothing[:, 1:].astype(int), np.zeros(count, bool)
    )


def sticky(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(target, held) (n, 13) of a controller that changes in one frame of twelve."""
    rng = np.random.default_rng(seed)
    fresh = decisions(rng, count).astype(np.int64)
    last = np.maximum.accumulate(np.where(rng.random(count) < 1 / 12, np.arange(count), 0))
    target = fresh[last]
    return target, np.concatenate([target[:1], target[:-1]])


def test_buttons_by_hand() -> None:
    """Held in six frames of ten, pressed in two of them; the sample meets one onset and makes up another."""
    given = frames(10)
    a = BUTTONS.index("A")
    given.target[:, a] = [0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    given.repeated[1:, a] = given.target[:-1, a]
    given.sampled[:, a] = [1, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    button = figures_of(given)["buttons"]["A"]
    assert (button["rate"], button["onsets"]) == (0.6, 2)
    assert button["sampled"] == {
        "rate": 0.5,
        "precision": 4 / 5,
        "recall": 4 / 6,
        "f1": 8 / 11,
        "onset_precision": 0.5,
        "onset_recall": 0.5,
        "onset_f1": 0.5,
        "false_onsets": 0.5,  # two frames with the button up, in which the player does not press it
    }
    assert button["repeated"]["recall"] == 4 / 6
    assert button["likeliest"]["rate"] == button["likeliest"]["recall"] == 0


def test_repeating_looks_good_by_accuracy_and_meets_no_onset() -> None:
    target, held = sticky(4000)
    figures = figures_of(replace(frames(4000), target=target, repeated=held))
    assert figures["whole"]["repeated"]["accuracy"] > 0.9
    for button in figures["buttons"].values():
        assert button["repeated"]["recall"] > 0.9
        assert button["repeated"]["onset_recall"] == 0
    for axis in figures["axes"].values():
        assert axis["repeated"]["accuracy"] > 0.9
        assert axis["repeated"]["change_accuracy"] == 0


def test_the_baselines_are_probabilities_and_the_best_of_their_kind() -> None:
    target, held = sticky(4000)
    for head in HEADS:
        now, before = target[:, head.choices], held[:, head.choices]
        rng = np.random.default_rng(0)
        one, two = rng.integers(0, imitation.classes(head), (2, 4000, now.shape[1]))
        entropy = imitation.constant_nll(head, now)
        assert imitation.constant_nll(head, one).mean() > entropy.mean()
        repeating = imitation.repeating_nll(head, now, before)
        stay = (now == before).all(1)
        assert repeating[stay].max() < 0.25 < entropy[stay].mean()
        assert repeating[~stay].mean() > entropy[~stay].mean()
        assert repeating.mean() < entropy.mean()
        assert imitation.repeating_nll(head, one, two).mean() >= np.log(imitation.classes(head)) - 0.02


def test_repeating_by_hand() -> None:
    """It stays three times of four; a class that it never changes to counts as half a time."""
    now, before = np.array([[0], [0], [0], [1]]), np.zeros((4, 1), int)
    nll = imitation.repeating_nll(HEADS[-1], now, before)
    assert np.exp(-nll) == pytest.approx([0.7, 0.7, 0.7, 0.3 * (1 / 3) / (1 - 1 / 6)])


def test_errors_of_sticks_are_between_the_middles_of_classes() -> None:
    given = frames(4)
    head = HEADS[1]
    given.target[:, head.choices][:, 0] = [8, 8, 16, 0]
    given.sampled[:, head.choices][:, 0] = [8, 12, 16, 16]
    given.ranks[:, 0] = [0, 2, 3, 5]
    axis = figures_of(given)["axes"]["main_x"]
    assert axis["sampled"]["accuracy"] == 0.5
    assert axis["sampled"]["error"] == (0 + 0.5 + 0 + 2) / 4
    assert axis["sampled"]["change_error"] == 1
    assert axis["top3"] == 0.5
    assert axis["change_top3"] == 0


def test_a_state_from_after_the_target_is_seen() -> None:
    """A leak: a button that goes down shows as a new action in the state that it is predicted from."""
    given = frames(1000)
    onsets = np.arange(0, 1000, 20)
    given.target[onsets, BUTTONS.index("B")] = 1
    for shift, honest in ((1, True), (0, False)):
        new = np.zeros(1000, bool)
        new[(onsets + shift) % 1000] = True
        new[7::30] = True
        figures = figures_of(replace(given, new_action=new))
        (check,) = (holds for name, holds, _ in imitation.checks(figures) if name == "no leak")
        assert check is honest


@pytest.mark.parametrize("nll, better", [(0.001, True), (9.0, False)])
def test_targets_are_more_than_repeating(nll: float, better: bool) -> None:
    target, held = sticky(2000)
    likelihood = np.full((2000, len(HEADS)), nll)
    sampled = target if better else held
    figures = figures_of(replace(frames(2000), target=target, repeated=held, sampled=sampled, nll=likelihood))
    assert {holds for _, holds, _ in imitation.targets(figures)} == {better}
    assert imitation.checks(figures)[0][1] is better
    assert figures["total"]["nll"] == pytest.approx(6 * nll)


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
    figures = figures_of(replace(frames(4000), target=target, repeated=held, sampled=target, nll=nll))
    assert figures["total"]["change_nll"] < figures["total"]["change_repeating"]
    assert {name: holds for name, holds, _ in imitation.targets(figures) if "controller changes" in name} == {
        "log-loss where the controller changes below repeating and below every constant": False
    }


def test_all_eight_buttons_count() -> None:
    """In totals of the whole controller, each as much as an axis: the mean of the eight would hide seven of them."""
    target, held = sticky(2000)
    target[:, 9:], held[:, 9:] = NEUTRAL[9:], NEUTRAL[9:]
    share = target[:, :8].mean(0)
    buttons = -(share * np.log(share) + (1 - share) * np.log(1 - share)).sum()
    stick = np.bincount(target[:, 8]) / 2000
    axis = -(stick[stick > 0] * np.log(stick[stick > 0])).sum()
    figures = figures_of(replace(frames(2000), target=target, repeated=held))
    assert figures["heads"]["buttons"]["constant"] == pytest.approx(buttons)
    rare = 0.02  # classes that never come count as half a time
    assert figures["total"]["constant"] == pytest.approx(buttons + axis, abs=rare)


def test_diversity_tells_a_player_from_one_who_does_nothing() -> None:
    target, held = sticky(2000)
    whole = figures_of(replace(frames(2000), target=target, repeated=held, sampled=target))["whole"]
    assert whole["sampled"]["different"] == whole["target"]["different"] > 100
    assert whole["likeliest"] == {
        "accuracy": 0.0,
        "change_accuracy": 0.0,
        "changes": whole["likeliest"]["changes"],
        "different": 1,
        "entropy": 0.0,
        "change_entropy": 0.0,
    }
