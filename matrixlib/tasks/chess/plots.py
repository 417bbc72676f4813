"""Pictures: positions and games; maps, calibration and learning curves of the self-supervised heads."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

import chess
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from matrixlib.tasks.plotting import RED, above, bars, beside, caption, level, log, matrix, panels, whole

Points = Sequence[tuple[float, float, int]]
"""(mean probability, share that is right, squares) of each bin."""

CLASSES = {"piece": [*"PNBRQKpnbrqk", "."], "control": ["theirs", "even", "ours"]}
COLOURS = {"piece": "tab20", "control": "RdYlGn"}  # of classes; of probabilities, PROBABLE
PROBABLE = "Oranges"  # white where nothing is, so that the men are seen
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
RARE = 0.2  # heads that never say more have a picture of calibration of their own


def maps_figure(
    boards: Sequence[chess.Board], maps: Mapping[str, tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]]
) -> Figure:
    """A row a head, two boards a position: what it says and what is true; ours are the white pieces.

    maps: head -> (output, truth, squares), each (N, 8, 8), of the side to move. Squares that do not count for a head
    are left blank.
    """
    width = 2 * len(boards)
    figure, panes = panels(width * len(maps), (1.75, 1.75), across=width, layout="compressed")
    grid = np.array(panes, object).reshape(len(maps), width)
    for row, (head, (output, truth, squares)) in zip(grid, maps.items(), strict=True):
        row[0].set_ylabel(head, fontsize=11)
        for number, board in enumerate(boards):
            oriented = board if board.turn == chess.WHITE else board.mirror()
            for axes, values in zip(row[2 * number :], (output, truth), strict=False):
                image = _map(axes, head, np.where(squares[number], values[number], np.nan), oriented, 9)
                axes.set(xticks=[], yticks=[])
        _key(figure, row, head, image)
    for number, axes in enumerate(grid[0]):
        caption(axes, f"position {number // 2 + 1}: {'truth' if number % 2 else 'says'}")
    return figure


def _map(axes: Axes, head: str, values: NDArray[Any], board: chess.Board, size: float = 16) -> AxesImage:
    """A map (8, 8) under the men of a board."""
    image = axes.imshow(values, origin="lower", **_shades(head))
    _men(axes, board, size)
    return image


def _shades(head: str) -> dict[str, Any]:
    """Colour map and range of a head's values; a class lies in the middle of its colour."""
    if names := CLASSES.get(head):
        return {"cmap": colormaps[COLOURS[head]].resampled(len(names)), "vmin": -0.5, "vmax": len(names) - 0.5}
    return {"cmap": colormaps[PROBABLE], "vmin": 0, "vmax": 1}


def _key(figure: Figure, axes: Iterable[Axes], head: str, image: AxesImage) -> None:
    """What the colours of these maps mean, at the right of them."""
    bar = figure.colorbar(image, ax=list(axes), pad=0.01)
    if names := CLASSES.get(head):
        bar.set_ticks(range(len(names)), labels=names)
    bar.ax.tick_params(labelsize=7, length=0)


def calibration_figure(points: Mapping[str, Points], confusions: Mapping[str, NDArray[np.int64]]) -> Figure:
    """How often each head is right where it says p, with a panel of their own for heads that never say more than RARE;
    then a confusion matrix for each head with classes."""
    most = {head: max((max(p, share) for p, share, _ in bins), default=1.0) for head, bins in points.items()}
    both = [[head for head in points if most[head] >= RARE], [head for head in points if most[head] < RARE]]
    groups = [heads for heads in both if heads] or [[]]
    figure, grid = panels(len(groups) + len(confusions), (4.2, 3.8), across=len(groups) + len(confusions))
    for axes, heads in zip(grid, groups, strict=False):
        edge = max((most[head] for head in heads), default=1.0)
        axes.plot([0, edge], [0, edge], color="grey", linewidth=0.8, linestyle="--")
        for head in heads:
            places = np.array(points[head])[:, :2].T
            axes.plot(*places, marker="o", color=f"C{list(points).index(head)}", label=head)
        axes.set(xlabel="probability by the network", ylabel="share that is so")
        above(axes)
    for axes, (head, counts) in zip(grid[len(groups) :], confusions.items(), strict=True):
        matrix(axes, counts / np.maximum(counts.sum(1, keepdims=True), 1), CLASSES[head], CLASSES[head])
        axes.set(xlabel="likeliest class", ylabel="true class")
        caption(axes, f"{head}: % of each true class")
    return figure


