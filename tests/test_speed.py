"""What times and measures the machine: calls in turns, matrices of the right size, threads left as they were."""

import time
from collections.abc import Callable

import pytest
import torch

from matrixlib.hardware import speed


def test_calls_take_turns_after_one_that_warms_up() -> None:
    order: list[str] = []
    medians = speed.turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 0.0)
    assert order == ["a", "b"] * (1 + speed.FEWEST)
    assert set(medians) == {"a", "b"}


def test_short_calls_warm_up_ten_times_and_count_two_hundred_times() -> None:
    calls: list[None] = []
    speed.turns({"a": lambda: calls.append(None)}, 10.0)
    assert len(calls) == speed.WARM + speed.MOST


def test_the_median_is_of_calls_without_the_first() -> None:
    waits = iter([0.05, 0.0, 0.0, 0.0])
    assert speed.turns({"a": lambda: time.sleep(next(waits))}, 0.0)["a"] < 0.04


def test_measuring_has_an_end() -> None:
    with pytest.raises(ValueError, match="measuring for nan seconds has no end"):
        speed.turns({"one": int}, float("nan"))


def test_measuring_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    rates = speed.rates("cpu", bf16=False, seconds=0.05)
    assert rates.matrix_fp32 > 0 < rates.conv_fp32_last
    assert rates.matrix_bf16 == rates.conv_bf16 == 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("device", "tflops", "side"),
    [("cpu", 0.02, 1024), ("cpu", 1, 2048), ("cuda", 4, 2048), ("cuda", 20, 4096), ("cuda", 400, 8192)],
)
def test_matrices_are_as_large_as_the_device_multiplies_in_the_time(
    monkeypatch: pytest.MonkeyPatch, device: str, tflops: float, side: int
) -> None:
    sides: list[int] = []

    def product(device: str, dtype: torch.dtype, n: int) -> tuple[float, Callable[[], object]]:
        sides.append(n)
        return 1.0, lambda: None

    monkeypatch.setattr(speed, "_product", product)
    monkeypatch.setattr(speed, "_best", lambda kinds, seconds: dict.fromkeys(kinds, tflops * 1e3))
    assert speed.matrix_rate(device, "fp32", 1, seconds=0.3) == tflops * 1e3
    assert sides[-1] == side


def test_rates_are_of_data_and_leave_the_random_streams_alone() -> None:
    """Ones make a GPU clock higher than data do."""
    before = torch.get_rng_state()
    noise = speed._noise("cpu", torch.bfloat16, 64, 64)
    assert noise.dtype == torch.bfloat16
    assert 0.8 < float(noise.float().std()) < 1.2
    speed.rates("cpu", bf16=False, seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before)
