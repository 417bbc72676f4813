"""One update: accumulation, verdicts, loss scaling, gradient report."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_task import ToyNet, ToyTask, toy_batch, toy_runtime

from matrixlib import config as configuration
from matrixlib.engine import optim
from matrixlib.engine.health import Health, Verdict
from matrixlib.engine.optim import EMA, Schedule
from matrixlib.engine.step import Step, gradient_report
from matrixlib.engine.task import Batch, slice_batch
from matrixlib.runtime import Runtime

CPU = torch.device("cpu")
OPTIM = configuration.load("demo").optim.model_copy(update={"warmup_steps": 4})


@dataclass(frozen=True)
class Scaled(Runtime):
    """A CPU runtime with a loss scaler, which the real policy never makes."""

    scale: float = 65536.0

    def grad_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=self.scale)


def scaled(scale: float, micro_batch: int = 8) -> Scaled:
    return Scaled(**{**toy_runtime(micro_batch).to_dict(), "reasons": ()}, scale=scale)


def build(
    task: ToyTask | None = None,
    micro_batch: int = 8,
    runtime: Runtime | None = None,
    double: bool = False,
    ema: float = 0.0,
    **changes: object,
) -> Step:
    torch.manual_seed(0)
    task = task or ToyTask()
    model = task.build_model().to(torch.float64 if double else torch.float32)
    config = OPTIM.model_copy(update=changes)
    return Step(
        model,
        task,
        optim.optimiser(model, config, CPU),
        Schedule.of(config, 20),
        runtime or toy_runtime(micro_batch),
        config,
        micro_batch,
        EMA(model, ema) if ema else None,
        Health(limit=3),
    )


def doubled(batch: Batch) -> Batch:
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def gradients(step: Step) -> dict[str, Tensor]:
    return {name: p.grad for name, p in step.model.named_parameters()}


def uneven(rows: int) -> Batch:
    """All known planes in the first rows and most labels in the last: counts differ between micro-batches."""
    batch = toy_batch(rows, seed=3)
    batch["known"] = (torch.arange(rows) < max(rows // 3, 1)).to(torch.uint8)
    batch["label"] = torch.where(torch.arange(rows) < rows // 2, -1, batch["label"].clamp(min=0))
    return batch


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-12), (False, 2e-6)])
@pytest.mark.parametrize("micro_batch", [1, 5, 8, 31, 32])
def test_accumulation_equals_the_big_batch(micro_batch: int, double: bool, tolerance: float) -> None:
    batch = uneven(32)
    batch = doubled(batch) if double else batch
    whole = build(micro_batch=32, double=double, clip_norm=1e9)
    parts = build(micro_batch=micro_batch, double=double, clip_norm=1e9)
    one, many = whole(batch), parts(batch)
    assert many.micro_batches == math.ceil(32 / micro_batch)
    assert many.counts == one.counts
    assert many.losses == pytest.approx(one.losses, rel=tolerance * 10)
    assert many.metrics == pytest.approx(one.metrics, rel=tolerance * 10)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=tolerance * 10)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, rtol=0, atol=tolerance)


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(2, 24), micro=st.integers(1, 24), seed=st.integers(0, 999))
def test_accumulation_for_any_cut(rows: int, micro: int, seed: int) -> None:
    batch = doubled(toy_batch(rows, seed))
    whole = build(micro_batch=rows, double=True)
    parts = build(micro_batch=micro, double=True)
    assert parts(batch).losses == pytest.approx(whole(batch).losses, rel=1e-10)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, rtol=0, atol=1e-11)


def test_mean_of_means_would_be_wrong() -> None:
    """The trap that dividing by the update's counts avoids."""
    task, batch = ToyTask(), uneven(32)
    model = task.build_model()
    means = []
    for start in range(0, 32, 8):
        part = slice_batch(batch, start, start + 8)
        losses, _ = task.losses(model, part, frozenset({"plane"}))
        means.append(losses["plane"].item() / max(task.counts(part)["plane"], 1))
    right = task.losses(model, batch, frozenset({"plane"}))[0]["plane"].item() / task.counts(batch)["plane"]
    assert abs(sum(means) / 4 - right) > 0.1 * right


def test_loss_is_the_weighted_sum_of_the_term_means() -> None:
    step = build()
    stats = step(toy_batch(32))
    assert stats.losses["class"] == pytest.approx(math.log(3), rel=1e-5)  # its head starts at zero
    assert stats.loss == pytest.approx(stats.losses["class"] + 0.5 * stats.losses["plane"])
    assert set(stats.metrics) == {"class/hits", "plane/absolute"}
    assert 0 <= stats.metrics["class/hits"] <= 1


def test_a_term_without_items_is_a_zero_and_is_reported() -> None:
    batch = toy_batch(16)
    batch["known"] = torch.zeros_like(batch["known"])
    step = build()
    stats = step(batch)
    assert stats.verdict is Verdict.OK
    assert stats.empty == ("plane",)
    assert set(stats.losses) == {"class"}
    assert set(stats.metrics) == {"class/hits"}
    assert torch.count_nonzero(gradients(step)["plane.weight"]) == 0


def test_a_weight_of_zero_leaves_the_term_out() -> None:
    step = build(ToyTask(plane_weight=0.0))
    stats = step(toy_batch(16), report=True)
    assert set(stats.losses) == {"class"}
    assert stats.report is not None
    assert stats.report.missing == ("plane.weight", "plane.bias")
    with pytest.raises(ValueError, match="weight"):
        build(ToyTask(class_weight=0.0, plane_weight=0.0))


