"""One update made in two ways that have to agree: beside the CPU, with recomputation, compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from parts import ROWS, batches_of, check_that, configured, step_of
from torch import Tensor

from matrixlib.engine.diagnostics import block_of
from matrixlib.engine.optim import unwrap
from matrixlib.hardware.backend import synchronize
from matrixlib.hardware.benchmark import Figure, Plan
from matrixlib.hardware.runtime import native_bf16
from matrixlib.hardware.speed import turns
from matrixlib.tasks import changed

if TYPE_CHECKING:
    from matrixlib.config import Config
    from matrixlib.engine.step import Step

LOSS, COSINE, LENGTH = 1e-5, {"fp32": 0.9999, "bf16": 0.99}, {"fp32": 0.01, "bf16": 0.1}
"""Bounds of an update beside another: relative difference of the loss in fp32; least cosine of a block's gradients;
relative difference of their lengths, as a gradient a thousand times too large (pytorch issue 177116) has a cosine of 1.
"""
NOTHING = 1e-9
"""Length of a block's gradient, as a share of the whole, that is rounding alone."""
SAME: Mapping[str, Any] = {
    "model": {"droppath": 0.0, "dropout": 0.0},
    "optim": {"clip_norm": 1e9, "ema_decay": 0.0},
    "runtime": {"compile": False},
}
"""Nothing drawn at random on the device, whose stream is another one; gradients as they are."""
ATTENTION = {"every": 1, "heads": 2}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "encoding matrix0": {"encoding": "matrix0"},
    "BatchNorm": {"norm": {"blocks": "batch", "stem_heads": "batch"}},
    "post-activation, ReLU": {"preact": False, "activation": "relu"},
    "bottleneck, Mish, features": {"block": "bottleneck", "activation": "mish", "chess_features": True},
    "attention with a bias": {"attention": ATTENTION},
    "masked": {"attention": {**ATTENTION, "mask": True}},
    "masked without a bias": {"attention": {**ATTENTION, "mask": True, "bias": False}},
    "masked, mixed": {"attention": {**ATTENTION, "mask": True, "unmasked_mix": 0.2}},
    "after the norm, masked, mixed": {"attention": {**ATTENTION, "mask": True, "unmasked_mix": 0.2, "norm": "post"}},
    "policy factored, clamped, normalised": {"policy": {"kind": "factored", "clamp": 5.0, "logit_norm": True}},
    "policy by squares": {"policy": {"kind": "attention", "rank": 8}},
    "policy dense, value scalar": {"policy": {"kind": "dense", "channels": 8}, "value": {"kind": "scalar"}},
    "value pooled, all self-supervised heads": {
        "value": {"pool": "pooled"},
        "ssl": ["piece", "threat", "pin", "fork", "control"],
    },
}
"""Options of a small chess network, each of which another operation hangs on."""


def networks(plan: Plan) -> Iterator[tuple[str, Config]]:
    """(name, configuration) of every preset's network and of `VARIANTS`."""
    small = {"model": {"channels": 16 if plan.brief else 32, "blocks": 1 if plan.brief else 2}}
    rows = {"train": {"batch_size": ROWS if plan.brief else 64}}
    if not plan.brief:
        for name, count in (("demo", 128), ("quick", 128), ("small", 64), ("matrix0_53m", 32)):
            yield name, configured(plan, name, SAME, {"train": {"batch_size": count}})
    latin = {"model": {"dropout": 0.0}, "train": {"batch_size": ROWS if plan.brief else 64}}
    plain = {key: SAME[key] for key in ("optim", "runtime")}
    yield "latin_demo", configured(plan, "latin_demo", plain, latin)
    if not plan.brief:
        large = {"model": {"width": 256, "layers": 8, "heads": 8}}
        yield "latin_quick", configured(plan, "latin_quick", plain, latin)
        yield "latin_full's network", configured(plan, "latin_quick", plain, latin, large)
    for name, model in list(VARIANTS.items())[:: 4 if plan.brief else 1]:  # a dry run tries the part, not the options
        yield (
            name,
            configured(plan, "demo", SAME, small, rows, {"model": {"attention": {"every": 0}}}, {"model": model}),
        )


