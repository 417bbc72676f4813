"""One update: accumulation, what becomes of it, loss scaling, gradient report."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import equal
from torch import Tensor, nn
from toy_task import Compiled, Hungry, Scaled, ToyNet, ToyTask, toy_batch, toy_runtime

from matrixlib import config as configuration
from matrixlib.engine import optim
from matrixlib.engine.checkpoint import Checkpoint
from matrixlib.engine.compiler import place
from matrixlib.engine.stats import Action
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, slice_batch, to_device
from matrixlib.hardware.runtime import Runtime
from matrixlib.tasks import load_config

CHANGES = {
    "optim": {"warmup_steps": 4},
    "health": {"skips": 3, "rollbacks": 0},
    "gating": {"warmup_steps": 0, "freeze_steps": 3},
}
CONFIG = load_config("demo", CHANGES)
OPTIM = CONFIG.optim
SCALED = Scaled(**toy_runtime().to_dict(), scale=1024.0)


def build(
    task: ToyTask | None = None,
    micro_batch: int = 8,
    runtime: Runtime | None = None,
    double: bool = False,
    gating: dict[str, object] | None = None,
    **changes: object,
) -> Step:
    torch.manual_seed(0)
    task = task or ToyTask()
    model = task.build_model().to(torch.float64 if double else torch.float32)
    changed = {"optim": {"ema_decay": 0.0} | changes, "gating": gating or {}}
    config = load_config("demo", configuration.merge(CHANGES, changed))
    return Step(task, model, runtime or toy_runtime(micro_batch), config, 20)


def gradients(step: Step) -> dict[str, Tensor]:
    return {name: p.grad for name, p in step.model.named_parameters()}


def uneven(rows: int) -> Batch:
    """All known planes in the first rows and most labels in the last: counts differ between micro-batches."""
    batch = toy_batch(rows, seed=3)
    batch["known"] = (torch.arange(rows) < max(rows // 3, 1)).to(torch.uint8)
    batch["label"] = torch.where(torch.arange(rows) < rows // 2, -1, batch["label"].clamp(min=0))
    return batch


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(2, 24), micro=st.integers(1, 24), seed=st.integers(0, 999))
def test_accumulation_for_any_cut(rows: int, micro: int, seed: int) -> None:
    """A mean of the means of micro-batches would be wrong, as counts differ."""
    batch = {k: v.double() if v.is_floating_point() else v for k, v in toy_batch(rows, seed).items()}
    whole, parts = (build(micro_batch=size, double=True, clip_norm=1e9) for size in (rows, micro))
    one, many = whole(batch), parts(batch)
    assert many.passes == math.ceil(rows / micro)
    assert many.counts == one.counts
    for name in ("losses", "metrics", "loss", "grad_norm"):
        assert getattr(many, name) == pytest.approx(getattr(one, name), rel=1e-10)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient, rtol=0, atol=1e-11)


def test_loss_is_the_weighted_sum_of_the_term_means_and_a_term_without_items_is_a_zero() -> None:
    stats = build()(toy_batch(32))
    assert stats.losses["class"] == pytest.approx(math.log(3), rel=1e-5)  # its head starts at zero
    assert stats.loss == pytest.approx(stats.losses["class"] + 0.5 * stats.losses["plane"])
    assert set(stats.metrics) == {"class/hits", "plane/absolute"}
    short = build(runtime=toy_runtime(dtype="bf16"))
    assert short(toy_batch(32)).losses == pytest.approx(stats.losses, rel=0.02), "computed in fp32"
    assert short.model.inner.weight.dtype == torch.float32
    step, batch = build(), toy_batch(16)
    batch["known"].zero_()
    stats = step(batch)
    assert (stats.action, stats.empty) == (Action.OK, ("plane",))
    assert (set(stats.losses), set(stats.metrics)) == ({"class"}, {"class/hits"})
    assert torch.count_nonzero(gradients(step)["plane.weight"]) == 0
    assert set(build(ToyTask(plane_weight=0.0))(toy_batch(16)).losses) == {"class"}, "of weight 0"
    with pytest.raises(ValueError, match="weight"):
        build(ToyTask(class_weight=0.0, plane_weight=0.0))


def test_learning_rate_follows_the_schedule_and_is_never_zero() -> None:
    step = build()
    rates = [step(toy_batch(16, seed)).learning_rate for seed in range(20)]
    assert rates == [step.schedule(update) for update in range(20)]
    assert rates[0] == pytest.approx(OPTIM.learning_rate / 4)
    assert build(rate_batch=CONFIG.train.batch_size // 4).schedule(3) == pytest.approx(2 * OPTIM.learning_rate)
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


def tensors(step: Step) -> dict[str, Tensor]:
    """Copies of all that an update moves, by name."""
    found = {**step.model.state_dict(), **optim.optimiser_tensors(step.optimiser, step.model)}
    averages = {f"average {name}": value for name, value in (step.ema.state_dict() if step.ema else {}).items()}
    return {name: value.clone() for name, value in {**found, **averages}.items()}


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("kind", ["input", "target"])
def test_nothing_moves_on_a_non_finite_update(kind: str, norm: str) -> None:
    """Weights, BatchNorm statistics, optimiser state and EMA stay bit for bit as they were."""
    step = build(ToyTask(norm=norm), ema_decay=0.9)
    step(toy_batch(16))
    before = tensors(step)
    stats = step(poisoned(kind))
    assert (stats.action, stats.overflow) == (Action.SKIP, False)
    assert "not finite: loss of" in step.health.last
    assert equal(tensors(step), before)
    assert step.ema.averages == 1
    assert step(toy_batch(16, seed=1)).action is Action.OK
    assert step.update == 3  # a skipped update counts, so rate and data stay aligned


def test_skips_in_a_row_halt() -> None:
    step = build()
    actions = [step(poisoned("input")).action for _ in range(3)]
    assert actions == [Action.SKIP, Action.SKIP, Action.HALT]
    assert "loss of plane; a non-finite gradient: inner.weight" in step.health.diagnosis()


def test_loss_scaling_changes_nothing_where_it_fits() -> None:
    """Scale, backward, unscale, clip, step, update: the result is that of the unscaled step."""
    plain, other = build(), build(runtime=SCALED)
    for seed in range(3):
        one, two = plain(toy_batch(16, seed)), other(toy_batch(16, seed))
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert two.clipped == one.clipped
    for a, b in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for _ in range(2):
        assert other(poisoned("input")).action is Action.SKIP
    assert other.scaler.get_scale() == 1024.0, "a bad batch says nothing about it"


def test_overflow_of_the_loss_scale_lowers_it_and_counts_apart() -> None:
    step = build(runtime=replace(SCALED, scale=3e38))
    before, overflows = tensors(step), 0
    while (stats := step(toy_batch(16))).overflow:
        overflows += 1
        assert stats.action is Action.SKIP
        assert equal(tensors(step), before)
    assert (stats.action, 0 < overflows < 6) == (Action.OK, True)
    assert step.scaler.get_scale() == pytest.approx(3e38 / 2**overflows)
    assert (step.health.overflows, step.health.skipped) == (overflows, 0)


def test_a_collapsed_loss_scale_is_no_excuse() -> None:
    """A gradient that is not finite at a scale of 1 is no overflow; at a larger one it would be."""
    for scale, overflow in ((1.0, False), (1024.0, True)):
        step = build(ToyTask(), runtime=replace(SCALED, scale=scale))
        step.model.plane.bias.register_hook(lambda gradient: gradient * math.inf)
        before, stats = tensors(step), step(toy_batch(16))
        assert math.isfinite(stats.loss)
        assert stats.detail.startswith("a non-finite gradient: plane.bias"), "clipping did not spread it"
        assert (stats.action, stats.overflow) == (Action.SKIP, overflow)
        assert equal(tensors(step), before)
        assert (step.health.skipped, step.health.overflows) == (int(not overflow), int(overflow))


def test_a_model_cut_off_from_every_loss_is_an_error() -> None:
    step, losses = build(), ToyTask().losses
    step.task.losses = lambda *given: ({name: value.detach() for name, value in losses(*given)[0].items()}, {})
    with pytest.raises(ValueError, match="no parameter receives a gradient"):
        step(toy_batch(8))


def test_the_module_that_went_bad_first_is_named_by_a_replay() -> None:
    step = build(ToyTask(dropout=0.5, norm="batch"), gating={"freeze_steps": 0})
    step(toy_batch(16))
    with torch.no_grad():
        step.model.plane.weight[0, 0] = torch.inf
    before = tensors(step)
    assert step(toy_batch(16)).action is Action.SKIP
    assert "first: plane" in step.health.last
    assert equal(tensors(step), before)
    once = torch.get_rng_state()
    quiet = build(ToyTask(dropout=0.5, norm="batch"))
    for _ in range(2):
        quiet(toy_batch(16))  # one pass draws as much as a pass and its replay
    assert torch.equal(torch.get_rng_state(), once)


@pytest.mark.parametrize("error", ["", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_out_of_memory_halves_the_micro_batch_and_repeats_the_same_update(error: str) -> None:
    batch = uneven(32)
    hungry, whole = (build(task, micro_batch=32, clip_norm=1e9) for task in (Hungry(error=error), ToyTask()))
    stats, plain = hungry(batch), whole(batch)
    assert hungry.task.seen == (32, 16, 8, 4, 4, 4, 4, 4, 4, 4, 4)
    assert hungry.micro_batch == 4
    assert len(stats.messages) == 3
    assert "micro-batch of 32" in stats.messages[0]
    assert stats.losses == pytest.approx(plain.losses, rel=1e-5)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(hungry)[name], gradient, rtol=0, atol=2e-6)
    hungry.task.seen = ()
    assert hungry(batch).messages == ()
    assert hungry.task.seen == (4,) * 8, "it does not happen twice for the same size"


def test_out_of_memory_repeats_with_the_same_random_numbers_and_buffers() -> None:
    """As if the update had begun with the smaller micro-batch: bit for bit, with dropout and BatchNorm."""
    kind = {"dropout": 0.5, "norm": "batch"}
    hungry, small = build(Hungry(room=8, **kind), micro_batch=32), build(ToyTask(**kind), micro_batch=8)
    for step in (hungry, small):
        for seed in range(3):
            step(toy_batch(32, seed))
    assert equal(tensors(hungry), tensors(small))


@pytest.mark.parametrize("room, error, last", [(0, "", 1), (0, "CUDA error: illegal memory access", 4), (2, "else", 4)])
def test_no_memory_for_one_row_and_other_errors_are_passed_on(room: int, error: str, last: int) -> None:
    step = build(Hungry(room=room, error=error, norm="batch" if error else "layer"), micro_batch=4)
    before = tensors(step)
    with pytest.raises(RuntimeError, match=error or "out of memory"):
        step(toy_batch(8))
    assert (step.micro_batch, step.consistent) == (last, True)
    assert equal(tensors(step), before), "buffers, too"


def test_gated_terms_warm_up_and_weigh_nothing_in_the_decision() -> None:
    step = build(ToyTask(gate_plane=True), gating={"warmup_steps": 4})
    stats = [step(toy_batch(32, seed)) for seed in range(5)]
    assert [s.gate for s in stats] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for s in stats:
        assert s.loss == pytest.approx(s.losses["class"] + 0.5 * s.gate * s.losses["plane"])
    assert step.health.losses == [s.losses["class"] for s in stats]


def test_gated_terms_are_frozen_after_an_unstable_update_and_come_back() -> None:
    step = build(ToyTask(gate_plane=True))
    assert step(poisoned("target")).messages == ("self-supervised terms are left out for 3 updates",)
    frozen = [step(toy_batch(16, seed)) for seed in range(3)]
    head = step.model.plane.weight.clone()
    assert [set(s.losses) for s in frozen] == [{"class"}] * 3
    assert [s.gate for s in frozen] == [0.0] * 3
    assert torch.equal(step.model.plane.weight, head), "neither weight decay nor moments touch a frozen head"
    assert set(step(toy_batch(16)).losses) == {"class", "plane"}
    assert not torch.equal(step.model.plane.weight, head)
    alone = build(ToyTask(gate_plane=True, class_weight=0.0))
    assert alone(poisoned("input")).action is Action.SKIP
    assert set(alone(toy_batch(16)).losses) == {"plane"}, "an update without all that there is would have no loss"


def test_a_time_limit_leaves_rows_out_and_keeps_the_weight() -> None:
    """The gated term's mean is taken over the rows that got it."""
    step = build(ToyTask(gate_plane=True), gating={"seconds": 1.0}, clip_norm=1e9)
    step.gate.row_seconds = 1.0 / 16
    batch = uneven(32)
    batch["known"] = (torch.arange(32) % 3 > 0).to(torch.uint8)
    stats = step(batch)
    assert stats.counts == {"plane": int(batch["known"][:16].sum()), "class": step.task.counts(batch)["class"]}
    losses, _ = ToyTask().losses(build().model, slice_batch(batch, 0, 16), frozenset({"plane"}))
    assert stats.losses["plane"] == pytest.approx(losses["plane"].item() / stats.counts["plane"], rel=1e-5)
    assert step.gate.row_seconds != 1.0 / 16, "measured again"
    assert stats.left_out == 16
    assert any("left 16 rows without the self-supervised terms" in text for text in stats.messages)
    assert build(ToyTask(gate_plane=True))(batch).left_out is None, "no limit was asked for"


