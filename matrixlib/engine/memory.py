"""Memory of this process and its device in MiB: thresholds, allocator cache, out-of-memory backoff.

The cache is emptied only here, and never in a healthy run: the next update would allocate the same blocks.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch

from matrixlib.config import MemoryConfig
from matrixlib.engine.stats import Event, Message
from matrixlib.engine.task import Batch, Task, rows, slice_batch
from matrixlib.hardware import backend, machine

MEBI = 2**20
HYSTERESIS = 0.05  # drop below a threshold that rearms it
CALM_CHECKS = 10  # in a row before a chunk grows again
ALLOCATORS = ("DefaultCPUAllocator", "_STATUS_ALLOC_FAILED")
"""Markers of the CPU allocator and of cuBLAS, cuDNN, cuSOLVER in errors without their own class."""

Figures = dict[str, float]
Result = TypeVar("Result")


def usage(device: torch.device) -> Figures:
    """MiB held by this process (`rss_mib`, `rss_peak_mib`), `total_mib`, and the fields of `backend.memory`."""
    info = psutil.Process().memory_info()
    if sys.platform == "win32":
        peak = info.peak_wset
    else:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sizes = {"rss": info.rss, "rss_peak": max(info.rss, peak), "total": machine.memory(), **backend.memory(device)}
    return {f"{name}_mib": round(size / MEBI, 1) for name, size in sizes.items()}


def share(figures: Mapping[str, float], limit: float = 0.0) -> float:
    """Share of memory in use: the device's, or of `memory.limit` if lower; on the CPU the process's."""
    if "device_total_mib" not in figures:
        return figures["rss_mib"] / figures["total_mib"]
    own = figures.get("reserved_mib", figures["driver_mib"])
    total = figures["device_total_mib"]
    return max(figures["driver_mib"] / total, own / (total * (limit or 1.0)))


def needed(figures: Mapping[str, float], limit: float = 0.0) -> float:
    """As `share`, of the peak of tensors where known (CUDA): between updates activations are gone."""
    if "allocated_peak_mib" not in figures:
        return share(figures, limit)
    return figures["allocated_peak_mib"] / (figures["device_total_mib"] * (limit or 1.0))


def out_of_memory(error: BaseException, device: torch.device | None = None) -> bool:
    """Whether an allocation failed, so that smaller parts may succeed. Leave the `except` clause before retrying: the
    traceback keeps tensors alive. device: on an accelerator unclassified errors may also be OOM (MPS, cuDNN); halving
    then shows."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, torch.AcceleratorError):  # the CUDA context is lost
        return False
    return (device is not None and device.type != "cpu") or any(name in str(error) for name in ALLOCATORS)


def first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def fresh_model(task: Task) -> torch.nn.Module:
    """A new network of the task. ValueError if it does not fit into memory."""
    try:
        return task.build_model()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ValueError(f"no memory for this network, make it smaller: {first_line(error)[:200]}") from error


