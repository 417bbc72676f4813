"""Imitation quality on held-out frames, with repeating the last input as baseline.

At 60 frames a second controllers rarely change, so accuracy says little: repeating gets 98 % of the buttons right. What
counts are changes: frames where a button goes down (an *onset*) or a stick moves.

Shapes: n valid frames; choices (n, 13) and log-likelihoods as in controller.py and model.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from matrixlib.engine.network import Network
from matrixlib.engine.task import Batch, to_device
from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.controller import AXES, CENTRE, HEADS, LOGITS, STICK_CLASSES, Head
from matrixlib.tasks.melee.model import gumbel, log_likelihood

ATTACKS = [BUTTONS.index(name) for name in ("A", "B", "X", "Y", "Z")]  # buttons that start a new action
DECISIONS = ("sampled", "likeliest", "repeated")  # names of `judge` that are decisions; the baseline last
Frames = dict[str, np.ndarray]  # what is to be judged, by name: see `judge`


@torch.inference_mode()
def judge(net: Network, batches: Iterable[Batch], seed: int = 0) -> Frames:
    """Valid frames of host batches with the network's outputs. ValueError if there are none.

    target, repeated (last input), sampled, likeliest: choices (n, 13). nll: (n, 6) negative log-likelihood by head, all
    eight buttons together. ranks: (n, 5) classes more probable than the true one. Both are conditional on the true
    earlier parts if autoregressive, so nll sums to the whole controller's. new_action (n,): the player's action differs
    from the previous frame's.
    """
    model: Any = net.model
    task: Any = net.task
    correct = task.objective(model).correct
    stream = torch.Generator().manual_seed(seed)
    parts: list[Frames] = []
    for host in batches:
        batch = to_device(host, net.runtime.torch_device)
        target, held = batch["choices"].long(), batch["previous"].long()
        noise = gumbel(torch.rand((*target.shape[:-1], LOGITS), generator=stream)).to(target.device)
        with net.runtime.autocast():
            inputs = (batch["numeric"], batch["action"].long(), batch["character"].long(), held)
            x = model.trunk(model.encode(*inputs))
            logits = model.heads(x, target).float()
            sampled = model.heads.decide(x, noise, correct)[1]
            likeliest = model.heads.decide(x, torch.zeros_like(noise), correct)[1]
        corrected = [correct(head, logits[..., head.logits]) for head in HEADS]
        said = zip(HEADS, corrected, strict=True)
        truth = [log_likelihood(head, logs, target[..., head.choices]) for head, logs in said]
        ranks = [(logs > own[..., None]).sum(-1) for logs, own in zip(corrected[1:], truth[1:], strict=True)]
        action = batch["action"][..., 0]
        named = {
            "target": target,
            "repeated": held,
            "sampled": sampled,
            "likeliest": likeliest,
            "nll": -torch.stack(truth, -1),
            "ranks": torch.stack(ranks, -1),
            "new_action": torch.cat([torch.zeros_like(action[:, :1]), action.diff(dim=1)], 1) != 0,
        }
        valid = batch["valid"].bool()
        parts.append({name: value[valid].cpu().numpy() for name, value in named.items()})
    if not parts:
        raise ValueError("nothing is held out to evaluate on")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def figures(frames: Frames) -> dict[str, Any]:
    """JSON data: `nats` of whole controllers, onsets, leak statistics; by decision, `button_figures` and `stick_mse`.

    onsets: count; `recall`: share where the sample presses the button; `false`: rate of presses in other frames with
    the button up. Over all buttons, onsets weighing equally. leak: how often the player's action just changed at
    onsets, and anywhere: if states came after their targets, the first would be many times the second.
    """
    target, held, sampled = (frames[name][:, : len(BUTTONS)] > 0 for name in ("target", "repeated", "sampled"))
    onset, fresh, up = target & ~held, sampled & ~held, ~held & ~target
    weights = onset.sum(0) / max(onset.sum(), 1)
    changed = frames["target"][(frames["target"] != frames["repeated"]).any(1)]
    shares = np.unique(changed, axis=0, return_counts=True)[1] / max(len(changed), 1)
    return {
        "frames": len(target),
        "total": nats(frames, HEADS) | {"change_entropy": float(-(shares * np.log(shares)).sum())},
        "onsets": {
            "number": int(onset.sum()),
            "recall": float((fresh & onset).sum() / max(onset.sum(), 1)),
            "false": float(weights @ ((fresh & up).sum(0) / np.maximum(up.sum(0), 1))),
        },
        "leak": {
            "at_onsets": mean(frames["new_action"][onset[:, ATTACKS].any(1)]),
            "anywhere": mean(frames["new_action"]),
        },
        "buttons": {decision: button_figures(frames, decision) for decision in DECISIONS},
        "stick_mse": {decision: stick_mse(frames, decision) for decision in DECISIONS},
    }


def button_figures(frames: Frames, decision: str) -> dict[str, dict[str, float | None]]:
    """How well a decision holds and presses each button; None where there is nothing to divide by.

    players, rate: shares of frames with the button held by the player, by the decision. accuracy, precision, recall,
    f1: of held frames. onset_precision, onset_recall, onset_f1: of frames where it is newly pressed. false_onsets: rate
    of new presses where the player leaves the button up. onsets: number of the player's.
    """
    target, held, said = (frames[name][:, : len(BUTTONS)] > 0 for name in ("target", "repeated", decision))
    onset, fresh, up = target & ~held, said & ~held, ~held & ~target
    everything = np.ones_like(target)
    columns: dict[str, list[Any]] = {"players": _ratio(target, everything), "rate": _ratio(said, everything)}
    columns["accuracy"] = _ratio(said == target, everything)
    for kind, true, made in (("", target, said), ("onset_", onset, fresh)):
        both = true & made
        columns |= {f"{kind}precision": _ratio(both, made), f"{kind}recall": _ratio(both, true)}
        columns[f"{kind}f1"] = _ratio(2 * both, true.astype(int) + made)
    columns |= {"false_onsets": _ratio(fresh & up, up), "onsets": onset.sum(0).tolist()}
    return {button: {name: column[i] for name, column in columns.items()} for i, button in enumerate(BUTTONS)}


def _ratio(hits: np.ndarray, among: np.ndarray) -> list[float | None]:
    """By column of two (n, 8)."""
    sums = zip(hits.sum(0).tolist(), among.sum(0).tolist(), strict=True)
    return [hit / number if number else None for hit, number in sums]


def confusion(frames: Frames, decision: str) -> np.ndarray:
    """(8, 9) frames where the player newly presses a button (row) and the decision one (column; last: none)."""
    target, held, said = (frames[name][:, : len(BUTTONS)] > 0 for name in ("target", "repeated", decision))
    onset, fresh = target & ~held, said & ~held
    return onset.T.astype(int) @ np.column_stack([fresh, ~fresh.any(1)])


def stick_map(frames: Frames, decision: str) -> np.ndarray:
    """(17, 17) frames by class of main y (rows) and main x. decision: also `target`."""
    x, y = (frames[decision][:, head.choices][:, 0] for head in HEADS[1:3])
    return np.bincount(y * STICK_CLASSES + x, minlength=STICK_CLASSES**2).reshape(STICK_CLASSES, STICK_CLASSES)


def stick_mse(frames: Frames, decision: str) -> dict[str, float]:
    """Mean squared error of each axis between class centres, on the stick's scale from -1 to 1."""
    squared = ((frames[decision] - frames["target"])[:, len(BUTTONS) : -1] / CENTRE) ** 2
    return dict(zip(AXES, squared.mean(0).tolist(), strict=True))


