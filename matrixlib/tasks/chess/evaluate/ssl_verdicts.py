"""Verdict on a self-supervised head from what it says of positions: numbers in, a word and its reasons out.

A loss alone says nothing, so a head is held against what needs no network: the shares of its classes, and a table of
what stands on which square. Its probabilities are calibrated anew before that, on other positions than those that are
judged: a head that knows its target and is only sure of it too much or too little is not called ignorant. What these
positions cannot tell is called undecided, never dead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Word = Literal["learning", "trivial", "dead", "harmful", "undecided"]

SURE = 3.0  # standard errors
CONSTANT = 1e-3  # deviation of log-probabilities over positions below which a head looks at nothing
LEAST = 0.01  # share of the prior entropy that counts as knowing something
RANKS = 1.5  # average precision, in base rates, above which a head knows where to look
ENOUGH = 100  # squares of the rarer classes together, below which nothing is said of a head
GIVEN_AWAY = 0.02  # share of the prior entropy below which a table gives the target away
FREQUENT = 0.05  # share of the differing squares that makes a kind of difference count
STRENGTH = 4.0  # squares of the coarser table that a cell of the finer one is smoothed by
EDGES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])  # of the calibration's bins
CONTENTS = 13  # of a square: 12 pieces, nothing

Classes = NDArray[np.uint8]
Nats = NDArray[np.float64]


@dataclass(frozen=True)
class Seen:
    """What a head says about N positions of the side to move.

    log_p: (N, c, 8, 8) float32 log-probabilities of the classes, c = 2 for maps of 0 and 1. truth: (N, 8, 8) uint8
    class. squares: (N, 8, 8) bool, where it is asked. content: (N, 8, 8) uint8, what the network sees on the square:
    0-11 pieces, 12 nothing.
    """

    log_p: NDArray[np.float32]
    truth: Classes
    squares: NDArray[np.bool_]
    content: Classes

    @property
    def classes(self) -> int:
        """Number of classes; 2 for a map."""
        return self.log_p.shape[1]

    @property
    def guess(self) -> Classes:
        """(N, 8, 8) likeliest class."""
        return self.log_p.argmax(1).astype(np.uint8)

    def nats(self, classes: Classes) -> Nats:
        """(N, 8, 8) minus log-probability of these classes."""
        return -np.take_along_axis(self.log_p, classes[:, None].astype(np.int64), 1)[:, 0].astype(np.float64)


@dataclass(frozen=True)
class Finding:
    """One head's verdict with the numbers behind it; nan where nothing could be counted.

    Losses in nats a square: `loss`; `uniform`, ln(classes); `prior`, the entropy of the classes' shares; `table`, that
    of a table of what stands on which square, made on other positions. gain: share of `prior` that the head saves once
    it is calibrated anew, with its standard error over positions; beyond: the same against `table`. precision, recall,
    f1: macro averages over the classes that occur, of class 1 alone for maps. average_precision: of maps. calibration:
    expected calibration error of the probability of class 1, or of the likeliest class. rate: share of class 1, or of
    the commonest class.
    """

    head: str
    word: Word
    why: str
    loss: float = math.nan
    uniform: float = math.nan
    prior: float = math.nan
    table: float = math.nan
    gain: tuple[float, float] = (math.nan, math.nan)
    beyond: tuple[float, float] = (math.nan, math.nan)
    precision: float = math.nan
    recall: float = math.nan
    f1: float = math.nan
    average_precision: float = math.nan
    calibration: float = math.nan
    rate: float = math.nan


def judge(head: str, seen: Seen, readings: Mapping[str, Classes], copies: frozenset[str]) -> Finding:
    """The verdict on a head.

    readings: name -> (N, 8, 8) class, what may be taken for the target by mistake; `copies` of them show what stands
    on the square.
    """
    if not seen.squares.any():
        return Finding(head, "undecided", "it is asked about no square (see data.hidden_squares)")
    if len(seen.truth) < 2:
        return Finding(head, "undecided", "one position says nothing")
    truth = seen.truth[seen.squares]
    shares = np.bincount(truth, minlength=seen.classes) / len(truth)
    prior, by_table = prior_nats(seen, seen.truth), table_nats(seen, seen.truth)
    entropy = float(prior[seen.squares].mean())
    anew = calibrated(seen).nats(seen.truth)
    gain, beyond = (
        _scaled(mean_and_error(line - anew, seen.squares), max(entropy, 1e-9)) for line in (prior, by_table)
    )
    precision, recall, f1 = detection(seen)
    ranked = average_precision(seen) if seen.classes == 2 else math.nan
    figures: dict[str, Any] = {
        "loss": float(seen.nats(seen.truth)[seen.squares].mean()),
        "uniform": math.log(seen.classes),
        "prior": entropy,
        "table": float(by_table[seen.squares].mean()),
        "gain": gain,
        "beyond": beyond,
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "average_precision": ranked,
        "calibration": calibration(seen)[0],
        "rate": float(shares[1] if seen.classes == 2 else shares.max()),
    }
    word, why = _word(seen, figures, readings, copies)
    return Finding(head, word, why, **figures)


def saved(seen: Seen) -> float:
    """Share of the prior entropy that a head saves once it is calibrated anew; nan where nothing is asked of it."""
    if not seen.squares.any():
        return math.nan
    prior = prior_nats(seen, seen.truth)[seen.squares].mean()
    return float(1 - calibrated(seen).nats(seen.truth)[seen.squares].mean() / max(prior, 1e-9))


def _word(
    seen: Seen, figures: Mapping[str, Any], readings: Mapping[str, Classes], copies: frozenset[str]
) -> tuple[Word, str]:
    if float(seen.log_p.std(0).max()) < CONSTANT:
        return "dead", "it says the same of every position"
    rare = int(len(seen.truth[seen.squares]) - np.bincount(seen.truth[seen.squares]).max())
    if rare < ENOUGH:
        return "undecided", f"{rare} squares of all but the commonest class; look at more positions"
    found = mistaken(seen, readings, copies)
    if found:
        name, agrees, squares = found
        what = f"{agrees:.0%} right by that on the {squares} squares where it is not the target"
        if name in copies:
            return "trivial", f"it is {name}: {what}"
        return "harmful", f"it has learned another target, {name}: {what}"
    (gain, error), (beyond, error_beyond) = figures["gain"], figures["beyond"]
    if figures["table"] < GIVEN_AWAY * figures["prior"]:
        return "trivial", "what stands on a square gives its target away"
    if gain - SURE * error > LEAST and beyond - SURE * error_beyond > LEAST:
        return "learning", f"it saves {gain:.0%} of the prior entropy, {beyond:.0%} more than a table"
    ranks = figures["average_precision"] > RANKS * figures["rate"]  # False for nan
    if gain + SURE * error < LEAST and not ranks:
        return "dead", f"it saves {gain:.1%} +- {error:.1%} of the prior entropy"
    if beyond + SURE * error_beyond < LEAST and gain - SURE * error > 0:
        return (
            "trivial",
            f"a table of what stands on which square does as well: {figures['table']:.4f} nat",
        )
    return (
        "undecided",
        f"it saves {gain:.1%} +- {error:.1%}, {beyond:.1%} +- {error_beyond:.1%} more than a table",
    )


def mistaken(
    seen: Seen, readings: Mapping[str, Classes], copies: frozenset[str]
) -> tuple[str, float, int] | None:
    """The mistaken reading of its target that a head follows rather than the target: name, agreement, squares.

    It is one that the head knows more about than a table of what stands on which square tells (a copy: than the shares
    of its classes). And in every frequent kind of difference, such as reading 1 for 0 and reading 0 for 1, it is surely
    likelier by the head's own probabilities than the target is, and right more often than not: a head that has not
    learned yet agrees in one of the two by itself. Of several, the one that is right most often.
    """
    best: tuple[str, float, int] | None = None
    for name, reading in readings.items():
        differs = (reading != seen.truth) & seen.squares
        easy = prior_nats(seen, reading) if name in copies else table_nats(seen, reading)
        known, error = mean_and_error(easy - seen.nats(reading), seen.squares)
        if not differs.any() or known < SURE * error:
            continue
        ahead = seen.nats(seen.truth) - seen.nats(reading)
        if all(_followed(seen, reading, ahead, kind) for kind in _kinds(seen, reading, differs)):
            agrees = float((seen.guess == reading)[differs].mean())
            if best is None or agrees > best[1]:
                best = (name, agrees, int(differs.sum()))
    return best


def _kinds(seen: Seen, reading: Classes, differs: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Masks of the frequent kinds of difference: one for each pair of true class and reading."""
    pairs = np.where(differs, seen.truth.astype(np.int64) * seen.classes + reading, -1)
    values, counts = np.unique(pairs[differs], return_counts=True)
    return [pairs == value for value in values[counts >= FREQUENT * counts.sum()]]


