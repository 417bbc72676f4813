"""The policy for machines that nobody has, as a table; the resolution on this one; what torch is told."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from matrixlib import config as configuration
from matrixlib.hardware import machine, speed
from matrixlib.hardware.machine import DeviceFacts, Gpu
from matrixlib.hardware.runtime import Runtime, policy, resolve, reuse, select_device, serving, suggest
from matrixlib.tasks import load_config

# What bf16 gains was measured on processors; of Apple's GPUs it is what is published: no units before the M5.
H200 = DeviceFacts(cores=16, gpu=Gpu("NVIDIA H200", (9, 0), True, 141 * 10**9))
T4 = DeviceFacts(cores=4, gpu=Gpu("Tesla T4", (7, 5), False, 16 * 10**9))
M3 = DeviceFacts(platform="darwin", cores=8, mps=True, macos=(15, 0), bf16_gain=(1, 1))
M5 = DeviceFacts(platform="darwin", cores=10, mps=True, macos=(26, 0), bf16_gain=(2, 1.3))
ZEN4 = DeviceFacts(cores=8, instructions=("avx512f", "avx512_bf16"), bf16_gain=(2.3, 1.9))
OLD_CPU = DeviceFacts(cores=4, instructions=("avx2",))
OLD_MAC = replace(M3, macos=(13, 6))
SMALL_GPU = DeviceFacts(cores=6, gpu=Gpu("RTX 3050", (8, 6), True, 4 * 2**30))

POLICY: list[tuple[DeviceFacts, dict[str, Any], str]] = [  # machine, options, what must come out
    (H200, {}, "cuda bf16 tf32 channels_last workers=4 prefetch=4 micro_batch=1024 threads=4"),
    (replace(H200, vcache=True), {}, "workers=8 prefetch=6"),
    (replace(H200, vcache=True, cores=4), {}, "workers=3 prefetch=6 threads=4"),
    (H200, {"precision": "fp32"}, "cuda fp32 no-tf32"),
    (H200, {"batch_size": 100, "micro_batch": 500}, "micro_batch=100"),
    (
        H200,
        {"device": "cpu", "precision": "fp32", "threads": 3, "workers": 5, "prefetch": 7, "micro_batch": 96}
        | {"channels_last": False, "compile": True},
        "cpu fp32 threads=3 no-channels_last compile workers=5 prefetch=7 micro_batch=96",
    ),
    (H200, {"compile": "auto"}, "compile 'the compiler fails'"),
    (H200, {"compile": "reduce-overhead"}, "compile 'compile reduce-overhead'"),
    (T4, {}, "cuda fp16 scaler no-tf32 channels_last workers=3 micro_batch=1024"),
    (T4, {"precision": "bf16"}, "bf16 no-scaler 'slow'"),
    (SMALL_GPU, {}, "cuda bf16 micro_batch=256"),
    (M3, {}, "mps fp32 no-scaler no-channels_last no-compile workers=0 micro_batch=256"),
    (M3, {"precision": "bf16"}, "mps bf16 no-scaler"),
    (M5, {}, "mps bf16 no-scaler 'convolution 1.3 times'"),
    (replace(M5, bf16_gain=(2, 0.9)), {}, "mps fp32"),
    (replace(M5, bf16_gain=None), {}, "mps fp32 'not measured'"),
    (replace(M5, bf16_problem="no bf16 kernel"), {}, "mps fp32 'bf16 does not work: no bf16 kernel'"),
    (M3, {"channels_last": True, "compile": True}, "channels_last compile '193349' '192551'"),
    (replace(M5, macos=(13, 6)), {}, "mps fp32 'macOS 14'"),
    (ZEN4, {}, "cpu bf16 no-scaler channels_last no-compile workers=1 prefetch=2 threads=8"),
    (replace(ZEN4, bf16_gain=(1.1, 1.1)), {}, "fp32 channels_last"),
    (replace(ZEN4, instructions=("asimd", "bf16")), {}, "bf16"),
    (replace(ZEN4, thread_limit=3), {}, "threads=3 'OMP_NUM_THREADS=3'"),
    (ZEN4, {"threads": 20}, "threads=20 'only 8 cores'"),
    (OLD_CPU, {}, "cpu fp32 channels_last workers=1"),
]
REFUSED = [
    (ZEN4, {"device": "cuda"}, r"no CUDA device was found .*TORCH_INDEX.*; use .auto. or one that works here: cpu"),
    (M3, {"device": "cuda"}, "works here: mps, cpu"),
    (H200, {"device": "mps"}, "no Apple GPU was found; use 'auto' or one that works here: cuda, cpu"),
    *((facts, {"precision": "fp16"}, r"fp16.*loss scaler.*use 'bf16'") for facts in (ZEN4, OLD_CPU, M3)),
    (OLD_MAC, {"precision": "bf16"}, "macOS 14"),
]


def sections(**options: Any) -> tuple[configuration.RuntimeConfig, configuration.TrainConfig, configuration.DataConfig]:
    """The three sections that the policy reads: the demo preset's, all on auto, with these options."""
    auto = dict.fromkeys(("device", "precision", "threads", "channels_last", "compile"), "auto")
    values = {
        "runtime": auto,
        "train": {"batch_size": 2048, "micro_batch": "auto"},
        "data": {"workers": "auto", "prefetch": "auto"},
    }
    for section in values.values():
        section |= {name: value for name, value in options.items() if name in section}
    config = load_config("demo", values)
    return config.runtime, config.train, config.data


