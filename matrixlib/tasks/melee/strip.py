"""A game played along: what a network holds in the place of a player, beside the player, frame by frame."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from matrixlib.data.shards import Batch, Shard, select
from matrixlib.tasks.melee import windows
from matrixlib.tasks.melee.columns import BUTTONS, LAYOUT, OWN
from matrixlib.tasks.melee.controller import AXES, SHOULDER_CLASSES, STICK_CLASSES, centre, choices_of
from matrixlib.tasks.melee.player import MeleeNetwork
from matrixlib.tasks.plotting import beside, panels

PLAYER, NETWORK = "0.25", "tab:blue"
FRAMES = 60  # a second


def strip(net: MeleeNetwork, shards: Iterable[Path], seconds: int = 10, seed: int = 0) -> Figure:
    """The first stretch of a held-out game that is `seconds` long, played by a network beside the player whom it sees:
    what it held before is its own decision, the game goes on as recorded. ValueError where none is that long.
    """
    for path in shards:
        stored = Shard(path, LAYOUT).arrays
        if len(rows := _consecutive(stored["records"], seconds)):
            recorded, played = play_along(net, select(stored, rows, LAYOUT), seed)
            return strip_figure(recorded, played)
    raise ValueError(f"no held-out game goes on for {seconds} seconds")


def play_along(net: MeleeNetwork, rows: Batch, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(recorded, played) choices (n, 13) over the own frames of rows that follow each other."""
    player, delay = net.player(seed), np.array([net.delays[0]])
    recorded, played = [], []
    for number, own in enumerate(rows["records"]["own"].tolist()):
        window, following = windows.cut(select(rows, np.array([number]), LAYOUT), np.array([0]), delay, own)
        recorded.append(choices_of(following)[0])
        for frame in range(own):
            player.act(window.at(frame))
            played.append(player.decision)
    return np.concatenate(recorded), np.stack(played)


def _consecutive(records: np.ndarray, seconds: int) -> np.ndarray:
    """The first `seconds` rows that follow each other in one game and hold a second each; none: empty."""
    same = (records["game"][1:] == records["game"][:-1]) & (records["port"][1:] == records["port"][:-1])
    whole = records["own"] == OWN
    joined = np.append(False, same & (np.diff(records["first"]) == OWN) & whole[1:] & whole[:-1])
    begin = np.maximum.accumulate(np.where(joined, 0, np.arange(len(records))))
    ends = np.flatnonzero(whole & (np.arange(len(records)) - begin >= seconds - 1))
    return np.arange(ends[0] - seconds + 1, ends[0] + 1) if len(ends) else ends


def strip_figure(recorded: np.ndarray, played: np.ndarray) -> Figure:
    """Controllers (T, 13) frame by frame: as a player held them, and as the network plays in the same game."""
    parts = [*AXES, "shoulder"]
    figure, axes = panels(1 + len(parts), (11, 1.3), across=1, sharex=True, height_ratios=(4, *[1] * len(parts)))
    seconds = np.arange(len(recorded)) / FRAMES
    for place in range(len(BUTTONS)):
        for shift, choices, colour in ((-0.2, recorded, PLAYER), (0.2, played, NETWORK)):
            _spans(axes[0], choices[:, place] > 0, place + shift, colour)
        axes[0].axhline(place + 0.5, color="0.9", linewidth=0.6)
    axes[0].set_yticks(range(len(BUTTONS)), BUTTONS)
    axes[0].set_ylim(len(BUTTONS) - 0.5, -0.5)
    axes[0].grid(False)
    for axis, part, column in zip(axes[1:], parts, range(len(BUTTONS), len(BUTTONS) + len(parts)), strict=True):
        for choices, colour, name in ((recorded, PLAYER, "player"), (played, NETWORK, "network")):
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
