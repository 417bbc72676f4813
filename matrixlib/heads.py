"""What the self-supervised heads of a finished run have learned: figures, and a verdict on each with its reason.

A loss alone says nothing: Matrix0 called 2.57 a working head, and ln 13 is 2.565. So each head is held against what
needs no network, against python-chess, against mistaken readings of its target, and its gradient against those of
policy and value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from matrixlib import run as runs
from matrixlib.compare import T_QUANTILES

if TYPE_CHECKING:
    import chess
    from matplotlib.figure import Figure

    from matrixlib.data.loader import Loader
    from matrixlib.engine.task import Batch
    from matrixlib.net import Net

Word = Literal["learning", "trivial", "dead", "harmful"]

HEADS = ("piece", "threat", "pin", "fork", "control")
MAIN = ("policy", "value")
SURE = 3.0  # standard errors
CONSTANT = 1e-3  # deviation of log-probabilities over positions below which a head looks at nothing
GIVEN_AWAY = 0.02  # share of the prior entropy below which the square itself gives the target away
LEAST = 0.01  # share of the prior entropy that counts as knowing something
COST = 0.05  # share of a main term's step down its own gradient that a head may take away
BINS = 10
BATCH = 128  # positions of one measured gradient


@dataclass(frozen=True)
class Seen:
    """What a head says about N positions of the side to move.

    log_p: (N, c, 8, 8) float32 log-probabilities of the classes, c = 2 for maps of 0 and 1. truth: (N, 8, 8) uint8
    class. squares: (N, 8, 8) bool, where it is asked. content: (N, 8, 8) uint8, what the network sees on the square:
    0-11 pieces, 12 nothing.
    """

    log_p: NDArray[np.float32]
    truth: NDArray[np.uint8]
    squares: NDArray[np.bool_]
    content: NDArray[np.uint8]


@dataclass(frozen=True)
class Look:
    """A network looked at: its positions, and what each head says about them."""

    boards: tuple[chess.Board, ...]
    seen: dict[str, Seen]


@dataclass(frozen=True)
class Conflict:
    """How a head's gradient at the trunk stands to those of policy and value; a mean over batches and a 95 % interval.

    cosine: main term -> (mean, half width). effect: main term -> (mean, half width) of what the head's weighted
    gradient adds to a small step down the main term's own, as a share of what that step gains: -0.1 takes a tenth away.
    """

    cosine: dict[str, tuple[float, float]]
    effect: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Finding:
    """One head's verdict with the numbers behind it.

    Losses in nats a square: `loss`; `uniform`, ln(classes); `prior`, the entropy of the classes' shares; `square`, the
    best that is possible by what the square itself shows. gain: share of `prior` that the head saves, with its
    standard error over positions. precision, recall, f1: macro averages over the classes that occur, of class 1 alone
    for maps. average_precision: of maps, 0 else. calibration: expected calibration error over ten bins of the
    probability of class 1, or of the likeliest class. rate: share of class 1, or of the commonest class.
    """

    head: str
    word: Word
    why: str
    loss: float
    uniform: float
    prior: float
    square: float
    gain: tuple[float, float]
    precision: float
    recall: float
    f1: float
    average_precision: float
    calibration: float
    rate: float


# Which run


def finished(run: str = "") -> Path:
    """The named run, else the newest complete one that has heads, else a demo that is trained now with all of them."""
    heads = {"model": {"ssl": list(HEADS)}}
    if run:
        return runs.finished_run(run)
    return runs.finished_run(overrides=heads, wanted=lambda asked: bool(asked.get("model", {}).get("ssl")))


# Looking


def look(net: Net, loader: Loader, positions: int = 512, seed: int = 0) -> Look:
    """What each head of the network says about `positions` held-out positions.

    The piece head is asked on squares that are hidden from it, as in training. ValueError for a network without heads.
    """
    import torch

    heads = net.task.config.model.ssl
    if not heads:
        raise ValueError("the network has no self-supervised heads: name some in model.ssl and train it")
    parts: dict[str, list[Seen]] = {head: [] for head in heads}
    boards: list[chess.Board] = []
    for batch, hidden in _batches(net, loader, positions, BATCH, seed):
        boards += _boards(batch)
        for head in heads:
            shown = hidden if head == "piece" else batch
            on_device = {name: value.to(net.runtime.torch_device) for name, value in shown.items()}
            with torch.inference_mode(), net.runtime.autocast():
                said = net.task.predict(net.model, on_device, frozenset({head}))[f"ssl/{head}"]
            parts[head].append(_seen(head, said.float().cpu(), shown))
    if not boards:
        raise ValueError("there are no held-out positions to look at; `positions` has to be 1 at least")
    joined = {
        head: Seen(*(np.concatenate([getattr(one, name) for one in seen]) for name in Seen.__annotations__))
        for head, seen in parts.items()
    }
    return Look(tuple(boards), joined)


def _batches(net: Net, loader: Loader, positions: int, size: int, seed: int) -> Iterator[tuple[Batch, Batch]]:
    """Held-out batches, whole and with squares hidden in every row."""
    import torch

    from matrixlib.tasks.chess import ssl

    share = net.task.config.data.hidden_squares
    rng = np.random.default_rng(seed)
    for batch in loader.sequential(size, sample=positions):
        squares = ssl.hide(rng, len(batch["pieces"]), 1.0, share)
        yield batch, batch | {"hidden": torch.from_numpy(squares)}


def _boards(batch: Batch) -> list[chess.Board]:
    from matrixlib.tasks.chess import records
    from matrixlib.tasks.chess.task import STATE

    rows = np.zeros(len(batch["pieces"]), records.LAYOUT.record)
    rows["pieces"] = batch["pieces"].numpy()
    for column, name in enumerate(STATE):
        rows[name] = batch["state"][:, column].numpy().astype(rows[name].dtype)
    return [records.to_board(row) for row in rows]


def _seen(head: str, said: Any, batch: Batch) -> Seen:
    import torch

    from matrixlib.tasks.chess import targets
    from matrixlib.tasks.chess.planes import unpack_maps

    probability = said if said.shape[1] > 1 else torch.cat([1 - said, said], dim=1)
    truth = targets.target(batch, head).to(torch.uint8)
    content = targets.target(batch, "piece")
    squares = torch.ones_like(truth, dtype=torch.bool)
    if "hidden" in batch and head == "piece":
        squares = unpack_maps(batch["hidden"]).bool()
        content = torch.where(squares, 12, content)
    log_p = probability.clamp(min=1e-12).log()
    return Seen(log_p.numpy(), truth.numpy(), squares.numpy(), content.to(torch.uint8).numpy())


def wrong_targets(found: Look) -> dict[str, int]:
    """Squares on which the targets that the network is trained on differ from those of python-chess, by head."""
    from matrixlib.tasks.chess import readings

    exact = [readings.maps(board) for board in found.boards]
    return {
        head: int(((seen.truth != np.stack([one[head] for one in exact])) & seen.squares).sum())
        for head, seen in found.seen.items()
    }


# Gradients


def conflicts(net: Net, loader: Loader, batches: int = 8, seed: int = 0) -> dict[str, Conflict]:
    """How each head's gradient at the trunk stands to those of policy and value, over batches of 128 positions.

    The model is in evaluation mode. Intervals are Student's. Empty where the trunk is cut off (model.ssl_trunk).
    ValueError for fewer than two batches, which give no interval.
    """
    import torch

    if batches < 2:
        raise ValueError(f"an interval needs at least 2 batches, not {batches}")
    task = net.task
    if not task.config.model.ssl_trunk:
        return {}
    terms = sorted(term for term, weight in task.weights.items() if weight > 0)
    trunk = [
        value
        for name, value in net.model.named_parameters()
        if name.split(".")[0] in ("stem", "features", "tower")
    ]
    gram = []
    try:
        for value in trunk:
            value.requires_grad_(True)
        for batch, hidden in _batches(net, loader, batches * BATCH, BATCH, seed):
            rows = []
            for term in terms:
                shown = hidden if term == "ssl_piece" else batch
                count = task.counts(shown)[term]
                on_device = {name: tensor.to(net.runtime.torch_device) for name, tensor in shown.items()}
                with net.runtime.autocast():
                    losses, _ = task.losses(net.model, on_device, frozenset({term}))
                grads = torch.autograd.grad(losses[term] / max(1, count), trunk)
                rows.append(torch.cat([grad.float().flatten() for grad in grads]))
            flat = torch.stack(rows)
            gram.append((flat @ flat.T).double().cpu().numpy())
    finally:
        for value in trunk:
            value.requires_grad_(False)
    if len(gram) < 2:
        raise ValueError(f"{len(gram)} batches of {BATCH} held-out positions give no interval; add data")
    return {
        head: _conflict(np.stack(gram), terms, f"ssl_{head}", task.weights)
        for head in task.config.model.ssl
        if f"ssl_{head}" in terms
    }


def _conflict(gram: NDArray[np.float64], terms: list[str], term: str, weights: Any) -> Conflict:
    """gram: (batches, terms, terms) inner products of the terms' gradients."""
    h = terms.index(term)
    cosine, effect = {}, {}
    for main in MAIN:
        if main not in terms:
            continue
        m = terms.index(main)
        inner, own, other = gram[:, h, m], gram[:, m, m], gram[:, h, h]
        cosine[main] = _interval(inner / np.sqrt(np.maximum(own * other, 1e-30)))
        effect[main] = _interval(weights[term] * inner / (weights[main] * np.maximum(own, 1e-30)))
    return Conflict(cosine, effect)


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    quantile = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1]
    return float(values.mean()), float(quantile * values.std(ddof=1) / math.sqrt(len(values)))


