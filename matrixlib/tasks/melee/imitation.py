"""How well a network imitates, on held-out frames: each figure beside what holding the controller as it is gives.

At 60 frames a second a controller mostly stays as it is, so accuracies say little: repeating the last one gets 98 % of
the buttons right. What counts is what a network says where something changes: at the frame in which a button goes down
(an *onset*), in which a stick moves.

Shapes: n valid frames; choices (n, 13) and log-likelihoods as in controller.py and losses.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from matrixlib.engine.network import Network
from matrixlib.engine.task import Batch, to_device
from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.controller import HEADS, LOGITS, STICK_CLASSES, Head, centre
from matrixlib.tasks.melee.heads import gumbel
from matrixlib.tasks.melee.losses import Objective, log_likelihood
from matrixlib.tasks.spec import Check

DECISIONS = ("sampled", "likeliest", "repeated")
ATTACKS = [BUTTONS.index(name) for name in ("A", "B", "X", "Y", "Z")]
"""Buttons that begin a new action."""
ACTION = 0  # place of the player's own among the two actions
TOP = 3
LEAK = 3.0
"""Times that an action may have changed more often where a button is about to go down: with a state that is one after
the target it was 7.6 times, paired as here a third."""


@dataclass(frozen=True)
class Frames:
    """What is to be judged. target, repeated (the controller held), sampled, likeliest: choices (n, 13).

    nll: (n, 6) by head, negative log-likelihood of the target, of all eight buttons together. ranks: (n, 5) classes
    that a head finds likelier than the true one. Both are those of a head that is given the true parts before it where
    the network decides one after the other, so the sum of nll is that of the whole controller. new_action (n,): the
    player's action is another than in the frame before; False where there is none.
    """

    target: np.ndarray
    repeated: np.ndarray
    sampled: np.ndarray
    likeliest: np.ndarray
    nll: np.ndarray
    ranks: np.ndarray
    new_action: np.ndarray

    @classmethod
    def join(cls, parts: Iterable[Frames]) -> Frames:
        """All in one."""
        lists = list(parts)
        return cls(*(np.concatenate([getattr(part, one.name) for part in lists]) for one in fields(cls)))


def judge(net: Network, batches: Iterable[Batch], seed: int = 0) -> Frames:
    """The valid frames of host batches, with what the network makes of them. ValueError where there is none."""
    stream = torch.Generator().manual_seed(seed)
    parts = list(_parts(net, batches, stream))
    if not parts:
        raise ValueError("nothing is held out to evaluate on")
    return Frames.join(parts)


def _parts(net: Network, batches: Iterable[Batch], stream: torch.Generator) -> Iterator[Frames]:
    model: Any = net.model
    task: Any = net.task
    objective = task.objective(model)
    for host in batches:
        batch = to_device(host, net.runtime.torch_device)
        target, held = batch["choices"].long(), batch["previous"].long()
        shape = (*target.shape[:-1], LOGITS)
        noise = gumbel(torch.rand(shape, generator=stream)).to(target.device)
        with torch.inference_mode(), net.runtime.autocast():
            inputs = (batch["numeric"], batch["action"].long(), batch["character"].long(), held)
            x = model.trunk(model.encode(*inputs))
            logits = model.heads(x, target).float()
            sampled = model.heads.decide(x, noise, objective.correct)[1]
            likeliest = model.heads.decide(x, torch.zeros_like(noise), objective.correct)[1]
        nll, ranks = _judged(objective, logits, target)
        own = batch["action"][..., ACTION]
        new = torch.zeros_like(own, dtype=torch.bool)
        new[:, 1:] = own[:, 1:] != own[:, :-1]
        valid = batch["valid"].bool()
        parts = (target, held, sampled, likeliest, nll, ranks, new)
        yield Frames(*(part[valid].cpu().numpy() for part in parts))


def _judged(objective: Objective, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    nll, ranks = [], []
    for head in HEADS:
        corrected, own = objective.correct(head, logits[..., head.logits]), target[..., head.choices]
        likelihood = log_likelihood(head, corrected, own)
        nll.append(-likelihood)
        if head.name != "buttons":
            ranks.append((corrected > likelihood[..., None]).sum(-1))
    return torch.stack(nll, -1), torch.stack(ranks, -1)


def figures(frames: Frames, autoregressive: bool) -> dict[str, Any]:
    """JSON data, each figure beside its baselines; log-likelihoods in nats a frame; counts for the pictures.

    The baselines of log-likelihoods, a constant predictor and one that mostly repeats the controller held, are fitted
    on the very frames that they are judged on, which favours them: constants once more on those with a change alone.
    given: what is to be said of the network's log-likelihoods and ranks of single parts where it decides them one after
    the other (see `Frames`).
    """
    change = np.stack([(frames.target != frames.repeated)[:, head.choices].any(1) for head in HEADS], 1)
    return {
        "frames": len(frames.target),
        "given": ", given true earlier parts" if autoregressive else "",
        "heads": {head.name: _nats(frames, [head], change[:, number]) for number, head in enumerate(HEADS)},
        "total": _nats(frames, HEADS, np.any(change, 1)),
        "whole": _whole(frames, np.any(change, 1)),
        "buttons": {name: _button(frames, place) for place, name in enumerate(BUTTONS)},
        "axes": {head.name: _axis(frames, number) for number, head in enumerate(HEADS) if head.name != "buttons"},
        "leak": _leak(frames),
        "sticks": {name: _stick_map(choices) for name, choices in _versions(frames, "target", "sampled", "likeliest")},
        "confusion": _confusion(frames),
    }


def _versions(frames: Frames, *names: str) -> Iterator[tuple[str, np.ndarray]]:
    return ((name, getattr(frames, name)) for name in names)


def _nats(frames: Frames, heads: Sequence[Head], change: np.ndarray) -> dict[str, float]:
    """Means of these parts together, over all frames and over those in which something changes (n,)."""
    parts = [(head, frames.target[:, head.choices], frames.repeated[:, head.choices]) for head in heads]
    nll = frames.nll[:, [HEADS.index(head) for head in heads]].sum(1)
    repeating = np.sum([repeating_nll(*part) for part in parts], 0)
    constant, change_constant = (
        _mean(np.sum([constant_nll(head, target[rows]) for head, target, _ in parts], 0)) for rows in (..., change)
    )
    return {
        "nll": _mean(nll),
        "constant": constant,
        "repeating": _mean(repeating),
        "change_nll": _mean(nll[change]),
        "change_constant": change_constant,
        "change_repeating": _mean(repeating[change]),
        "saved": constant - _mean(nll),
        "changes": _mean(change),
    }


def constant_nll(head: Head, target: np.ndarray) -> np.ndarray:
    """(n,) of the predictor that always says how frequent each class of the target (n, 8 or 1) is."""
    return np.column_stack([-np.log(_shares(column, classes(head)))[column] for column in target.T]).sum(1)


def repeating_nll(head: Head, target: np.ndarray, held: np.ndarray) -> np.ndarray:
    """(n,) of the predictor that knows how often the part held (n, 8 or 1) stays, and else only how frequent each class
    is that it changes to."""
    columns = []
    for now, before in zip(target.T, held.T, strict=True):
        stay = now == before
        moves = _shares(now[~stay], classes(head))
        keep = (stay.sum() + 0.5) / (len(stay) + 1)
        change = (1 - keep) * moves[now] / np.maximum(1 - moves[before], 1e-9)
        columns.append(-np.log(np.where(stay, keep, np.minimum(change, 1 - keep))))
    return np.column_stack(columns).sum(1)


def classes(head: Head) -> int:
    """Of one choice of a head."""
    return 2 if head.name == "buttons" else head.classes


def _shares(values: np.ndarray, count: int) -> np.ndarray:
    """(count,) of whole numbers; one that never comes counts as half a time."""
    number = np.maximum(np.bincount(values, minlength=count), 0.5)
    return number / number.sum()


def _button(frames: Frames, place: int) -> dict[str, Any]:
    """Of one button: how often it is held, and precision, recall and F1 of holding it, and of pressing it anew."""
    target, held = frames.target[:, place] > 0, frames.repeated[:, place] > 0
    out: dict[str, Any] = {"rate": _mean(target), "onsets": int((target & ~held).sum())}
    for name, choices in _versions(frames, *DECISIONS):
        output = choices[:, place] > 0
        out[name] = {"rate": _mean(output)} | _match(target, output)
        onset = _match((target & ~held)[~held], (output & ~held)[~held])
        out[name] |= {f"onset_{key}": value for key, value in onset.items()}
        out[name]["false_onsets"] = _mean(output[~held & ~target])
    return out


def _match(true: np.ndarray, output: np.ndarray) -> dict[str, float]:
    hits = int((true & output).sum())
    precision, recall = _ratio(hits, int(output.sum())), _ratio(hits, int(true.sum()))
    return {"precision": precision, "recall": recall, "f1": _ratio(2 * hits, int(true.sum()) + int(output.sum()))}


def _axis(frames: Frames, number: int) -> dict[str, Any]:
    """Of one axis or the shoulder: accuracy, how often the truth is among the three likeliest, mean distance of the
    classes' values (of an axis in -1..1, of the shoulder in 0..1)."""
    head = HEADS[number]
    target, scale = frames.target[:, head.choices][:, 0], 2 if head.classes == STICK_CLASSES else 1
    change = target != frames.repeated[:, head.choices][:, 0]
    ranks = frames.ranks[:, number - 1]
    out: dict[str, Any] = {"top3": _mean(ranks < TOP), "change_top3": _mean(ranks[change] < TOP)}
    for name, choices in _versions(frames, *DECISIONS):
        output = choices[:, head.choices][:, 0]
        error = scale * np.abs(centre(output, head.classes) - centre(target, head.classes))
        out[name] = {
            "accuracy": _mean(output == target),
            "change_accuracy": _mean(output[change] == target[change]),
            "error": _mean(error),
            "change_error": _mean(error[change]),
        }
    return out


