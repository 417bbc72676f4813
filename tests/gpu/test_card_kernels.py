"""What runs on a card: reads that the host waits for, kernels of attention, gradients beside those of the CPU."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from card import CALM, DEVICE, DRY, QUIET, ROWS, batches_of, configured, half_precision, overrides, step_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from matrixlib.engine.diagnostics import block_of
from matrixlib.engine.optim import unwrap
from matrixlib.engine.step import Step
from matrixlib.engine.task import active_terms, to_device
from matrixlib.runs.run import open_run
from matrixlib.tasks import changed
from matrixlib.tasks.chess.config import SSL_CHANNELS

# Reads that the host waits for

READS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "equal", "repeat_interleave"}
    | {"_unique2", "unique_dim", "unique_consecutive"}
)
"""Operations whose result, or the size of it, the host has to read from the device."""


class HostReads(TorchDispatchMode):
    """Names of the operations inside the context that would make the host wait for a card, wherever they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in READS or any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


# Not Latin squares on a CPU: there, and nowhere else, one_hot reads what it is given.
@pytest.mark.parametrize("preset", ["demo"] if DRY else ["quick", "small", "matrix0_53m", "latin_quick"])
def test_losses_and_gradients_ask_the_host_for_nothing(preset: str) -> None:
    config = configured(preset, {} if DRY else {"train": {"batch_size": 128}})
    step = step_of(config)
    (batch,) = batches_of(config)
    step(batch)  # tables are copied to the device once
    part = to_device(batch, step.runtime.torch_device)
    with HostReads() as reads:
        with step.runtime.autocast():
            losses, _ = step.task.losses(step.model, part, active_terms(step.task))
        torch.stack(list(losses.values())).sum().backward()
        assert reads.names == []
        next(iter(losses.values())).item()
    assert reads.names == ["_local_scalar_dense"]


@pytest.mark.skipif(DEVICE != "cuda", reason="torch tells of waits on CUDA alone")
@pytest.mark.parametrize(("preset", "precision"), [("quick", "bf16"), ("small", "fp16"), ("matrix0_53m", "bf16")])
def test_an_update_waits_for_the_card_once(reports: Path, preset: str, precision: str) -> None:
    first, last = 11, 30
    changes = {"runtime": {"precision": precision}, "data": {"workers": 2}}
    updates = open_run(preset, run="reads", steps=last, overrides=overrides(QUIET, changes)).train()
    list(itertools.islice(updates, first - 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            list(itertools.islice(updates, last - first))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    updates.close()
    waits = [w for w in caught if "called a synchronizing CUDA operation" in str(w.message)]
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits)
    assert len(waits) == last - first, places.most_common(8)


# Attention

MATH = "_scaled_dot_product_attention_math"
MASKS: dict[str, dict[str, Any]] = {
    "a bias": {},
    "a mask": {"mask": True, "bias": False},
    "a mask and a bias": {"mask": True},
    "both, mixed": {"mask": True, "unmasked_mix": 0.2},
}


def attention_of(work: Callable[[], object]) -> dict[str, int]:
    """Attention operation -> how often `work` ran it, forward and backward, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as recorder:
        work()
    return {
        event.key.removeprefix("aten::"): event.count
        for event in recorder.key_averages()
        if "scaled_dot_product" in event.key and event.key != "aten::scaled_dot_product_attention"
    }


@pytest.mark.parametrize("mask", MASKS)
def test_attention_goes_through_fused_kernels(mask: str) -> None:
    """Plain products in fp32 need several times the time and the memory."""
    options = MASKS[mask]
    if DRY and options.get("bias") is not False:
        pytest.skip("the CPU's fused kernel gives a trainable bias no gradient")
    model = {"channels": 64, "blocks": 1, "attention": {"every": 1, "heads": 4, **options}}
    config = configured("quick", {"train": {"batch_size": ROWS if DRY else 256}, "model": model})
    step = step_of(config)
    (batch,) = batches_of(config)
    step(batch)
    assert MATH not in attention_of(lambda: step(batch))


# One update beside the CPU's, recomputed, compiled

LOSS, COSINE, LENGTH = 1e-5, {"fp32": 0.9999, "bf16": 0.99, "fp16": 0.99}, {"fp32": 0.01, "bf16": 0.1, "fp16": 0.1}
"""Bounds of an update beside another: relative difference of the loss in fp32; least cosine of a block's gradients;
relative difference of their lengths, as a gradient a thousand times too large (pytorch issue 177116) has a cosine of 1.
"""
NOTHING = 1e-9
"""Length of a block's gradient, as a share of the whole, that is rounding alone."""
ATTENTION = {"every": 1, "heads": 2}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "matrix0's planes, BatchNorm": {"encoding": "matrix0", "norm": {"blocks": "batch", "stem_heads": "batch"}},
    "post-activation, ReLU": {"preact": False, "activation": "relu", "policy": {"kind": "attention", "rank": 8}},
    "bottleneck, Mish, features": {"block": "bottleneck", "activation": "mish", "chess_features": True},
    "attention with a bias": {"attention": ATTENTION, "value": {"pool": "pooled"}},
    "masked without a bias": {"attention": {**ATTENTION, "mask": True, "bias": False}},
    "after the norm, masked, mixed": {"attention": {**ATTENTION, "mask": True, "unmasked_mix": 0.2, "norm": "post"}},
    "policy factored, clamped, normalised": {"policy": {"kind": "factored", "clamp": 5.0, "logit_norm": True}},
    "policy dense, value scalar": {"policy": {"kind": "dense", "channels": 8}, "value": {"kind": "scalar"}},
    "self-supervised heads, features, lines": {"ssl": list(SSL_CHANNELS), "chess_features": True, "lines": 4},
}
"""Options of a small chess network, each of which another operation hangs on."""
PRESETS = {} if DRY else {"demo": 128, "quick": 128, "small": 64, "matrix0_53m": 32, "latin_quick": 64}


