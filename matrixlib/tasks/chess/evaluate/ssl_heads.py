"""What the self-supervised heads of a finished run have learned: looked at, judged (verdicts.py), shown.

And how their gradients at the trunk stand to those of policy and value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from matrixlib.runs import run as runs
from matrixlib.tasks.chess.config import SSL_CHANNELS
from matrixlib.tasks.chess.evaluate import ssl_verdicts as verdicts
from matrixlib.tasks.chess.evaluate.ssl_verdicts import Finding, Seen

if TYPE_CHECKING:
    import chess
    from matplotlib.figure import Figure

    from matrixlib.data.loader import Loader
    from matrixlib.engine.task import Batch
    from matrixlib.tasks.chess.evaluate.net import Net

MAIN = ("policy", "value")
BATCH = 128  # positions looked at in one pass
GRADIENT_BATCH = 256  # positions of one measured gradient


@dataclass(frozen=True)
class Look:
    """A network looked at: its positions, what each head says about them, and what may be taken for its target.

    readings: head -> name -> (N, 8, 8) classes, the exact target by python-chess among them.
    """

    boards: tuple[chess.Board, ...]
    seen: dict[str, Seen]
    readings: dict[str, dict[str, NDArray[np.uint8]]]


@dataclass(frozen=True)
class Conflict:
    """How a head's gradient at the trunk stands to those of policy and value: main term -> (estimate, half a 95 %
    interval); None where the main term's own gradient cannot be told from noise.

    effect: what the head's weighted gradient adds to a small step down the main term's own, as a share of what that
    step gains: -0.1 takes a tenth away.
    """

    cosine: dict[str, tuple[float, float] | None]
    effect: dict[str, tuple[float, float] | None]


# Which run


def finished(run: str = "") -> Path:
    """The named run, else the newest complete one that has heads, else a demo that is trained now with all of them."""
    heads = {"model": {"ssl": list(SSL_CHANNELS)}}
    if run:
        return runs.finished_run(run)
    return runs.finished_run(overrides=heads, wanted=lambda asked: bool(asked.get("model", {}).get("ssl")))


# Looking


def look(net: Net, loader: Loader, positions: int = 2048, seed: int = 0) -> Look:
    """What each head of the network says about `positions` held-out positions, 0: all of them.

    The piece head is asked on squares that are hidden from it, as in training. ValueError for a network without heads.
    """
    import torch

    from matrixlib.engine.task import to_device
    from matrixlib.tasks.chess.evaluate import oracle as readings

    heads = net.task.config.model.ssl
    if not heads:
        raise ValueError("the network has no self-supervised heads: name some in model.ssl and train it")
    parts: dict[str, list[Seen]] = {head: [] for head in heads}
    boards: list[chess.Board] = []
    for batch, hidden in _batches(net, loader, positions, BATCH, seed):
        boards += boards_of(batch)
        hiding = {"piece"} & set(heads)
        for shown, asked in ((hidden, hiding), (batch, set(heads) - hiding)):
            if asked:
                on_device = to_device(shown, net.runtime.torch_device)
                with torch.inference_mode(), net.runtime.autocast():
                    said = net.task.predict(net.model, on_device, frozenset(asked))
                for head in asked:
                    parts[head].append(_seen(head, said[f"ssl/{head}"].float().cpu(), shown))
    joined = {
        head: Seen(*(np.concatenate([getattr(one, field.name) for one in seen]) for field in fields(Seen)))
        for head, seen in parts.items()
    }
    return Look(tuple(boards), joined, readings.readings(boards))


def _batches(net: Net, loader: Loader, positions: int, size: int, seed: int) -> Iterator[tuple[Batch, Batch]]:
    """Held-out batches, whole and with squares hidden in every row."""
    import torch

    from matrixlib.tasks.chess import ssl_targets as ssl

    share = net.task.config.data.hidden_squares
    rng = np.random.default_rng(seed)
    for batch in loader.sequential(size, sample=positions):
        squares = ssl.hide(rng, len(batch["pieces"]), 1.0, share)
        yield batch, batch | {"hidden": torch.from_numpy(squares)}


def boards_of(batch: Batch) -> list[chess.Board]:
    """The positions of a prepared batch, whole."""
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
    from matrixlib.tasks.chess.evaluate import oracle as readings
    from matrixlib.tasks.chess.planes import unpack_maps

    probability = said if said.shape[1] > 1 else torch.cat([1 - said, said], dim=1)
    truth = targets.target(batch, head).to(torch.uint8)
    content = targets.target(batch, "piece")
    squares = torch.ones_like(truth, dtype=torch.bool)
    if head == "piece":
        squares = unpack_maps(batch["hidden"]).bool()
        content = torch.where(squares, readings.EMPTY, content)
    log_p = probability.clamp(min=1e-12).log()
    return Seen(log_p.numpy(), truth.numpy(), squares.numpy(), content.to(torch.uint8).numpy())


def wrong_targets(found: Look) -> dict[str, int]:
    """Squares on which the targets that the network is trained on differ from those of python-chess, by head."""
    from matrixlib.tasks.chess.evaluate import oracle as readings

    exact = {head: every[readings.EXACT] for head, every in found.readings.items()}
    return {
        head: int(((seen.truth != exact[head]) & seen.squares).sum()) for head, seen in found.seen.items()
    }


def judge(net: Net, found: Look) -> list[Finding]:
    """A verdict on each head, in the order of the configuration."""
    from matrixlib.tasks.chess.evaluate import oracle as readings

    copies = frozenset({readings.COPY})
    findings = []
    for head, seen in found.seen.items():
        if not net.task.weights[f"ssl_{head}"]:
            findings.append(Finding(head, "undecided", f"its weight loss.ssl.{head} is 0: it is not trained"))
            continue
        wrong = {name: value for name, value in found.readings[head].items() if name != readings.EXACT}
        findings.append(verdicts.judge(head, seen, wrong, copies))
    return findings


# Gradients


def conflicts(net: Net, loader: Loader, batches: int = 16, seed: int = 0) -> dict[str, Conflict]:
    """How each head's gradient at the trunk stands to those of policy and value, over batches of 256 positions.

    One batch's gradient is mostly noise, and terms of one batch share it. So inner products are taken between
    different batches alone, which leaves those of the true gradients, and intervals by leaving a batch out in turn
    (jackknife). In fp32 and evaluation mode; all gradients are held on the host, 4 bytes for each batch, term and
    parameter of the trunk. Empty where no head's gradient reaches the trunk. ValueError for fewer than 4 batches.
    """
    import torch

    from matrixlib.engine.task import to_device
    from matrixlib.tasks.chess.model import PolicyValueNet

    task, device = net.task, net.runtime.torch_device
    terms = sorted(term for term, weight in task.weights.items() if weight > 0)
    heads = [head for head in task.config.model.ssl if f"ssl_{head}" in terms]
    if not (task.config.model.ssl_trunk and heads):
        return {}
    assert isinstance(net.model, PolicyValueNet)
    trunk = net.model.trunk_parameters()
    found = []
    try:
        for value in trunk:
            value.requires_grad_(True)
        for batch, hidden in _batches(net, loader, batches * GRADIENT_BATCH, GRADIENT_BATCH, seed):
            if len(batch["pieces"]) < GRADIENT_BATCH:
                continue
            rows = []
            for term in terms:
                shown = hidden if term == "ssl_piece" else batch
                losses, _ = task.losses(net.model, to_device(shown, device), frozenset({term}))
                grads = torch.autograd.grad(losses[term] / max(1, task.counts(shown)[term]), trunk)
                rows.append(torch.cat([grad.flatten() for grad in grads]).cpu())
            found.append(torch.stack(rows).numpy())
    finally:
        net.model.requires_grad_(False)
    if len(found) < 4:
        raise ValueError(
            f"{len(found)} batches of {GRADIENT_BATCH} held-out positions tell too little of the gradients; "
            "take 4 at least"
        )
    main = {term: terms.index(term) for term in MAIN if term in terms}
    weights = [float(task.weights[term]) for term in terms]
    return {head: compared(np.stack(found), terms.index(f"ssl_{head}"), main, weights) for head in heads}


def compared(
    gradients: NDArray[np.float32], head: int, main: dict[str, int], weights: Sequence[float]
) -> Conflict:
    """A head's conflict by gradients (batches, terms, parameters); head, main: places among the terms."""
    cosine, effect = {}, {}
    for name, m in main.items():
        inner, own, other = (_across(gradients, *pair) for pair in ((head, m), (m, m), (head, head)))
        told = own[0] > 2 * _jackknife(own)
        ratio = weights[head] / weights[m] * inner / np.maximum(own, 1e-30)
        effect[name] = (float(ratio[0]), 1.96 * _jackknife(ratio)) if told else None
        told = told and other[0] > 2 * _jackknife(other)
        angle = inner / np.sqrt(np.maximum(own * other, 1e-30))
        cosine[name] = (float(angle[0]), 1.96 * _jackknife(angle)) if told else None
    return Conflict(cosine, effect)


