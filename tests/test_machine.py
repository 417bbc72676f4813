"""Facts of machines, read from the files that the operating system shows of them; how fast they are."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core import caching
from torch.utils import collect_env

from matrixlib.hardware import machine, runtime, speed
from matrixlib.hardware.kernels import kernel
from matrixlib.hardware.machine import DeviceFacts

AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model name\t: AMD Ryzen 5 7600X 6-Core Processor
flags\t\t: fpu avx avx2 fma avx512f avx512_bf16

processor\t: 1
vendor_id\t: other
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16\nCPU implementer\t: 0x41\n"


def test_processors_are_read_from_flags_not_from_names() -> None:
    amd = machine.processor(AMD)
    assert (amd.vendor, amd.family, amd.name) == ("AuthenticAMD", 25, "AMD Ryzen 5 7600X 6-Core Processor")
    assert amd.instructions == ("avx", "avx2", "fma", "avx512f", "avx512_bf16")
    assert set(machine.processor(ARM).instructions) == {"asimd", "i8mm", "bf16"}
    for text, bf16 in ((AMD, True), (ARM, True), ("", False)):
        assert runtime.native_bf16(DeviceFacts(instructions=machine.processor(text).instructions), "cpu") is bf16


def cpu_tree(root: Path, l3: list[tuple[str, str]], siblings: list[str]) -> Path:
    """A made-up /sys/devices/system/cpu: (size, shared list) of each processor's L3 and its hyper-threads."""
    for number, ((size, shared), twins) in enumerate(zip(l3, siblings, strict=True)):
        texts = {"cache/index3/size": size, "cache/index3/shared_cpu_list": shared, "cache/index3/level": "3"}
        texts |= {"cache/index2/size": "1024K", "cache/index2/level": "2", "topology/thread_siblings_list": twins}
        written(root / f"cpu{number}", texts)
    return root


def written(root: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def test_l3_is_counted_by_instance_so_an_epyc_is_no_vcache(tmp_path: Path) -> None:
    epyc = cpu_tree(tmp_path / "epyc", [("32768K", "0-1")] * 2 + [("32768K", "2-3")] * 2, ["0", "1", "2", "3"])
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
    assert machine.cores(tree, tmp_path, range(4)) == 2
    assert machine.cores(tree, tmp_path, [0, 2]) == 1
    written(tmp_path, {"cpu.max": "50000 100000"})
    assert machine.cores(tree, tmp_path, range(4)) == 1


@pytest.mark.parametrize(
    "files, membership, expected",
    [
        ({"cpu.max": "max 100000"}, "0::/\n", 0.0),
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 2.0),
        ({"cpu/j/cpu.cfs_quota_us": "150000", "cpu/j/cpu.cfs_period_us": "100000"}, "1:cpu,cpuacct:/j\n", 1.5),
        ({"cpu.max": "100000 100000"}, "0::/not/in/this/container\n", 1.0),
    ],
)
def test_quota_of_both_cgroup_versions(tmp_path: Path, files: dict[str, str], membership: str, expected: float) -> None:
    written(tmp_path, {**files, "membership": membership, "memory.max": "1048576"})
    assert machine.quota(tmp_path, tmp_path / "membership") == expected
    assert machine.memory(tmp_path, tmp_path / "membership") == 2**20
    assert machine.memory(tmp_path / "none", tmp_path / "membership") > 2**27


@pytest.mark.parametrize(("name", "text"), [("OMP_NUM_THREADS", "2,1"), ("LOCAL_WORLD_SIZE", "0")])
def test_a_number_of_threads_that_is_none_is_named(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"{name} is '{text}'; set it to one whole number above 0"):
        machine.facts()


def test_threads_wait_a_short_while_unless_somebody_has_decided() -> None:
    """Before torch is imported: a run that is opened has it, and the processes that it starts."""
    code = f"""
import os, sys
from matrixlib.runs.run import open_run
assert "torch" not in sys.modules
for variable in ("", *{machine.WAITING}):
    for name in {machine.WAITING}:
        os.environ.pop(name, None)
    os.environ[variable or "nothing of it"] = "1"
    try:
        open_run(ranks=0)
    except ValueError:
        print(os.environ.get("GOMP_SPINCOUNT"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10000", "None", "1", "None"], f"unset, or {machine.WAITING}"


def test_versions_name_what_cuda_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.versions()
    assert {"python", "torch", "numpy", "matrixlib"} <= set(here)
    assert not torch.backends.mkldnn.is_available() or here["onednn"].count(".") == 2
    monkeypatch.setattr(torch.__config__, "show", lambda: "  - oneAPI Math Kernel Library Version 2024.2-Product Build")
    assert machine.versions()["mkl"] == "2024.2-Product"
    assert not {"driver", "nccl"} & set(here) or torch.version.cuda, "what is not there is left out"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    monkeypatch.setattr(collect_env, "get_nvidia_driver_version", lambda run: "580.65.06")
    there = {"cuda": "13.0", "cudnn": "91002", "nccl": "2.27.7", "driver": "580.65.06"}
    assert there.items() <= machine.versions().items()


def test_calls_take_turns_and_the_median_is_of_those_after_a_warm_up() -> None:
    order: list[str] = []
    waits = iter([0.05, 0.0, 0.0, 0.0])
    works = {"a": lambda: time.sleep(next(waits)), "b": lambda: order.append("b"), "c": lambda: order.append("c")}
    medians = speed.turns(works, 0.0)
    assert order == ["b", "c"] * (1 + speed.MIN_CALLS)
    assert medians["a"] < 0.04
    speed.turns({"b": works["b"]}, 10.0)
    assert len(order) - 2 * (1 + speed.MIN_CALLS) == speed.WARM_CALLS + speed.MAX_CALLS == 210


def twice(number: int) -> int:
    return 2 * number


def test_where_nothing_can_be_kept_a_function_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(UserWarning, match="let NUMBA_CACHE_DIR name a folder that can be written"):
        compiled: Any = kernel(twice)
    assert compiled(21) == 42
    assert len(compiled.signatures) == 1
