"""Figures of self-supervised targets: dtypes, ranges, histograms, at the updates that were asked for."""

import json
from pathlib import Path

import pytest
import torch

from matrixlib.engine.diagnostics import log_targets, target_figures
from matrixlib.engine.stats import Stats


def test_classes_are_counted_each_and_other_values_in_bins_with_broken_ones_apart() -> None:
    figures = target_figures(torch.tensor([[0, 12, 12], [3, 12, 0]], dtype=torch.uint8))
    known = {"dtype": "uint8", "shape": [2, 3], "least": 0.0, "greatest": 12.0, "not_finite": 0}
    assert figures == known | {"histogram": {"0": 2, "3": 1, "12": 3}}
    figures = target_figures(torch.cat([torch.linspace(0, 1, 1000), torch.tensor([torch.nan, torch.inf])]))
    assert (figures["least"], figures["greatest"], figures["not_finite"]) == (0, 1, 2)
    assert (len(figures["histogram"]), sum(figures["histogram"].values())) == (16, 1000)
    assert figures["histogram"]["0"] == pytest.approx(1000 / 16, abs=1)
    assert target_figures(torch.zeros(0))["histogram"] == {}


def test_a_row_has_the_figures_of_every_term(tmp_path: Path) -> None:
    for step in (10, 20):
        batch = {"a": torch.tensor([1, 1, 0])}
        log_targets(tmp_path / "targets.jsonl", lambda batch: {"a": batch["a"]}, Stats(step, 1.0, 1.0), batch)
    rows = [json.loads(line) for line in (tmp_path / "targets.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20]
    assert rows[0]["targets"]["a"]["histogram"] == {"0": 1, "1": 2}