def nats(frames: Frames, heads: Sequence[Head]) -> dict[str, float]:
    """Mean nats a frame of these parts together, over all frames and over those where one of them changes.

    Baselines (constant, repeating) are fitted on the frames judged, which favours them; constant also on changes.
    """
    parts = [(head, frames["target"][:, head.choices], frames["repeated"][:, head.choices]) for head in heads]
    change = np.any([(target != held).any(1) for _, target, held in parts], 0)
    nll = frames["nll"][:, [HEADS.index(head) for head in heads]].sum(1)
    repeating = np.sum([repeating_nll(*part) for part in parts], 0)
    constant, change_constant = (
        mean(np.sum([constant_nll(head, target[rows]) for head, target, _ in parts], 0)) for rows in (..., change)
    )
    return {
        "nll": mean(nll),
        "constant": constant,
        "repeating": mean(repeating),
        "change_nll": mean(nll[change]),
        "change_constant": change_constant,
        "change_repeating": mean(repeating[change]),
        "saved": constant - mean(nll),
        "changes": mean(change),
    }


def constant_nll(head: Head, target: np.ndarray) -> np.ndarray:
    """(n,) of a predictor with the class frequencies of the target (n, 8 or 1)."""
    return np.column_stack([-np.log(_shares(column, head))[column] for column in target.T]).sum(1)


def repeating_nll(head: Head, target: np.ndarray, held: np.ndarray) -> np.ndarray:
    """(n,) of a predictor with the probability that the held part (n, 8 or 1) stays, and that of each change."""
    columns = []
    for now, before in zip(target.T, held.T, strict=True):
        stay = now == before
        moves = _shares(now[~stay], head)
        keep = (stay.sum() + 0.5) / (len(stay) + 1)
        change = (1 - keep) * moves[now] / np.maximum(1 - moves[before], 1e-9)
        columns.append(-np.log(np.where(stay, keep, np.minimum(change, 1 - keep))))
    return np.column_stack(columns).sum(1)


def _shares(values: np.ndarray, head: Head) -> np.ndarray:
    """(classes,) frequencies of integers; unseen ones count half a time."""
    number = np.maximum(np.bincount(values, minlength=2 if head.name == "buttons" else head.classes), 0.5)
    return number / number.sum()


def mean(values: np.ndarray) -> float:
    """Mean, 0 if empty."""
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0