# Judging


def judge(found: Look, conflict: dict[str, Conflict]) -> list[Finding]:
    """A verdict on each head, in the order of the configuration."""
    return [_judge(head, seen, found, conflict.get(head)) for head, seen in found.seen.items()]


def _judge(head: str, seen: Seen, found: Look, conflict: Conflict | None) -> Finding:
    classes = seen.log_p.shape[1]
    asked = seen.squares
    own, prior = _nats(seen, seen.truth), _prior(seen, seen.truth)
    shares = np.bincount(seen.truth[asked], minlength=classes) / asked.sum()
    square = _by_content(seen, seen.truth)
    saved = _mean_and_error(prior - own, asked)
    beyond = _mean_and_error(square - own, asked)
    figures = {
        "loss": float(own[asked].mean()),
        "prior": float(prior[asked].mean()),
        "square": float(square[asked].mean()),
    }
    gain = saved[0] / max(figures["prior"], 1e-12), saved[1] / max(figures["prior"], 1e-12)
    word, why = _word(head, seen, found, figures, gain, beyond, conflict)
    precision, recall, f1, ranked = _detection(seen, classes)
    return Finding(
        head,
        word,
        why,
        figures["loss"],
        math.log(classes),
        figures["prior"],
        figures["square"],
        gain,
        precision,
        recall,
        f1,
        ranked,
        _calibration(seen)[0],
        float(shares[1] if classes == 2 else shares.max()),
    )


