"""The best micro-batch, by trying: doubling, then halving between the last size that fits and the first that does
not. The update (`train.batch_size`) stays what the user named; only the rows of one pass are looked for.

Doubling and then taking 80 % rounded down to a power of two, as is often done, always ends at half of what fits.
"""

import gc
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch

from matrixlib.engine import memory
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, rows
from matrixlib.hardware import backend
from matrixlib.hardware.speed import seconds_of

TOLERANCE = 0.03  # sizes this near to the best rate are as good: the smallest of them leaves most memory
REPEATS = 2  # timed updates of a trial, after one that warms up
SECONDS = 30.0  # of all trials


@dataclass(frozen=True)
class Trial:
    """One size tried. seconds: of one update. peak_mib: device (CPU: resident) memory. problem: "" if it fits."""

    size: int
    seconds: float | None
    peak_mib: float | None
    problem: str


@dataclass(frozen=True)
class Tuning:
    """size: the micro-batch to use, in rows. trials: all that were made, in their order."""

    size: int
    trials: tuple[Trial, ...]

    def table(self) -> pd.DataFrame:
        """A row a size, smallest first: rows, rows/s, peak MiB, and what came of it."""
        table = [
            {
                "rows": f"{trial.size:,}",
                "rows/s": f"{trial.size / trial.seconds:,.1f}" if trial.seconds is not None else "-",
                "peak MiB": f"{trial.peak_mib:,.0f}" if trial.peak_mib is not None else "-",
                "result": trial.problem or ("best" if trial.size == self.size else "fits"),
            }
            for trial in sorted(self.trials, key=lambda trial: trial.size)
        ]
        return pd.DataFrame(table).set_index("rows")


def largest(works: Callable[[int], float | None], start: int, batch: int) -> tuple[int, dict[int, float | None]]:
    """(best size, seconds by size tried; None = does not fit) of those that cut `batch` rows into parts as equal as
    they can be, of which only the last is smaller.

    works(size): seconds of one update of `size` rows, None where it does not fit. start: about the first size tried.
    Of the sizes that fit, the one with the most rows/s is the best, or the smallest within `TOLERANCE` of it. Raises
    ValueError when not even one row fits.
    """
    sizes = sorted({-(-batch // parts) for parts in range(1, batch + 1)})
    tried: dict[int, float | None] = {}

    def fits(index: int) -> bool:
        tried[sizes[index]] = works(sizes[index])
        return tried[sizes[index]] is not None

    def at_most(size: int) -> int:
        return bisect_right(sizes, size) - 1

    good, bad = at_most(start), len(sizes)
    while not fits(good):
        if good == 0:
            raise ValueError("not even one row fits; use a smaller network, or free memory")
        good, bad = at_most(sizes[good] // 2), good
    while good + 1 < bad:
        doubled = max(good + 1, at_most(2 * sizes[good]))
        index = doubled if bad == len(sizes) else (good + bad) // 2
        if fits(index):
            good = index
        else:
            bad = index
    return best(tried), tried


def best(tried: dict[int, float | None]) -> int:
    """The smallest size whose rows/s are within `TOLERANCE` of the most."""
    rates = {size: size / seconds for size, seconds in tried.items() if seconds is not None}
    return min(size for size, rate in rates.items() if rate >= (1 - TOLERANCE) * max(rates.values()))


def tune_step(step: Step, batch: Batch, limit: float) -> Tuning:
    """The best micro-batch of a throwaway step, for updates of all rows of `batch`. limit: as `memory.limit`."""
    size, start = rows(batch), step.micro_batch

    def update(count: int) -> None:
        step.micro_batch = count
        step({name: tensor[:count] for name, tensor in batch.items()})
        if step.micro_batch < count:  # the step has helped itself
            raise torch.OutOfMemoryError(f"{count} rows do not fit")

    device = step.runtime.torch_device
    return tune(update, size, device, SECONDS, start=min(start, size), limit=limit)


def tune(
    step_of_size: Callable[[int], object],
    batch: int,
    device: torch.device,
    budget_seconds: float,
    *,
    start: int = 32,
    headroom: float = 0.1,
    limit: float = 0.0,
    read: Callable[[torch.device], memory.Figures] = memory.usage,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Find the micro-batch for updates of `batch` rows.

    step_of_size(n): forward, backward and optimiser update of n rows, as in training; it moves weights, so give it
    a copy. headroom: share of the memory that must stay free (measured, so sizes are not rounded for it). limit: as
    `memory.limit`. A size that would, by the trials before it, overrun the memory (not on CUDA, where trying is
    harmless: elsewhere the system swaps, or kills the process) or the time left is not tried.
    Raises ValueError when not even one row fits; any error but running out of memory is passed on.
    """
    trials: list[Trial] = []
    deadline = clock() + budget_seconds
    allowed = 1.0 - headroom
    idle = memory.share(read(device), limit)
    slope = pace = 0.0  # share of memory and seconds of one row, from the largest size that fitted

    def works(size: int) -> float | None:
        nonlocal slope, pace
        if device.type != "cuda" and idle + slope * size > allowed:
            return record(Trial(size, None, None, "too little memory, by the smaller sizes"))
        if clock() + pace * size * (1 + REPEATS) > deadline:
            return record(Trial(size, None, None, "too little time left"))
        seconds, peak = _timed(step_of_size, size, device, read, clock)
        peak_mib = peak.get("driver_mib", peak["rss_mib"])
        used = memory.share(peak, limit)
        if seconds is None:
            return record(Trial(size, None, None, "out of memory"))
        if used > allowed:
            return record(Trial(size, None, peak_mib, f"{used:.0%} of the memory, more than {allowed:.0%}"))
        slope, pace = max(0.0, used - idle) / size, seconds / size
        return record(Trial(size, seconds, peak_mib, ""))

    def record(trial: Trial) -> float | None:
        trials.append(trial)
        return trial.seconds

    size, _ = largest(works, start, batch)
    return Tuning(size, tuple(trials))


def _timed(
    step_of_size: Callable[[int], object],
    size: int,
    device: torch.device,
    read: Callable[[torch.device], memory.Figures],
    clock: Callable[[], float],
) -> tuple[float | None, memory.Figures]:
    """(seconds of the faster update, None if memory ran out; figures at the highest use)."""
    backend.empty_cache(device)  # else the driver's count would hold the blocks of larger sizes
    seconds: float | None = None
    try:
        with memory.sampled(device, read) as peak:
            times = [seconds_of(lambda: step_of_size(size), device.type, clock) for _ in range(1 + REPEATS)]
            seconds = min(times[1:])
    except (RuntimeError, MemoryError) as error:
        if not memory.out_of_memory(error):
            raise
        seconds = None
    if seconds is None:
        gc.collect()  # what the failed update left in reference cycles
    return seconds, peak