def curves_figure(rows: Sequence[Mapping[str, Any]], priors: Mapping[str, float]) -> Figure:
    """Each head's training loss as a share of its prior entropy, and the factor on the heads' weights below.

    rows: metrics.jsonl. priors: head -> nats a square; a head at 1 knows the shares of its classes and no more.
    """
    figure, (top, bottom) = panels(2, (8, 2.25), across=1, sharex=True, height_ratios=(4, 1))
    drawn: list[float] = []
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
        drawn += (losses / prior).tolist()
    top.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    log(top, drawn)
    top.set_ylabel("loss / prior entropy")
    gates = [(row["step"], row["gate"]) for row in rows if row.get("gate") is not None]
    if gates:
        bottom.step(*np.array(gates, dtype=float).T, where="post", color="tab:purple")
    bottom.set(ylabel="gate", ylim=(-0.05, 1.1))
    whole(bottom)
    beside(figure)
    return figure


def position_figure(
    board: chess.Board, moves: Mapping[str, Mapping[str, float]], maps: Mapping[str, NDArray[Any]]
) -> Figure:
    """A board for each of `moves` (title -> UCI -> share) with the likeliest as arrows; then one for each map.

    White is below. maps: head -> (8, 8) on the real board, row 0 = rank 1: probabilities, or classes of CLASSES.
    """
    figure, grid = panels(len(moves) + len(maps), (3.4, 3.7), ACROSS, layout="compressed")
    for axes, (whose, shares) in zip(grid, moves.items(), strict=False):
        axes.imshow(SQUARES, cmap="gray", vmin=0, vmax=1, origin="lower")
        _men(axes, board)
        caption(axes, whose)
        _arrows(axes, shares)
    for axes, (head, values) in zip(grid[len(moves) :], maps.items(), strict=True):
        image = _map(axes, head, values, board)
        caption(axes, head)
        _key(figure, [axes], head, image)
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
    axes.grid(False)
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
    shades = _shades(head)
    shares = (np.asarray(values, float).ravel() - shades["vmin"]) / (shades["vmax"] - shades["vmin"])
    return [to_hex(colour) for colour in shades["cmap"](shares)]


def colour_key(head: str) -> list[tuple[str, str]]:
    """(words, colour) of what the colours of such a map mean."""
    names = CLASSES.get(head, ["0%", "50%", "100%"])
    places = np.linspace(0, 1, len(names))
    words = ["empty" if name == "." else name for name in names]
    return [(word, to_hex(_shades(head)["cmap"](place))) for word, place in zip(words, places, strict=True)]


def course_figure(values: NDArray[Any], first: int) -> Figure:
    """Expected results for White (N,) in a game whose first position has the ply `first`."""
    figure, (axes,) = panels(size=(7, 2.6))
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.plot(1 + (first + np.arange(len(values))) / 2, values, marker=".")
    whole(axes, "move")
    axes.set(ylabel="expected result for White", ylim=(-1.05, 1.05))
    return figure


