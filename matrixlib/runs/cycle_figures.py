"""Tables and pictures of a cycle: what its generations did, their strength, how near they are to perfect play."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from matrixlib import files
from matrixlib.play.elo import Rating, rating
from matrixlib.runs.cycle_state import Decision, Generation
from matrixlib.runs.figures import png
from matrixlib.tasks.plotting import beside, panels, whole

ELO_SHOWN = 1500  # beyond it lies what a side that lost every game could have


def generation_table(generations: Sequence[Generation]) -> pd.DataFrame:
    """A row for each generation: games and their results, what was learned, the match, the decision.

    `top-1`: on held-out positions, `where new`: on those of them that no game to learn from has, `new`: their share.
    """
    rows = {}
    for generation in generations:
        games, decision = generation.selfplay, generation.decision
        rows[generation.number] = {
            "games": games.games,
            "positions": games.positions,
            "W/D/L/?": f"{games.wins}/{games.draws}/{games.losses}/{games.unknown}",
            "plies": f"{games.plies / games.games:.0f}",
            "top-1": _share(generation.top1),
            "where new": _share(generation.top1_new),
            "new": _share(generation.new),
            "SPRT": decision.reason.removeprefix("SPRT ").partition(", score")[0] if decision else "",
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def decision_table(decisions: Sequence[Decision]) -> pd.DataFrame:
    """A row for each decision about the best network, oldest first."""
    rows = [(decision.after, decision.best, decision.reason) for decision in decisions]
    return pd.DataFrame(rows, columns=["after", "best network", "reason"]).set_index("after")


def course_table(course: Mapping[int, Mapping[str, float]]) -> pd.DataFrame:
    """A row for each figure of `Cycle.course`, a column for each generation."""
    return pd.DataFrame(dict(course)).map("{:.2%}".format).rename_axis(columns="generation")


def course_figure(course: Mapping[int, Mapping[str, float]]) -> Figure:
    """The same as curves."""
    figure, (axes,) = panels()
    for name in next(iter(course.values())):
        axes.plot(list(course), [100 * figures[name] for figures in course.values()], "o-", label=name)
    axes.set(ylim=(-3, 103), ylabel="[%]")
    whole(axes, "generation")
    beside(figure)
    return figure


def elo_figure(generations: Sequence[Generation]) -> Figure:
    """Elo of each generation over the untrained network, with 95 % intervals; promoted ones are filled."""
    figure, (axes,) = panels()
    course = {0: 0.0}
    for generation in generations:
        pairs = generation.pairs("anchor")
        if not sum(pairs):
            continue
        low, middle, high = _shown(rating(pairs))
        promoted = generation.decision is not None and generation.decision.best == generation.number
        fill, label = ("C0", "promoted") if promoted else ("white", "not promoted")
        reach = [[middle - low], [high - middle]]
        style: dict[str, Any] = {"color": "C0", "markerfacecolor": fill, "capsize": 3, "zorder": 3}
        axes.errorbar(generation.number, middle, reach, fmt="o", label=label, **style)
        course[generation.number] = middle
    axes.plot(list(course), list(course.values()), color="C0", linewidth=0.8, alpha=0.5)
    axes.plot(0, 0, "s", color="0.4", label="untrained")
    axes.set(xlim=(-0.5, len(generations) + 0.5), ylabel="Elo over generation 0 (95 %)")
    whole(axes, "generation")
    beside(figure)
    return figure


def write_summary(folder: Path, generations: Sequence[Generation], course: Mapping[int, Mapping[str, float]]) -> Path:
    """Write what the report of a cycle shows beside its verdict, summary.json and pictures; returns its folder."""
    pictures = {"strength": elo_figure(generations)} | ({"perfect-play": course_figure(course)} if course else {})
    for name, figure in pictures.items():
        files.write_bytes(folder / f"{name}.png", png(figure))
    last = generations[-1]
    figures: dict[str, float] = {
        f"self-play {name}": sum(getattr(g.selfplay, name) for g in generations) for name in ("games", "positions")
    }
    if sum(pairs := last.pairs("anchor")):
        figures |= dict(
            zip(("its lower bound", "Elo over generation 0", "its upper bound"), _shown(rating(pairs)), strict=True)
        )
    files.write_json(folder / "summary.json", {"headline": str(last), "evaluation": figures})
    return folder


def _shown(elo: Rating) -> list[float]:
    """(low, middle, high)"""
    return np.clip([elo.low, elo.elo, elo.high], -ELO_SHOWN, ELO_SHOWN).tolist()