@pytest.mark.parametrize("facts, options, expected", POLICY)
def test_the_policy(facts: DeviceFacts, options: Mapping[str, Any], expected: str) -> None:
    """Words: a device, a dtype, a choice that is on, `no-` one that is off, `name=number`, 'part of a reason'."""
    runtime = policy(facts, *sections(**options))
    for word in expected.split(" '")[0].split():
        name, _, value = word.partition("=")
        if value:
            assert getattr(runtime, name) == int(value), word
        elif name in ("cuda", "mps", "cpu"):
            assert runtime.device == name
        elif name in ("fp32", "bf16", "fp16"):
            assert runtime.dtype == name
        else:
            assert bool(getattr(runtime, name.removeprefix("no-"))) is not name.startswith("no-"), word
    for part in expected.split(" '")[1:]:
        assert part.rstrip("'") in runtime.table()
    assert {*runtime.reasons, "reasons", "requested", "ranks"} == set(Runtime.__dataclass_fields__)
    assert all(runtime.reasons.values())
    assert runtime.scaler == (runtime.dtype == "fp16")
    for name, (value, _) in suggest(facts, runtime.device).items():
        if name not in options and runtime.micro_batch != options.get("batch_size"):
            assert getattr(runtime, name) == value, "the probe shows what `auto` uses"


