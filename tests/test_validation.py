"""When validation is due, what it measures and what follows from it."""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from toy_task import ToyData, ToySource, ToyTask, toy_batch, toy_runtime

from matrixlib.config import ValidationConfig
from matrixlib.engine import validation
from matrixlib.engine.memory import OomBackoff
from matrixlib.engine.task import Batch, slice_batch
from matrixlib.engine.validation import HeldOut, ValidationSchedule, check_target_loss, validate
from matrixlib.tasks import load_config

BOTH = frozenset({"class", "plane"})


def settings(**changes: object) -> ValidationConfig:
    base = {"interval": 10, "full_every": 3, "plateau": 0, "plateau_factor": 4, "patience": 0, "min_delta": 0.1}
    return load_config("demo").validation.model_copy(update={**base, "target_loss": 0.0, **changes})


def run(cadence: ValidationSchedule, steps: int, losses: Iterator[float]) -> list[tuple[int, str]]:
    """Every validation of a run as (update count, kind); `losses` gives their losses."""
    seen = []
    for update in range(1, steps + 1):
        if kind := cadence.due(update, steps):
            seen.append((update, kind))
            cadence.record(update, kind, next(losses))
        if cadence.stop:
            break
    return seen


def test_sample_each_interval_full_every_third_and_at_the_end() -> None:
    seen = run(ValidationSchedule(settings()), 75, itertools.count(100.0, -1.0))
    kinds = ["sample", "sample", "full", "sample", "sample", "full", "sample", "full"]
    assert seen == list(zip([10, 20, 30, 40, 50, 60, 70, 75], kinds, strict=True))
    assert run(ValidationSchedule(settings(full_every=1)), 20, itertools.count(100.0, -1.0)) == [
        (10, "full"),
        (20, "full"),
    ]
    assert run(ValidationSchedule(settings()), 4, itertools.count(100.0, -1.0)) == [(4, "full")]


def test_rarer_on_a_plateau_and_often_again_after_an_improvement() -> None:
    losses = iter([5.0, 5.0, 5.0, 5.0, 1.0, 0.5, 0.1])
    seen = run(ValidationSchedule(settings(plateau=2, full_every=100)), 130, losses)
    assert [update for update, _ in seen] == [10, 20, 30, 70, 110, 120, 130]


@pytest.mark.parametrize("pace, sample, full", [(0.1, 1.0, 10.0), (1.0, 2.0, 20.0)])
def test_an_interval_of_auto_keeps_to_its_share_of_the_time(pace: float, sample: float, full: float) -> None:
    """Whatever updates and validations take; once both kinds are known, as often as the share allows."""
    cadence = ValidationSchedule(settings(interval="auto", share=0.05))
    steps = int(200 * full / pace)
    validating, count, shares = 0.0, 0, []
    for update in range(1, steps):
        cadence.updated(pace)
        if kind := cadence.due(update, steps):
            seconds = {"sample": sample, "full": full}[kind]
            cadence.record(update, kind, 1.0, seconds)
            validating, count = validating + seconds, count + 1
            shares.append(validating / (validating + update * pace))
    assert max(shares[3:]) <= 0.0501
    assert shares[-1] > 0.045
    assert count > 3


def test_a_full_pass_has_a_bar_and_that_of_the_sample_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[Any, ...]] = []

    def live_bar(iterable: list[Batch], **options: Any) -> list[Batch]:
        bars.append((options["total"], options["desc"], options["leave"]))
        return iterable

    monkeypatch.setattr(validation, "live_bar", live_bar)
    task = ToyTask()
    data = ToyData(task, ToySource(8), lambda kind: parts(toy_batch(12), 4))
    held_out, model = HeldOut(task, data, toy_runtime()), task.build_model()
    for kind in ("sample", "full"):
        assert held_out.measure(kind, model, BOTH).counts == task.counts(toy_batch(12))
    assert held_out.measure("phase", model, BOTH) is None, "without a curriculum"
    assert bars == [(3, "full validation", False)]


def test_patience_counts_full_validations() -> None:
    cadence = ValidationSchedule(settings(patience=2))
    assert run(cadence, 1000, itertools.repeat(1.0))[-1] == (90, "full")
    assert "2 full validations" in cadence.stop
    assert "after 30 updates" in cadence.stop
    # less than min_delta at a time is no improvement; that in sum it is more, is
    slow = ValidationSchedule(settings(patience=2, full_every=1))
    assert run(slow, 60, iter([2.0, 1.94, 1.88, 1.82, 1.76, 1.7])) == [(n * 10, "full") for n in range(1, 7)]
    assert not slow.stop


