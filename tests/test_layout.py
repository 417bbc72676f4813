"""The layout of a GPU's updates, chosen by measurements."""

import pytest
import torch
from toy_task import ToyTask, toy_batch, toy_runtime

from matrixlib.config import Config
from matrixlib.engine import layout
from matrixlib.engine.layout import choose_layout, fastest, update_seconds
from matrixlib.hardware.runtime import Runtime

Layout = tuple[bool, bool]


def choose(times: dict[Layout, float | Exception], own: Layout = (True, False), fixed: bool = False) -> Runtime:
    """What becomes of a runtime with the layout `own` (channels_last, benchmark), where these are measured."""

    def seconds(candidate: Runtime) -> float:
        assert not candidate.compile
        time = times[candidate.channels_last, candidate.benchmark]
        if isinstance(time, Exception):
            raise time
        return time

    told = {"channels_last": "as asked for"} if fixed else {}
    runtime = toy_runtime(8, channels_last=own[0], benchmark=own[1], compile="default", reasons=told)
    return fastest(runtime, seconds, fixed)


def test_the_fastest_layout_is_chosen_and_says_why() -> None:
    chosen = choose({(True, False): 0.060, (True, True): 0.055, (False, False): 0.070, (False, True): 0.050})
    assert (chosen.channels_last, chosen.benchmark) == (False, True)
    assert list(chosen.reasons) == ["channels_last", "benchmark"]
    for reason in chosen.reasons.values():
        assert "60.0 ms with channels last" in reason
        assert "50.0 ms with channels first and the search" in reason


def test_noise_changes_nothing() -> None:
    chosen = choose({(True, False): 0.0505, (True, True): 0.0500, (False, False): 0.0495, (False, True): 0.0500})
    assert (chosen.channels_last, chosen.benchmark) == (True, False)


def test_a_memory_format_that_the_user_named_stays() -> None:
    chosen = choose({(True, False): 0.060, (True, True): 0.050}, fixed=True)  # the others would be a KeyError
    assert (chosen.channels_last, chosen.benchmark) == (True, True)
    assert chosen.reasons["channels_last"] == "as asked for", "what else was decided keeps its reason"


def test_a_layout_without_room_is_left_out_and_other_errors_are_not_hidden() -> None:
    short = torch.OutOfMemoryError("CUDA out of memory")
    chosen = choose({(True, False): short, (True, True): short, (False, False): 0.060, (False, True): 0.070})
    assert (chosen.channels_last, chosen.benchmark) == (False, False)
    nothing = choose(dict.fromkeys(((a, b) for a in (True, False) for b in (True, False)), short))
    assert (nothing.channels_last, nothing.benchmark) == (True, False)
    with pytest.raises(RuntimeError, match="broken"):
        choose({(True, False): RuntimeError("broken")})


def test_updates_are_timed_in_the_layout_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = []

    def look(device: str) -> None:
        switches.append(torch.backends.cudnn.benchmark)

    monkeypatch.setattr("matrixlib.hardware.speed.synchronize", look)
    streams = torch.get_rng_state()
    task, batch, config = ToyTask(dropout=0.5), toy_batch(8), Config(task="toy")
    assert update_seconds(task, batch, toy_runtime(8, benchmark=True), config) > 0
    assert switches == [True] * (layout.WARM + layout.TIMED)
    assert not torch.backends.cudnn.benchmark
    assert choose_layout(task, batch, toy_runtime(8), config, fixed=True).channels_last is False
    assert torch.equal(torch.get_rng_state(), streams)
