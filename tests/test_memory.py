"""Memory: figures, thresholds, the cache, and what running out of it looks like."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_task import toy_batch

from matrixlib.config import MemoryConfig
from matrixlib.engine.memory import (
    CALM_CHECKS,
    MEBI,
    Chunk,
    Monitor,
    OomBackoff,
    needed,
    out_of_memory,
    share,
    usage,
)
from matrixlib.engine.stats import Event

ROOT = Path(__file__).resolve().parents[1]
CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
CONFIG = MemoryConfig(limit=0.0, warn=0.85, clear=0.92)


class Accelerator:
    """Stands for torch.cuda or torch.mps: 1,000 MiB in all; `held` is what the allocator has from the driver."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        self.tensors, self.held, self.others, self.peak, self.clears, self.limits = 100, 200, 50, 150, 0, []
        functions: dict[str, Any] = {
            "empty_cache": self.empty,
            "set_per_process_memory_fraction": self.limit,
            "mem_get_info": lambda device: ((1000 - self.held - self.others) * MEBI, 1000 * MEBI),
            "memory_allocated": lambda device: self.tensors * MEBI,
            "max_memory_allocated": lambda device: self.peak * MEBI,
            "memory_reserved": lambda device: self.held * MEBI,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.tensors),
            "current_allocated_memory": lambda: self.tensors * MEBI,
            "driver_allocated_memory": lambda: self.held * MEBI,
            "recommended_max_memory": lambda: 1000 * MEBI,
        }
        for name in functions.keys() & vars(module).keys():
            patch.setattr(module, name, functions[name])

    def empty(self) -> None:
        self.held = self.tensors
        self.clears += 1

    def limit(self, fraction: float, device: Any = None) -> None:
        assert isinstance(fraction, float)  # torch raises TypeError otherwise
        assert device is None or isinstance(device, int)  # and ValueError for a device without an index
        self.limits.append(fraction)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return Accelerator(monkeypatch, torch.cuda)


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return Accelerator(monkeypatch, torch.mps)


def test_figures_of_accelerators(cuda: Accelerator, mps: Accelerator) -> None:
    """Allocated, reserved and the driver's count differ: all three are there."""
    names = ("allocated_mib", "allocated_peak_mib", "reserved_mib", "driver_mib", "device_total_mib")
    assert [usage(CUDA)[name] for name in names] == [100, 150, 200, 250, 1000]
    assert [usage(MPS).get(name) for name in names] == [100, None, None, 200, 1000]


# Thresholds


def monitor(accelerator: Accelerator, **changes: float) -> Monitor:
    return Monitor(CUDA, CONFIG.model_copy(update=changes))


def test_a_healthy_run_says_nothing_and_clears_nothing(cuda: Accelerator) -> None:
    watch = monitor(cuda)
    assert watch.apply_limit() == ""
    for step in range(0, 2000, 10):
        cuda.held = 200 + step % 500
        assert watch.check(step) == []
    assert (cuda.clears, watch.interval()["clears"], cuda.limits) == (0, 0, [])


def test_tight_memory_is_told(cuda: Accelerator) -> None:
    watch = monitor(cuda, clear=1.0)
    cuda.held, cuda.others = 840, 0
    assert watch.check(1) == []
    cuda.held = 860
    (message,) = watch.check(2)
    assert message == (
        "memory: 86% in use after update 2; a smaller train.micro_batch needs less, or model.checkpoint_every"
    )
    assert message.event is Event.MEMORY
    full = Monitor(CPU, CONFIG, lambda device: {"rss_mib": 99.0, "total_mib": 100.0})
    assert [message.event for message in full.check(1)] == [Event.MEMORY]
    assert full.interval()["clears"] == 0, "the CPU has no cache to clear"


def test_cache_is_cleared_once_while_the_next_update_fills_it_again(cuda: Accelerator) -> None:
    """The trap: a clear makes the use fall, which must not arm the next clear."""
    watch = monitor(cuda, warn=1.0)
    for step in range(0, 1000, 10):
        cuda.held, cuda.others = 950, 0  # each update takes the blocks again
        messages = watch.check(step)
        cleared = ["memory: 95% in use after update 0; clearing the cache gave back 850 MiB"]
        assert messages == ([] if step else cleared)
    assert [cuda.clears, watch.interval()["clears"], watch.interval()["clears"]] == [1, 1, 0]
    for held in (500, 950):  # it was not needed meanwhile
        cuda.held = held
        watch.check(1000)
    assert cuda.clears == 2


def test_nothing_else_empties_the_cache() -> None:
    """Neither the package nor a notebook: one clear too many costs more than it frees."""
    files = [path for kind in ("matrixlib/**/*.py", "notebooks/*.ipynb") for path in ROOT.glob(kind)]
    found = [path.name for path in files if "empty_cache" in path.read_text(encoding="utf-8")]
    assert len(files) > 30
    assert set(found) <= {"backend.py", "memory.py", "run.py"}, "between trials and in one place"


# Limit and intervals


def test_limit_on_mps_is_a_share_of_what_metal_recommends(mps: Accelerator, cuda: Accelerator) -> None:
    watch = monitor(cuda, limit=0.5)
    assert watch.apply_limit() == "memory.limit: this process may take 500 of 1,000 MiB"
    cuda.held = 450  # 90 % of what it may take
    assert (cuda.limits, len(watch.check(1))) == ([0.5], 1)
    limited = CONFIG.model_copy(update={"limit": 0.9})
    assert Monitor(MPS, limited).apply_limit() == "memory.limit: this process may take 900 of 1,000 MiB"
    assert mps.limits == [0.9]
    assert "not applied" in Monitor(CPU, limited).apply_limit()


