"""The policy on every device without having it; the facts of made-up machines; this machine's own resolution."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from matrixlib import config as configuration
from matrixlib.hardware import machine
from matrixlib.hardware import speed as rates
from matrixlib.hardware.machine import DeviceFacts, Gpu, Rates
from matrixlib.hardware.runtime import Runtime, policy, probe, resolve, reuse, serving, suggest

FAST_BF16 = Rates(90, 210, 150, 200, 400, 390)
SLOW_BF16 = Rates(90, 95, 150, 200, 160, 210)
LAST_LOSES = Rates(90, 30, 200, 100, 0, 0)
ZEN4 = DeviceFacts(cores=8, instructions=("avx512f", "avx512_bf16"), rates=FAST_BF16)
H200 = DeviceFacts(cores=16, gpu=Gpu("NVIDIA H200", (9, 0), True, 141 * 10**9), gpu_problem="")
T4 = DeviceFacts(cores=4, gpu=Gpu("Tesla T4", (7, 5), False, 16 * 10**9), gpu_problem="")
LAPTOP_GPU = DeviceFacts(cores=6, gpu=Gpu("RTX 3050", (8, 6), True, 4 * 2**30), gpu_problem="")
M3 = DeviceFacts(platform="darwin", cores=8, mps=True, mps_problem="", macos=(15, 1))
OLD_MAC = replace(M3, macos=(13, 6))
OLD_CPU = DeviceFacts(cores=4, instructions=("avx2",), rates=Rates(50, 0, 40, 45, 0, 0))
FLAGS = (
    "device",
    "dtype",
    "scaler",
    "tf32",
    "channels_last",
    "compile",
    "workers",
    "prefetch",
    "micro_batch",
)

TABLE = [
    (H200, ("cuda", "bf16", False, True, True, False, 4, 4, 1024)),
    (replace(H200, vcache=True), ("cuda", "bf16", False, True, True, False, 8, 6, 1024)),
    (replace(H200, vcache=True, cores=4), ("cuda", "bf16", False, True, True, False, 3, 6, 1024)),
    (replace(H200, cores=1), ("cuda", "bf16", False, True, True, False, 0, 2, 1024)),
    (T4, ("cuda", "fp16", True, False, True, False, 3, 4, 1024)),
    (LAPTOP_GPU, ("cuda", "bf16", False, True, True, False, 4, 4, 256)),
    (M3, ("mps", "bf16", False, False, False, False, 0, 2, 256)),
    (OLD_MAC, ("mps", "fp32", False, False, False, False, 0, 2, 256)),
    (ZEN4, ("cpu", "bf16", False, False, True, False, 1, 2, 256)),
    (replace(ZEN4, cores=2, vcache=True), ("cpu", "bf16", False, False, True, False, 0, 2, 256)),
    (replace(ZEN4, rates=SLOW_BF16), ("cpu", "fp32", False, False, True, False, 1, 2, 256)),
    (replace(ZEN4, rates=LAST_LOSES), ("cpu", "fp32", False, False, False, False, 1, 2, 256)),
    (replace(ZEN4, rates=None), ("cpu", "fp32", False, False, False, False, 1, 2, 256)),
    (replace(ZEN4, instructions=("asimd", "bf16")), ("cpu", "bf16", False, False, True, False, 1, 2, 256)),
    (OLD_CPU, ("cpu", "fp32", False, False, True, False, 1, 2, 256)),
]


def sections(
    device: str = "auto",
    precision: str = "auto",
    threads: int | str = "auto",
    channels_last: bool | str = "auto",
    compile: bool | str = "auto",
    workers: int | str = "auto",
    prefetch: int | str = "auto",
    batch_size: int = 2048,
    micro_batch: int | str = "auto",
) -> tuple[configuration.RuntimeConfig, configuration.TrainConfig, configuration.DataConfig]:
    """The three sections that the policy reads, on top of the demo preset."""
    asked = {"device": device, "precision": precision, "threads": threads}
    asked |= {"channels_last": channels_last, "compile": compile}
    overrides = {
        "runtime": asked,
        "train": {"batch_size": batch_size, "micro_batch": micro_batch},
        "data": {"workers": workers, "prefetch": prefetch},
    }
    config = configuration.load("demo", overrides)
    return config.runtime, config.train, config.data


@pytest.mark.parametrize("facts, expected", TABLE)
def test_policy_on_every_device(facts: DeviceFacts, expected: tuple[object, ...]) -> None:
    runtime = policy(facts, *sections())
    assert tuple(getattr(runtime, name) for name in FLAGS) == expected
    assert runtime.threads == facts.cores


@pytest.mark.parametrize("facts", [facts for facts, _ in TABLE])
def test_every_decision_has_a_reason_and_the_scaler_is_for_fp16_on_cuda_alone(facts: DeviceFacts) -> None:
    for precision in ("auto", "fp32", "bf16", "fp16"):
        try:
            runtime = policy(facts, *sections(precision=precision))
        except ValueError:
            continue
        named = [line.split(" ")[0] for line in runtime.reasons]
        assert sorted([*named, "reasons"]) == sorted(Runtime.__dataclass_fields__)
        assert all(line.partition(": ")[2] for line in runtime.reasons)
        assert runtime.scaler == (runtime.dtype == "fp16" and runtime.device == "cuda")


@pytest.mark.parametrize(
    "facts, device, says",
    [
        (ZEN4, "cuda", "no CUDA device was found; use 'auto' or one that works here: cpu"),
        (M3, "cuda", "works here: mps, cpu"),
        (H200, "mps", "no Apple GPU was found; use 'auto' or one that works here: cuda, cpu"),
        (replace(ZEN4, gpu_problem="this build of torch (2.13.0+cpu) has no CUDA"), "cuda", "TORCH_INDEX"),
    ],
)
def test_an_absent_device_says_what_is_there(facts: DeviceFacts, device: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        policy(facts, *sections(device=device))


@pytest.mark.parametrize("facts", [ZEN4, OLD_CPU, M3])
def test_fp16_is_refused_without_a_scaler(facts: DeviceFacts) -> None:
    with pytest.raises(ValueError, match=r"fp16.*loss scaler.*use 'bf16'"):
        policy(facts, *sections(precision="fp16"))


def test_bf16_on_an_old_macos_is_refused_and_emulated_bf16_is_said_to_be_slow() -> None:
    with pytest.raises(ValueError, match="macOS 14"):
        policy(OLD_MAC, *sections(precision="bf16"))
    for facts in (OLD_CPU, T4):
        runtime = policy(facts, *sections(precision="bf16"))
        assert runtime.dtype == "bf16"
        assert not runtime.scaler
        assert "slow" in runtime.table()


def test_what_was_asked_for_is_used() -> None:
    runtime = policy(
        H200,
        *sections(
            device="cpu",
            precision="fp32",
            threads=3,
            channels_last=False,
            compile=True,
            workers=5,
            prefetch=7,
            micro_batch=96,
        ),
    )
    assert (runtime.device, runtime.dtype, runtime.threads, runtime.channels_last) == (
        "cpu",
        "fp32",
        3,
        False,
    )
    assert (runtime.compile, runtime.workers, runtime.prefetch, runtime.micro_batch) == (True, 5, 7, 96)


def test_fp32_asked_for_on_cuda_means_no_tf32() -> None:
    assert not policy(H200, *sections(precision="fp32")).tf32


def test_slow_choices_on_mps_are_kept_but_named() -> None:
    table = policy(M3, *sections(channels_last=True, compile=True)).table()
    assert "193349" in table
    assert "192551" in table


def test_micro_batch_never_exceeds_the_update() -> None:
    for micro_batch in ("auto", 500):
        runtime = policy(H200, *sections(batch_size=100, micro_batch=micro_batch))
        assert runtime.micro_batch == 100
        assert "the whole update fits in one pass" in runtime.table()


def test_threads_never_depend_on_workers_but_respect_omp_num_threads() -> None:
    assert {policy(ZEN4, *sections(workers=n)).threads for n in (0, 1, 4)} == {8}
    limited = policy(replace(ZEN4, thread_limit=3), *sections())
    assert limited.threads == 3
    assert "OMP_NUM_THREADS=3" in limited.table()
    assert "only 8 cores" in policy(ZEN4, *sections(threads=20)).table()


def test_suggestions_are_what_auto_uses() -> None:
    for facts, _ in TABLE:
        runtime = policy(facts, *sections(batch_size=4096))
        for name, (value, why) in suggest(facts, runtime.device).items():
            assert getattr(runtime, name) == value
            assert why


def test_round_trip_through_json_and_reuse() -> None:
    runtime = policy(T4, *sections())
    stored = json.loads(json.dumps(runtime.to_dict()))
    assert Runtime.from_dict(stored) == runtime
    assert reuse(stored, T4) == runtime
    with pytest.raises(ValueError, match=r"began on 'cuda'.*no CUDA device was found"):
        reuse(stored, ZEN4)
    del stored["tf32"]
    with pytest.raises(ValueError, match="missing or unknown keys: tf32"):
        Runtime.from_dict(stored)


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
    monkeypatch.setattr(machine, "facts", lambda: H200)
    monkeypatch.setattr(rates, "measure", lambda bf16: FAST_BF16)
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    runtime = resolve(*sections())
    assert runtime.device == "cpu"
    assert "MATRIXLIB_DEVICE" in runtime.table()
    assert resolve(*sections(device="cuda")).device == "cuda"
    monkeypatch.setenv("MATRIXLIB_DEVICE", "mps")
    with pytest.raises(ValueError, match="no Apple GPU"):
        resolve(*sections())
    monkeypatch.setenv("MATRIXLIB_DEVICE", "gpu")
    with pytest.raises(ValueError, match="MATRIXLIB_DEVICE is 'gpu'"):
        resolve(*sections())
    monkeypatch.delenv("MATRIXLIB_DEVICE")
    assert resolve(*sections()).device == "cuda"


def test_nothing_is_measured_where_nothing_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(bf16: bool) -> Rates:
        raise AssertionError("measured")

    monkeypatch.setattr(rates, "measure", never)
    resolve(*sections(device="cpu", precision="fp32", channels_last=True))
    monkeypatch.setattr(machine, "facts", lambda: H200)
    resolve(*sections())


def test_resolve_here() -> None:
    runtime = resolve(*sections(device="cpu"))
    assert runtime.dtype in ("fp32", "bf16")
    assert 1 <= runtime.threads <= len(machine.usable())
    assert reuse(runtime.to_dict()) == runtime


def test_measuring_leaves_the_threads_alone() -> None:
    before = torch.get_num_threads()
    measured = rates.measure(bf16=False, seconds=0.05)
    assert measured.matrix_fp32 > 0 < measured.conv_fp32_last
    assert measured.matrix_bf16 == measured.conv_bf16 == 0
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("device", "tflops", "side"),
    [("cpu", 1e3, 2048), ("cuda", 4, 2048), ("cuda", 20, 4096), ("cuda", 400, 8192)],
)
def test_matrices_are_as_large_as_the_device_multiplies_in_the_time(
    monkeypatch: pytest.MonkeyPatch, device: str, tflops: float, side: int
) -> None:
    sides: list[int] = []

    def product(device: str, dtype: torch.dtype, n: int) -> tuple[float, Callable[[], object]]:
        sides.append(n)
        return 1.0, lambda: None

    monkeypatch.setattr(rates, "_product", product)
    monkeypatch.setattr(rates, "_best", lambda kinds, seconds: dict.fromkeys(kinds, tflops * 1e3))
    assert rates.matrix(device, "fp32", 1, seconds=0.3) == tflops * 1e3
    assert sides[-1] == side


def test_probe_describes_this_machine_as_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure", lambda bf16: FAST_BF16)
    found = json.loads(json.dumps(probe(seconds=0.1, device="cpu")))
    assert set(found["suggested"]) == {"threads", "workers", "prefetch", "micro_batch"}
    assert found["measured"]["fp32"] > 0 < found["measured"]["copy"]
    assert found["environment"]["torch"] == torch.__version__
    assert {"cuda", "cudnn", "nccl", "mkl", "onednn"} <= set(found["environment"])


AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 97
model name\t: AMD Ryzen 5 7600X 6-Core Processor
flags\t\t: fpu avx avx2 fma avx512f avx512_bf16

processor\t: 1
vendor_id\t: other
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\nCPU implementer\t: 0x41\nCPU architecture: 8\n"


def test_processors_are_read_from_flags_not_from_names() -> None:
    amd = machine.processor(AMD)
    assert (amd.vendor, amd.family, amd.model) == ("AuthenticAMD", 25, 97)
    assert amd.instructions == ("avx", "avx2", "fma", "avx512f", "avx512_bf16")
    assert DeviceFacts(instructions=amd.instructions).bf16
    arm = machine.processor(ARM)
    assert set(arm.instructions) == {"asimd", "i8mm", "bf16"}
    assert not DeviceFacts(instructions=machine.processor("").instructions).bf16


def cpu_tree(root: Path, l3: list[tuple[str, str]], siblings: list[str]) -> Path:
    """A made-up /sys/devices/system/cpu: (size, shared list) of each processor's L3 and its hyper-threads."""
    for number, ((size, shared), twins) in enumerate(zip(l3, siblings, strict=True)):
        texts = {"cache/index3/size": size, "cache/index3/shared_cpu_list": shared, "cache/index3/level": "3"}
        texts |= {
            "cache/index2/size": "1024K",
            "cache/index2/level": "2",
            "topology/thread_siblings_list": twins,
        }
        for name, text in texts.items():
            path = root / f"cpu{number}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return root