def test_a_plain_descent_that_has_no_part_in_the_losses_does_not_end_a_scaled_update() -> None:
    class Idle(optim.SGDParameters):
        rate = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(torch.zeros(()))

    model = ToyNet()
    model.idle = Idle()
    step = Step(ToyTask(), model, SCALED, CONFIG, 20)
    assert step(toy_batch(16)).action is Action.OK
    assert step.model.idle.raw.item() == 0.0


def test_a_device_that_is_gone_is_the_error_and_nothing_after_it() -> None:
    """Closing the loss scale is one more call to the device, whose error says less."""
    step = build(runtime=SCALED)

    def gone(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    step.health.judge = gone  # after the gradients were unscaled
    step.scaler.update = lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA error: the second one"))
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        step(toy_batch(16))


def test_where_the_compiler_fails_the_update_goes_on_without_it() -> None:
    kind = {"dropout": 0.5, "norm": "batch"}
    broken, plain = build(ToyTask(**kind)), build(ToyTask(**kind))
    broken.model = Compiled(broken.model)
    messages = [[step(toy_batch(32, seed)).messages for seed in range(2)] for step in (broken, plain)]
    assert messages == [
        [("torch.compile failed, continuing without it: InductorError: no C++ compiler",), ()],
        [(), ()],
    ]
    assert equal(tensors(broken), tensors(plain))
    plain.model = Compiled(plain.model, good=4)
    plain(toy_batch(32))
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):  # an error of a model that was compiled
        plain(toy_batch(32))


