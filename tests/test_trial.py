"""Timed updates before a run: steps that fit in a time, micro-batch that fits in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.engine import autotune as trial
from matrixlib.engine.task import Batch
from matrixlib.tasks import load_config

CONFIG = load_config("demo", {"train": {"batch_size": 48, "minutes": 0.05}})


class Batches:
    """As much of a loader as a trial needs."""

    def batch(self, i: int) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in toy_batch(48, seed=i).items()}


def test_steps_fit_the_minutes_and_random_streams_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(k) / 2 for k in range(10_000))  # every update takes half a second
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    before = torch.get_rng_state()
    loader: Any = Batches()
    config = load_config("demo", {"train": {"batch_size": 48, "minutes": 2.0}})
    assert trial.fit_steps(config, toy_runtime(8), ToyTask(), loader) == int(240 / trial.BESIDES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_slow_machine_makes_a_short_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(60.0 * k for k in range(10_000))
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    loader: Any = Batches()
    assert trial.fit_steps(CONFIG, toy_runtime(8), ToyTask(), loader) == trial.SHORTEST


@pytest.mark.parametrize(("spread", "updates"), [(0.0, 24), (0.01, 24), (0.3, 104)])
def test_steady_updates_are_timed_briefly_and_unsteady_ones_longer(
    monkeypatch: pytest.MonkeyPatch, spread: float, updates: int
) -> None:
    """A run of steady updates begins five seconds earlier."""
    rng, now, asked = np.random.default_rng(0), 0.0, []

    def clock() -> float:
        nonlocal now
        now += 0.01 * (1 + spread * rng.standard_normal())
        return now

    class Counted(Batches):
        def batch(self, i: int) -> dict[str, np.ndarray]:
            asked.append(i)
            return super().batch(i)

    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=clock))
    loader: Any = Counted()
    steps = trial.fit_steps(CONFIG, toy_runtime(8), ToyTask(), loader)
    assert len(asked) == updates
    assert steps == pytest.approx(3.0 / trial.BESIDES / 0.01, rel=max(spread, 0.01))


def test_the_micro_batch_is_one_that_fits_and_divides_the_update() -> None:
    class Hungry(ToyTask):
        def losses(
            self, model: nn.Module, batch: Batch, active: frozenset[str]
        ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            if len(batch["x"]) > 13:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().losses(model, batch, active)

    loader: Any = Batches()
    tuning = trial.tune_micro_batch(CONFIG, toy_runtime(8), Hungry(), loader)
    assert 48 % tuning.size == 0
    assert tuning.size <= 12
    tried = {one.size: one.problem for one in tuning.trials}
    assert tried[8] == ""
    assert tried[16] == "out of memory"


def test_the_memory_table_names_what_each_part_keeps() -> None:
    """R102: a part that keeps twice the activations stands there with twice the memory."""

    class Wide(ToyTask):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            model.add_module("wasteful", nn.Sequential(nn.Linear(1, 2**18), nn.GELU()))
            return model

        def losses(
            self, model: nn.Module, batch: Batch, active: frozenset[str]
        ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            losses, metrics = super().losses(model, batch, active)
            nothing = 0 * model.get_submodule("wasteful")(torch.ones(1, 1)).sum()
            return {term: loss + nothing for term, loss in losses.items()}, metrics

    before = torch.get_rng_state()
    loader: Any = Batches()
    title, *lines = trial.memory_table(CONFIG, toy_runtime(48), Wide(), loader).splitlines()
    assert title.endswith("micro-batch 48 [MiB]")
    found = {line[:-10].strip(): float(line[-10:]) for line in lines}
    assert found["wasteful"] == pytest.approx(
        2.0, abs=0.1
    )  # what goes into GELU and what comes out, 1 MiB each
    assert torch.equal(torch.get_rng_state(), before)
    weights = sum(value.numel() for value in Wide().build_model().parameters()) * 4 / 2**20
    assert found["weights"] == found["their gradients"] == pytest.approx(weights, abs=0.01)
    assert found["optimiser"] == pytest.approx(2 * weights, abs=0.01)  # AdamW's two moments
