"""Speed of this machine: bf16 against fp32 for the policy, peak rates of a device, alternating timings.

torch is imported inside functions.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from matrixlib.hardware.backend import synchronize

SIDES = (1024, 2048, 4096, 8192)
REPEAT = 10  # calls timed at once on an accelerator, to hide launch time
PIECE = {True: (512, 4), False: (2048, 256)}  # on the CPU? -> matrix side, boards: enough to compare
WARM_CALLS, MIN_CALLS, MAX_CALLS = 10, 3, 200  # of each function in `turns`; the first do not count
Kinds = Mapping[str, tuple[float, Callable[[], object]]]  # name -> (FLOP of a call, call)


def seconds_of(work: Callable[[], object], device: str = "cpu", calls: int = 1) -> float:
    """Seconds of `calls` calls, including their work on `device`."""
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - began


def turns(works: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of a call by name, after warm-up (at least one call, at most `WARM_CALLS` in a tenth of the time).

    Calls alternate for `seconds` in total, at least `MIN_CALLS` each, so that the machine's changes affect all alike.
    """
    times: dict[str, list[float]] = {}
    for least, most, share in ((1, WARM_CALLS, 0.1), (MIN_CALLS, MAX_CALLS, 1.0)):
        times = {name: [] for name in works}  # the first round warms up
        end = time.perf_counter() + share * seconds
        for count in range(most):
            if count >= least and time.perf_counter() > end:
                break
            for name, work in works.items():
                times[name].append(seconds_of(work))
    return {name: statistics.median(values) for name, values in times.items()}


def bf16_gain(device: str, seconds: float = 0.3) -> tuple[float, float]:
    """Speed-up of bf16 over fp32 (matrix product, 3x3 convolution on 8x8 boards forward and backward), on one CPU core
    or a whole accelerator. Takes about `seconds`.

    Robust on a busy machine: short alternating pieces (on the CPU at most 1 ms, one thread), and the best of each.
    """
    kinds: dict[str, tuple[float, Callable[[], object]]] = {}
    side, boards = PIECE[device == "cpu"]
    for dtype in ("fp32", "bf16"):
        kinds[f"product {dtype}"] = _product(device, dtype, side)
        kinds[f"convolution {dtype}"] = _convolution(device, dtype, boards)
    best = _best(kinds, device, 1, seconds)
    return best["product bf16"] / best["product fp32"], best["convolution bf16"] / best["convolution fp32"]


def matrix_rate(device: str, dtype: str, threads: int, seconds: float = 0.3) -> float:
    """GFLOP/s of a matrix product on the whole device in fp32, bf16 or fp16: the peak of MFU.

    Best of about `seconds` (two products or more) of matrices that take up to a quarter of it; fp32 as TF32 is set.
    """
    sides, repeat = (SIDES, 1) if device == "cpu" else (SIDES[1:], REPEAT)
    small = 1e9 * _best({dtype: _product(device, dtype, sides[0])}, device, threads, 0.0)[dtype]
    fit = [n for n in sides if 2.0 * n**3 * repeat / small <= seconds / 4]
    largest = _product(device, dtype, max(fit, default=sides[0]))
    return round(_best({dtype: largest}, device, threads, seconds)[dtype], 1)


def _best(kinds: Kinds, device: str, threads: int, seconds: float) -> dict[str, float]:
    """Name -> best rate (FLOP / 1e9 a second) with so many torch threads, alternating for `seconds`, at least one round
    after the first. (torch.utils.benchmark imports setuptools.)"""
    import torch

    before, repeat, best = torch.get_num_threads(), 1 if device == "cpu" else REPEAT, dict.fromkeys(kinds, 0.0)
    torch.set_num_threads(threads)
    try:
        for _, call in kinds.values():
            seconds_of(call, device, repeat)
        end = time.perf_counter() + seconds
        while True:
            for name, (flops, call) in kinds.items():
                best[name] = max(best[name], repeat * flops / 1e9 / seconds_of(call, device, repeat))
            if time.perf_counter() > end:
                return best
    finally:
        torch.set_num_threads(before)


def _product(device: str, dtype: str, n: int) -> tuple[float, Callable[[], object]]:
    """(FLOP, call) of a square matrix product.

    Random numbers: constant ones draw so little power that a GPU clocks an eighth higher.
    """
    a, b = _noise(device, dtype, n, n), _noise(device, dtype, n, n)
    return 2.0 * n**3, lambda: a @ b


def _convolution(device: str, dtype: str, boards: int) -> tuple[float, Callable[[], object]]:
    """(FLOP, call) of a 3x3 convolution on `boards` boards with 96 channels, forward and backward."""
    import torch

    x, w = (_noise(device, dtype, *shape).requires_grad_() for shape in ((boards, 96, 8, 8), (96, 96, 3, 3)))
    flops = 3 * 2.0 * boards * 64 * 96 * 96 * 9
    return flops, lambda: torch.autograd.grad(torch.conv2d(x, w, padding=1).sum(), (x, w))


def _noise(device: str, dtype: str, *shape: int) -> Any:
    """Normal numbers from a separate stream, not a run's."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return torch.randn(shape, generator=generator, device=device).to(kind)