def test_l3_is_counted_by_instance_so_an_epyc_is_no_vcache(tmp_path: Path) -> None:
    epyc = cpu_tree(
        tmp_path / "epyc", [("32768K", "0-1")] * 2 + [("32768K", "2-3")] * 2, ["0", "1", "2", "3"]
    )
    caches = machine.l3_caches(epyc, range(4))
    assert caches == [(32 * 2**20, 2)] * 2
    assert not machine.vcache("AuthenticAMD", caches)
    half = cpu_tree(tmp_path / "7950x3d", [("98304K", "0"), ("32768K", "1")], ["0", "1"])
    caches = machine.l3_caches(half, range(2))
    assert caches == [(96 * 2**20, 1), (32 * 2**20, 1)]
    assert machine.vcache("AuthenticAMD", caches)
    assert not machine.vcache("AuthenticAMD", machine.l3_caches(half, [1]))  # bound to the die without it
    assert not machine.vcache("GenuineIntel", [(96 * 2**20, 8)])
    assert not machine.vcache("AuthenticAMD", [(96 * 2**20, 64)])  # a virtual machine's one L3 for all


def test_cores_are_physical_and_within_affinity_and_quota(tmp_path: Path) -> None:
    tree = cpu_tree(tmp_path / "cpu", [("32768K", "0-3")] * 4, ["0,2", "1,3", "0,2", "1,3"])
    free = tmp_path / "free"
    free.mkdir()
    assert machine.cores(tree, free, range(4)) == 2
    assert machine.cores(tree, free, [0, 2]) == 1
    (free / "cpu.max").write_text("50000 100000\n")
    assert machine.cores(tree, free, range(4)) == 1