def _whole(frames: Frames, change: np.ndarray) -> dict[str, Any]:
    """Whole controllers: how often right, how often another than the one held, how many different ones there are.

    entropy: in nats; of the target, no predictor that always says the same has a lower log-loss, whatever it knows of
    the parts that go together.
    """
    out: dict[str, Any] = {}
    for name, choices in _versions(frames, "target", *DECISIONS):
        equal = (choices == frames.target).all(1)
        different, entropy = _variety(choices)
        out[name] = {
            "accuracy": _mean(equal),
            "change_accuracy": _mean(equal[change]),
            "changes": _mean((choices != frames.repeated).any(1)),
            "different": different,
            "entropy": entropy,
            "change_entropy": _variety(choices[change])[1],
        }
    return out


def _variety(choices: np.ndarray) -> tuple[int, float]:
    """How many different controllers there are in (n, 13), and their entropy in nats."""
    counts = np.unique(choices, axis=0, return_counts=True)[1]
    shares = counts / counts.sum()
    return len(counts), float(-(shares * np.log(shares)).sum())


def _leak(frames: Frames) -> dict[str, float]:
    """How often the player's action has just changed where the target presses a button anew, and anywhere: were the
    state one after the target already, the first would be many times the second."""
    onset = ((frames.target[:, ATTACKS] > 0) & (frames.repeated[:, ATTACKS] == 0)).any(1)
    return {"at_onsets": _mean(frames.new_action[onset]), "anywhere": _mean(frames.new_action)}


