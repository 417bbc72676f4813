"""What a researcher changes from a notebook's cells without an edit in the package, through papermill: ten tasks."""

from __future__ import annotations

from pathlib import Path

import nbformat
import papermill
import pytest

SETUP = """
import warnings
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
import matrixlib
from matrixlib.engine import metrics
from matrixlib.runs import compare, ending, live
from matrixlib.tasks.chess.heads import Head
from matrixlib.tasks.chess.losses import visible_rows

ending.UNDRAWN |= {"train", "compare"}  # the end of a run has no pictures, which take a second
small = {"model": {"channels": 16, "blocks": 1}, "train": {"batch_size": 64, "statistics_interval": 100},
         "validation": {"interval": 100, "sample": 128, "limit": 256}, "checkpoint": {"interval": 100},
         "runtime": {"threads": 1, "precision": "fp32"}, "data": {"limit": 2048}}

def train(name, **parts):
    run = matrixlib.open_run("demo", run=name, device="cpu", steps=6, overrides=small, **parts)
    for stats in run.train():
        pass
    run.close()
    return run, stats
"""
LOOK = """
run = matrixlib.open_run("demo", run="look", device="cpu", steps=6, overrides=small | {"model": {"ssl": ["threat"]}})
batch = run.batch(0)
assert batch["planes"].shape == (64, 19, 8, 8)
losses = run.losses(batch)
assert set(losses) == {"policy", "value", "ssl_threat"} and all(loss.requires_grad for loss in losses.values())
assert "<svg" in run.show(batch, 2).data
assert not run.trainer.step, "looking trains nothing"
run.close()
"""
VALUE = """
def squared(outputs, batch):
    value = outputs["value"].softmax(1)
    error = ((value[:, 0] - value[:, 2]) - (batch["wdl"][:, 0] - batch["wdl"][:, 2])) ** 2
    return (error * (visible_rows(batch) & (batch["wdl"].sum(1) > 0))).sum()

_, stats = train("loss", losses={"value": squared})
assert stats.losses["value"] < 1, "a mean squared error, not a cross-entropy of about 1.1"
"""
PARTS = """
class Mobility(Head):
    name = "mobility"
    def build(self, config):
        return nn.Sequential(nn.Flatten(), nn.Linear(64 * config.channels, 1))
    def targets(self, rows):
        return np.diff(rows["policy_offset"]).astype(np.float32)
    def row_losses(self, output, target):
        return F.smooth_l1_loss(output[:, 0], target / 40, reduction="none")

class Tokens(nn.Module):
    \"\"\"A transformer over the squares.\"\"\"
    def __init__(self, config):
        super().__init__()
        self.first = nn.Linear(19, config.channels)
        self.mix = nn.TransformerEncoderLayer(config.channels, 2, 32, batch_first=True)
    def forward(self, planes):
        x = self.mix(self.first(planes.flatten(2).transpose(1, 2)))
        return x.transpose(1, 2).unflatten(2, (8, 8))

run, stats = train("head", heads=[Mobility()])
assert "mobility" in stats.losses and run.summary()["complete"]
run, stats = train("trunk", trunk=Tokens)
assert run.summary()["evaluation"]["top1"] >= 0
net = matrixlib.load("trunk", trunk=Tokens, device="cpu")
run, stats = train("schedule", schedule=lambda update: 0.01 / (1 + update))
rates = [row["learning_rate"] for row in metrics.read(run.folder / "metrics.jsonl")]
assert np.allclose(rates, [0.01 / (1 + update) for update in range(6)])
"""
CURVE = """
run = matrixlib.open_run("demo", run="curve", device="cpu", steps=6, overrides=small)
with live.LivePlot(run.steps, title="with a curve of mine") as panel:
    for stats in run.train():
        norm = float(sum(weight.norm() ** 2 for weight in run.model.parameters()) ** 0.5)
        panel.update(stats, norm=norm)
        run.log(norm=norm)
run.close()
assert panel.table()["extra/norm"].notna().all()
assert metrics.read(run.folder / "metrics.jsonl")[-1]["extra"]["norm"] == norm
"""
COMPARE = """
arms = {"A": ("demo", small), "B": ("demo", small | {"optim": {"learning_rate": 0.01}})}
results = compare.results(compare.train_arms(arms, "cpu", seeds=2, steps=6))
assert len(results) == 4 and results.select_dtypes("number").shape[1] > 3, "numbers, not text"
print(compare.differences(results, base="A"))
"""
TENSORS = """
import chess
net, board, fens = matrixlib.load("loss", device="cpu"), chess.Board(), []
rng = np.random.default_rng(0)
while len(fens) < 1000:
    board = chess.Board() if board.is_game_over() else board
    board.push(list(board.legal_moves)[rng.integers(board.legal_moves.count())])
    fens += [] if board.is_game_over() else [board.fen()]
planes = net.planes(fens)
out = net.model(planes, frozenset({"policy", "value"}))
assert planes.shape == (1000, 19, 8, 8) and out["policy"].shape == (1000, 4672) and out["value"].shape == (1000, 3)
value = out["value"].softmax(1) @ torch.tensor([1.0, 0.0, -1.0])
known = net.values([chess.Board(fen) for fen in fens[:3]])  # in bf16 where the machine has it
assert np.allclose(known, value[:3].numpy(), atol=0.05)
"""
FAULT = """
run = matrixlib.open_run("demo", run="fault", device="cpu", steps=6, overrides=small)

def spoil(module, args, output):
    if module.training and run.trainer.step == 3:
        output["value"] = output["value"] * float("nan")
    return output

run.model.register_forward_hook(spoil)
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")
    actions = [str(stats.action) for stats in run.train()]
run.close()
assert actions.count("skip") == 1 and len(actions) == 6, actions
assert all(bool(weight.isfinite().all()) for weight in run.model.parameters())
"""


@pytest.mark.slow
def test_tasks_of_a_researcher_need_no_edit_of_the_package(reports: Path, tmp_path: Path) -> None:
    """One's own games mixed half and half with the sample set are in test_run.py."""
    cells = (SETUP, LOOK, VALUE, PARTS, CURVE, COMPARE, TENSORS, FAULT)
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", progress_bar=False)
