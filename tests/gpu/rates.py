"""How fast: updates by layout, compiler and cuDNN's search for algorithms; inference, and what bf16 costs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from parts import ROWS, TINY, check_that, configured

from matrixlib.bench.workloads import LARGE, Update
from matrixlib.config import merge
from matrixlib.hardware.benchmark import Figure, Plan
from matrixlib.hardware.runtime import native_bf16
from matrixlib.hardware.speed import turns

TARGETS = {LARGE: (20_000.0, 0.5)}
"""Positions a second on an H200, in bf16, and the share of the matrix rate that this is on any card."""
BUDGET = 360.0
"""Seconds after which no further network is compiled."""


def layouts(plan: Plan) -> Iterator[Figure | str]:
    """Positions a second of updates by memory format, compiler and cudnn.benchmark, beside the matrix rate."""
    began = time.monotonic()
    presets = ("demo",) if plan.brief else ("quick", "small", LARGE)
    peak = plan.matrix_rate()
    for preset in presets:
        ways: dict[str, tuple[Update, bool]] = {}
        for last in (True, False):
            layout = "channels_last" if last else "contiguous"
            update = Update(plan, preset, merge(small(plan), {"runtime": {"channels_last": last}}))
            for search in (False, True) if plan.device == "cuda" else (False,):
                ways[f"{layout}{', cudnn.benchmark' if search else ''}"] = update, search
        seconds = turns({name: partial(searching, *way) for name, way in ways.items()}, plan.seconds * len(ways) / 2)
        name = min(seconds, key=lambda name: seconds[name])
        update, search = ways[name]
        last = name.startswith("channels_last")
        if plan.compile and time.monotonic() - began < BUDGET:
            torch.compiler.reset()
            fused = Update(plan, preset, {"runtime": {"channels_last": last, "compile": True}})
            ways |= {"eager again": (update, search), "compiled": (fused, search)}
            works = {key: partial(searching, *ways[key]) for key in ("eager again", "compiled")}
            seconds |= turns(works, plan.seconds)
        elif plan.compile:
            yield f"{preset} was not compiled: {time.monotonic() - began:.0f} s had passed"
        peak = max(peak, plan.matrix_rate())
        for key, (way, _) in ways.items():
            limit = peak / way.flops
            of = f"{way.runtime.dtype} products, {peak / 1e9:,.0f} GFLOP/s"
            yield Figure(f"{preset}, {key}, {way.rows} rows", way.rows / seconds[key], "positions/s", limit, of)
        best = min(seconds, key=lambda name: seconds[name])
        rate = ways[best][0].rows / seconds[best]
        yield f"{preset}: best {best}, {rate:,.0f} positions/s, {rate * update.flops / peak:.0%} of the matrix rate"
        if preset in TARGETS:
            target, share = TARGETS[preset]
            yield f"{preset}: targets are {target:,.0f} positions/s on an H200, {share:.0%} of the matrix rate on any"
        torch.compiler.reset()


def small(plan: Plan) -> dict[str, Any]:
    """Changes of the networks that are timed."""
    return dict(TINY) if plan.brief else {}


def searching(update: Callable[[], object], search: bool) -> None:
    """An update with cuDNN's search for the fastest algorithm on or off; what it has found is kept by torch."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, search
    try:
        update()
    finally:
        torch.backends.cudnn.benchmark = before


SIZES = (1, 17, 300, 1024)
STRETCH = 10.0
"""Factor on the heads' last layers, which begin near zero: so that logits are about as large as trained ones."""
DIVERGENCE, VALUE, TIES, BEST = 2e-3, 0.03, 0.01, 0.95
"""Bounds of bf16 beside fp32: mean KL (nats), largest difference of the value, rows more whose two most probable moves
are equal, rows with the same best move."""
SAME = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.02}
"""Log-probabilities of a row alone and in a larger batch, which other kernels may work on."""


