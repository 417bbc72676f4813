"""Diagnosis of a self-supervised head from what it says of positions: a word, its reason, and the figures behind it.

A loss alone says nothing, so a head is held against what needs no network: the shares of its classes, and a table of
what stands on which square. Its probabilities are calibrated anew before that, on other positions than those that are
judged: a head that knows its target and is only sure of it too much or too little is not called ignorant. What these
positions cannot tell is called undecided, never dead.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.nn import functional as F

from matrixlib.data.loader import Loader
from matrixlib.engine import history
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.tasks.chess import plots
from matrixlib.tasks.chess.evaluate import oracle
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.ssl_outputs import Classes, HeadOutput, HeadOutputs, Nats, head_outputs
from matrixlib.tasks.chess.spec import load

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


@dataclass(frozen=True)
class Diagnosis:
    """A head's diagnosis with the numbers behind it; nan where nothing could be counted.

    Losses in nats a square: `loss`; `uniform`, ln(classes); `prior`, the entropy of the classes' shares; `table`, that
    of a table of what stands on which square, made on other positions. gain: share of `prior` that the head saves once
    it is calibrated anew, with its standard error over positions; beyond: the same against `table`. rate: share of
    class 1, or of the commonest class. precision, recall, f1: macro averages over the classes that occur, of class 1
    alone for maps. average_precision: of maps. calibration: expected calibration error of the probability of class 1,
    or of the likeliest class.
    """

    head: str
    word: Word
    reason: str
    loss: float = math.nan
    uniform: float = math.nan
    prior: float = math.nan
    table: float = math.nan
    gain: tuple[float, float] = (math.nan, math.nan)
    beyond: tuple[float, float] = (math.nan, math.nan)
    rate: float = math.nan
    precision: float = math.nan
    recall: float = math.nan
    f1: float = math.nan
    average_precision: float = math.nan
    calibration: float = math.nan


def diagnose(head: str, output: HeadOutput, mistakes: Mapping[str, Classes]) -> Diagnosis:
    """The diagnosis of a head.

    mistakes: name -> (N, 8, 8) class, what may be mistaken for its target; see `oracle.alternatives`.
    """
    if not output.squares.any():
        return Diagnosis(head, "undecided", "it is asked about no square (see data.hidden_squares)")
    if len(output.truth) < 2:
        return Diagnosis(head, "undecided", "one position says nothing")
    truth = output.truth[output.squares]
    shares = np.bincount(truth, minlength=output.classes) / len(truth)
    prior, by_table = prior_nats(output, output.truth), table_nats(output, output.truth)
    entropy = float(prior[output.squares].mean())
    anew = calibrated(output).nats(output.truth)
    gain, beyond = (
        (share / max(entropy, 1e-9), error / max(entropy, 1e-9))
        for share, error in (mean_and_error(line - anew, output.squares) for line in (prior, by_table))
    )
    precision, recall, f1 = detection(output)
    one = Diagnosis(
        head,
        "undecided",
        "",
        loss=float(output.nats(output.truth)[output.squares].mean()),
        uniform=math.log(output.classes),
        prior=entropy,
        table=float(by_table[output.squares].mean()),
        gain=gain,
        beyond=beyond,
        rate=float(shares[1] if output.classes == 2 else shares.max()),
        precision=precision,
        recall=recall,
        f1=f1,
        average_precision=average_precision(output) if output.classes == 2 else math.nan,
        calibration=calibration(output)[0],
    )
    word, reason = _word(output, one, mistakes)
    return replace(one, word=word, reason=reason)


def diagnose_all(net: Net, outputs: HeadOutputs) -> list[Diagnosis]:
    """The diagnosis of each head, in the order of the configuration."""
    diagnoses = []
    for head, output in outputs.heads.items():
        if net.task.weights[f"ssl_{head}"]:
            alternatives = outputs.alternatives[head]
            mistakes = {name: value for name, value in alternatives.items() if name != oracle.EXACT}
            diagnoses.append(diagnose(head, output, mistakes))
        else:
            reason = f"its weight loss.ssl.{head} is 0: it is not trained"
            diagnoses.append(Diagnosis(head, "undecided", reason))
    return diagnoses


def _word(output: HeadOutput, one: Diagnosis, mistakes: Mapping[str, Classes]) -> tuple[Word, str]:
    if float(output.log_p.std(0).max()) < CONSTANT:
        return "dead", "it says the same of every position"
    rare = int(len(output.truth[output.squares]) - np.bincount(output.truth[output.squares]).max())
    if rare < ENOUGH:
        return "undecided", f"{rare} squares of all but the commonest class; look at more positions"
    if mistake := mistaken(output, mistakes):
        name, agreement, squares = mistake
        what = f"{agreement:.0%} right by that on the {squares} squares where it is not the target"
        if name == oracle.COPY:
            return "trivial", f"it is {name}: {what}"
        return "harmful", f"it has learned another target, {name}: {what}"
    (gain, error), (beyond, error_beyond) = one.gain, one.beyond
    if one.table < GIVEN_AWAY * one.prior:
        return "trivial", "what stands on a square gives its target away"
    if gain - SURE * error > LEAST and beyond - SURE * error_beyond > LEAST:
        return "learning", f"it saves {gain:.0%} of the prior entropy, {beyond:.0%} more than a table"
    ranks = one.average_precision > RANKS * one.rate  # False for nan
    if gain + SURE * error < LEAST and not ranks:
        return "dead", f"it saves {gain:.1%} +- {error:.1%} of the prior entropy"
    if beyond + SURE * error_beyond < LEAST and gain - SURE * error > 0:
        return "trivial", f"a table of what stands on which square does as well: {one.table:.4f} nat"
    return ("undecided", f"it saves {gain:.1%} +- {error:.1%}, {beyond:.1%} +- {error_beyond:.1%} more than a table")


def mistaken(output: HeadOutput, mistakes: Mapping[str, Classes]) -> tuple[str, float, int] | None:
    """The mistaken target that a head follows rather than its own: name, agreement, squares.

    It is one that the head knows more about than a table of what stands on which square tells (a copy: than the shares
    of its classes). And in every frequent kind of difference, such as 1 for 0 and 0 for 1, it is surely likelier by the
    head's own probabilities than the target is, and right more often than not: a head that has not learned yet agrees
    in one of the two by itself. Of several, the one that is right most often.
    """
    best: tuple[str, float, int] | None = None
    for name, mistake in mistakes.items():
        differs = (mistake != output.truth) & output.squares
        easy = prior_nats(output, mistake) if name == oracle.COPY else table_nats(output, mistake)
        known, error = mean_and_error(easy - output.nats(mistake), output.squares)
        if not differs.any() or known < SURE * error:
            continue
        ahead = output.nats(output.truth) - output.nats(mistake)
        if all(_followed(output, mistake, ahead, kind) for kind in _kinds(output, mistake, differs)):
            agreement = float((output.likeliest == mistake)[differs].mean())
            if best is None or agreement > best[1]:
                best = (name, agreement, int(differs.sum()))
    return best


def _kinds(output: HeadOutput, mistake: Classes, differs: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """Masks of the frequent kinds of difference: one for each pair of true and mistaken class."""
    pairs = np.where(differs, output.truth.astype(np.int64) * output.classes + mistake, -1)
    values, counts = np.unique(pairs[differs], return_counts=True)
    return [pairs == value for value in values[counts >= FREQUENT * counts.sum()]]


def _followed(output: HeadOutput, mistake: Classes, ahead: Nats, kind: NDArray[np.bool_]) -> bool:
    mean, error = mean_and_error(ahead, kind)
    return mean > SURE * error and float((output.likeliest == mistake)[kind].mean()) > 0.5


# Lines that need no network


def prior_nats(output: HeadOutput, classes: Classes) -> Nats:
    """(N, 8, 8) minus log of the share of these classes (N, 8, 8) among the squares that count."""
    counts = np.bincount(classes[output.squares], minlength=output.classes)
    return -np.log(np.maximum(counts / counts.sum(), 1e-12))[classes]


def table_nats(output: HeadOutput, classes: Classes) -> Nats:
    """(N, 8, 8) nats that these classes (N, 8, 8) cost a table of what stands on which square."""
    probability = square_table(output, classes)
    return -np.log(np.take_along_axis(probability, classes[:, None].astype(np.int64), 1)[:, 0])


def square_table(output: HeadOutput, classes: Classes) -> NDArray[np.float64]:
    """(N, c, 8, 8) probabilities of these classes (N, 8, 8) by a table of what stands on which square.

    Each half of the positions is told by the counts of the other half. Cells are smoothed towards the counts of what
    stands there on any square, those towards the shares of the classes.
    """
    where = output.content.astype(np.int64) * 64 + np.arange(64).reshape(8, 8)
    probability = np.empty(output.log_p.shape)
    half = np.arange(len(classes)) % 2 == 0
    for mine in (half, ~half):
        others = output.squares & ~mine[:, None, None]
        counts = np.zeros((CONTENTS * 64, output.classes))
        np.add.at(counts, (where[others], classes[others]), 1)
        shares = _smoothed(counts.sum(0), np.full(output.classes, 1 / output.classes))
        by_content = _smoothed(counts.reshape(CONTENTS, 64, -1).sum(1), shares)
        cells = _smoothed(counts, np.repeat(by_content, 64, axis=0))
        probability[mine] = cells[where[mine]].transpose(0, 3, 1, 2)
    return probability


def _smoothed(counts: NDArray[np.float64], towards: NDArray[np.float64]) -> NDArray[np.float64]:
    return (counts + STRENGTH * towards) / (counts.sum(-1, keepdims=True) + STRENGTH)


def mean_and_error(values: NDArray[Any], squares: NDArray[np.bool_]) -> tuple[float, float]:
    """Mean over squares, and its standard error where a position's squares depend on each other (ratio estimator)."""
    sums = np.where(squares, values, 0).sum((1, 2), dtype=np.float64)
    counts = squares.sum((1, 2))
    mean = float(sums.sum() / counts.sum())
    rows = len(sums)
    spread = np.sqrt(np.square(sums - mean * counts).sum() / (rows - 1))
    return mean, float(spread * math.sqrt(rows) / counts.sum())