def _stick_map(choices: np.ndarray) -> list[list[int]]:
    """(17, 17) frames by main y and main x."""
    x, y = choices[:, HEADS[1].choices][:, 0], choices[:, HEADS[2].choices][:, 0]
    counts: list[list[int]] = (
        np.bincount(y * STICK_CLASSES + x, minlength=STICK_CLASSES**2).reshape(STICK_CLASSES, -1).tolist()
    )
    return counts


def _confusion(frames: Frames) -> list[list[int]]:
    """(8, 9): where a button goes down, which ones the sample presses anew; the last column, none."""
    rows = []
    fresh = (frames.sampled[:, :8] > 0) & (frames.repeated[:, :8] == 0)
    for place in range(len(BUTTONS)):
        onset = (frames.target[:, place] > 0) & (frames.repeated[:, place] == 0)
        rows.append([*fresh[onset].sum(0).tolist(), int((~fresh[onset].any(1)).sum())])
    return rows


def _mean(values: np.ndarray) -> float:
    """0 of nothing."""
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# Verdicts


def onset_recall(figures: Mapping[str, Any], decision: str) -> tuple[float, float]:
    """(share of all onsets that are met, share of the other frames with the button up in which it is pressed anew),
    over all buttons, each onset weighing the same."""
    rows = figures["buttons"].values()
    onsets = sum(row["onsets"] for row in rows)
    met = sum(row["onsets"] * row[decision]["onset_recall"] for row in rows)
    false = sum(row["onsets"] * row[decision]["false_onsets"] for row in rows)
    return (met / onsets, false / onsets) if onsets else (0.0, 0.0)


def checks(figures: Mapping[str, Any]) -> list[Check]:
    """What holds of any network that has learned something, and of data that give nothing away."""
    total, leak = figures["total"], figures["leak"]
    return [
        (
            "held-out log-loss below a constant predictor's",
            total["nll"] < total["constant"],
            f"{total['nll']:.3f} nats a frame, {total['constant']:.3f}",
        ),
        (
            "no leak",
            leak["at_onsets"] <= LEAK * leak["anywhere"],
            f"the action has just changed at {leak['at_onsets']:.1%} of the onsets, in {leak['anywhere']:.1%} of all",
        ),
    ]


def targets(figures: Mapping[str, Any]) -> list[Check]:
    """What a network that had its time has to reach: more than holding the controller as it is."""
    recall, false = onset_recall(figures, "sampled")
    repeated, _ = onset_recall(figures, "repeated")
    total, constant = figures["total"], figures["whole"]["target"]["change_entropy"]
    return [
        (
            "onsets met more often than by repeating, and twice as often as by chance",
            recall > 2 * max(repeated, false),
            f"{recall:.1%} of the onsets, {repeated:.1%} by repeating, {false:.1%} of the frames without one",
        ),
        (
            "log-loss where the controller changes below repeating and below every constant",
            total["change_nll"] < min(total["change_repeating"], constant),
            f"{total['change_nll']:.2f} nats, {total['change_repeating']:.2f} by repeating, {constant:.2f} by the best "
            "constant",
        ),
        (
            "log-loss of all frames below repeating",
            total["nll"] < total["repeating"],
            f"{total['nll']:.3f} nats a frame, {total['repeating']:.3f} by repeating",
        ),
    ]