def _word(
    head: str,
    seen: Seen,
    found: Look,
    figures: dict[str, float],
    gain: tuple[float, float],
    beyond: tuple[float, float],
    conflict: Conflict | None,
) -> tuple[Word, str]:
    from matrixlib.tasks.chess import readings

    if float(seen.log_p.std(0).max()) < CONSTANT:
        return "dead", "it says the same of every position"
    mistaken = _mistaken(head, seen, found)
    if mistaken:
        name, agrees, squares = mistaken
        what = f"{agrees:.0%} right by that on the {squares} squares where it is not the target"
        if name == readings.COPY:
            return "trivial", f"it is {name}: {what}"
        return "harmful", f"it has learned another target, {name}: {what}"
    if gain[0] < max(LEAST, SURE * gain[1]):
        return "dead", f"it saves {gain[0]:.1%} +- {gain[1]:.1%} of the entropy of the classes' shares"
    if figures["square"] < GIVEN_AWAY * figures["prior"]:
        return "trivial", "what stands on a square gives its target away"
    if beyond[0] < max(LEAST * figures["prior"], SURE * beyond[1]):
        return (
            "trivial",
            f"a table of what stands on the square does as well: {figures['square']:.4f} nat",
        )
    if conflict:
        for main, (mean, half) in conflict.effect.items():
            if mean + half < -COST:
                return "harmful", f"it takes {-mean:.0%} +- {half:.0%} of the {main}'s gradient away"
    return "learning", f"it saves {gain[0]:.0%} of the entropy of the classes' shares"