def _across(gradients: NDArray[np.float32], a: int, b: int) -> NDArray[np.float64]:
    """(1 + batches,): mean inner product of term a's and term b's gradients of different batches, over all batches and
    over all but one.
    """
    gram = (gradients[:, a] @ gradients[:, b].T).astype(np.float64)
    n = len(gram)
    diagonal = np.diag(gram)
    total = gram.sum() - diagonal.sum()
    without = total - (gram.sum(0) + gram.sum(1) - 2 * diagonal)
    return np.concatenate([[total / (n * (n - 1))], without / ((n - 1) * (n - 2))])


def _jackknife(estimates: NDArray[np.float64]) -> float:
    """Standard error of the first estimate, of all batches, from the others, each without one of them."""
    without = estimates[1:]
    n = len(without)
    return float(math.sqrt((n - 1) / n * np.square(without - without.mean()).sum()))


# Showing


def table(findings: Sequence[Finding]) -> str:
    """Text table: a head's loss beside its lines of chance, and how it finds what is rare."""
    lines = [
        f"{'head':8}{'loss':>8}{'uniform':>9}{'prior':>8}{'table':>8}{'saves':>8}{'beyond':>8}"
        f"{'rate':>9}{'precision':>11}{'recall':>8}{'F1':>7}{'AP':>7}{'ECE':>8}"
    ]
    for one in findings:
        ranked = "-" if math.isnan(one.average_precision) else f"{one.average_precision:.2f}"
        lines.append(
            f"{one.head:8}{one.loss:8.4f}{one.uniform:9.4f}{one.prior:8.4f}{one.table:8.4f}{one.gain[0]:8.1%}"
            f"{one.beyond[0]:8.1%}{one.rate:9.2%}{one.precision:11.2f}{one.recall:8.2f}{one.f1:7.2f}"
            f"{ranked:>7}{one.calibration:8.4f}"
        )
    return "\n".join(lines)