def gradients(step: Step) -> dict[str, Tensor]:
    """Block -> all of its gradient of the last update, (n,) in fp64 on the host."""
    model, blocks = unwrap(step.model), dict[str, list[Tensor]]()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach().cpu().double().flatten()
            blocks.setdefault(block_of(model, name), []).append(gradient)
    return {block: torch.cat(parts) for block, parts in blocks.items()}


def compare(
    name: str, one: Mapping[str, Tensor], other: Mapping[str, Tensor], cosine: float, length: float
) -> tuple[float, str]:
    """(least cosine, its block) of the gradients by block; AssertionError where they are not alike."""
    check_that(one.keys() == other.keys(), f"{name}: gradients of other blocks: {sorted(one.keys() ^ other.keys())}")
    whole = math.hypot(*(float(gradient.norm()) for gradient in one.values()))
    least = (1.0, "")
    for block, gradient in one.items():
        expected, found = float(gradient.norm()), float(other[block].norm())
        check_that(math.isfinite(found), f"{name}: the gradient of {block} is not finite")
        if max(expected, found) < NOTHING * whole:
            continue
        apart = abs(found / expected - 1) if expected else math.inf
        check_that(apart < length, f"{name}: the gradient of {block} is {found:.4g} long and should be {expected:.4g}")
        least = min(least, (float(gradient @ other[block]) / (expected * found), block))
    check_that(least[0] > cosine, f"{name}: gradients of {least[1]} have a cosine of {least[0]:.6f}, not {cosine}")
    return least


def parity(plan: Plan) -> Iterator[Figure | str]:
    """The same rows through the same weights on the CPU in fp32 and on the device in its precisions.

    On a CPU the other way is channels_last.
    """
    from matrixlib.hardware import machine

    precisions = ["fp32", "bf16"] if plan.brief or native_bf16(machine.facts(), plan.device) else ["fp32"]
    least = dict.fromkeys(precisions, (1.0, "", ""))
    loss = (0.0, "")
    for name, config in networks(plan):
        (batch,) = batches_of(config)
        plain = {"device": "cpu", "precision": "fp32", "channels_last": False}
        reference = step_of(changed(config, {"runtime": plain}))
        expected = reference(batch).loss
        for precision in precisions:
            other = {"precision": precision} | ({"channels_last": True} if plan.brief else {})
            step = step_of(changed(config, {"runtime": other}))
            apart = abs(step(batch).loss / expected - 1)
            words = f"{name} in {precision}"
            if precision == "fp32":
                check_that(apart < LOSS, f"{words}: the loss differs by {apart:.2g} of it from the CPU's")
                loss = max(loss, (apart, name))
            found = compare(words, gradients(reference), gradients(step), COSINE[precision], LENGTH[precision])
            least[precision] = min(least[precision], (*found, name))
    yield f"fp32: losses within {loss[0]:.1g} of the CPU's ({loss[1]})"
    for precision, (value, block, name) in least.items():
        yield f"{precision}: least cosine of a block's gradients {value:.6f} ({name}, {block})"


