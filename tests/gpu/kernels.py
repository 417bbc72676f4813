"""What runs on the device: reads that the host waits for, kernels of attention, gaps between kernels."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from parts import ROWS, Skip, batches_of, check_that, configured, run_overrides, step_of
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from matrixlib.config import Config
from matrixlib.engine.task import active_terms, to_device
from matrixlib.hardware.benchmark import Figure, Plan
from matrixlib.runs.run import open_run
from matrixlib.tasks.chess.blocks import MASKED_SCORE, SQUARES, board_mask

# Synchronisation

WAITS = "called a synchronizing CUDA operation"
"""What torch warns of in its debug mode; entering the mode warns too, of other things."""
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


def synchronisations(work: Callable[[], object]) -> list[str]:
    """Where the host waited for the card in `work`: file and line of each wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return waits(caught)


def waits(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """File and line of each warning of a wait among these."""
    return [f"{Path(w.filename).name}:{w.lineno}" for w in caught if WAITS in str(w.message)]


def host_reads(plan: Plan) -> Iterator[Figure | str]:
    """An update waits for the card once, when the host reads what it judges by. Losses and gradients ask for nothing,
    which a CPU can show too.
    """
    # Not Latin squares on a CPU: there, and nowhere else, one_hot reads what it is given.
    names = ("demo",) if plan.brief else ("quick", "small", "matrix0_53m", "latin_quick")
    for name in names:
        config = configured(plan, name, {"train": {"batch_size": ROWS if plan.brief else 128}})
        step = step_of(config)
        (batch,) = batches_of(config)
        step(batch)  # tables are copied to the device once
        asked = reads_of_losses(step, batch)
        check_that(not asked, f"{name}: losses or gradients make the host wait: {', '.join(asked)}")
        yield f"{name}: losses and gradients ask the host for nothing"
    if plan.device != "cuda":
        yield f"waits of a whole update were not counted: torch tells of them on CUDA alone, and this is {plan.device}"
        return
    for name, precision in (("quick", "bf16"), ("small", "fp16"), ("matrix0_53m", "bf16")):
        first, last = 11, 30
        overrides = run_overrides(plan, {"runtime": {"precision": precision}, "data": {"workers": 2}})
        updates = open_run(name, run=f"reads-{name}", steps=last, overrides=overrides).train()
        for stats in updates:
            if stats.step == first - 1:
                break
        count = last - first
        places = synchronisations(partial(list, itertools.islice(updates, count)))
        updates.close()
        text = ", ".join(f"{place} x{times}" for place, times in Counter(places).most_common(8))
        check_that(len(places) == count, f"{name} in {precision}: {len(places)} waits in {count} updates: {text}")
        yield f"{name} in {precision}: one wait in each of {count} updates, at {text}"


def reads_of_losses(step: Any, batch: dict[str, Tensor]) -> list[str]:
    """Host reads of one forward and backward pass of all of a step's terms."""
    part = to_device(batch, step.runtime.torch_device)
    with HostReads() as reads:
        with step.runtime.autocast():
            losses, _ = step.task.losses(step.model, part, active_terms(step.task))
        torch.stack(list(losses.values())).sum().backward()
    return reads.names


# Attention

MATH = "_scaled_dot_product_attention_math"
COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.99, torch.float16: 0.99}
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


def attention_kernels(plan: Plan) -> Iterator[Figure | str]:
    """Attention goes through fused kernels: plain products in fp32 need several times the time and the memory.

    The CPU's fused kernel gives a trainable bias no gradient, so there it is asked only of masks without one.
    """
    rows = {"train": {"batch_size": ROWS if plan.brief else 256}}
    networks: list[tuple[str, Config]] = []
    for name, options in MASKS.items():
        if plan.device != "cpu" or options.get("bias") is False:
            changes = {"model": {"channels": 64, "blocks": 1, "attention": {"every": 1, "heads": 4, **options}}}
            networks.append((f"attention with {name}", configured(plan, "quick", rows, changes)))
    if not plan.brief:
        dropout = {"model": {"dropout": 0.1, "attention": {"every": 2, "heads": 4}}}
        networks += [(name, configured(plan, name, rows)) for name in ("small", "matrix0_53m", "latin_quick")]
        networks.append(("attention with dropout", configured(plan, "quick", rows, dropout)))
    for name, config in networks:
        step = step_of(config)
        (batch,) = batches_of(config)
        step(batch)
        ran = attention_of(lambda step=step, batch=batch: step(batch))
        check_that(MATH not in ran, f"{name}: attention fell back to plain products ({MATH}); it ran {ran}")
        yield f"{name}: {', '.join(sorted(ran)) or 'none of torch'}"


def distant_logits(plan: Plan) -> Iterator[Figure | str]:
    """A softmax does not see what all its logits have in common. Kernels that keep the logarithm of the sum of the
    exponentials must not either (pytorch issue 196678): gradients beside those of plain products in fp64.
    """
    near = board_mask()
    ways = list(itertools.product((0.0, -120.0), (MASKED_SCORE, -float("inf")), (False, True)))
    for dtype in (torch.float32, torch.bfloat16, *([torch.float16] if plan.device == "cuda" else [])):
        least = (2.0, "")
        for level, fill, trained in ways:
            bias = torch.zeros(2, SQUARES, SQUARES).masked_fill(~near, fill).to(dtype)
            inputs = [*distant(level, dtype), bias]
            expected = attention_gradients(inputs, "cpu", torch.float64, plain=True)
            found = attention_gradients(inputs, plan.device, dtype, bias_too=trained)
            words = f"{dtype}, logits near {level:g}, masked with {fill:g}, bias {'trained' if trained else 'fixed'}"
            for name, gradient in found.items():
                alike = float(F.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0))
                length = float(gradient.norm() / expected[name].norm())
                check_that(
                    alike > COSINE[dtype] and abs(length - 1) < 0.1,  # not where one of them is NaN
                    f"{words}: the gradient of {name} has a cosine of {alike:.5f} and is {length:.3g} times as long",
                )
                least = min(least, (alike, f"{name}, {words}"))
        yield f"least cosine {least[0]:.6f}: {least[1]}"