def _mistaken(head: str, seen: Seen, found: Look) -> tuple[str, float, int] | None:
    """The mistaken reading of its target that a head follows rather than the target: name, agreement, squares.

    It is one that the head knows more about than what stands on a square tells (a copy: than the shares of its
    classes); that is surely likelier, by the head's own probabilities, on the squares where it differs from the exact
    target; and more often right there than not. Of several, the one that is right most often.
    """
    from matrixlib.tasks.chess import readings

    every = readings.readings(found.boards, head, seen.squares if head == "piece" else seen.squares & False)
    exact = every.pop(readings.EXACT)
    best: tuple[str, float, int] | None = None
    for name, reading in every.items():
        differs = (reading != exact) & seen.squares
        easy = _prior(seen, reading) if name == readings.COPY else _by_content(seen, reading)
        known, error = _mean_and_error(easy - _nats(seen, reading), seen.squares)
        if not differs.any() or known < SURE * error:
            continue
        ahead, error = _mean_and_error(_nats(seen, exact) - _nats(seen, reading), differs)
        agrees = float((seen.log_p.argmax(1) == reading)[differs].mean())
        if ahead > SURE * error and agrees > 0.5 and (best is None or agrees > best[1]):
            best = (name, agrees, int(differs.sum()))
    return best


def _nats(seen: Seen, classes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(N, 8, 8): minus log-probability of these classes (N, 8, 8)."""
    found: NDArray[np.float32] = -np.take_along_axis(seen.log_p, classes[:, None].astype(np.int64), 1)[:, 0]
    return found


def _prior(seen: Seen, classes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """(N, 8, 8): minus log of the share of these classes (N, 8, 8) among the squares that are asked about."""
    counts = np.bincount(classes[seen.squares], minlength=seen.log_p.shape[1])
    found: NDArray[np.float64] = -np.log(np.maximum(counts / counts.sum(), 1e-12))[classes]
    return found


def _by_content(seen: Seen, classes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """(N, 8, 8): nats that these classes (N, 8, 8) cost the best guess that sees its own square alone."""
    counts = np.zeros((13, seen.log_p.shape[1]))
    np.add.at(counts, (seen.content[seen.squares], classes[seen.squares]), 1)
    log_p = np.log(np.maximum(counts / np.maximum(counts.sum(1, keepdims=True), 1), 1e-12))
    found: NDArray[np.float64] = -log_p[seen.content, classes]
    return found


def _mean_and_error(values: NDArray[Any], squares: NDArray[np.bool_]) -> tuple[float, float]:
    """Mean over squares, and its standard error where a position's squares depend on each other (ratio estimator)."""
    sums = np.where(squares, values, 0).sum((1, 2), dtype=np.float64)
    counts = squares.sum((1, 2))
    mean = float(sums.sum() / counts.sum())
    rows = len(sums)
    if rows < 2:
        return mean, math.inf
    spread = np.sqrt(np.square(sums - mean * counts).sum() / (rows - 1))
    return mean, float(spread * math.sqrt(rows) / counts.sum())


def _detection(seen: Seen, classes: int) -> tuple[float, float, float, float]:
    """(precision, recall, f1, average precision); see `Finding`."""
    truth, guess = seen.truth[seen.squares], seen.log_p.argmax(1)[seen.squares]
    table = confusion(seen)
    present = [1] if classes == 2 else [k for k in range(classes) if table[k].any()]
    hit = np.diag(table).astype(float)
    precision = hit / np.maximum(np.bincount(guess, minlength=classes), 1)
    recall = hit / np.maximum(np.bincount(truth, minlength=classes), 1)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    means = (float(value[present].mean()) for value in (precision, recall, f1))
    ranked = 0.0
    if classes == 2 and truth.any():
        order = np.argsort(-seen.log_p[:, 1][seen.squares], kind="stable")
        hits = truth[order] == 1
        ranked = float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())
    return *means, ranked  # type: ignore[return-value]


def confusion(seen: Seen) -> NDArray[np.int64]:
    """(classes, classes): squares by true class (rows) and likeliest class (columns)."""
    classes = seen.log_p.shape[1]
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (seen.truth[seen.squares], seen.log_p.argmax(1)[seen.squares]), 1)
    return table