def recomputation(plan: Plan) -> Iterator[Figure | str]:
    """Blocks that are run again in the backward pass and heads that work in chunks change neither losses, gradients nor
    BatchNorm's statistics, with dropout on.
    """
    rows = ROWS if plan.brief else 256
    model: dict[str, Any] = {"dropout": 0.1, "droppath": 0.1, "ssl": ["threat", "control"]}
    shape = {"blocks": "batch", "stem_heads": "group"}
    changes = {"model": {**model, "norm": shape}, "train": {"batch_size": rows}, "optim": SAME["optim"]}
    ways: dict[str, tuple[dict[str, Any], int]] = {
        "neither": ({}, 0),
        "every block again": ({"checkpoint_every": 1}, 0),
        "every second block again": ({"checkpoint_every": 2}, 0),
        "heads in chunks": ({}, rows // 4),
        "both": ({"checkpoint_every": 1}, rows // 4),
    }
    precision = {"runtime": {"precision": "fp32"}}
    base = configured(plan, "small", changes, precision)
    (batch,) = batches_of(base)
    steps = {}
    for name, (more, chunk) in ways.items():
        step = steps[name] = step_of(changed(base, {"model": more}))
        step.task.set_chunk(unwrap(step.model), chunk)
        loss = step(batch).loss
        if name == "neither":
            expected, reference = loss, gradients(step)
            statistics = {key: value.clone() for key, value in unwrap(step.model).named_buffers()}
            continue
        check_that(abs(loss / expected - 1) < LOSS, f"{name}: the loss is {loss:.6f}, not {expected:.6f}")
        compare(name, reference, gradients(step), COSINE["fp32"], LENGTH["fp32"])
        for key, value in unwrap(step.model).named_buffers():
            alike = torch.allclose(value.float(), statistics[key].float(), rtol=1e-4, atol=1e-5)
            check_that(alike, f"{name}: {key} differs: it took in a batch twice")
    seconds = turns({name: partial(timed, step, batch) for name, step in steps.items()}, plan.seconds)
    for name, step in steps.items():
        yield Figure(f"{name}, {rows} rows", rows / seconds[name], "positions/s")
        if plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            timed(step, batch)
            yield f"{name}: {(torch.cuda.max_memory_allocated() - before) / 2**20:,.0f} MiB beyond weights and moments"


def timed(step: Step, batch: dict[str, Tensor]) -> None:
    """One update, ended on the device."""
    step(batch)
    synchronize(step.runtime.device)


ALIKE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference of the losses of compiled updates: fused operations round once where others round often."""
UPDATES = 6


def compilation(plan: Plan) -> Iterator[Figure | str]:
    """One graph a network, made once: an update that compiles again would stall a training for a minute.

    On a CPU the graph is traced and not compiled.
    """
    from torch._dynamo.utils import counters

    for preset in ("demo",) if plan.brief else ("quick", "matrix0_53m"):
        rows = {"train": {"batch_size": ROWS if plan.brief else 256}}
        config = configured(plan, preset, rows, {"model": SAME["model"]}, {"optim": SAME["optim"]})
        batches = batches_of(config, UPDATES)
        plain = step_of(config)
        expected = [plain(batch).loss for batch in batches]
        torch.compiler.reset()
        counters.clear()
        if plan.brief:
            network = plain.task.build_model()
            step = step_of(config, torch.compile(network, backend="aot_eager"))
        else:
            step = step_of(changed(config, {"runtime": {"compile": True}}))
        losses = []
        for number, batch in enumerate(batches):
            with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
                stats = step(batch)
            check_that(not stats.messages, f"{preset}: {'; '.join(stats.messages)}")
            losses.append(stats.loss)
        graphs, breaks = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
        check_that(unwrap(step.model) is not step.model, f"{preset}: it went on without the compiler")
        check_that(graphs == 1, f"{preset}: {graphs} graphs, not one; graph breaks: {breaks}")
        apart = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
        bound = ALIKE[step.runtime.dtype]
        check_that(apart < bound, f"{preset}: losses of compiled updates differ by {apart:.2g} of them, over {bound}")
        yield f"{preset}: one graph, {UPDATES} updates without another, losses within {apart:.1g}"
        if not plan.brief:
            works = {name: partial(timed, way, batches[0]) for name, way in (("plain", plain), ("compiled", step))}
            rates = {name: 256 / seconds for name, seconds in turns(works, plan.seconds).items()}
            yield Figure(
                f"{preset} compiled, 256 rows", rates["compiled"], "positions/s", rates["plain"], "not compiled"
            )
