"""Figures of self-supervised targets: dtypes, ranges, histograms, at the updates that were asked for."""

import json
from pathlib import Path

import pytest
import torch

from matrixlib.engine.diagnostics import log_targets, target_figures
from matrixlib.engine.stats import Stats


def test_classes_are_counted_each() -> None:
    figures = target_figures(torch.tensor([[0, 12, 12], [3, 12, 0]], dtype=torch.uint8))
    assert figures == {
        "dtype": "uint8",
        "shape": [2, 3],
        "least": 0.0,
        "greatest": 12.0,
        "not_finite": 0,
        "histogram": {"0": 2, "3": 1, "12": 3},
    }


def test_values_of_many_kinds_are_counted_in_bins_and_broken_ones_apart() -> None:
    values = torch.cat([torch.linspace(0, 1, 1000), torch.tensor([torch.nan, torch.inf])])
    figures = target_figures(values)
    assert (figures["least"], figures["greatest"], figures["not_finite"]) == (0, 1, 2)
    assert len(figures["histogram"]) == 16
    assert sum(figures["histogram"].values()) == 1000
    assert figures["histogram"]["0"] == pytest.approx(1000 / 16, abs=1)
    assert target_figures(torch.zeros(0))["histogram"] == {}


def test_a_row_has_the_figures_of_every_term(tmp_path: Path) -> None:
    for step in (10, 20):
        batch = {"a": torch.tensor([1, 1, 0])}
        log_targets(tmp_path / "targets.jsonl", lambda batch: {"a": batch["a"]}, Stats(step, 1.0, 1.0), batch)
    rows = [json.loads(line) for line in (tmp_path / "targets.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20]
    assert rows[0]["targets"]["a"]["histogram"] == {"0": 1, "1": 2}
