"""Held-out figures of Melee by hand, and the mistakes that they have to show."""

from typing import Any

import numpy as np
import pytest
from melee_batches import decisions, melee_batch
from test_melee_player import network

from matrixlib.tasks.melee import imitation
from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.controller import HEADS, NEUTRAL
from matrixlib.tasks.melee.imitation import Frames, figures


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


def test_repeating_looks_good_by_accuracy_and_meets_no_onset() -> None:
    target, held = sticky(4000)
    assert (held == target).mean() > 0.9
    assert figures(frames(4000, target=target, repeated=held, sampled=held))["onsets"]["recall"] == 0


def test_the_baselines_are_probabilities_and_the_best_of_their_kind() -> None:
    target, held = sticky(4000)
    for head in HEADS:
        now, before = target[:, head.choices], held[:, head.choices]
        rng, classes = np.random.default_rng(0), 2 if head.name == "buttons" else head.classes
        one, two = rng.integers(0, classes, (2, 4000, now.shape[1]))
        entropy = imitation.constant_nll(head, now)
        assert imitation.constant_nll(head, one).mean() > entropy.mean()
        repeating = imitation.repeating_nll(head, now, before)
        stay = (now == before).all(1)
        assert repeating[stay].max() < 0.25 < entropy[stay].mean()
        assert repeating[~stay].mean() > entropy[~stay].mean()
        assert repeating.mean() < entropy.mean()
        assert imitation.repeating_nll(head, one, two).mean() >= np.log(classes) - 0.02
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
    below, (_, no_leak, _) = imitation.checks(figures(given))
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


def test_all_eight_buttons_count() -> None:
    """In totals of the whole controller, each as much as an axis: the mean of the eight would hide seven of them."""
    target, held = sticky(2000)
    target[:, 9:], held[:, 9:] = NEUTRAL[9:], NEUTRAL[9:]
    share = target[:, :8].mean(0)
    buttons = -(share * np.log(share) + (1 - share) * np.log(1 - share)).sum()
    stick = np.bincount(target[:, 8]) / 2000
    axis = -(stick[stick > 0] * np.log(stick[stick > 0])).sum()
    given = frames(2000, target=target, repeated=held)
    assert imitation.nats(given, HEADS[:1])["constant"] == pytest.approx(buttons)
    rare = 0.02  # classes that never come count as half a time
    assert imitation.nats(given, HEADS)["constant"] == pytest.approx(buttons + axis, abs=rare)


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
