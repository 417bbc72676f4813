"""Parts of a run that a cell defines: heads, a trunk, losses, a schedule, an optimizer; in real notebooks, killed."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
import torch
from nbclient.exceptions import DeadKernelError
from saved import assert_same, tensors
from torch import nn

import matrixlib
from matrixlib.engine import metrics
from matrixlib.engine.parts import Parts, check_same_parts, describe
from matrixlib.runs import run as runs

SCALE = 2.0


def halved(step: int) -> float:
    return SCALE / (step + 1)


def made(factor: float) -> Any:
    return lambda step: factor / (step + 1)


class Object:
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, config: Any) -> nn.Module:
        return nn.Conv2d(19, self.width, 1)


def digest(part: Any) -> str:
    return describe(part)["sha256"]


def test_a_part_is_known_by_its_source_and_by_the_values_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(halved)
    assert [digest(part) for part in (halved, made(1.0), Object(4))] == [before, digest(made(1.0)), digest(Object(4))]
    assert digest(made(1.0)) != digest(made(2.0)), "a closure's value"
    assert digest(Object(4)) != digest(Object(8)), "an object's attribute"
    assert digest(functools.partial(torch.optim.RAdam, lr=1)) != digest(functools.partial(torch.optim.Adam, lr=1))
    assert describe(torch.optim.RAdam)["path"] == "torch.optim.radam:RAdam"
    monkeypatch.setattr("test_parts.SCALE", 3.0)
    assert digest(halved) != before, "a global that it uses"
    with pytest.raises(ValueError, match=r"source of .*lambda.* cannot be found: define it in a cell or in a module"):
        describe(eval("lambda step: 1.0"))


@pytest.mark.parametrize(
    ("given", "recorded", "problem"),
    [
        (
            {"schedule": halved, "losses": {"value": made}},
            {"schedule": halved, "trunk": made},
            "'losses.value' is new, ",
        ),
        ({"schedule": halved}, {"schedule": halved, "trunk": made}, "'trunk' is missing"),
        ({"schedule": made(1.0)}, {"schedule": halved}, "'schedule' has another source"),
    ],
)
def test_other_parts_are_refused_by_name(given: Any, recorded: Any, problem: str) -> None:
    check_same_parts(Parts(**given), Parts(**given).record(), "x")
    with pytest.raises(ValueError, match=f"run 'x' was started with other parts: {problem}"):
        check_same_parts(Parts(**given), Parts(**recorded).record(), "x")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"trunk": lambda config: nn.Conv2d(19, 5, 1)},
            r"trunk: its output for one position is \(1, 5, 8, 8\), expected",
        ),
        ({"ranks": 2, "schedule": halved}, "ranks 2 and own parts"),
        ({"preset": "latin_demo", "trunk": made}, "the task latin does not support own heads, trunk or losses"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_run_begins(reports: Path, options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        runs.open_run(**options).model  # noqa: B018 - built at first use
    assert not [path for path in reports.iterdir() if (path / "metrics.jsonl").exists()]


PARTS = """
import os, signal
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
import matrixlib
from matrixlib.runs import ending
from matrixlib.tasks.chess.heads import Head
from matrixlib.tasks.chess.losses import visible_rows

class Mobility(Head):
    name = "mobility"
    def build(self, config):
        return nn.Conv2d(config.channels, 1, 1)
    def targets(self, rows):
        row = np.repeat(np.arange(len(rows["records"])), np.diff(rows["policy_offset"]))
        moves = np.zeros((len(rows["records"]), 64), np.float32)
        np.add.at(moves, (row, rows["policy_index"] // 73), 1)
        return moves.reshape(-1, 8, 8)
    def row_losses(self, output, target):
        return F.smooth_l1_loss(output[:, 0], target, reduction="none").mean((1, 2))

class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first, self.drop = nn.Conv2d(19, config.channels, 3, padding=1), nn.Dropout(0.1)
    def forward(self, planes):
        return self.drop(F.relu(self.first(planes)))

def value(outputs, batch):
    rows = visible_rows(batch) & (batch["wdl"].sum(1) > 0)
    return (F.cross_entropy(outputs["value"], batch["wdl"], reduction="none") * rows).sum()

def optimizer(groups):
    return torch.optim.RAdam(groups, decoupled_weight_decay=True)
"""
TRAIN = """
ending.UNDRAWN |= {"train"}
overrides = {"data": {"workers": 1}, "runtime": {"threads": 1, "precision": "fp32"}, "checkpoint": {"interval": 5},
             "validation": {"limit": 256}}
run = matrixlib.open_run("demo", run=name, device="cpu", steps=20, overrides=overrides, heads=[Mobility()],
                         trunk=Trunk, losses={"value": value}, schedule=lambda step: 0.004 / (1 + step),
                         optimizer=optimizer)
for stats in run.train():
    run.log(norm=float(run.model.own_trunk.first.weight.norm()))
    if stats.step == die:
        os.kill(os.getpid(), signal.SIGKILL)
print("messages", run.messages)
run.close()
assert isinstance(matrixlib.load(name, trunk=Trunk, device="cpu").model.own_trunk, Trunk), "it plays without its heads"
"""


def execute(folder: Path, name: str, *, die: int = 0, parts: str = PARTS) -> nbformat.NotebookNode:
    """Train in a notebook that defines the parts, through papermill."""
    cells = [nbformat.v4.new_code_cell(f"name, die = {name!r}, {die}"), *map(nbformat.v4.new_code_cell, (parts, TRAIN))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "in.ipynb")
    return papermill.execute_notebook(folder / "in.ipynb", folder / "out.ipynb", progress_bar=False)


@pytest.mark.slow
def test_parts_of_a_cell_are_trained_killed_and_resumed_bit_for_bit(reports: Path, tmp_path: Path) -> None:
    whole = execute(tmp_path, "whole")
    text = "".join(output.get("text", "") for cell in whole.cells for output in cell.get("outputs", []))
    assert "workers do not work" not in text, "loader workers know what a cell defines"
    with pytest.raises(DeadKernelError):
        execute(tmp_path, "killed", die=13)
    with pytest.raises(papermill.PapermillExecutionError, match=r"'losses.value' has another source"):
        execute(tmp_path, "killed", parts=PARTS.replace("* rows).sum()", "* rows * 2).sum()"))
    execute(tmp_path, "killed")
    assert_same(reports / "whole", reports / "killed")
    assert {"model/own_heads.mobility.weight", "model/own_trunk.first.weight"} <= tensors(reports / "whole").keys()
    rows, others = (metrics.read(reports / name / "metrics.jsonl") for name in ("whole", "killed"))
    for key in ("loss", "losses", "learning_rate"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in others]
    assert rows[4]["learning_rate"] == pytest.approx(0.004 / 5)
    assert rows[-1]["extra"] == others[-1]["extra"]
    assert rows[-1]["extra"]["norm"] > 0
    record = json.loads((reports / "whole" / "run.json").read_text())["parts"]
    assert set(record) == {"heads.mobility", "losses.value", "optimizer", "schedule", "trunk"}
    assert "class Mobility(Head):" in record["heads.mobility"]["source"]
    with pytest.raises(ValueError, match=r"trained with its own trunk, __main__:Trunk: give it as load\(run, trunk"):
        matrixlib.load("whole")