# Calibration and detection


def calibrated(output: HeadOutput) -> HeadOutput:
    """The head with its log-probabilities times a slope, not negative, plus an offset for each class, fitted for each
    half of the positions on the other half (Platt 1999).
    """
    log_p, truth = torch.from_numpy(output.log_p).double(), torch.from_numpy(output.truth).long()
    squares = torch.from_numpy(output.squares)
    anew = torch.empty_like(log_p)
    half = torch.arange(len(truth)) % 2 == 0
    for mine in (half, ~half):
        x, y = log_p[~mine].movedim(1, 3)[squares[~mine]], truth[~mine][squares[~mine]]
        slope = torch.ones((), dtype=torch.float64, requires_grad=True)
        offsets = torch.zeros(output.classes, dtype=torch.float64, requires_grad=True)
        fit = torch.optim.LBFGS([slope, offsets], max_iter=200, line_search_fn="strong_wolfe")

        def cost() -> float:
            fit.zero_grad()  # noqa: B023 - called in this pass of the loop alone
            loss = F.cross_entropy(slope.relu() * x + offsets, y)  # noqa: B023
            loss.backward()
            return loss.item()

        if len(y):
            fit.step(cost)
        anew[mine] = (slope.relu() * log_p[mine] + offsets[:, None, None]).log_softmax(1).detach()
    return replace(output, log_p=anew.float().numpy())


