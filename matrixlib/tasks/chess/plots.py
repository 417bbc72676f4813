"""Pictures: positions and games; maps, calibration and learning curves of the self-supervised heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
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
SQUARES = 1 - 0.25 * ((np.add.outer(range(8), range(8)) + 1) % 2)  # grey of a board
ARROWS = 5
ACROSS = 4  # boards beside each other
EDGE = 3  # times `far`
BINS, FEWEST = 10, 30  # of the value, and positions in one that is drawn
HISTOGRAMS = {  # axis and edges of the bins
    "men": ("pieces on the board", np.arange(1.5, 33)),
    "ply": ("half moves played", np.arange(0, 241, 10)),
    "balance": ("balance for the side to move [pawns]", np.arange(-12.5, 13)),
    "phase": ("phase [0 endgame, 24 opening]", np.arange(-0.5, 26, 2)),
    "value": ("points by win-draw-loss", np.linspace(-1, 1, 21)),
    "entropy": ("entropy of the policy [nats]", np.linspace(0, 4, 21)),
}
SMOOTH = 0.05  # share of the curve that one drawn value is a mean of


def maps_figure(
    boards: Sequence[chess.Board],
    maps: Mapping[str, tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]],
) -> Figure:
    """A row a head, two boards a position: what it says and what is true; ours are the white pieces.

    maps: head -> (output, truth, squares), each (N, 8, 8), of the side to move. Squares that do not count for a head
    are left blank.
    """
    width = 2 * len(boards)
    figure = Figure(figsize=(1.75 * width, 1.75 * len(maps) + 0.3), layout="constrained")
    grid: NDArray[Any] = np.asarray(figure.subplots(len(maps), width, squeeze=False))
    for row, (head, (output, truth, squares)) in enumerate(maps.items()):
        colours, low, high = SHOWN.get(head, ("viridis", 0, 1))
        grid[row, 0].set_ylabel(head, fontsize=11)
        for number, board in enumerate(boards):
            oriented = board if board.turn == chess.WHITE else board.mirror()
            for offset, (label, values) in enumerate((("says", output), ("truth", truth))):
                axes = grid[row, 2 * number + offset]
                shown = np.where(squares[number], values[number], np.nan)
                axes.imshow(shown, cmap=colours, vmin=low, vmax=high, origin="lower")
                _men(axes, oriented, 9)
                axes.set_xticks([])
                axes.set_yticks([])
                if row == 0:
                    axes.set_title(f"position {number + 1}: {label}", fontsize=9)
    return figure


def calibration_figure(points: Mapping[str, Points], confusions: Mapping[str, NDArray[np.int64]]) -> Figure:
    """Left: how often each head is right where it says p; then a confusion matrix for each head with classes."""
    count = 1 + len(confusions)
    figure = Figure(figsize=(4.2 * count, 3.8), layout="constrained")
    first, *others = np.atleast_1d(np.asarray(figure.subplots(1, count)))
    first.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
    for head, bins in points.items():
        first.plot([p for p, _, _ in bins], [share for _, share, _ in bins], marker="o", label=head)
    first.set(xlabel="probability by the network", ylabel="share that is so", title="calibration")
    if points:
        first.legend(loc="lower left", bbox_to_anchor=(0, 1.08), ncols=3, fontsize=8, frameon=False)
    for axes, (head, counts) in zip(others, confusions.items(), strict=True):
        axes.imshow(counts / np.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
        names = CLASSES[head]
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="likeliest class", ylabel="true class", title=f"{head}: share of each true class")
    return figure


def curves_figure(rows: Sequence[Mapping[str, Any]], priors: Mapping[str, float]) -> Figure:
    """Each head's training loss as a share of its prior entropy, and the factor on the heads' weights below.

    rows: metrics.jsonl. priors: head -> nats a square; a head at 1 knows the shares of its classes and no more.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for head, prior in priors.items():
        name = f"ssl_{head}"
        curve = [
            (row["step"], row["metrics"].get(f"{name}/cross_entropy", row["losses"][name]))
            for row in rows
            if name in row.get("losses", {})
        ]
        if not curve or not prior > 0:  # nan: no square counted
            continue
        steps, losses = np.array(curve, dtype=float).T
        window = max(1, int(len(steps) * SMOOTH))
        mean = np.convolve(losses, np.ones(window) / window, "valid") / prior
        (line,) = top.plot(steps[window - 1 :], mean, label=head)
        top.plot(steps, losses / prior, color=line.get_color(), linewidth=0.7, alpha=0.2)
    top.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    top.set(ylabel="loss / prior entropy", title="learning curves of the heads", ylim=(0, 2))
    if len(top.get_lines()) > 1:
        top.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
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
    columns = min(count, ACROSS)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.4 * columns, 3.7 * rows), layout="constrained")
    grid = np.asarray(figure.subplots(rows, columns, squeeze=False)).ravel()
    for axes in grid[count:]:
        axes.remove()
    for axes, (title, shares) in zip(grid[: len(moves)], moves.items(), strict=True):
        axes.imshow(SQUARES, cmap="gray", vmin=0, vmax=1, origin="lower")
        _men(axes, board)
        axes.set_title(title, fontsize=10)
        _arrows(axes, shares)
    for axes, (head, values) in zip(grid[len(moves) : count], maps.items(), strict=True):
        colours, low, high = SHOWN.get(head, ("viridis", 0, 1))
        axes.imshow(values, cmap=colours, vmin=low, vmax=high, origin="lower")
        _men(axes, board)
        axes.set_title(head, fontsize=10)
    return figure


