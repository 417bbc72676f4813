"""How fast this machine is: a quick comparison for the policy, whole-device rates for people, calls timed in turns.

torch is imported inside functions.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from matrixlib.hardware.backend import synchronize
from matrixlib.hardware.machine import Rates

if TYPE_CHECKING:
    import torch

SIDES = (1024, 2048, 4096, 8192)
REPEAT = 10
"""Products of a call on an accelerator, so that starting them does not count."""
PIECE = {True: (512, 4), False: (2048, 256)}
"""Side of the matrices and number of boards that are enough to compare by, on the CPU and elsewhere."""
WARM, FEWEST, MOST = 10, 3, 200
"""Calls of each function in `turns`: those that do not count at most, and those that do."""
Kinds = Mapping[str, tuple[float, Callable[[], object]]]
"""Name -> (FLOP or bytes of a call, call)."""


def seconds_of(
    work: Callable[[], object], device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of one call, with all that it has `device` do."""
    began = clock()
    work()
    synchronize(device)
    return clock() - began


def turns(works: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of a call by name, after calls of each that warm up: one, and up to `WARM` in a tenth of the time.

    The calls alternate for `seconds` in all, `FEWEST` of each at least, so that a change in the machine's speed meets
    all alike.
    """
    if not math.isfinite(seconds):
        raise ValueError(f"measuring for {seconds} seconds has no end: give a number")
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + seconds / 10
    for count in range(WARM):
        if count and time.perf_counter() > end:
            break
        for work in works.values():
            work()
    end = time.perf_counter() + seconds
    for count in range(1, MOST + 1):
        for name, work in works.items():
            times[name].append(seconds_of(work))
        if count >= FEWEST and time.perf_counter() > end:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def rates(device: str, bf16: bool, seconds: float = 0.8) -> Rates:
    """Measure one core of the CPU, or a whole accelerator, for about `seconds`; bf16 where `bf16` says that it has it.

    Meant to compare, and to come to the same end on a busy machine: short pieces take turns (on the CPU of a
    millisecond at most, on one thread), and the best of each counts.
    """
    import torch

    kinds: dict[str, tuple[float, Callable[[], object]]] = {}
    side, boards = PIECE[device == "cpu"]
    with _threads(1) if device == "cpu" else contextlib.nullcontext():
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))[: 2 if bf16 else 1]:
            kinds[f"matrix_{name}"] = _product(device, dtype, side)
            kinds[f"conv_{name}"] = _convolution(device, dtype, boards, last=False)
            if device == "cpu":
                kinds[f"conv_{name}_last"] = _convolution(device, dtype, boards, last=True)
        best = _best(kinds, seconds)
    return Rates(**{name: round(best.get(name, 0.0), 1) for name in Rates.__dataclass_fields__})


def device_rates(device: str, bf16: bool, threads: int, seconds: float = 2.0) -> dict[str, float]:
    """What `device` does with all its cores: "fp32" (and "bf16" where requested) in GFLOP/s, "copy" in GB/s.

    The first two are matrix products, fp32 under torch's present TF32 setting. The copy is of 256 MiB within
    the device's memory; reading and writing both count.
    """
    import torch

    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        synchronize(device)

    kinds: dict[str, tuple[float, Callable[[], object]]] = {}
    with _threads(threads):
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))[: 2 if bf16 else 1]:
            kinds[name] = _product(device, dtype, _side(device, dtype, seconds))
        kinds["copy"] = (2.0 * source.numel() * source.element_size(), copy)
        return {name: round(value, 1) for name, value in _best(kinds, seconds).items()}


def matrix_rate(device: str, dtype: str, threads: int, seconds: float = 0.3) -> float:
    """GFLOP/s of a matrix product on the whole device in fp32, bf16 or fp16: what a share of the peak is a share of.

    The best of about `seconds`, two products at least. fp32 is under torch's present TF32 setting.
    """
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    with _threads(threads):
        rows = _side(device, kind, seconds)
        return round(_best({dtype: _product(device, kind, rows)}, seconds)[dtype], 1)


def copy_rate() -> float:
    """Bytes a second that one core copies in memory."""
    source = np.ones(2**27, np.uint8)
    target = np.empty_like(source)
    return source.nbytes / turns({"copy": lambda: np.copyto(target, source)}, 0.2)["copy"]


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many intra-op threads for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _best(kinds: Kinds, seconds: float) -> dict[str, float]:
    """Name -> the best rate (work / 1e9 a second), calls in turns; `seconds` in all, but one turn at least."""
    for _, call in kinds.values():
        call()
    best = dict.fromkeys(kinds, 0.0)
    end = time.perf_counter() + seconds
    while True:
        for name, (work, call) in kinds.items():
            best[name] = max(best[name], work / 1e9 / seconds_of(call))
        if time.perf_counter() > end:
            return best


def _side(device: str, dtype: torch.dtype, seconds: float) -> int:
    """Rows of the matrices to multiply: 1024 on the CPU, 2048 on an accelerator, and up to 8192 as long as a call takes
    a quarter of `seconds` at most, by the rate of the small ones.
    """
    sides, repeat = (SIDES, 1) if device == "cpu" else (SIDES[1:], REPEAT)
    rate = 1e9 * _best({"": _product(device, dtype, sides[0])}, 0.0)[""]
    fit = [n for n in sides if 2.0 * n**3 * repeat / rate <= seconds / 4]
    return max(fit, default=sides[0])


def _product(device: str, dtype: torch.dtype, n: int) -> tuple[float, Callable[[], object]]:
    """(FLOP, call) of a square matrix product that has ended when the call returns.

    Of random numbers: ones switch so few transistors that a GPU clocks an eighth higher than with data.
    """
    import torch

    a, b = _noise(device, dtype, n, n), _noise(device, dtype, n, n)
    repeat = 1 if device == "cpu" else REPEAT

    def call() -> None:
        for _ in range(repeat):
            torch.mm(a, b)
        synchronize(device)

    return 2.0 * n**3 * repeat, call


def _convolution(device: str, dtype: torch.dtype, boards: int, last: bool) -> tuple[float, Callable[[], object]]:
    """(FLOP, call) of a 3x3 convolution over so many boards with 96 channels, forward and backward."""
    import torch
    from torch.nn import functional

    memory_format = torch.channels_last if last else torch.contiguous_format
    x = _noise(device, dtype, boards, 96, 8, 8).contiguous(memory_format=memory_format).requires_grad_()
    w = _noise(device, dtype, 96, 96, 3, 3).contiguous(memory_format=memory_format).requires_grad_()
    repeat = 1 if device == "cpu" else REPEAT

    def call() -> None:
        for _ in range(repeat):
            torch.autograd.grad(functional.conv2d(x, w, padding=1).sum(), (x, w))
        synchronize(device)

    return 3 * 2.0 * boards * 64 * 96 * 96 * 9 * repeat, call


def _noise(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Normal numbers, from a stream of their own: measuring leaves those of a run alone."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)