def chances_figure(chances: Sequence[tuple[float, float, float]]) -> Figure:
    """A bar for each position of a game: White wins below, draw, Black wins above."""
    figure, (axes,) = panels(size=(7, 2.4))
    bottom = np.zeros(len(chances))
    for name, colour, share in zip(
        ("White wins", "draw", "Black wins"), ("white", "0.6", "0.15"), zip(*chances, strict=True), strict=True
    ):
        height = 100 * np.array(share)
        axes.bar(np.arange(len(chances)), height, 1.0, bottom, color=colour, edgecolor="0.4", linewidth=0.4, label=name)
        bottom = bottom + height
    whole(axes, "half move")
    axes.set(ylabel="chances [%]", xlim=(-0.5, max(len(chances), 12) - 0.5), ylim=(0, 100))
    beside(figure)
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
    figure, grid = panels(8, (3, 2.7))
    results, chances = grid[len(HISTOGRAMS) :]
    ended: dict[str, tuple[str, NDArray[Any]]] = {}
    for index, (source, values) in enumerate(sources.items()):
        colour = f"C{index}"
        for axes, (name, (_, edges)) in zip(grid, HISTOGRAMS.items(), strict=False):
            known = values[name][~np.isnan(values[name])]
            if len(known):
                shares = np.histogram(np.clip(known, edges[0], edges[-1]), edges)[0] / len(values[name])
                axes.stairs(100 * shares, edges, color=colour, fill=True, alpha=0.2)
                axes.stairs(100 * shares, edges, color=colour, linewidth=1.2, label=source)
        white, value, result = values["white"], values["value"], values["result"]
        parts = [*((white == points).mean() for points in (1, 0, -1)), np.isnan(white).mean()]
        ended[source] = colour, 100 * np.array(parts)
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
    bars(results, ["1-0", "1/2", "0-1", "unknown"], ended)
    results.set(xlabel="result of the game", ylabel="positions [%]")
    chances.plot([-1, 1], [-1, 1], color="grey", linewidth=0.8, linestyle="--")
    chances.set(xlabel="points by win-draw-loss", ylabel="mean points of the games")
    for axes in grid:
        if not axes.patches and len(axes.get_lines()) < 2:
            axes.text(0.5, 0.4, "unknown", ha="center", color="grey", transform=axes.transAxes)
    beside(figure)
    return figure


def distances_figure(shards: Mapping[str, Mapping[str, float]], far: float) -> Figure:
    """A line for each figure of the shards, a dot for each shard at its robust z; red and named beyond `far`, and at
    the edge where it is further away than three times that.
    """
    names = list(dict.fromkeys(name for figures in shards.values() for name in figures))
    figure, (axes,) = panels(size=(9, 0.6 + 0.24 * max(4, len(names))))
    for shard, figures in shards.items():
        for name, z in figures.items():
            beyond = abs(z) > far
            place = (max(-EDGE * far, min(EDGE * far, z)), names.index(name))
            axes.plot(*place, "o", markersize=5, color=RED if beyond else "C0", alpha=0.6)
            if beyond:
                side = "left" if z < 0 else "right"
                label = f"{shard} ({z:+.1f})"
                axes.annotate(label, place, (0, 5), textcoords="offset points", fontsize=7, ha=side)
    for edge in (-far, far):
        axes.axvline(edge, color=RED, linewidth=0.8, linestyle="--")
    axes.set_xlim(-1.05 * EDGE * far, 1.05 * EDGE * far)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.7)
    axes.set(xlabel="distance from the median of the other shards [robust standard deviations]")
    if not names:
        axes.text(0.5, 0.5, "too few shards to compare", ha="center", va="center", transform=axes.transAxes)
    return figure


def temperature_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """The temperature of distillation by update, and the parameter of a learned one; rows of metrics.jsonl by run."""
    figure, grid = panels(2, (5, 2.8))
    for axes, name in zip(grid, ("temperature", "raw"), strict=True):
        values: list[float] = []
        for number, (run, rows) in enumerate(runs.items()):
            points = [(row["step"], row["metrics"].get(f"teacher_policy/{name}")) for row in rows]
            points = [point for point in points if point[1] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), color=f"C{number}", label=run)
                values += [value for _, value in points]
        axes.set_ylabel({"temperature": "T", "raw": "raw parameter of a learned T"}[name])
        level(axes, values)
        whole(axes)
    beside(figure)
    return figure