def _arrows(axes: Axes, shares: Mapping[str, float]) -> None:
    """The likeliest moves (UCI -> share)."""
    for uci, share in sorted(shares.items(), key=lambda item: item[1])[-ARROWS:]:
        move = chess.Move.from_uci(uci)
        start, end = ((square % 8, square // 8) for square in (move.from_square, move.to_square))
        style: dict[str, Any] = {"arrowstyle": "-|>", "color": "tab:blue", "lw": 1 + 4 * share}
        style["alpha"] = 0.45 + 0.5 * share
        axes.annotate("", end, start, arrowprops=style)


def _men(axes: Axes, board: chess.Board, size: float = 16) -> None:
    axes.set_xticks(range(8), "abcdefgh")
    axes.set_yticks(range(8), [str(rank) for rank in range(1, 9)])
    for square, piece in board.piece_map().items():
        figure = chess.Piece(piece.piece_type, chess.BLACK).unicode_symbol()  # filled, unlike the white ones
        colour = "white" if piece.color else "black"
        outline = [withStroke(linewidth=1.2, foreground="black")]
        place = {"ha": "center", "va": "center"}
        at = square % 8, square // 8
        axes.text(*at, figure, place, fontsize=size, color=colour, path_effects=outline)


def square_colours(head: str, values: NDArray[Any]) -> list[str]:
    """Colours (`#rrggbb`) of the squares a1, b1, ... h8 of a map (8, 8), as `position_figure` draws it."""
    import matplotlib
    from matplotlib.colors import to_hex

    colours, low, high = SHOWN.get(head, ("viridis", 0, 1))
    shares = (np.asarray(values, float).ravel() - low) / (high - low)
    return [to_hex(colour) for colour in matplotlib.colormaps[colours](shares)]


def course_figure(values: NDArray[Any], first: int) -> Figure:
    """Expected results for White (N,) in a game whose first position has the ply `first`."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.plot(1 + (first + np.arange(len(values))) / 2, values, marker=".")
    axes.set(xlabel="move", ylabel="expected result for White", ylim=(-1.05, 1.05))
    return figure


def chances_figure(chances: Sequence[tuple[float, float, float]]) -> Figure:
    """A bar for each position of a game: White wins below, draw, Black wins above."""
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    bottom = np.zeros(len(chances))
    for name, colour, share in zip(
        ("White wins", "draw", "Black wins"), ("white", "0.6", "0.15"), zip(*chances, strict=True), strict=True
    ):
        height = 100 * np.array(share)
        axes.bar(np.arange(len(chances)), height, 1.0, bottom, color=colour, edgecolor="0.4", linewidth=0.4, label=name)
        bottom = bottom + height
    axes.set(xlabel="half move", ylabel="chances [%]", xlim=(-0.5, max(len(chances), 12) - 0.5), ylim=(0, 100))
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


# Data sets


def boards_figure(
    groups: Mapping[str, Sequence[tuple[chess.Board, Mapping[str, float], str]]], columns: int = 3
) -> Figure:
    """Groups side by side, of boards (board, UCI -> share in the policy, words) with their FEN below."""
    rows = max(1, -(-max(map(len, groups.values())) // columns))
    figure = Figure(figsize=(2.2 * columns * len(groups), 2.75 * rows + 0.3), layout="constrained")
    parts = np.atleast_1d(np.asarray(figure.subfigures(1, len(groups), wspace=0.03)))
    for part, (title, shown) in zip(parts, groups.items(), strict=True):
        if title:
            part.suptitle(title if shown else f"{title}: none", fontsize=11)
        grid = list(part.subplots(rows, columns, squeeze=False).flat)
        for axes, one in zip_longest(grid, shown):
            if one is None:
                axes.set_axis_off()
                continue
            board, moves, words = one
            axes.imshow(SQUARES, cmap="gray", vmin=0, vmax=1, origin="lower")
            _men(axes, board, 11)
            _arrows(axes, moves)
            axes.tick_params(labelsize=6, length=0)
            axes.set_title("\n".join(wrap(words, 38)), fontsize=7)
            placement, rest = board.fen().split(" ", 1)
            half = len(placement) // 2
            cut = placement.find("/", half - 4) + 1
            axes.set_xlabel(f"{placement[:cut]}\n{placement[cut:]} {rest}", fontsize=5.5, family="monospace")
    return figure


def distributions_figure(sources: Mapping[str, Mapping[str, NDArray[Any]]]) -> Figure:
    """Shares of the positions of each source by what HISTOGRAMS names; results; what win-draw-loss is worth.

    sources: name -> quantity -> (n,), nan where unknown; also result and value, points of the side to move.
    """
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    grid = list(figure.subplots(2, 4).flat)
    for index, (source, values) in enumerate(sources.items()):
        colour = f"C{index}"
        for axes, (name, (_, edges)) in zip(grid, HISTOGRAMS.items(), strict=False):
            known = values[name][~np.isnan(values[name])]
            if len(known):
                shares = np.histogram(np.clip(known, edges[0], edges[-1]), edges)[0] / len(values[name])
                axes.stairs(100 * shares, edges, color=colour, fill=True, alpha=0.2)
                axes.stairs(100 * shares, edges, color=colour, linewidth=1.2, label=source)
        results, chances = grid[len(HISTOGRAMS)], grid[len(HISTOGRAMS) + 1]
        white, value, result = values["white"], values["value"], values["result"]
        thirds = [(white == points).mean() for points in (1, 0, -1)]
        width = 0.8 / len(sources)
        results.bar(
            np.arange(4) + width * (index + 0.5) - 0.4,
            100 * np.array([*thirds, np.isnan(white).mean()]),
            width,
            color=colour,
        )
        both = ~np.isnan(value) & ~np.isnan(result)
        place = np.clip(((value[both] + 1) * BINS / 2).astype(int), 0, BINS - 1)
        count = np.bincount(place, minlength=BINS)
        some = count >= FEWEST
        mean = np.bincount(place, result[both], BINS)[some] / count[some]
        middle = np.bincount(place, value[both], BINS)[some] / count[some]
        if len(middle):
            chances.plot(middle, mean, "o-", markersize=3, linewidth=1, color=colour)
    for axes, (label, _) in zip(grid, HISTOGRAMS.values(), strict=False):
        axes.set(xlabel=label, ylabel="positions [%]", ylim=(0, None))
    results.set_xticks(range(4), ["1-0", "1/2", "0-1", "unknown"])
    results.set(xlabel="result of the game", ylabel="positions [%]")
    chances.plot([-1, 1], [-1, 1], color="grey", linewidth=0.8, linestyle="--")
    chances.set(xlabel="points by win-draw-loss", ylabel="mean points of the games")
    for axes in grid:
        if not axes.patches and len(axes.get_lines()) < 2:
            axes.text(0.5, 0.4, "unknown", ha="center", color="grey", transform=axes.transAxes)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        axes.xaxis.label.set_size(9)
        axes.yaxis.label.set_size(8)
    grid[0].legend(fontsize=8)
    return figure


def distances_figure(shards: Mapping[str, Mapping[str, float]], far: float) -> Figure:
    """A line for each figure of the shards, a dot for each shard at its robust z; red and named beyond `far`, and at
    the edge where it is further away than three times that.
    """
    names = list(dict.fromkeys(name for figures in shards.values() for name in figures))
    figure = Figure(figsize=(9, 0.6 + 0.24 * max(4, len(names))), layout="constrained")
    axes = figure.subplots()
    for shard, figures in shards.items():
        for name, z in figures.items():
            beyond = abs(z) > far
            place = (max(-EDGE * far, min(EDGE * far, z)), names.index(name))
            axes.plot(*place, "o", markersize=5, color="#b3261e" if beyond else "C0", alpha=0.6)
            if beyond:
                side = "left" if z < 0 else "right"
                label = f"{shard} ({z:+.1f})"
                axes.annotate(label, place, (0, 5), textcoords="offset points", fontsize=7, ha=side)
    for edge in (-far, far):
        axes.axvline(edge, color="#b3261e", linewidth=0.8, linestyle="--")
    axes.set_xlim(-1.05 * EDGE * far, 1.05 * EDGE * far)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set(xlabel="distance from the median of the other shards [robust standard deviations]")
    axes.grid(alpha=0.3)
    if not names:
        axes.text(0.5, 0.5, "too few shards to compare", ha="center", va="center", transform=axes.transAxes)
    return figure


def temperature_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """The temperature of distillation by update, and the parameter of a learned one; rows of metrics.jsonl by run."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("temperature", "raw"), strict=True):
        for run, rows in runs.items():
            points = [(row["step"], row["metrics"].get(f"teacher_policy/{name}")) for row in rows]
            points = [point for point in points if point[1] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=run)
        axes.set(xlabel="update", ylabel={"temperature": "T", "raw": "raw parameter of a learned T"}[name])
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    return figure
