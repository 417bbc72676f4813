"""The micro-batch tuner: the search by tables over made-up memories, the driving by a made-up device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.engine.memory import Figures
from matrixlib.engine.microbatch import TOLERANCE, Tuning, best, largest, tune, tune_step
from matrixlib.engine.step import throwaway
from matrixlib.engine.task import Batch
from matrixlib.hardware import backend
from matrixlib.tasks import load_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def seconds(size: int) -> float:
    """A fixed cost and one a row: the larger, the faster."""
    return 1.0 + 0.001 * size


@pytest.mark.parametrize(
    "capacity, start, batch, expected",
    [
        (600, 32, 4096, 586),  # not 256, where 80 % of 512 rounded down to a power of two would end
        (512, 32, 4096, 512),
        (511, 32, 4096, 456),  # nine parts, of which the last is smaller
        (300, 32, 1000, 250),
        (9999, 32, 1024, 1024),  # all at once
        (9999, 7, 7, 7),
        (600, 32, 1009, 505),  # a prime
        (3, 7, 7, 3),
        (5, 32, 4096, 5),  # starts too large
        (1, 32, 4096, 1),
        (40, 32, 96, 32),
        (96, 32, 96, 96),
    ],
)
def test_the_best_size_for_a_memory(capacity: int, start: int, batch: int, expected: int) -> None:
    size, tried = largest(lambda n: seconds(n) if n <= capacity else None, start, batch)
    assert size == expected
    assert all(n == -(-batch // -(-batch // n)) for n in tried), "no smaller size needs as few passes"
    assert all((value is None) == (n > capacity) for n, value in tried.items())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 5000))
def test_the_largest_size_that_fits_is_tried_and_none_twice(capacity: int, start: int, batch: int) -> None:
    calls = []

    def works(size: int) -> float | None:
        calls.append(size)
        return seconds(size) if size <= capacity else None

    size, _ = largest(works, start, batch)
    assert size <= capacity
    assert max(n for n in calls if n <= capacity) == max(
        n for parts in range(1, batch + 1) if (n := -(-batch // parts)) <= capacity
    )
    assert len(calls) == len(set(calls)) <= 20


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="not even one row"):
        largest(lambda size: None, 32, 256)


def test_the_smallest_of_those_that_are_as_good() -> None:
    """Rows/s: 8 -> 80, 16 -> 98, 32 -> 100, 64 -> 90 (say, out of the cache), 128 does not fit."""
    rates = {8: 80, 16: 98, 32: 100, 64: 90}
    tried: dict[int, float | None] = {size: size / rate for size, rate in rates.items()}
    assert TOLERANCE == 0.03
    assert best(tried | {128: None}) == 16
    assert best({8: 0.1, 16: 0.2, 32: 0.4}) == 8


# Driving


class Machine:
    """A device where a row takes 1 MiB of 1,000 and 10 ms; 100 MiB are in use before anything is done."""

    def __init__(self, on_cuda: bool = False) -> None:
        self.now, self.used, self.runs, self.on_cuda = 0.0, 100, [], on_cuda

    def step(self, size: int) -> None:
        self.runs.append(size)
        self.used = 100 + size
        if self.used > 1000:
            self.used = 100
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.now += 0.5 + 0.01 * size

    def read(self, device: torch.device) -> Figures:
        found = {"rss_mib": float(self.used), "total_mib": 1000.0}
        return {**found, "driver_mib": found["rss_mib"], "device_total_mib": 1000.0} if self.on_cuda else found

    def tune(self, batch: int, device: torch.device = CPU, budget: float = 1e6, **options: float) -> Tuning:
        return tune(self.step, batch, device, budget, read=self.read, clock=lambda: self.now, **options)


def test_headroom_is_measured_and_what_would_overrun_the_memory_is_not_run() -> None:
    """On the CPU an update that is too large does not fail: the machine swaps, or the process is killed."""
    machine = Machine()
    tuning = machine.tune(batch=960, headroom=0.2)
    assert tuning.size == 480  # the next is 960
    assert max(machine.runs) == 480
    for headroom, most in {0.15: 700, 0.25: 560}.items():  # the next is 1,400
        machine = Machine()
        machine.tune(batch=2800, headroom=headroom)
        assert max(machine.runs) == most
    assert [t.problem for t in tuning.trials if t.size == 960] == ["too little memory, by the smaller sizes"]


def test_running_out_on_an_accelerator_is_a_trial_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    cleared = []
    machine = Machine(on_cuda=True)

    def clear(device: torch.device) -> None:
        cleared.append(device)
        machine.used = 100

    monkeypatch.setattr(backend, "empty_cache", clear)
    tuning = machine.tune(2048, CUDA, headroom=0.0)
    assert tuning.size == 512
    problems = {trial.size: trial.problem for trial in tuning.trials}
    assert problems == {32: "", 64: "", 128: "", 256: "", 512: "", 683: "", 1024: "out of memory"}
    assert len(cleared) == len(tuning.trials)  # before each trial, or the driver's count would be of an earlier one
    tight = machine.tune(2048, CUDA, headroom=0.5)
    assert tight.size == 342
    assert {t.size: t.problem for t in tight.trials}[512] == "61% of the memory, more than 50%"


def test_time_is_bounded() -> None:
    machine = Machine()
    tuning = machine.tune(batch=512, budget=20.0)
    assert machine.now <= 20.0 + 3 * 0.5
    assert {t.problem for t in tuning.trials} == {"", "too little time left"}
    assert tuning.size == max(t.size for t in tuning.trials if not t.problem)


def test_other_errors_are_passed_on() -> None:
    def broken(size: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        tune(broken, 64, CPU, 10.0)


def test_the_first_update_of_a_trial_is_not_timed() -> None:
    machine = Machine()
    plain = machine.step

    def step(size: int) -> None:
        if size not in machine.runs:
            machine.now += 100.0  # a warm-up: kernels chosen, memory taken from the system
        plain(size)

    tuning = tune(step, 64, CPU, 1e6, read=machine.read, clock=lambda: machine.now)
    assert [trial.seconds for trial in tuning.trials] == pytest.approx([0.5 + 0.32, 0.5 + 0.64])


def test_table() -> None:
    table = Machine().tune(batch=960, headroom=0.2).table().reset_index()
    assert table.to_numpy().tolist() == [
        ["32", "39.0", "132", "fits"],
        ["64", "56.1", "164", "fits"],
        ["120", "70.6", "220", "fits"],
        ["240", "82.8", "340", "fits"],
        ["480", "90.6", "580", "best"],
        ["960", "-", "-", "too little memory, by the smaller sizes"],
    ]
    assert list(table) == ["rows", "rows/s", "peak MiB", "result"]


def test_the_micro_batch_of_a_step_fits() -> None:
    class Hungry(ToyTask):
        def losses(
            self, model: nn.Module, batch: Batch, active: frozenset[str]
        ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            if len(batch["x"]) > 13:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().losses(model, batch, active)

    with throwaway(Hungry(), toy_runtime(8), load_config("demo")) as step:
        tuning = tune_step(step, toy_batch(48), 0.0)
    assert tuning.size <= 12
    problems = {trial.size: trial.problem for trial in tuning.trials}
    assert problems[8] == ""
    assert problems[16] == "out of memory"


def test_a_real_network_on_the_cpu() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))
    adamw = torch.optim.AdamW(net.parameters())

    def step(size: int) -> None:
        adamw.zero_grad()
        net(torch.rand(size, 4, 8, 8)).square().sum().backward()
        adamw.step()

    tuning = tune(step, 24, CPU, 20.0, start=4)
    assert [trial.size for trial in tuning.trials] == [4, 8, 12, 24]
    assert tuning.size in (4, 8, 12, 24)
    assert all(trial.seconds > 0 and trial.peak_mib > 10 and not trial.problem for trial in tuning.trials)