def test_interval_elsewhere_has_the_most_that_a_check_saw_and_falls_again(mps: Accelerator) -> None:
    """Though the peak of the process never does."""
    watch = Monitor(MPS, CONFIG)
    for step, tensors in enumerate((100, 300, 200)):
        mps.tensors = tensors
        watch.check(step)
    assert [watch.interval()["peak_mib"] for _ in range(2)] == [300, 200]


def test_interval_on_cuda_has_the_exact_peak_and_resets_it(cuda: Accelerator) -> None:
    watch = monitor(cuda)
    assert [watch.interval()[name] for name in ("peak_mib", "share", "allocated_mib")] == [150, 0.25, 100]
    cuda.peak = 180
    usage(CUDA)  # the heartbeat reads, too, and resets nothing
    assert [watch.interval()["peak_mib"] for _ in range(2)] == [180, 100]


def test_the_trials_before_a_run_are_no_part_of_it(cuda: Accelerator) -> None:
    """The trap: the self-test leaves a cache and a peak of 95 %, and the first look takes them for the run's own."""
    cuda.held, cuda.others, cuda.peak = 950, 0, 950
    watch = monitor(cuda)
    watch.begin()
    assert (watch.check(10), watch.needed, watch.interval()["clears"]) == ([], 0.1, 0)


# Running out


@pytest.mark.parametrize(
    ("error", "on_the_cpu", "on_mps"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True, True),
        (MemoryError(), True, True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.89 GB)."), False, True),  # no English text is read
        (torch.AcceleratorError("CUDA error: out of memory"), False, False),  # asynchronous: the context is dead
        (torch.AcceleratorError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), False, False),
        (OSError(28, "No space left on device"), False, False),
        (ValueError("out of memory"), False, False),
    ],
)
def test_what_running_out_of_memory_is(error: BaseException, on_the_cpu: bool, on_mps: bool) -> None:
    assert (out_of_memory(error), out_of_memory(error, CPU), out_of_memory(error, MPS)) == (
        on_the_cpu,
        on_the_cpu,
        on_mps,
    )


PROGRAM = """
import resource, sys
import torch
from torch import nn
from matrixlib.engine.memory import out_of_memory

torch.set_num_threads(1)
net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.SiLU())])
adamw = torch.optim.AdamW(net.parameters())

def update(rows):
    net(torch.rand(rows, 32, 8, 8)).square().sum().backward()
    adamw.step()

update(8)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 200 * 2**20,) * 2)
for work in (lambda: update(65536), lambda: bytearray(2**33)):
    failed = None
    try:
        work()
    except Exception as error:
        failed = type(error).__name__, out_of_memory(error)
    print(*failed)
    update(256)  # in smaller parts it goes on
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS binds on Linux alone")
def test_the_cpu_runs_out_for_real_and_goes_on_in_smaller_parts() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["RuntimeError True", "MemoryError True", "done"], done.stderr


def test_a_chunk_halves_while_memory_is_tight_and_grows_back_slowly() -> None:
    chunk = Chunk()
    assert [chunk.check(0.9, 0.85, 64) for _ in range(5)] == [True, True, True, False, False]
    assert chunk.rows == 8  # an eighth
    assert not any(chunk.check(0.80, 0.85, 64) for _ in range(3 * CALM_CHECKS))  # below, but not well below
    sizes = []
    for _ in range(3 * CALM_CHECKS):
        chunk.check(0.5, 0.85, 64)
        sizes.append(chunk.rows)
    assert sizes == [8] * (CALM_CHECKS - 1) + [16] * CALM_CHECKS + [32] * CALM_CHECKS + [0]
    chunk = Chunk(rows=8)
    assert not any(chunk.check(used, 0.85, 64) for used in (0.5, 0.84) * CALM_CHECKS), "calm only now and then"
    chunk = Chunk(rows=64)
    assert (chunk.check(0.9, 0.85, 16), chunk.rows) == (True, 8), "of a halved micro-batch"
    assert not Chunk().check(0.9, 0.85, 1), "one row is not cut"


def test_what_is_needed_leaves_the_allocators_cache_out() -> None:
    figures = {"allocated_peak_mib": 20.0, "reserved_mib": 90.0, "driver_mib": 95.0, "device_total_mib": 100.0}
    assert [share(figures), needed(figures), needed(figures, limit=0.5)] == [0.95, 0.2, 0.4]
    assert needed({"rss_mib": 30.0, "total_mib": 100.0}) == 0.3
    assert share({"driver_mib": 600.0, "device_total_mib": 1000.0}, limit=0.75) == 0.8, "of MPS's share"
    assert share(figures, limit=0.99) == 0.95, "the device's end is nearer"


def test_a_pass_that_does_not_fit_is_cut_and_the_next_ones_too() -> None:
    sizes = []

    def work(part: dict[str, torch.Tensor]) -> list[float]:
        sizes.append(len(part["x"]))
        if sizes[-1] > 9:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
        return part["target"].tolist()

    passes, batch = OomBackoff(), toy_batch(30)
    for _ in range(2):
        assert [value for part in passes.over(batch, work) for value in part] == batch["target"].tolist()
    assert sizes == [30, 15, 8, 8, 8, 6, 8, 8, 8, 6]
    messages = passes.take()
    assert ["of 30 rows" in messages[0], "with 8" in messages[1], len(messages)] == [True, True, 2]
    assert passes.take() == []

    def broken(part: dict[str, torch.Tensor]) -> None:
        raise torch.OutOfMemoryError("not even one row")

    with pytest.raises(torch.OutOfMemoryError, match="not even one row"):
        list(passes.over(batch, broken))