def distant(level: float, dtype: torch.dtype, rows: int = 4, heads: int = 2, width: int = 16) -> list[Tensor]:
    """query, key, value (rows, heads, 64, width) whose scaled products all lie near `level`, as `dtype` holds them."""
    stream = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(rows, heads, SQUARES, width, generator=stream) for _ in range(3))
    query[..., 0] = key[..., 0] = 0.0
    common = (abs(level) * width**0.5) ** 0.5
    query[..., 0], key[..., 0] = common, -common if level < 0 else common
    return [tensor.to(dtype) for tensor in (query, key, value)]


def attention_gradients(
    inputs: Sequence[Tensor], device: str, dtype: torch.dtype, plain: bool = False, bias_too: bool = True
) -> dict[str, Tensor]:
    """Gradients (on the host, fp64) of query, key, value and bias, of a weighted sum of what attention gives."""
    query, key, value, bias = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
    if not bias_too:
        bias = bias.detach()
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    if plain:
        out = ((query @ key.mT) * query.shape[-1] ** -0.5 + bias).softmax(-1) @ value
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    (out * weights).sum().backward()
    tensors = {"query": query, "key": key, "value": value, "bias": bias}
    return {name: t.grad.cpu().double() for name, t in tensors.items() if t.grad is not None}


# Idleness

GAP = 0.5e-3
"""Seconds that a card may idle between the read of one update and the first kernel of the next batch."""


class Span(NamedTuple):
    """Something that ran, from `start` to `stop` in seconds."""

    start: float
    stop: float
    name: str


def busy(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The times in which anything ran, in order and apart from each other."""
    times: list[tuple[float, float]] = []
    for start, stop, _ in sorted(spans):
        if times and start <= times[-1][1]:
            times[-1] = times[-1][0], max(times[-1][1], stop)
        else:
            times.append((start, stop))
    return times


def idle(times: Sequence[tuple[float, float]], start: float, stop: float) -> float:
    """Seconds between start and stop in which nothing ran."""
    return stop - start - sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in times)


def gaps(spans: Sequence[Span]) -> list[float]:
    """Idle seconds after each host read, until the first kernel that works on the next batch's copies.

    Meanwhile the optimiser's kernels run; the host judges, launches them, and fetches and sends the next batch.
    """
    times, ordered, found = busy(spans), sorted(spans), []
    for i, read in enumerate(ordered):
        if not read.name.startswith("Memcpy DtoH"):
            continue
        later = iter(ordered[i + 1 :])
        copy = next((span for span in later if span.name.startswith("Memcpy HtoD")), None)
        kernel = next((span for span in later if not span.name.startswith(("Memcpy", "Memset"))), None)
        if copy is not None and kernel is not None:
            found.append(idle(times, read.stop, kernel.start))
    return found


def spans_of(recorder: Any, device: str) -> list[Span]:
    """What ran on a card, without the annotations that cover others; on a CPU torch's outermost operations."""
    spans = []
    for event in recorder.events():
        on_card = event.device_type == DeviceType.CUDA and not event.is_user_annotation
        outermost = event.device_type == DeviceType.CPU and event.cpu_parent is None and "::" in event.name
        if on_card if device == "cuda" else outermost:
            spans.append(Span(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name))
    return spans


def idleness(plan: Plan) -> Iterator[Figure | str]:
    """Updates of a run with its loader, under the profiler: the share of the time in which nothing ran, and the gap
    that each read leaves. On a CPU: the share in which none of torch's operations ran.
    """
    if plan.device == "mps":
        raise Skip("torch's profiler sees no kernels of MPS")
    # the host's side of a profile costs it time, which would look like idleness
    activities = [ProfilerActivity.CUDA if plan.device == "cuda" else ProfilerActivity.CPU]
    for name in ("demo",) if plan.brief else ("quick", "small", "matrix0_53m"):
        before, count = (4, 4) if plan.brief else (30, 15)
        overrides = run_overrides(plan, {} if plan.brief else {"data": {"workers": 4}, "train": {"batch_size": 1024}})
        updates = open_run(name, run=f"idle-{name}", steps=before + 2 * count, overrides=overrides).train()
        for stats in updates:
            if stats.step == before:
                break
        with profile(activities=activities):  # the first profile of a process may lose kernels (pytorch issue 192021)
            next(updates)
        with profile(activities=activities) as recorder:
            for _ in range(count):
                next(updates)
        updates.close()
        spans = spans_of(recorder, plan.device)
        check_that(bool(spans), f"{name}: the profiler saw nothing run on {plan.device}")
        start, stop = min(s.start for s in spans), max(s.stop for s in spans)
        share = idle(busy(spans), start, stop) / (stop - start)
        yield f"{name}: idle {share:.1%} of {(stop - start) / count * 1e3:.2f} ms an update (under the profiler)"
        if plan.device == "cuda":
            between = gaps(spans)
            check_that(len(between) >= count // 2, f"{name}: {len(between)} reads in {count} updates, by the profiler")
            gap = statistics.median(between)
            yield Figure(f"{name}, gap after the read", gap, "s", GAP, "what a card may idle")
            check_that(gap < GAP, f"{name}: the card idles {gap * 1e3:.2f} ms after the read, over {GAP * 1e3} ms")
