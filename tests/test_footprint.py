"""Where the memory of an update goes."""

import pytest
import torch
from torch import nn

from matrixlib.engine.footprint import by_part
from matrixlib.engine.memory import MEBI


def test_the_memory_of_each_part_of_a_network() -> None:
    """A part that keeps twice the activations stands there with twice the memory."""
    model = nn.Module()
    model.add_module("wasteful", nn.Sequential(nn.Linear(1, 2**18), nn.GELU()))
    model.add_module("heads", nn.ModuleDict({"one": nn.Linear(2**18, 1), "two": nn.Linear(1, 1)}))
    adamw = torch.optim.AdamW(model.parameters())

    def update() -> None:
        heads = model.get_submodule("heads")
        heads["two"](heads["one"](model.get_submodule("wasteful")(torch.ones(1, 1)))).sum().backward()
        adamw.step()

    table = by_part(update, model, adamw)["MiB"]
    rows = ["wasteful", "heads.one", "heads.two", "weights", "their gradients", "optimiser"]
    assert list(table.index) == rows
    assert table["wasteful"] == pytest.approx(2.0, abs=0.1), "what goes into GELU and what comes out, 1 MiB each"
    weights = sum(value.numel() for value in model.parameters()) * 4 / MEBI
    assert table["weights"] == table["their gradients"] == pytest.approx(weights, abs=0.01)
    assert table["optimiser"] == pytest.approx(2 * weights, abs=0.01), "AdamW's two moments"