def test_learning_rate_follows_the_schedule_and_is_never_zero() -> None:
    step = build()
    rates = [step(toy_batch(16, seed)).learning_rate for seed in range(20)]
    assert rates == [step.schedule(update) for update in range(20)]
    assert rates[0] == pytest.approx(OPTIM.learning_rate / 4)
    assert step.optimiser.param_groups[0]["lr"] == rates[-1]


def test_clipping_by_global_norm() -> None:
    step = build(clip_norm=1e-3)
    stats = step(toy_batch(16))
    assert stats.clipped
    assert stats.grad_norm > 1e-3  # reported as it was before clipping
    norm = torch.nn.utils.get_total_norm(list(gradients(step).values()))
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)
    assert not build(clip_norm=1e9)(toy_batch(16)).clipped


def poisoned(kind: str) -> Batch:
    batch = toy_batch(16)
    if kind == "input":
        batch["x"][3, 2] = torch.nan
    else:
        batch["target"][torch.nonzero(batch["known"])[0]] = torch.inf
    return batch


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("kind", ["input", "target"])
def test_nothing_moves_on_a_non_finite_update(kind: str, norm: str) -> None:
    """Weights, BatchNorm statistics, optimiser state and EMA stay bit for bit as they were."""
    step = build(ToyTask(norm=norm), ema=0.9)
    step(toy_batch(16))
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    states = {k: v.clone() for k, v in optim.optimiser_tensors(step.optimiser, step.model).items()}
    average = {name: value.clone() for name, value in step.ema.state_dict().items()}
    stats = step(poisoned(kind))
    assert stats.verdict is Verdict.SKIP
    assert not stats.overflow
    assert "not finite: loss of" in step.health.last
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    for name, value in optim.optimiser_tensors(step.optimiser, step.model).items():
        assert torch.equal(value, states[name]), name
    for name, value in step.ema.state_dict().items():
        assert torch.equal(value, average[name]), name
    assert step.ema.averages == 1
    assert step(toy_batch(16, seed=1)).verdict is Verdict.OK
    assert step.update == 3  # a skipped update counts, so rate and data stay aligned


def test_a_non_finite_gradient_with_a_finite_loss_is_skipped_and_named() -> None:
    class Trap(ToyNet):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            return out | {"plane": out["plane"] + torch.sqrt((self.plane.bias * 0).abs())}  # 0 * inf = NaN

    step = build()
    step.model.__class__ = Trap
    before = step.model.inner.weight.clone()
    stats = step(toy_batch(16))
    assert math.isfinite(stats.loss)
    assert stats.verdict is Verdict.SKIP
    assert stats.report is not None
    assert stats.report.nonfinite == ("plane.bias",)  # clipping did not spread the NaN to the others
    assert torch.equal(step.model.inner.weight, before)


def test_skips_in_a_row_halt() -> None:
    step = build()
    verdicts = [step(poisoned("input")).verdict for _ in range(3)]
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.HALT]
    assert "loss of plane; a non-finite gradient: inner.weight" in step.health.diagnosis()


def test_loss_scaling_changes_nothing_where_it_fits() -> None:
    """Scale, backward, unscale, clip, step, update: the result is that of the unscaled step."""
    plain, other = build(), build(runtime=scaled(1024.0))
    for seed in range(3):
        one, two = plain(toy_batch(16, seed)), other(toy_batch(16, seed))
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert two.clipped == one.clipped
    for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_overflow_of_the_loss_scale_lowers_it_and_counts_apart() -> None:
    step = build(runtime=scaled(3e38))
    before = step.model.inner.weight.clone()
    verdicts = []
    for _ in range(6):
        stats = step(toy_batch(16))
        verdicts.append(stats.verdict)
        if stats.verdict is Verdict.OK:
            break
        assert stats.overflow
        assert torch.equal(step.model.inner.weight, before)
    assert verdicts[0] is Verdict.SKIP
    assert verdicts[-1] is Verdict.OK
    assert step.scaler.get_scale() == pytest.approx(3e38 / 2 ** (len(verdicts) - 1))
    assert (step.health.overflows, step.health.skipped) == (len(verdicts) - 1, 0)


def test_a_collapsed_loss_scale_is_no_excuse() -> None:
    step = build(ToyTask(), runtime=scaled(1.0))
    step.model.register_parameter("trap", nn.Parameter(torch.zeros(())))
    stats = step(poisoned("input"))
    assert not stats.overflow
    assert step.health.skipped == 1


def test_first_update_report_names_missing_and_zero_gradients() -> None:
    step = build()
    step.model.orphan = nn.Linear(2, 2)
    stats = step(toy_batch(16), report=True)
    assert stats.report == gradient_report(step.model)
    assert stats.report.missing == ("orphan.weight", "orphan.bias")
    assert stats.report.nonfinite == ()
    assert stats.report.zero == ()
    assert "orphan.weight" in str(stats.report)
    assert step(toy_batch(16)).report is None


def test_a_model_cut_off_from_every_loss_is_an_error() -> None:
    class Detached(ToyTask):
        def losses(
            self, model: nn.Module, batch: Batch, active: frozenset[str]
        ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            losses, metrics = super().losses(model, batch, active)
            return {name: value.detach() for name, value in losses.items()}, metrics

    with pytest.raises(ValueError, match="no parameter receives a gradient"):
        build(Detached())(toy_batch(8))


def test_losses_stay_fp32_under_bf16_autocast() -> None:
    step = build(runtime=toy_runtime(dtype="bf16"))
    one, two = step(toy_batch(64)), build()(toy_batch(64))
    assert step.model.inner.weight.dtype == torch.float32
    assert one.losses == pytest.approx(two.losses, rel=0.02)