class OomBackoff:
    """Splits batches into smaller no-grad passes when memory runs out. rows: limit of a pass, 0 = whole batches."""

    def __init__(self) -> None:
        self.rows = 0
        self._messages: list[Message] = []

    def over(self, batch: Batch, work: Callable[[Batch], Result]) -> Iterator[Result]:
        """Results of `work` on the parts of a host batch, in order; an OOM at a single row is raised."""
        start, end = 0, rows(batch)
        while start < end:
            stop = min(end, start + (self.rows or end))
            try:
                result = work(slice_batch(batch, start, stop))
            except (RuntimeError, MemoryError) as error:
                if stop - start == 1 or not out_of_memory(error):
                    raise
                self.rows = -(-(stop - start) // 2)
                text = (
                    f"out of memory in a pass of {stop - start} rows without gradients ({first_line(error)}); it is "
                    f"repeated with {self.rows}, which the run keeps from now on"
                )
                self._messages.append(Message(Event.OUT_OF_MEMORY, text, "without gradients"))
                continue
            start = stop
            yield result

    def take(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages


@dataclass
class Chunk:
    """Rows that SSL layers process at once, 0 = all. calm: checks in a row below the threshold."""

    rows: int = 0
    calm: int = 0
    changes: int = 0

    def check(self, used: float, warn: float, micro_batch: int) -> bool:
        """Halve `rows` above `warn`, down to an eighth; double them after calm checks. True if changed."""
        before, present = self.rows, min(self.rows or micro_batch, micro_batch)
        self.calm = self.calm + 1 if used < warn - 2 * HYSTERESIS else 0
        if used > warn and present // 2 >= max(1, micro_batch // 8):
            self.rows = present // 2
        elif self.rows and self.calm >= CALM_CHECKS:
            self.rows, self.calm = 2 * present if 2 * present < micro_batch else 0, 0
        self.changes += self.rows != before
        return self.rows != before


class Monitor:
    """Warns above `memory.warn`, empties the allocator cache above `memory.clear`."""

    def __init__(
        self, device: torch.device, config: MemoryConfig, read: Callable[[torch.device], Figures] = usage
    ) -> None:
        self._device, self._config, self._limit, self._read = device, config, float(config.limit), read
        self._may_clear, self._clears, self._peak, self.needed = True, 0, 0.0, 0.0

    def apply_limit(self) -> str:
        """Apply `memory.limit` to the allocator; what was done, as text, "" without a limit."""
        if not self._limit:
            return ""
        if self._device.type == "cpu":
            return "memory.limit is not applied: it is for an accelerator; limit the CPU by a cgroup or `ulimit -v`"
        backend.limit_memory(self._device, self._limit)
        total = self._read(self._device)["device_total_mib"]
        return f"memory.limit: this process may take {self._limit * total:,.0f} of {total:,.0f} MiB"

    def begin(self) -> None:
        """Reset peaks after trial updates before the run."""
        if self._device.type != "cpu":
            gc.collect()  # frees their networks, which are in reference cycles
            backend.empty_cache(self._device)
        self._forget_peak()

    def check(self, step: int) -> list[Message]:
        """Measure after update `step`; messages. While usage stays high the cache is cleared once."""
        figures = self._measure()
        used, self.needed = share(figures, self._limit), needed(figures, self._limit)
        text, messages = f"memory: {used:.0%} in use after update {step};", list[Message]()
        if used > self._config.warn:  # every time: the trainer rate-limits messages
            advice = "a smaller train.micro_batch needs less, or model.checkpoint_every"
            messages.append(Message(Event.MEMORY, f"{text} {advice}"))
        self._may_clear = self._may_clear or used < self._config.clear - HYSTERESIS
        if used > self._config.clear and self._may_clear and self._device.type != "cpu":
            self._may_clear = False
            self._clear()
            back = figures["driver_mib"] - self._read(self._device)["driver_mib"]
            messages.append(Message(Event.CACHE_CLEARED, f"{text} clearing the cache gave back {back:,.0f} MiB"))
        return messages

    def chunked(self, step: int, present: int, size: int) -> Message:
        """Message that SSL rows at once changed to `present` (0 = all) of `size`."""
        if self._device.type == "mps":  # its cache counts as used, so usage would never fall
            self._clear()
        text = f"memory: the self-supervised heads work on {present or size} of {size} rows at once after update {step}"
        return Message(Event.CHUNK, text)

    def current(self) -> Figures:
        """`usage` and the device's utilisation now; resets nothing."""
        return self._read(self._device) | backend.utilisation(self._device)

    def interval(self) -> Figures:
        """`usage` and `share` now; `clears` and `peak_mib` since the last call (except CUDA: of the checks)."""
        figures = self._measure() | backend.utilisation(self._device)
        peak = figures.get("allocated_peak_mib", self._peak)
        figures |= {"share": round(share(figures, self._limit), 4), "peak_mib": peak, "clears": self._clears}
        self._forget_peak()
        self._clears = 0
        return figures

    def _clear(self) -> None:
        backend.empty_cache(self._device)
        self._clears += 1

    def _forget_peak(self) -> None:
        backend.reset_peak_memory(self._device)
        self._peak = 0.0

    def _measure(self) -> Figures:
        figures = self._read(self._device)
        self._peak = max(self._peak, figures.get("allocated_mib", figures["rss_mib"]))
        return figures