def inference(plan: Plan) -> Iterator[Figure | str]:
    """Predictions in bf16 and of a row in batches of any size beside those in fp32, and how many a second."""
    from matrixlib.hardware import machine
    from matrixlib.tasks.chess.evaluate import throughput

    sizes = (1, 17, 40) if plan.brief else SIZES
    half = "bf16" if native_bf16(machine.facts(), plan.device) or plan.brief else "fp16"
    for preset in ("demo",) if plan.brief else ("quick", LARGE):
        nets = {f"torch {dtype}": stretched(plan, preset, dtype) for dtype in ("fp32", half)}
        batch = throughput.positions(nets["torch fp32"], sizes[-1])
        legal = batch["policy_index"] >= 0
        out: dict[str, dict[str, np.ndarray]] = {}
        for name, net in nets.items():
            dtype = name.split()[-1]
            net.runtime.apply()  # TF32 off for the fp32 one
            out[dtype] = net.predict(batch)
            for rows in sizes[:-1]:
                part = net.predict({key: array[:rows] for key, array in batch.items()})
                apart = float(np.abs(part["policy"] - out[dtype]["policy"][:rows])[legal[:rows]].max())
                words = f"{preset} in {dtype}: {rows} rows alone differ from the same among {sizes[-1]}"
                check_that(apart < SAME[dtype], f"{words} by {apart:.3g} nats, over {SAME[dtype]}")
        full, low = (np.where(legal, out[dtype]["policy"], -np.inf) for dtype in ("fp32", half))
        shares = np.exp(full)
        divergence = float((shares * np.where(legal, full - np.where(legal, low, 0), 0)).sum(1).mean())
        value = float(np.abs(out["fp32"]["value"] - out[half]["value"]).max())
        same = float((full.argmax(1) == low.argmax(1)).mean())
        ties = [float((np.diff(np.sort(p, axis=1)[:, -2:]) == 0).mean()) for p in (full, low)]
        yield (
            f"{preset}: {half} beside fp32: KL {divergence:.2g} nats, value within {value:.2g}, the same best move in "
            f"{same:.1%}, ties of the best two {ties[1]:.1%} (fp32 {ties[0]:.1%}), of {sizes[-1]} rows"
        )
        check_that(
            divergence < DIVERGENCE,
            f"{preset}: {half} policies are {divergence:.2g} nats from fp32's, over {DIVERGENCE}",
        )
        check_that(value < VALUE, f"{preset}: a value differs by {value:.2g} in {half}, over {VALUE}")
        check_that(
            ties[1] <= ties[0] + TIES,
            f"{preset}: in {half} {ties[1]:.1%} of the rows have two best moves, in fp32 {ties[0]:.1%}",
        )
        check_that(same > BEST, f"{preset}: {half} has another best move in {1 - same:.1%} of the rows")
        nets["torch fp32"].runtime.apply()
        for speed in throughput.measure(nets, sizes, plan.seconds / 4):
            limit = speed.limit or None
            yield Figure(
                f"{preset}, {speed.engine}, {speed.rows} at once", speed.rate, "positions/s", limit, "its products"
            )


def stretched(plan: Plan, preset: str, dtype: str) -> Any:
    """A fresh network for use, with outputs about as far apart as a trained one's."""
    from matrixlib.hardware import runtime as runtimes
    from matrixlib.tasks import get_task

    rows = {"train": {"batch_size": ROWS}}
    config: Any = configured(plan, preset, {"runtime": {"precision": dtype}}, rows if plan.brief else {})
    spec = get_task(config.task)
    model: Any = spec.task(config).build_model()
    head = model.policy_head
    last = (
        {"conv": "planes", "dense": "dense", "factored": "expand"}[head.kind]
        if head.logit_norm is None
        else "logit_norm"
    )
    with torch.no_grad():
        for layer in (head.get_submodule(last), model.value_head.fc3):
            layer.weight.mul_(STRETCH)
    runtime = runtimes.resolve(config.runtime, config.train, config.data)
    return spec.network(model, config, runtime)
