"""Pictures: what a network decides beside what players did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from matrixlib.tasks.melee.columns import BUTTONS
from matrixlib.tasks.melee.controller import AXES, SHOULDER_CLASSES, STICK_CLASSES, centre

TRUE, SAMPLED, LIKELIEST = "0.25", "tab:blue", "tab:orange"
FRAMES = 60  # a second


def rates_figure(figures: Mapping[str, Any]) -> Figure:
    """How often each button is held, and how many of its onsets are met: as the players did, sampled, likeliest."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rates, onsets = figure.subplots(1, 2)
    places, buttons = np.arange(len(BUTTONS)), [figures["buttons"][name] for name in BUTTONS]
    bars = {
        "players": (TRUE, [button["rate"] for button in buttons]),
        "sampled": (SAMPLED, [button["sampled"]["rate"] for button in buttons]),
        "likeliest": (LIKELIEST, [button["likeliest"]["rate"] for button in buttons]),
    }
    for number, (name, (colour, values)) in enumerate(bars.items()):
        rates.bar(places + 0.27 * (number - 1), 100 * np.array(values), 0.25, color=colour, label=name)
    rates.set(title="held", ylabel="% of the frames", xticks=places, xticklabels=BUTTONS)
    rates.legend(fontsize=8)
    for number, (name, colour) in enumerate((("sampled", SAMPLED), ("likeliest", LIKELIEST))):
        met = 100 * np.array([button[name]["onset_recall"] for button in buttons])
        onsets.bar(places + 0.27 * number, met, 0.25, color=colour, label=name)
    wrong = 100 * np.array([button["sampled"]["false_onsets"] for button in buttons])
    onsets.plot(places, wrong, "k_", markersize=14, label="sampled, in other frames")
    onsets.set(title="pressed anew, where players do", ylabel="% of their onsets", ylim=(0, None))
    onsets.set_xticks(places, [f"{name}\n{button['onsets']}" for name, button in zip(BUTTONS, buttons, strict=True)])
    onsets.legend(fontsize=8)
    return figure


def nats_figure(figures: Mapping[str, Any]) -> Figure:
    """Negative log-likelihood by part of the controller, over all frames and over those in which it changes."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    heads = figures["heads"]
    places = np.arange(len(heads))
    for axis, prefix, title in zip(
        figure.subplots(1, 2), ("", "change_"), ("all frames", "frames in which the part changes"), strict=True
    ):
        kinds = (("constant", "0.75"), ("repeating", "0.45"), ("nll", SAMPLED))
        for number, (kind, colour) in enumerate(kinds):
            values = [head[f"{prefix}{kind}"] for head in heads.values()]
            label = f"network{figures['given']}" if kind == "nll" else kind
            axis.bar(places + 0.27 * (number - 1), values, 0.25, color=colour, label=label)
        axis.set(title=title, ylabel="nats a frame", xticks=places)
        axis.set_xticks(places, [name.replace("_", " ") for name in heads], fontsize=8)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def sticks_figure(figures: Mapping[str, Any]) -> Figure:
    """Where the main stick is held, in shares of the frames: players, sampled, likeliest, sampled less players."""
    figure = Figure(figsize=(11, 3), layout="constrained")
    maps = {name: np.array(counts) / max(np.sum(counts), 1) for name, counts in figures["sticks"].items()}
    least = 1 / max(figures["frames"], 1)
    edges = (-1 - 1 / 16, 1 + 1 / 16) * 2
    axes = figure.subplots(1, 4)
    titles = ("players", "sampled", "likeliest")
    for axis, title, name in zip(axes, titles, ("target", "sampled", "likeliest"), strict=False):
        image = axis.imshow(maps[name], origin="lower", extent=edges, cmap="viridis", norm=LogNorm(least, 1))
        axis.set_title(title)
    figure.colorbar(image, ax=axes[2], label="share of the frames")
    difference = maps["sampled"] - maps["target"]
    most = max(np.sort(np.abs(difference), axis=None)[-2], least)
    image = axes[3].imshow(difference, origin="lower", extent=edges, cmap="coolwarm", vmin=-most, vmax=most)
    axes[3].set_title("sampled less players")
    figure.colorbar(image, ax=axes[3], extend="both")
    return figure


def confusion_figure(figures: Mapping[str, Any]) -> Figure:
    """Which buttons the sample presses anew where the players press one, in shares of their onsets."""
    counts = np.array(figures["confusion"], float)
    onsets = np.array([figures["buttons"][name]["onsets"] for name in BUTTONS])
    shares = counts / np.maximum(onsets, 1)[:, None]
    figure = Figure(figsize=(5.5, 4.2), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axis.set_xticks(range(len(BUTTONS) + 1), [*BUTTONS, "none"])
    axis.set_yticks(range(len(BUTTONS)), [f"{name} ({count})" for name, count in zip(BUTTONS, onsets, strict=True)])
    axis.set(xlabel="the sample presses", ylabel="the player presses")
    for row, column in np.argwhere(shares >= 0.005):
        share = shares[row, column]
        colour = "white" if share > 0.6 else "black"
        axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image)
    return figure


def strip_figure(recorded: np.ndarray, played: np.ndarray) -> Figure:
    """Controllers (T, 13) frame by frame: as a player held them, and as the network plays in the same game."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1, 1, 1))
    seconds = np.arange(len(recorded)) / FRAMES
    for place in range(len(BUTTONS)):
        for shift, choices, colour in ((0.2, recorded, TRUE), (-0.2, played, SAMPLED)):
            _spans(axes[0], choices[:, place] > 0, place + shift, colour)
        axes[0].axhline(place + 0.5, color="0.9", linewidth=0.6)
    axes[0].set_yticks(range(len(BUTTONS)), BUTTONS)
    axes[0].set_ylim(len(BUTTONS) - 0.5, -0.5)
    for axis, title, x in ((axes[1], "main stick", 0), (axes[2], "C-stick", 2)):
        for choices, colour, name in ((recorded, TRUE, "player"), (played, SAMPLED, "network")):
            stick = 2 * centre(choices[:, len(BUTTONS) + x : len(BUTTONS) + x + 2], STICK_CLASSES) - 1
            axis.step(seconds, stick[:, 0], where="post", color=colour, linewidth=1, label=f"{name}, x")
            axis.step(seconds, stick[:, 1], where="post", color=colour, linewidth=1, linestyle=":", label=f"{name}, y")
        axis.set(ylabel=title, ylim=(-1.1, 1.1))
    axes[1].legend(fontsize=7, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    for choices, colour in ((recorded, TRUE), (played, SAMPLED)):
        level = centre(choices[:, len(BUTTONS) + len(AXES)], SHOULDER_CLASSES)
        axes[3].step(seconds, level, where="post", color=colour, linewidth=1)
    axes[3].set(ylabel="shoulder", ylim=(-0.05, 1.05), xlabel="seconds", xlim=(0, len(recorded) / FRAMES))
    axes[0].set_title("grey: the player, blue: the network", fontsize=9)
    return figure


def _spans(axis: Axes, held: np.ndarray, height: float, colour: str) -> None:
    """Bars over the frames in which a button is held."""
    edges = np.flatnonzero(np.diff(held, prepend=False, append=False))
    spans = [(start / FRAMES, (stop - start) / FRAMES) for start, stop in edges.reshape(-1, 2)]
    axis.broken_barh(spans, (height - 0.15, 0.3), facecolors=colour)