def test_compiled_code_is_kept_where_a_restart_leaves_it(monkeypatch: pytest.MonkeyPatch, compiler_cache: Path) -> None:
    monkeypatch.setattr(torch, "compile", Compiled)
    compiled = replace(toy_runtime(8), compile="default")
    place(nn.Linear(2, 2), toy_runtime(8))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    model, forward = place(nn.Linear(2, 2), compiled)
    assert optim.unwrap(forward) is model
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(compiler_cache)
    other = str(compiler_cache / "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", other)
    place(nn.Linear(2, 2), compiled)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == other, "what the user set stands"


def test_weights_of_a_checkpoint_in_half_precision_become_fp32(tmp_path: Path) -> None:
    step = Step(ToyTask(norm="batch"), ToyNet(norm="batch"), toy_runtime(), CONFIG, 10)
    tensors, state = step.state_dict()
    halved = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors["model"].items()}
    step.load_state_dict(Checkpoint(0, tmp_path, {**tensors, "model": halved}, state, {}))
    assert {t.dtype for t in optim.named_tensors(step.model).values() if t.is_floating_point()} == {torch.float32}
    assert step(toy_batch(32)).finite


def test_copies_to_a_device_are_asynchronous_from_pinned_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere an unfinished copy could be read."""
    asked = []

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        asked.append(non_blocking)
        return self

    pinned, plain = torch.zeros(2), torch.zeros(2)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: self is pinned)
    monkeypatch.setattr(Tensor, "to", to)
    for device in ("cuda", "mps", "cpu"):
        to_device({"pinned": pinned, "plain": plain}, torch.device(device))
    assert asked == [True, False, False, False, False, False]


def test_weights_and_buffers_in_half_precision_are_refused() -> None:
    for part in ("norm", "plane"):
        model = ToyNet(norm="batch")
        getattr(model, part).to(torch.bfloat16)
        with pytest.raises(ValueError, match=f"^{part}.* is in half precision; build networks in fp32"):
            Step(ToyTask(), model, toy_runtime(), CONFIG, 10)