def confusion(output: HeadOutput) -> NDArray[np.int64]:
    """(classes, classes): squares by true class (rows) and likeliest class (columns)."""
    counts = np.zeros((output.classes, output.classes), np.int64)
    np.add.at(counts, (output.truth[output.squares], output.likeliest[output.squares]), 1)
    return counts


def detection(output: HeadOutput) -> tuple[float, float, float]:
    """(precision, recall, f1); see `Diagnosis`."""
    counts = confusion(output)
    present = [1] if output.classes == 2 else np.flatnonzero(counts.sum(1))
    hit, predicted, true = np.diag(counts).astype(float), counts.sum(0), counts.sum(1)
    scores = (hit / np.maximum(predicted, 1), hit / np.maximum(true, 1), 2 * hit / np.maximum(predicted + true, 1))
    precision, recall, f1 = (float(score[present].mean()) for score in scores)
    return precision, recall, f1


def average_precision(output: HeadOutput) -> float:
    """Of class 1 by its probability; squares of equal probability count together. nan where it never occurs."""
    log_p, truth = output.log_p[:, 1][output.squares], output.truth[output.squares] == 1
    if not truth.any():
        return math.nan
    order = np.argsort(-log_p, kind="stable")
    last = np.flatnonzero(np.append(np.diff(log_p[order]) != 0, True))
    hits = np.cumsum(truth[order])[last]
    return float((np.diff(hits, prepend=0) * hits / (last + 1)).sum() / truth.sum())


