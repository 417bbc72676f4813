"""Pictures: positions and games; maps, calibration and learning curves of the self-supervised heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import chess
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

Points = Sequence[tuple[float, float, int]]
"""(mean probability, share that is right, squares) of each bin."""

CLASSES = {
    "piece": [*"PNBRQKpnbrqk", "."],
    "control": ["theirs", "even", "ours"],
}
SHOWN = {  # colour map and range of the values
    "piece": ("tab20", 0, 19),
    "control": ("RdYlGn", 0, 2),
}
ARROWS = 5
SMOOTH = 0.05  # share of the curve that one drawn value is a mean of


def maps_figure(
    boards: Sequence[chess.Board],
    maps: Mapping[str, tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]],
) -> Figure:
    """A row a position, two boards a head: what it says and what is true; pieces as letters, ours in capitals.

    maps: head -> (said, truth, squares), each (N, 8, 8), of the side to move. Squares that a head is not asked about
    are left blank.
    """
    width = 2 * len(maps)
    figure = Figure(figsize=(1.55 * width, 1.75 * len(boards) + 0.5), layout="constrained")
    grid: NDArray[Any] = np.asarray(figure.subplots(len(boards), width, squeeze=False))
    for row, board in enumerate(boards):
        oriented = board if board.turn == chess.WHITE else board.mirror()
        for column, (head, (said, truth, squares)) in enumerate(maps.items()):
            for offset, (label, values) in enumerate((("says", said), ("truth", truth))):
                axes = grid[row, 2 * column + offset]
                colours, low, high = SHOWN.get(head, ("viridis", 0, 1))
                shown = np.where(squares[row], values[row], np.nan)
                axes.imshow(shown, cmap=colours, vmin=low, vmax=high, origin="lower")
                axes.set_xticks([])
                axes.set_yticks([])
                if row == 0:
                    axes.set_title(f"{head}: {label}", fontsize=9)
                for square, piece in oriented.piece_map().items():
                    axes.text(
                        *(square % 8, square // 8),
                        piece.symbol(),
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if head not in SHOWN else "black",
                    )
    return figure


def calibration_figure(points: Mapping[str, Points], confusions: Mapping[str, NDArray[np.int64]]) -> Figure:
    """Left: how often each head is right where it says p; then a confusion matrix for each head with classes."""
    count = 1 + len(confusions)
    figure = Figure(figsize=(4.2 * count, 3.8), layout="constrained")
    first, *others = np.atleast_1d(np.asarray(figure.subplots(1, count)))
    first.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    for head, found in points.items():
        first.plot([p for p, _, _ in found], [share for _, share, _ in found], marker="o", label=head)
    first.set(xlabel="probability said", ylabel="share that is so", title="calibration")
    if points:
        first.legend(fontsize=8)
    for axes, (head, counts) in zip(others, confusions.items(), strict=True):
        _confusion(axes, head, counts)
    return figure


def _confusion(axes: Axes, head: str, counts: NDArray[np.int64]) -> None:
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    names = CLASSES[head]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="likeliest class", ylabel="true class", title=f"{head}: share of each true class")


def curves_figure(rows: Sequence[Mapping[str, Any]], priors: Mapping[str, float]) -> Figure:
    """Each head's training loss as a share of its prior entropy, and the factor on the heads' weights below.

    rows: metrics.jsonl. priors: head -> nats a square; a head at 1 knows the shares of its classes and no more.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for head, prior in priors.items():
        name = f"ssl_{head}"
        found = [
            (row["step"], row["metrics"].get(f"{name}/cross_entropy", row["losses"][name]))
            for row in rows
            if name in row.get("losses", {})
        ]
        if not found or not prior > 0:  # nan: nothing was asked
            continue
        steps, losses = np.array(found, dtype=float).T
        window = max(1, int(len(steps) * SMOOTH))
        mean = np.convolve(losses, np.ones(window) / window, "valid") / prior
        top.plot(steps[window - 1 :], mean, label=head)
    top.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    top.set(ylabel="loss / prior entropy", title="learning curves of the heads", ylim=(0, 2))
    if len(top.get_lines()) > 1:
        top.legend(fontsize=8)
    gates = [(row["step"], row["gate"]) for row in rows if row.get("gate") is not None]
    if gates:
        bottom.step(*np.array(gates, dtype=float).T, where="post", color="tab:purple")
    bottom.set(xlabel="update", ylabel="gate", ylim=(-0.05, 1.1))
    return figure


def position_figure(
    board: chess.Board, moves: Mapping[str, Mapping[str, float]], maps: Mapping[str, NDArray[Any]]
) -> Figure:
    """A board for each of `moves` (title -> UCI -> share) with the likeliest as arrows; then one for each map.

    White is below. maps: head -> (8, 8) on the real board, row 0 = rank 1: probabilities, or classes of CLASSES.
    """
    count = len(moves) + len(maps)
    figure = Figure(figsize=(3.4 * count, 3.7), layout="constrained")
    grid: NDArray[Any] = np.atleast_1d(np.asarray(figure.subplots(1, count)))
    squares = (np.add.outer(range(8), range(8)) + 1) % 2
    for axes, (title, shares) in zip(grid[: len(moves)], moves.items(), strict=True):
        axes.imshow(1 - 0.25 * squares, cmap="gray", vmin=0, vmax=1, origin="lower")
        _men(axes, board)
        axes.set_title(title, fontsize=10)
        for uci, share in sorted(shares.items(), key=lambda item: item[1])[-ARROWS:]:
            move = chess.Move.from_uci(uci)
            start, end = ((square % 8, square // 8) for square in (move.from_square, move.to_square))
            style = {
                "arrowstyle": "-|>",
                "color": "tab:blue",
                "alpha": 0.25 + 0.7 * share,
                "lw": 1 + 4 * share,
            }
            axes.annotate("", end, start, arrowprops=style)
    for axes, (head, values) in zip(grid[len(moves) :], maps.items(), strict=True):
        colours, low, high = SHOWN.get(head, ("viridis", 0, 1))
        axes.imshow(values, cmap=colours, vmin=low, vmax=high, origin="lower")
        _men(axes, board)
        axes.set_title(head, fontsize=10)
    return figure


def _men(axes: Axes, board: chess.Board) -> None:
    axes.set_xticks(range(8), "abcdefgh")
    axes.set_yticks(range(8), [str(rank) for rank in range(1, 9)])
    for square, piece in board.piece_map().items():
        figure = chess.Piece(piece.piece_type, chess.BLACK).unicode_symbol()  # filled, unlike the white ones
        colour = "white" if piece.color else "black"
        axes.text(
            *(square % 8, square // 8),
            figure,
            ha="center",
            va="center",
            fontsize=16,
            color=colour,
            path_effects=[withStroke(linewidth=1.2, foreground="black")],
        )


def course_figure(values: NDArray[Any], first: int) -> Figure:
    """Expected results for White (N,) in a game whose first position has the ply `first`."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.plot(1 + (first + np.arange(len(values))) / 2, values, marker=".")
    axes.set(xlabel="move", ylabel="expected result for White", ylim=(-1.05, 1.05))
    return figure