def _followed(seen: Seen, reading: Classes, ahead: Nats, kind: NDArray[np.bool_]) -> bool:
    mean, error = mean_and_error(ahead, kind)
    return mean > SURE * error and float((seen.guess == reading)[kind].mean()) > 0.5


# Lines that need no network


def prior_nats(seen: Seen, classes: Classes) -> Nats:
    """(N, 8, 8) minus log of the share of these classes (N, 8, 8) among the squares that are asked about."""
    counts = np.bincount(classes[seen.squares], minlength=seen.classes)
    found: Nats = -np.log(np.maximum(counts / counts.sum(), 1e-12))[classes]
    return found


def table_nats(seen: Seen, classes: Classes) -> Nats:
    """(N, 8, 8) nats that these classes (N, 8, 8) cost a table of what stands on which square."""
    probability = table(seen, classes)
    found: Nats = -np.log(np.take_along_axis(probability, classes[:, None].astype(np.int64), 1)[:, 0])
    return found


def table(seen: Seen, classes: Classes) -> Nats:
    """(N, c, 8, 8) probabilities of these classes (N, 8, 8) by a table of what stands on which square.

    Each half of the positions is told by the counts of the other half. Cells are smoothed towards the counts of what
    stands there on any square, those towards the shares of the classes.
    """
    where = seen.content.astype(np.int64) * 64 + np.arange(64).reshape(8, 8)
    out = np.empty(seen.log_p.shape)
    half = np.arange(len(classes)) % 2 == 0
    for mine in (half, ~half):
        others = seen.squares & ~mine[:, None, None]
        counts = np.zeros((CONTENTS * 64, seen.classes))
        np.add.at(counts, (where[others], classes[others]), 1)
        shares = _smoothed(counts.sum(0), np.full(seen.classes, 1 / seen.classes))
        by_content = _smoothed(counts.reshape(CONTENTS, 64, -1).sum(1), shares)
        cells = _smoothed(counts, np.repeat(by_content, 64, axis=0))
        out[mine] = cells[where[mine]].transpose(0, 3, 1, 2)
    return out