def calibration(output: HeadOutput) -> tuple[float, list[tuple[float, float, int]]]:
    """Expected calibration error, and (mean probability, share that is right, squares) of each bin that is used.

    Of the probability of class 1 of a map, else of the likeliest class. The bins are finer near 0, where most squares
    of a rare map are.
    """
    if output.classes == 2:
        p, right = np.exp(output.log_p[:, 1]), output.truth == 1
    else:
        p, right = np.exp(output.log_p.max(1)), output.likeliest == output.truth
    p, right = p[output.squares], right[output.squares]
    bins = np.digitize(p, EDGES)
    points = [
        (float(p[bins == k].mean()), float(right[bins == k].mean()), int((bins == k).sum())) for k in np.unique(bins)
    ]
    return sum(abs(mean - share) * n for mean, share, n in points) / max(1, len(p)), points


# Tables and pictures


def table(diagnoses: Sequence[Diagnosis]) -> pd.DataFrame:
    """A row a head: its loss beside its lines of chance, and how it finds what is rare."""
    frame = pd.DataFrame([asdict(one) for one in diagnoses]).set_index("head").rename_axis(None)
    for name, title in (("gain", "saves [%]"), ("beyond", "beyond [%]")):
        frame[title] = 100 * frame[name].str[0]
    frame["rate [%]"] = 100 * frame["rate"]
    frame = frame.rename(columns={"f1": "F1", "average_precision": "AP", "calibration": "ECE"})
    digits = {"saves [%]": 1, "beyond [%]": 1, "rate [%]": 2, "precision": 2, "recall": 2, "F1": 2, "AP": 2}
    columns = ["loss", "uniform", "prior", "table", *digits, "ECE"]
    return frame[columns].round({name: digits.get(name, 4) for name in columns})


def progress(folder: Path, loader: Loader, device: str, positions: int = 512) -> pd.DataFrame:
    """A row for each checkpoint that a run has kept, a column a head: how much of the prior entropy it saved, in
    percent.
    """
    rows = {}
    for step in Checkpoints(folder / "checkpoints", keep=2).steps():
        outputs = head_outputs(load(folder, f"step_{step:08d}", device), loader, positions)
        rows[step] = {head: 100 * diagnose(head, output, {}).gain[0] for head, output in outputs.heads.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("update").round(1)


def curves_figure(folder: Path, diagnoses: Sequence[Diagnosis]) -> Figure:
    """Learning curves of the heads of a run, with the factor on their weights."""
    rows = history.read(folder / "metrics.jsonl")
    return plots.curves_figure(rows, {one.head: one.prior for one in diagnoses})


def calibration_figure(outputs: HeadOutputs) -> Figure:
    """Reliability of each head, and the confusion of those with several classes."""
    counted = {head: output for head, output in outputs.heads.items() if output.squares.any()}
    return plots.calibration_figure(
        {head: calibration(output)[1] for head, output in counted.items()},
        {head: confusion(output) for head, output in counted.items() if output.classes > 2},
    )
