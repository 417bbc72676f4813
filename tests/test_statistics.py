"""Statistics of outputs, gradient norms and throughput; warnings in words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.engine.health import Health, Verdict
from matrixlib.engine.statistics import (
    GradientNorms,
    Stats,
    Throughput,
    clip_warning,
    compare_with_chance,
    output_statistics,
    unusual,
)
from matrixlib.engine.step import StepStats
from matrixlib.engine.task import Batch
from matrixlib.tasks import load_config


def done(**changes: Any) -> StepStats:
    base: dict[str, Any] = {
        "update": 0,
        "loss": 1.0,
        "losses": {"class": 1.0986},
        "metrics": {},
        "counts": {"class": 10, "plane": 0},
        "empty": (),
        "grad_norm": 1.0,
        "clipped": False,
        "learning_rate": 0.1,
        "verdict": Verdict.OK,
        "overflow": False,
        "micro_batches": 1,
    }
    return StepStats(**{**base, **changes})


def test_masked_entries_do_not_count_and_infinities_do() -> None:
    values = torch.tensor([1.0, -5.0, torch.nan, 2.0, torch.inf, torch.nan])

    class Fixed(ToyTask):
        def outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            assert not model.training
            nothing = torch.full((3,), torch.nan)
            return {"head": values, "half": values[:2].half(), "none": nothing, "empty": values[:0]}

    found = output_statistics(Fixed(), ToyTask().build_model(), toy_batch(4), toy_runtime())
    kept = np.array([1.0, -5.0, 2.0])
    assert set(found) == {"head", "half"}
    assert found["head"]["mean"] == pytest.approx(kept.mean())
    assert found["head"]["std"] == pytest.approx(kept.std())
    assert found["head"]["max"] == 5.0
    assert found["head"]["infinite"] == pytest.approx(1 / 4)
    assert found["half"]["infinite"] == 0


def test_outputs_leave_batchnorm_and_streams_alone() -> None:
    task = ToyTask(norm="batch", dropout=0.5)
    model = task.build_model().train()
    mean, stream = model.norm.running_mean.clone(), torch.get_rng_state()
    found = output_statistics(task, model, toy_batch(16), toy_runtime())
    assert set(found) == {"class", "plane"}
    assert torch.equal(model.norm.running_mean, mean)
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.training


def test_gradient_norm_quantiles_over_a_ring_without_infinities() -> None:
    norms = GradientNorms(window=100)
    assert norms.quantiles() == {}
    for value in [1e9] * 50 + list(range(1, 101)):
        norms.add(float(value))
        norms.add(math.inf)
        norms.add(math.nan)
    assert norms.quantiles() == {"median": 50.5, "p95": 95.0}
    assert GradientNorms(norms.to_list(), window=100).quantiles() == norms.quantiles()


def test_throughput_over_a_window() -> None:
    throughput = Throughput(window=2)
    assert throughput.add(10, 1.0) == 10
    assert throughput.add(30, 1.0) == 20
    assert throughput.add(30, 1.0) == 30
    assert Throughput().add(5, 0.0) == 0


def test_first_losses_beside_chance() -> None:
    task, batch = ToyTask(), toy_batch(64)
    counts = task.counts(batch)
    chance = task.bounds(batch)["plane"][0] / counts["plane"]
    fine = done(losses={"class": 1.2, "plane": chance * 1.1}, counts=counts)
    table, messages = compare_with_chance(task, batch, fine)
    assert messages == []
    assert table["class"] == {"loss": 1.2, "chance": pytest.approx(math.log(3)), "floor": 0.0}
    for bad in (math.log(3) * 1.16, math.log(3) * 0.84, 8.45, math.nan):
        _, messages = compare_with_chance(task, batch, done(losses={"class": bad}, counts=counts))
        assert len(messages) == 1
        assert "class" in messages[0]
        assert "1.0986" in messages[0]


def health(**changes: object) -> Health:
    return Health(load_config("demo").health, **changes)


def test_warnings_in_words() -> None:
    well, ill = health(), health(last="update 7: loss nan", overflowed=[1, 2, 3])
    assert unusual(done(), well) == []
    assert "no valid target of plane" in unusual(done(empty=("plane",)), well)[0]
    assert unusual(done(empty=("plane",)), well, known=("plane",)) == []
    assert "update 7: loss nan" in unusual(done(verdict=Verdict.SKIP), ill)[0]
    assert "loss scale" in unusual(done(verdict=Verdict.SKIP, overflow=True), well)[0]
    assert "fell 3 times" in unusual(done(verdict=Verdict.SKIP, overflow=True), ill)[1]
    assert clip_warning(health(clips=[True] * 99)) == []
    assert clip_warning(health(clips=[True] * 10 + [False] * 90)) == []
    assert "11%" in clip_warning(health(clips=[True] * 11 + [False] * 89))[0]
    assert clip_warning(health(clips=[True] * 22 + [False] * 78), said=0.11) == []
    assert "23%" in clip_warning(health(clips=[True] * 23 + [False] * 77), said=0.11)[0]


def test_a_row_leaves_out_what_an_update_has_not() -> None:
    stats = Stats(1, 2, 1.0, {"a": 1.0}, {}, 0.1, 1.0, 0.0, "ok", 0, 0, 0, 0.5, 10.0)
    row = stats.row()
    assert row["step"] == 1
    assert row["micro_step"] == 2
    assert not {"validation", "statistics", "initial", "messages"} & set(row)
