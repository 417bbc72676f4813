"""Suspicious shards: those whose quality figures lie far from the others of their source and split."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pandas import DataFrame

from matrixlib.data.catalogue import Catalogue, ShardRow

MIN_SHARDS = 9  # of a source and split, to look for outliers
OUTLIER_Z = 6.0  # robust standard deviations
Figures: TypeAlias = Callable[[Mapping[str, Any]], Mapping[str, float]]
"""Quality of a shard in the catalogue -> the figures that are compared; nan where unknown."""


def outlier_scores(rows: Iterable[ShardRow], figures: Figures) -> DataFrame:
    """Robust z-scores of each shard's figures, (x - median) / scale, by shard name; only in groups of source and split
    with MIN_SHARDS shards. scale: 1.4826 * MAD, at least 2 % of the median and 0.01."""
    measured = [row for row in rows if row.state == "healthy" and row.quality]
    table = DataFrame([figures(row.quality) for row in measured], [row.name for row in measured], dtype=float)
    groups = [[row.source for row in measured], [row.split for row in measured]]
    middle = table.groupby(groups).transform("median")
    scale = 1.4826 * (table - middle).abs().groupby(groups).transform("median")
    far = (table - middle) / scale.clip(lower=(0.02 * middle.abs()).clip(lower=0.01))
    return far[(table.assign(n=1.0).groupby(groups)["n"].transform("sum") >= MIN_SHARDS).to_numpy(bool)]


def mark_outliers(catalogue: Catalogue, names: Sequence[str], figures: Figures) -> list[str]:
    """Store the outlying figures of these shards in the catalogue ("outliers": figure -> z); returns them as text."""
    rows = {row.name: row for row in catalogue.shards()}
    found, lines = outlier_scores(rows.values(), figures), []
    for name in filter(set(names).__contains__, found.index):
        far = {figure: round(z, 1) for figure, z in found.loc[name].items() if abs(z) > OUTLIER_Z}
        if far:
            catalogue.set_quality(name, {**rows[name].quality, "outliers": far})
            lines.append(f"{name}: " + ", ".join(f"{figure} (z {z:+.1f})" for figure, z in far.items()))
    return lines