def _calibration(seen: Seen) -> tuple[float, list[tuple[float, float, int]]]:
    """Expected calibration error, and (mean probability, share that is right, squares) of each bin that is used."""
    if seen.log_p.shape[1] == 2:
        said, right = np.exp(seen.log_p[:, 1])[seen.squares], seen.truth[seen.squares] == 1
    else:
        said = np.exp(seen.log_p.max(1))[seen.squares]
        right = (seen.log_p.argmax(1) == seen.truth)[seen.squares]
    at = np.minimum((said * BINS).astype(int), BINS - 1)
    points = [
        (float(said[at == k].mean()), float(right[at == k].mean()), int((at == k).sum()))
        for k in range(BINS)
        if (at == k).any()
    ]
    return sum(abs(p - r) * n for p, r, n in points) / max(1, len(said)), points


# Showing


def table(findings: Sequence[Finding]) -> str:
    """Text table: a head's loss beside its lines of chance, and how it finds what is rare."""
    lines = [
        f"{'head':8}{'loss':>8}{'uniform':>9}{'prior':>8}{'square':>8}{'saves':>8}"
        f"{'rate':>9}{'precision':>11}{'recall':>8}{'F1':>7}{'AP':>7}{'ECE':>8}"
    ]
    for one in findings:
        ranked = f"{one.average_precision:.2f}" if one.average_precision else "-"
        lines.append(
            f"{one.head:8}{one.loss:8.4f}{one.uniform:9.4f}{one.prior:8.4f}{one.square:8.4f}{one.gain[0]:8.1%}"
            f"{one.rate:9.2%}{one.precision:11.2f}{one.recall:8.2f}{one.f1:7.2f}{ranked:>7}{one.calibration:8.4f}"
        )
    return "\n".join(lines)


def progress(folder: Path, loader: Loader, device: str, positions: int = 512) -> str:
    """Text table: how much of the prior entropy each head saves at each checkpoint that the run has kept."""
    from matrixlib import net as nets
    from matrixlib.engine.checkpoint import Checkpoints

    lines: list[str] = []
    for step in Checkpoints(folder / "checkpoints", keep=2).steps():
        net = nets.load(folder, f"step_{step:08d}", device)
        findings = judge(look(net, loader, positions), {})
        if not lines:
            lines.append(f"{'update':>8}" + "".join(f"{one.head:>10}" for one in findings))
        lines.append(f"{step:8}" + "".join(f"{one.gain[0]:10.1%}" for one in findings))
    return "\n".join(lines)


def curves_figure(folder: Path, findings: Sequence[Finding]) -> Figure:
    """Learning curves of the heads, with the factor on their weights."""
    from matrixlib.engine import metrics
    from matrixlib.tasks.chess import plots

    rows = metrics.read(folder / "metrics.jsonl")
    return plots.curves_figure(rows, {one.head: one.prior for one in findings})


def conflict_table(found: dict[str, Conflict]) -> str:
    """Text table: cosine of each head's gradient with those of policy and value, and what it does to their steps."""
    if not found:
        return "model.ssl_trunk is off: the heads' gradients do not reach the trunk"
    lines = [
        f"{'head':8}"
        + "".join(f"{f'cosine with {m}':>22}{'to its step':>17}" for m in next(iter(found.values())).cosine)
    ]
    for head, one in found.items():
        cells = "".join(
            f"{cosine:+13.3f} +- {half:5.3f}{one.effect[main][0]:+10.1%} +- {one.effect[main][1]:4.1%}"
            for main, (cosine, half) in one.cosine.items()
        )
        lines.append(f"{head:8}{cells}")
    return "\n".join(lines)


def calibration_figure(found: Look) -> Figure:
    """Reliability of each head, and the confusion of those with several classes."""
    from matrixlib.tasks.chess import plots

    return plots.calibration_figure(
        {head: _calibration(seen)[1] for head, seen in found.seen.items()},
        {head: confusion(seen) for head, seen in found.seen.items() if seen.log_p.shape[1] > 2},
    )


def boards_figure(found: Look, count: int = 3) -> Figure:
    """The first positions with what each head says beside what is true."""
    from matrixlib.tasks.chess import plots

    maps = {
        head: (_expected(np.exp(seen.log_p[:count])), seen.truth[:count], seen.squares[:count])
        for head, seen in found.seen.items()
    }
    return plots.maps_figure(found.boards[:count], maps)


def _expected(probability: NDArray[np.float32]) -> NDArray[np.float32]:
    """(N, 8, 8): probability of class 1 of a map, else the likeliest class."""
    if probability.shape[1] == 2:
        return probability[:, 1]
    return probability.argmax(1).astype(np.float32)