@pytest.mark.parametrize(
    "files, membership, expected",
    [
        ({"cpu.max": "max 100000"}, "0::/\n", 0.0),
        ({"cpu.max": "350000 100000"}, "0::/\n", 3.5),
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n", 0.0),
        (
            {"cpu/j/cpu.cfs_quota_us": "150000", "cpu/j/cpu.cfs_period_us": "100000"},
            "1:cpu,cpuacct:/j\n",
            1.5,
        ),
        ({"cpu.max": "100000 100000"}, "0::/not/seen/in/this/container\n", 1.0),
    ],
)
def test_quota_of_both_cgroup_versions(
    tmp_path: Path, files: dict[str, str], membership: str, expected: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "membership").write_text(membership)
    assert machine.quota(tmp_path, tmp_path / "membership") == expected


def test_memory_is_limited_by_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "membership").write_text("0::/\n")
    assert machine.memory(tmp_path, tmp_path / "membership") == 2**20
    assert machine.memory(tmp_path / "none", tmp_path / "membership") > 2**27


@pytest.mark.parametrize(
    ("device", "compile", "largest", "fill", "compiled"),
    [
        ("cpu", "auto", 256, False, False),
        ("cpu", True, 256, True, True),
        ("cuda", "auto", 1024, True, False),
        ("cuda", False, 1024, True, False),
        ("mps", "auto", 1024, True, False),
    ],
)
def test_how_networks_are_evaluated(
    device: str, compile: bool | str, largest: int, fill: bool, compiled: bool
) -> None:
    found = serving(device, compile)
    assert (found.sizes[-1], found.fill, found.compile) == (largest, fill, compiled)
    assert list(found.sizes) == sorted(found.sizes)
    assert [reason.split()[0] for reason in found.reasons] == ["batch", "fill", "compile"]
    assert ("asked for" in found.reasons[2]) == (compile != "auto")
