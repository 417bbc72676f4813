"""Dropout stages and the gate of self-supervised terms."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import equal, history
from test_trainer import settings, train, weights
from torch import nn
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.config import GatingConfig
from matrixlib.engine import compiler
from matrixlib.engine.schedule import Dropout, Gate
from matrixlib.engine.step import Step
from matrixlib.tasks import get_task, load_config

STAGES = [1.0, 0.5, 0.0]
NETWORKS: dict[str, dict[str, Any]] = {
    "demo": {"channels": 16, "blocks": 2, "attention": {"every": 1, "heads": 2}},
    "latin_demo": {"width": 16, "layers": 1, "heads": 2},
    "melee_demo": {"trunk": "transformer", "width": 16, "layers": 2, "heads": 2},
    "recurrent": {"trunk": "gru", "width": 16, "layers": 2},
}


def rates(model: nn.Module) -> set[float]:
    own = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    return own | {m.dropout for m in model.modules() if isinstance(getattr(m, "dropout", None), float)}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_dropout_of_a_network_follows(name: str) -> None:
    preset = "melee_demo" if name == "recurrent" else name
    config = load_config(preset, {"model": {**NETWORKS[name], "dropout": 0.4}})
    model = get_task(config.task).task(config).build_model()
    dropout = Dropout(model.modules(), [1.0, 0.5, 0.25])
    seen = [(dropout.enter(progress), rates(model)) for progress in (0.0, 0.3, 0.34, 0.6, 0.67, 0.999, 1.5)]
    assert [changed for changed, _ in seen] == [False, False, True, False, True, False, False]
    assert [rate for _, rate in seen] == [{0.4}] * 2 + [{0.2}] * 2 + [{0.1}] * 3


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = settings(train={"dropout_stages": STAGES})
    whole, stats = train(tmp_path / "whole", config=config)
    assert [s.dropout for s in stats] == [1.0] * 4 + [0.5] * 4 + [0.0] * 4
    train(tmp_path / "part", 6, config=config)
    part, _ = train(tmp_path / "part", config=config)
    assert equal(weights(part), weights(whole))
    assert history(tmp_path / "part") == history(tmp_path / "whole")
    plain, stats = train(tmp_path / "plain")
    assert [s.dropout for s in stats] == [None] * 12
    assert not equal(weights(plain), weights(whole))


def test_a_compiled_network_is_compiled_once_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch would keep fewer graphs; and it drops what the stage says."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    monkeypatch.setattr(compiler, "compiled", lambda model, mode: torch.compile(model, backend=backend))
    config = settings(train={"dropout_stages": [1.0, 0.8, 0.6, 0.4, 0.0]})
    step = Step(
        ToyTask(dropout=0.5), ToyTask(dropout=0.5).build_model(), toy_runtime(20, compile="default"), config, 10
    )
    counts = []
    with torch._dynamo.config.patch(recompile_limit=2):
        for i in range(10):
            step(toy_batch(20, seed=i))
            counts.append(len(graphs))
    assert counts == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    batch = toy_batch(20)
    assert torch.equal(step.model(batch["x"])["plane"], step.model(batch["x"])["plane"])


def test_a_network_without_dropout_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="has no dropout"):
        Dropout(ToyTask().build_model().modules(), STAGES)


# The gate


def gate(warmup: int = 0, freeze: int = 0, seconds: float = 0.0) -> Gate:
    return Gate(GatingConfig(warmup_steps=warmup, freeze_steps=freeze, seconds=seconds))


def test_frozen_for_some_updates_and_back_at_full_weight() -> None:
    found = gate(freeze=3)
    assert found.freeze(10)
    assert [found.factor(u) for u in range(11, 16)] == [0, 0, 0, 1, 1]
    assert not found.freeze(12), "instability while frozen makes it longer and is no new freeze"
    found = Gate.from_dict(found.config, json.loads(json.dumps(found.to_dict())))
    assert [found.factor(u) for u in range(13, 17)] == [0, 0, 0, 1]
    assert not gate().freeze(10)


@pytest.mark.parametrize(
    ("seconds", "row", "rows"),
    [(0.0, 9.0, 64), (1.0, 0.0, 64), (1.0, 0.001, 64), (1.0, 0.02, 48), (1.0, 0.5, 8), (0.3, 0.01, 24)],
)
def test_rows_within_the_time_limit_are_whole_micro_batches(seconds: float, row: float, rows: int) -> None:
    found = gate(seconds=seconds)
    found.row_seconds = row
    assert found.rows(64, 8) == rows