def test_best_is_the_lowest_full_loss_only() -> None:
    """A sample's reaches no target either, and a full one above it is no sign of a plateau."""
    cadence = ValidationSchedule(settings(target_loss=0.5, plateau=2))
    for update, kind, loss in (10, "sample", 0.4), (20, "full", 2.0), (30, "sample", 0.2), (40, "full", 1.8):
        assert cadence.record(update, kind, loss) is (kind == "full")
    assert (cadence.stale, cadence.due_at) == (0, 50)
    assert cadence.record(50, "full", 1.79)  # better by less than min_delta is still the best
    assert not cadence.record(60, "full", 1.79)
    assert not cadence.record(70, "full", math.nan)
    assert (cadence.best, cadence.best_at, cadence.stop) == (1.79, 50, "")
    assert cadence.record(80, "full", 0.5)
    assert "0.5" in cadence.stop


def test_cadence_survives_json_and_a_changed_configuration() -> None:
    whole, part = ValidationSchedule(settings(plateau=1)), ValidationSchedule(settings(plateau=1))
    losses = [5.0, 5.0, 4.0, 5.0, 5.0, 5.0, 2.0, 2.0]
    seen = run(whole, 500, iter([*losses, *[2.0] * 50]))
    first = run(part, 70, iter(losses))
    again = ValidationSchedule.from_dict(settings(plateau=1), json.loads(json.dumps(part.to_dict())))
    assert again == part
    assert seen[: len(first) - 1] == first[:-1]  # the last one of the short run is its final full one
    stopped = ValidationSchedule(settings(patience=1))
    run(stopped, 500, itertools.repeat(1.0))
    assert stopped.stop
    assert not ValidationSchedule.from_dict(settings(patience=9), stopped.to_dict()).stop


def parts(batch: Batch, size: int) -> list[Batch]:
    rows = len(batch["x"])
    return [slice_batch(batch, start, min(start + size, rows)) for start in range(0, rows, size)]


def test_running_sums_weigh_by_items_not_by_batches() -> None:
    task, batch = ToyTask(), toy_batch(50)
    batch["label"][:16] = -1  # no label at all in the first batch
    model = task.build_model()
    found = validate(task, model, parts(batch, 16), toy_runtime(), BOTH, "full")
    losses, metrics = task.losses(model, batch, BOTH)
    counts = task.counts(batch)
    assert found.counts == counts
    for term in BOTH:
        assert found.losses[term] == pytest.approx(losses[term].item() / counts[term], rel=1e-5)
    assert found.metrics["class/hits"] == pytest.approx(metrics["class/hits"].item() / counts["class"])
    assert found.loss == pytest.approx(found.losses["class"] + 0.5 * found.losses["plane"])


def test_validation_goes_on_in_smaller_passes_where_memory_runs_out() -> None:
    """And keeps to them: the next validation does not try again what failed."""
    calls = []

    class Hungry(ToyTask):
        def losses(self, model: nn.Module, batch: Batch, active: frozenset[str]) -> Any:
            calls.append(len(batch["x"]))
            if calls[-1] > 5:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().losses(model, batch, active)

    batch, passes = toy_batch(50), OomBackoff()
    model = ToyTask().build_model()
    whole = validate(ToyTask(), model, parts(batch, 16), toy_runtime(), BOTH, "full")
    for _ in range(2):
        result = validate(Hungry(), model, parts(batch, 16), toy_runtime(), BOTH, "full", passes=passes)
        assert result.counts == whole.counts
        assert result.losses == pytest.approx(whole.losses, rel=1e-6)
        assert result.metrics == pytest.approx(whole.metrics, rel=1e-6)
    assert calls == [16, 8, *2 * ([4] * 12 + [2])]
    assert len(passes.take()) == 2


def test_a_term_without_items_is_left_out_and_no_batches_give_none() -> None:
    task, batch = ToyTask(), toy_batch(20)
    batch["known"].zero_()
    found = validate(task, task.build_model(), [batch], toy_runtime(), BOTH, "sample")
    assert (set(found.losses), found.counts["plane"]) == ({"class"}, 0)
    assert validate(task, task.build_model(), [], toy_runtime(), BOTH, "full") is None


def test_evaluation_leaves_the_model_and_random_streams_as_they_were() -> None:
    task = ToyTask(dropout=0.5, norm="batch")
    model = task.build_model().train()
    model.classes.eval()  # a part frozen on purpose stays so
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    beats: list[int] = []
    one = validate(task, model, [toy_batch(20)], toy_runtime(), BOTH, "full", lambda: beats.append(1))
    two = validate(task, model, [toy_batch(20)], toy_runtime(), BOTH, "full")
    assert (one.losses, beats) == (two.losses, [1])
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.training, model.norm.training, model.classes.training) == (True, True, False)


def test_floor_is_weighted_and_guards_the_target() -> None:
    task, batch = ToyTask(noise=0.5), toy_batch(40)
    batches = parts(batch, 16)
    with pytest.raises(ValueError, match=r"0\.1250"):
        check_target_loss(0.12, task, batches, BOTH)
    check_target_loss(0.13, task, batches, BOTH)
    with pytest.raises(ValueError, match="held-out"):
        check_target_loss(0.13, task, [], BOTH)