def gradients(step: Step) -> dict[str, Tensor]:
    """Block -> all of its gradient of the last update, (n,) in fp64 on the host."""
    model, blocks = unwrap(step.model), dict[str, list[Tensor]]()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach().cpu().double().flatten()
            blocks.setdefault(block_of(model, name), []).append(gradient)
    return {block: torch.cat(parts) for block, parts in blocks.items()}


def compare(one: Mapping[str, Tensor], other: Mapping[str, Tensor], precision: str = "fp32") -> None:
    """AssertionError where gradients by block are not alike."""
    assert one.keys() == other.keys()
    whole = math.hypot(*(float(gradient.norm()) for gradient in one.values()))
    for block, gradient in one.items():
        expected, found = float(gradient.norm()), float(other[block].norm())
        assert math.isfinite(found), f"the gradient of {block} is not finite"
        if max(expected, found) >= NOTHING * whole:
            cosine = float(gradient @ other[block]) / (expected * found)
            assert cosine > COSINE[precision], f"the gradient of {block} has a cosine of {cosine:.6f}"
            text = f"the gradient of {block} is {found:.4g} long and should be {expected:.4g}"
            assert abs(found / expected - 1) < LENGTH[precision], text


@pytest.mark.parametrize("name", [*PRESETS, "latin_demo", *list(VARIANTS)[:: 4 if DRY else 1]])
def test_an_update_is_that_of_the_cpu(name: str) -> None:
    """The same rows through the same weights, in fp32 on the CPU; the other way of a dry run is channels_last."""
    calm = {"optim": CALM["optim"], "model": {"dropout": 0.0}} if name.startswith("latin") else CALM
    if name in VARIANTS:
        small = {"model": {"channels": ROWS if DRY else 32, "blocks": 1 if DRY else 2, "attention": {"every": 0}}}
        rows = {"train": {"batch_size": ROWS if DRY else 64}}
        config = configured("demo", calm, small, rows, {"model": VARIANTS[name]})
    else:
        config = configured(name, calm, {"train": {"batch_size": PRESETS.get(name, ROWS)}})
    (batch,) = batches_of(config)
    reference = step_of(changed(config, {"runtime": {"device": "cpu", "precision": "fp32", "channels_last": False}}))
    expected = reference(batch).loss
    for precision in ("fp32", half_precision()):
        other = {"precision": precision} | ({"channels_last": True} if DRY else {})
        step = step_of(changed(config, {"runtime": other}))
        loss = step(batch).loss
        assert precision != "fp32" or loss == pytest.approx(expected, rel=LOSS)
        compare(gradients(reference), gradients(step), precision)


@pytest.mark.parametrize("preset", ["demo"] if DRY else ["quick", "matrix0_53m"])
def test_a_compiled_network_has_one_graph_made_once(preset: str) -> None:
    """An update that compiles again would stall a training for a minute. On a CPU the graph is traced alone."""
    from torch._dynamo.utils import counters

    config = configured(preset, CALM, {"train": {"batch_size": ROWS if DRY else 256}})
    batches = batches_of(config, 6)
    plain = step_of(config)
    expected = [plain(batch).loss for batch in batches]
    torch.compiler.reset()
    counters.clear()
    if DRY:
        step = step_of(config, torch.compile(plain.task.build_model(), backend="aot_eager"))
    else:
        step = step_of(changed(config, {"runtime": {"compile": True}}))
    for number, batch in enumerate(batches):
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            stats = step(batch)
        assert not stats.messages
        # fused operations round once where others round often
        assert stats.loss == pytest.approx(expected[number], rel=1e-4 if step.runtime.dtype == "fp32" else 2e-2)
    assert unwrap(step.model) is not step.model, "it went on without the compiler"
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["graph_break"])