@pytest.mark.parametrize("facts, options, message", REFUSED)
def test_what_cannot_work_is_refused(facts: DeviceFacts, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(facts, *sections(**options))


def test_round_trip_through_json_and_reuse() -> None:
    runtime = policy(T4, *sections())
    stored = json.loads(json.dumps(runtime.to_dict()))
    assert Runtime.from_dict(stored) == runtime
    assert reuse(stored, T4) == runtime
    with pytest.raises(ValueError, match=r"began on 'cuda'.*no CUDA device was found"):
        reuse(stored, ZEN4)
    for strange in ({"device": []}, {"threads": "x"}, {"threads": -1}, {"dtype": "fp8"}, {"reasons": [1]}, {"new": 1}):
        (name,) = strange
        with pytest.raises(ValueError, match=f"the stored runtime's {name}: .*restore it"):
            Runtime.from_dict(stored | strange)
    del stored["tf32"]
    with pytest.raises(ValueError, match="tf32: Field required"):
        Runtime.from_dict(stored)


def test_another_number_of_ranks_shares_the_cores_anew() -> None:
    alone, eighth = replace(H200, cores=16), replace(H200, cores=2, ranks=8)
    runtime = policy(alone, *sections())
    resumed = reuse(runtime.to_dict(), eighth)
    assert (resumed.threads, resumed.workers, resumed.micro_batch) == (2, 1, runtime.micro_batch)
    assert reuse(resumed.to_dict(), alone) == runtime
    assert reuse(policy(alone, *sections(threads=3)).to_dict(), eighth).threads == 3, "what the user named stays"
    assert machine.facts(2).ranks == 2


def test_autocast_scaler_and_parameters() -> None:
    layer = torch.nn.Linear(4, 4)
    for dtype, expected in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        runtime = replace(policy(ZEN4, *sections()), dtype=dtype)
        with runtime.autocast():
            assert layer(torch.ones(2, 4)).dtype == expected
        assert layer.weight.dtype == torch.float32
        assert runtime.grad_scaler() is None
        assert runtime.torch_device == torch.device("cpu")
    # the trap: torch itself would build it
    assert torch.amp.GradScaler("mps").is_enabled()
    with pytest.raises(AssertionError):
        replace(policy(M3, *sections()), scaler=True).grad_scaler()


def test_apply_sets_threads_and_leaves_tf32_readable() -> None:
    before = torch.get_num_threads()
    runtime = replace(policy(ZEN4, *sections()), threads=before + 1)
    precise, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        runtime.apply()
        assert torch.get_num_threads() == before + 1
        assert torch.get_float32_matmul_precision() == precise
        for tf32 in (True, False):
            replace(runtime, device="cuda", tf32=tf32).apply()  # settings alone; no GPU is touched
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
            assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    finally:
        torch.set_num_threads(before)
        torch.set_float32_matmul_precision(precise)
        torch.backends.cudnn.allow_tf32 = cudnn


def test_the_environment_variable_replaces_auto_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "facts", lambda ranks=1: H200)
    monkeypatch.setattr(speed, "bf16_gain", lambda device: (1, 1))
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    runtime = resolve(*sections())
    assert runtime.device == "cpu"
    assert "MATRIXLIB_DEVICE" in runtime.table()
    assert resolve(*sections(device="cuda")).device == "cuda"
    for value, message in (("mps", "no Apple GPU"), ("gpu", "MATRIXLIB_DEVICE is 'gpu'")):
        monkeypatch.setenv("MATRIXLIB_DEVICE", value)
        with pytest.raises(ValueError, match=message):
            resolve(*sections())
    monkeypatch.delenv("MATRIXLIB_DEVICE")
    assert resolve(*sections()).device == "cuda"
    with pytest.raises(ValueError, match="device 'tpu' is none; use auto, cuda, mps, cpu"):  # of an evaluation
        select_device(H200, "tpu")


def test_bf16_on_mps_is_measured_and_left_alone_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an operation has no kernel in it, the run begins in fp32 and says why; `auto` alone measures."""
    calls: list[str] = []

    def fails(device: str) -> tuple[float, float]:
        calls.append(device)
        raise TypeError("BFloat16 is not supported on MPS\nat length")

    monkeypatch.setattr(machine, "facts", lambda ranks=1: replace(M5, bf16_gain=None))
    monkeypatch.setattr(speed, "bf16_gain", fails)
    runtime = resolve(*sections())
    assert (runtime.device, runtime.dtype) == ("mps", "fp32")
    assert "bf16 does not work: BFloat16 is not supported on MPS" in runtime.table()
    assert resolve(*sections(precision="bf16")).dtype == "bf16"
    assert calls == ["mps"]
    monkeypatch.setattr(speed, "bf16_gain", lambda device: (2.2, 1.3))
    assert resolve(*sections()).dtype == "bf16"


def test_another_choice_takes_its_reason_along() -> None:
    runtime = policy(T4, *sections(compile="default"))
    plain = runtime.with_choice("compile", "", "slower")
    assert (plain.compile, plain.reasons) == ("", runtime.reasons | {"compile": "slower"})
    assert (runtime.requested, plain.requested) == (("compile",), ()), "another choice is not the user's"


def test_resolve_here_and_where_nothing_is_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = resolve(*sections(device="cpu"))
    assert 1 <= runtime.threads <= len(machine.usable_processors())
    assert reuse(runtime.to_dict()) == runtime
    monkeypatch.setattr(speed, "bf16_gain", None)
    assert resolve(*sections(device="cpu", precision="fp32")).dtype == "fp32"


@pytest.mark.parametrize(
    ("device", "option", "largest", "fill"),
    [("cpu", "auto", 256, False), ("cpu", True, 256, True), ("cuda", "auto", 1024, True), ("mps", False, 1024, True)],
)
def test_how_networks_are_evaluated(device: str, option: bool | str, largest: int, fill: bool) -> None:
    plan = serving(device, option)
    assert (plan.sizes[-1], plan.fill, plan.compile) == (largest, fill, option is True)
    assert list(plan.sizes) == sorted(plan.sizes)
