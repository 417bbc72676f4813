"""Pictures of scores: bars and points with their intervals, none where there is nothing."""

import numpy as np
import pandas as pd
import pytest

from matrixlib.tasks.chess.evaluate.pictures import elo_figure, shares_figure
from matrixlib.tasks.chess.evaluate.puzzles import Share


def test_bars_stand_at_their_shares_with_wilsons_intervals() -> None:
    shares = {("all", "best capture"): 10, ("all", "policy"): 40, ("400-1000", "best capture"): 20}
    rows = [(group, 100, solver, Share(hits, 100)) for (group, solver), hits in shares.items()]
    rows.append(("400-1000", 100, "policy", Share(60, 100)))
    table = pd.DataFrame(rows, columns=["group", "puzzles", "solver", "first move"]).set_index("group")
    figure = shares_figure(table, "first move")
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([10, 20, 40, 60])
    low, high = Share(40, 100).interval()
    segment = axes.collections[1].get_segments()[0]
    assert segment[:, 1] == pytest.approx([100 * low, 100 * high])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["all\n100", "400-1000\n100"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["best capture", "policy"]


def test_elo_is_a_point_with_its_interval_even_where_that_is_endless() -> None:
    table = pd.DataFrame(
        {"Elo": [120.0, -400.0], "low": [60.0, -np.inf], "high": [180.0, -90.0], "games": [40, 40]},
        index=["network", "random"],
    )
    (axes,) = elo_figure(table).axes
    assert list(axes.get_lines()[0].get_xdata()) == [120, -400]
    assert [tuple(segment[:, 0]) for segment in axes.collections[0].get_segments()] == [(60, 180), (-1500, -90)]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["network", "random"]
