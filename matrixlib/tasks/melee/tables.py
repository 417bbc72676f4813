"""Work of the Melee notebook: what a network makes of held-out games, as tables, checks and a strip."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from matrixlib.data.shards import Batch, Shard, select
from matrixlib.tasks.melee import plots, windows
from matrixlib.tasks.melee.columns import LAYOUT, OWN
from matrixlib.tasks.melee.controller import choices_of
from matrixlib.tasks.melee.player import MeleeNetwork
from matrixlib.tasks.spec import Check

LEAK = 3.0
"""Times that an action may have changed more often where a button is about to go down: with a state that is one after
the target it was 7.6 times, paired as here a third."""


def heads(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Nats a frame by part of the controller, over all frames and over those in which it changes; the eight buttons are
    one part, and the whole controller the sum of all."""
    network = f"network{figures['given']}"
    columns = {
        network: "nll",
        "repeating": "repeating",
        "constant": "constant",
        "saved": "saved",
        "% change": "changes",
        f"{network} ": "change_nll",
        "repeating ": "change_repeating",
        "constant ": "change_constant",
    }
    parts = {**figures["heads"], "controller": figures["total"]}
    rows = {name: {title: part[key] for title, key in columns.items()} for name, part in parts.items()}
    return _table({name: row | {"% change": 100 * row["% change"]} for name, row in rows.items()})


def buttons(figures: Mapping[str, Any]) -> pd.DataFrame:
    """By button: how often it is held, and precision, recall, F1 of holding it and recall and false alarms of pressing
    it anew; sampled, by the likeliest decisions, and by repeating what is held."""
    rows = {
        (name, decision): {
            "held %": 100 * button[decision]["rate"],
            "players %": 100 * button["rate"],
            **{key: button[decision][key] for key in ("precision", "recall", "f1")},
            "onsets": button["onsets"],
            "onset recall": button[decision]["onset_recall"],
            "onset precision": button[decision]["onset_precision"],
            "false %": 100 * button[decision]["false_onsets"],
        }
        for name, button in figures["buttons"].items()
        for decision in ("sampled", "likeliest", "repeated")
    }
    return _table(rows)


def axes(figures: Mapping[str, Any]) -> pd.DataFrame:
    """By axis: accuracy and distance of the classes' values, over all frames and where it changes, beside repeating."""
    note = figures["given"]
    rows = {
        (name, decision): {
            **axis[decision],
            f"top3{note}": axis["top3"] if decision == "likeliest" else None,
            f"change_top3{note}": axis["change_top3"] if decision == "likeliest" else None,
        }
        for name, axis in figures["axes"].items()
        for decision in ("sampled", "likeliest", "repeated")
    }
    return _table(rows)


def whole(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Whole controllers: how often right, how often they change, how many different ones, their entropy in nats."""
    names = ("target", "sampled", "likeliest", "repeated")
    return _table({"players" if name == "target" else name: figures["whole"][name] for name in names})


def _table(rows: dict[Any, Any]) -> pd.DataFrame:
    frame = pd.DataFrame.from_dict(rows, orient="index").round(3)
    return frame.rename(columns=lambda name: name.replace("_", " "))


def onset_recall(figures: Mapping[str, Any], decision: str) -> tuple[float, float]:
    """(share of all onsets that are met, share of the other frames with the button up in which it is pressed anew),
    over all buttons, each onset weighing the same."""
    rows = figures["buttons"].values()
    onsets = sum(row["onsets"] for row in rows)
    met = sum(row["onsets"] * row[decision]["onset_recall"] for row in rows)
    false = sum(row["onsets"] * row[decision]["false_onsets"] for row in rows)
    return (met / onsets, false / onsets) if onsets else (0.0, 0.0)


def checks(figures: Mapping[str, Any]) -> list[Check]:
    """What holds of any network that has learned something, and of data that give nothing away."""
    total, leak = figures["total"], figures["leak"]
    return [
        (
            "held-out log-loss below a constant predictor's",
            total["nll"] < total["constant"],
            f"{total['nll']:.3f} nats a frame, {total['constant']:.3f}",
        ),
        (
            "no leak",
            leak["at_onsets"] <= LEAK * leak["anywhere"],
            f"the action has just changed at {leak['at_onsets']:.1%} of the onsets, in {leak['anywhere']:.1%} of all",
        ),
    ]


def targets(figures: Mapping[str, Any]) -> list[Check]:
    """What a network that had its time has to reach: more than holding the controller as it is."""
    recall, false = onset_recall(figures, "sampled")
    repeated, _ = onset_recall(figures, "repeated")
    total, constant = figures["total"], figures["whole"]["target"]["change_entropy"]
    return [
        (
            "onsets met more often than by repeating, and twice as often as by chance",
            recall > 2 * max(repeated, false),
            f"{recall:.1%} of the onsets, {repeated:.1%} by repeating, {false:.1%} of the frames without one",
        ),
        (
            "log-loss where the controller changes below repeating and below every constant",
            total["change_nll"] < min(total["change_repeating"], constant),
            f"{total['change_nll']:.2f} nats, {total['change_repeating']:.2f} by repeating, {constant:.2f} by the best "
            "constant",
        ),
        (
            "log-loss of all frames below repeating",
            total["nll"] < total["repeating"],
            f"{total['nll']:.3f} nats a frame, {total['repeating']:.3f} by repeating",
        ),
    ]


def strip(net: MeleeNetwork, shards: Iterable[Path], seconds: int = 10, seed: int = 0) -> Figure:
    """The first stretch of a held-out game that is `seconds` long, played by a network beside the player whom it sees:
    what it held before is its own decision, the game goes on as recorded. ValueError where none is that long.
    """
    for path in shards:
        stored = Shard(path, LAYOUT).arrays
        if len(rows := _consecutive(stored["records"], seconds)):
            recorded, played = play_along(net, select(stored, rows, LAYOUT), seed)
            return plots.strip_figure(recorded, played)
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
