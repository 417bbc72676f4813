"""Pictures: what a network decides beside what players did."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.controller import AXES, SHOULDER_CLASSES, STICK_CLASSES, centre
from matrixlib.tasks.plotting import bars, beside, caption, matrix, panels

TRUE, SAMPLED, LIKELIEST = "0.25", "tab:blue", "tab:orange"
FRAMES = 60  # a second


def rates_figure(figures: Mapping[str, Any]) -> Figure:
    """How often each button is held, and how many of its onsets are met: as the players did, sampled, likeliest."""
    figure, (rates, onsets) = panels(2, (5, 3))
    buttons = [figures["buttons"][name] for name in BUTTONS]
    held = {"players": (TRUE, [100 * button["rate"] for button in buttons])}
    met = {}
    for name, colour in (("sampled", SAMPLED), ("likeliest", LIKELIEST)):
        held[name] = colour, [100 * button[name]["rate"] for button in buttons]
        met[name] = colour, [100 * button[name]["onset_recall"] for button in buttons]
    bars(rates, BUTTONS, held)
    caption(rates, "held")
    rates.set_ylabel("% of the frames")
    bars(onsets, [f"{name}\n{button['onsets']:,}" for name, button in zip(BUTTONS, buttons, strict=True)], met)
    wrong = [100 * button["sampled"]["false_onsets"] for button in buttons]
    onsets.plot(np.arange(len(BUTTONS)) - 0.21, wrong, "k_", markersize=10, label="sampled, in other frames")
    caption(onsets, "pressed anew, where players do")
    onsets.set(ylabel="% of their onsets", ylim=(0, None))
    beside(figure)
    return figure


def nats_figure(figures: Mapping[str, Any]) -> Figure:
    """Negative log-likelihood by part of the controller, over all frames and over those in which it changes."""
    figure, grid = panels(2, (5, 3))
    heads = figures["heads"]
    kinds = {
        "constant": ("constant", "0.75"),
        "repeating": ("repeating", "0.45"),
        f"network{figures['given']}": ("nll", SAMPLED),
    }
    titles = {"": "all frames", "change_": "frames in which the part changes"}
    for axis, (prefix, words) in zip(grid, titles.items(), strict=True):
        series = {
            label: (colour, [head[f"{prefix}{kind}"] for head in heads.values()])
            for label, (kind, colour) in kinds.items()
        }
        bars(axis, [name.replace("_", " ") for name in heads], series)
        caption(axis, words)
        axis.set_ylabel("nats a frame")
    beside(figure)
    return figure


def sticks_figure(figures: Mapping[str, Any]) -> Figure:
    """Where the main stick is held, in shares of the frames: players, sampled, likeliest, sampled less players."""
    figure, axes = panels(4, (2.75, 2.6), layout="compressed")
    maps = {name: np.array(counts) / max(np.sum(counts), 1) for name, counts in figures["sticks"].items()}
    least = 1 / max(figures["frames"], 1)
    edges = (-1 - 1 / 16, 1 + 1 / 16) * 2
    titles = ("players", "sampled", "likeliest")
    for axis, words, name in zip(axes, titles, ("target", "sampled", "likeliest"), strict=False):
        image = axis.imshow(maps[name], origin="lower", extent=edges, cmap="viridis", norm=LogNorm(least, 1))
        caption(axis, words)
        axis.grid(False)
    figure.colorbar(image, ax=axes[2]).set_label("share of the frames", size=8)
    difference = maps["sampled"] - maps["target"]
    most = max(np.sort(np.abs(difference), axis=None)[-2], least)
    image = axes[3].imshow(difference, origin="lower", extent=edges, cmap="coolwarm", vmin=-most, vmax=most)
    caption(axes[3], "sampled less players")
    axes[3].grid(False)
    figure.colorbar(image, ax=axes[3], extend="both")
    return figure


def confusion_figure(figures: Mapping[str, Any]) -> Figure:
    """Which buttons the sample presses anew where the players press one, in shares of their onsets."""
    counts = np.array(figures["confusion"], float)
    onsets = np.array([figures["buttons"][name]["onsets"] for name in BUTTONS])
    shares = counts / np.maximum(onsets, 1)[:, None]
    figure, (axis,) = panels(size=(4.8, 4.2))
    rows = [f"{name} ({count})" for name, count in zip(BUTTONS, onsets, strict=True)]
    matrix(axis, shares, rows, [*BUTTONS, "none"])
    axis.set(xlabel="the sample presses", ylabel="the player presses")
    caption(axis, "% of the player's onsets")
    return figure


def strip_figure(recorded: np.ndarray, played: np.ndarray) -> Figure:
    """Controllers (T, 13) frame by frame: as a player held them, and as the network plays in the same game."""
    parts = [*AXES, "shoulder"]
    figure, axes = panels(1 + len(parts), (11, 1.3), across=1, sharex=True, height_ratios=(4, *[1] * len(parts)))
    seconds = np.arange(len(recorded)) / FRAMES
    for place in range(len(BUTTONS)):
        for shift, choices, colour in ((-0.2, recorded, TRUE), (0.2, played, SAMPLED)):
            _spans(axes[0], choices[:, place] > 0, place + shift, colour)
        axes[0].axhline(place + 0.5, color="0.9", linewidth=0.6)
    axes[0].set_yticks(range(len(BUTTONS)), BUTTONS)
    axes[0].set_ylim(len(BUTTONS) - 0.5, -0.5)
    axes[0].grid(False)
    for axis, part, column in zip(axes[1:], parts, range(len(BUTTONS), len(BUTTONS) + len(parts)), strict=True):
        for choices, colour, name in ((recorded, TRUE, "player"), (played, SAMPLED, "network")):
            if part == "shoulder":
                level = centre(choices[:, column], SHOULDER_CLASSES)
            else:
                level = 2 * centre(choices[:, column], STICK_CLASSES) - 1
            axis.step(seconds, level, where="post", color=colour, linewidth=1, label=name)
        axis.set(ylabel=part.replace("_", " "), ylim=(-0.05 if part == "shoulder" else -1.1, 1.1))
    axes[-1].set(xlabel="seconds", xlim=(0, len(recorded) / FRAMES))
    beside(figure)
    return figure


def _spans(axis: Axes, held: np.ndarray, height: float, colour: str) -> None:
    """Bars over the frames in which a button is held."""
    edges = np.flatnonzero(np.diff(held, prepend=False, append=False))
    spans = [(start / FRAMES, (stop - start) / FRAMES) for start, stop in edges.reshape(-1, 2)]
    axis.broken_barh(spans, (height - 0.15, 0.3), facecolors=colour)