def progress(folder: Path, loader: Loader, device: str, positions: int = 512) -> str:
    """Text table: how much of the prior entropy each head saves at each checkpoint that the run has kept."""
    from matrixlib.engine.checkpoint import Checkpoints
    from matrixlib.tasks.chess.spec import load

    lines: list[str] = []
    for step in Checkpoints(folder / "checkpoints", keep=2).steps():
        net = load(folder, f"step_{step:08d}", device)
        found = look(net, loader, positions)
        if not lines:
            lines.append(f"{'update':>8}" + "".join(f"{head:>10}" for head in found.seen))
        saved = (verdicts.saved(seen) for seen in found.seen.values())
        lines.append(f"{step:8}" + "".join(f"{share:10.1%}" for share in saved))
    return "\n".join(lines)


def conflict_table(found: dict[str, Conflict]) -> str:
    """Text table: cosine of each head's gradient with those of policy and value, and what it does to their steps."""
    if not found:
        return "no head's gradient reaches the trunk (model.ssl_trunk, loss.ssl)"
    lines = [
        f"{'head':8}"
        + "".join(f"{f'cosine with {m}':>22}{'to its step':>20}" for m in next(iter(found.values())).cosine)
    ]
    for head, one in found.items():
        cells = ""
        for main, cosine in one.cosine.items():
            effect = one.effect[main]
            cells += f"{f'{cosine[0]:+.2f} +- {cosine[1]:.2f}' if cosine else 'not to be told':>22}"
            cells += f"{f'{effect[0]:+.0%} +- {effect[1]:.0%}' if effect else 'not to be told':>20}"
        lines.append(f"{head:8}{cells}")
    return "\n".join(lines)


def curves_figure(folder: Path, findings: Sequence[Finding]) -> Figure:
    """Learning curves of the heads, with the factor on their weights."""
    from matrixlib.engine import metrics
    from matrixlib.tasks.chess import plots

    rows = metrics.read(folder / "metrics.jsonl")
    return plots.curves_figure(rows, {one.head: one.prior for one in findings})


def calibration_figure(found: Look) -> Figure:
    """Reliability of each head, and the confusion of those with several classes."""
    from matrixlib.tasks.chess import plots

    asked = {head: seen for head, seen in found.seen.items() if seen.squares.any()}
    return plots.calibration_figure(
        {head: verdicts.calibration(seen)[1] for head, seen in asked.items()},
        {head: verdicts.confusion(seen) for head, seen in asked.items() if seen.classes > 2},
    )


def boards_figure(found: Look, count: int = 3) -> Figure:
    """The first positions with what each head says beside what is true."""
    from matrixlib.tasks.chess import plots

    maps = {
        head: (
            np.exp(seen.log_p[:count, 1]) if seen.classes == 2 else seen.guess[:count],
            seen.truth[:count],
            seen.squares[:count],
        )
        for head, seen in found.seen.items()
    }
    return plots.maps_figure(found.boards[:count], maps)