def _smoothed(counts: NDArray[np.float64], towards: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = (counts + STRENGTH * towards) / (counts.sum(-1, keepdims=True) + STRENGTH)
    return found


def mean_and_error(values: NDArray[Any], squares: NDArray[np.bool_]) -> tuple[float, float]:
    """Mean over squares, and its standard error where a position's squares depend on each other (ratio estimator)."""
    sums = np.where(squares, values, 0).sum((1, 2), dtype=np.float64)
    counts = squares.sum((1, 2))
    mean = float(sums.sum() / counts.sum())
    rows = len(sums)
    spread = np.sqrt(np.square(sums - mean * counts).sum() / (rows - 1))
    return mean, float(spread * math.sqrt(rows) / counts.sum())


def _scaled(pair: tuple[float, float], by: float) -> tuple[float, float]:
    return pair[0] / by, pair[1] / by


# Calibration and detection


def calibrated(seen: Seen) -> Seen:
    """The head with its log-probabilities times a slope, plus an offset for each class, fitted for each half of the
    positions on the other half (Platt 1999).
    """
    log_p = np.empty_like(seen.log_p)
    half = np.arange(len(seen.truth)) % 2 == 0
    for mine in (half, ~half):
        asked = seen.squares[~mine]
        fitted = _fit(seen.log_p[~mine].transpose(0, 2, 3, 1)[asked], seen.truth[~mine][asked])
        log_p[mine] = _log_softmax(seen.log_p[mine] * fitted[0] + fitted[1:, None, None], axis=1)
    return Seen(log_p, seen.truth, seen.squares, seen.content)


def _fit(log_p: NDArray[np.float32], truth: Classes, steps: int = 30) -> NDArray[np.float32]:
    """(1 + classes,) slope and offsets that cost M rows (M, classes) least, by damped Newton steps; the slope is not
    negative.
    """
    rows, classes = log_p.shape
    theta = np.concatenate([[1.0], np.zeros(classes)])
    if not rows:
        return theta.astype(np.float32)
    x, y = log_p.astype(np.float64), np.eye(classes)[truth]
    damping, cost = 1e-3, math.inf
    for _ in range(steps):
        log_q = _log_softmax(theta[0] * x + theta[1:], axis=1)
        found = -float((log_q * y).sum(1).mean())
        if found > cost - 1e-9:
            break
        cost, best, q = found, theta, np.exp(log_q)
        residual, mean = q - y, (q * x).sum(1)
        gradient = np.concatenate([[(residual * x).sum(1).mean()], residual.mean(0)])
        hessian = np.empty((1 + classes, 1 + classes))
        hessian[0, 0] = ((q * x * x).sum(1) - mean**2).mean()
        hessian[0, 1:] = hessian[1:, 0] = (q * (x - mean[:, None])).mean(0)
        hessian[1:, 1:] = np.diag(q.mean(0)) - q.T @ q / rows
        ridge = damping * np.diag(np.maximum(np.diag(hessian), 1e-8)) + 1e-10 * np.eye(1 + classes)
        theta = theta - np.linalg.solve(hessian + ridge, gradient)
        theta[0] = max(theta[0], 0.0)
    return best.astype(np.float32)


def _log_softmax(x: NDArray[Any], axis: int) -> NDArray[Any]:
    x = x - x.max(axis, keepdims=True)
    found: NDArray[Any] = x - np.log(np.exp(x).sum(axis, keepdims=True))
    return found


def confusion(seen: Seen) -> NDArray[np.int64]:
    """(classes, classes): squares by true class (rows) and likeliest class (columns)."""
    counts = np.zeros((seen.classes, seen.classes), np.int64)
    np.add.at(counts, (seen.truth[seen.squares], seen.guess[seen.squares]), 1)
    return counts


def detection(seen: Seen) -> tuple[float, float, float]:
    """(precision, recall, f1); see `Finding`."""
    counts = confusion(seen)
    present = [1] if seen.classes == 2 else np.flatnonzero(counts.sum(1))
    hit, said, true = np.diag(counts).astype(float), counts.sum(0), counts.sum(1)
    precision, recall = hit / np.maximum(said, 1), hit / np.maximum(true, 1)
    f1 = 2 * hit / np.maximum(said + true, 1)
    return float(precision[present].mean()), float(recall[present].mean()), float(f1[present].mean())


def average_precision(seen: Seen) -> float:
    """Of class 1 by its probability; squares of equal probability count together. nan where it never occurs."""
    said, truth = seen.log_p[:, 1][seen.squares], seen.truth[seen.squares] == 1
    if not truth.any():
        return math.nan
    order = np.argsort(-said, kind="stable")
    last = np.flatnonzero(np.append(np.diff(said[order]) != 0, True))
    hits = np.cumsum(truth[order])[last]
    return float((np.diff(hits, prepend=0) * hits / (last + 1)).sum() / truth.sum())


def calibration(seen: Seen) -> tuple[float, list[tuple[float, float, int]]]:
    """Expected calibration error, and (mean probability, share that is right, squares) of each bin that is used.

    Of the probability of class 1 of a map, else of the likeliest class. The bins are finer near 0, where most squares
    of a rare map are.
    """
    if seen.classes == 2:
        said, right = np.exp(seen.log_p[:, 1])[seen.squares], seen.truth[seen.squares] == 1
    else:
        said = np.exp(seen.log_p.max(1))[seen.squares]
        right = (seen.guess == seen.truth)[seen.squares]
    at = np.digitize(said, EDGES)
    points = [
        (float(said[at == k].mean()), float(right[at == k].mean()), int((at == k).sum()))
        for k in np.unique(at)
    ]
    return sum(abs(p - r) * n for p, r, n in points) / max(1, len(said)), points
