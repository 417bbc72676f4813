"""This machine: facts for the policy in runtime.py, a description for people.

Facts are read, not guessed from model names, for what this process may use. torch is imported inside functions.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # the last is Arm's
INSTRUCTIONS = (
    *("avx", "avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512_vnni", "avx512_fp16"),
    *("amx_int8", "amx_fp16", "asimd", "sve", "sve2", "i8mm", *BF16_INSTRUCTIONS),
)
VCACHE_BYTES = (64 * 2**20, 128 * 2**20)  # an AMD die with V-Cache has 96 MiB, one without has 16 or 32
VCACHE_SHARERS = 16  # logical processors of one die; a virtual machine may report one huge L3 for all
CPU_TREE = Path("/sys/devices/system/cpu")
CGROUP_TREE = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables by which a user sets how threads wait
PACKAGES = (
    *("matrixlib", "torch", "triton", "numpy", "numba", "safetensors", "zstandard"),
    *("pydantic", "chess", "papermill", "matplotlib"),
)


@dataclass(frozen=True)
class Gpu:
    """A CUDA (or ROCm) device; memory in bytes."""

    name: str
    capability: tuple[int, int]
    bf16: bool  # in hardware; Turing only emulates it
    memory: int


@dataclass(frozen=True)
class Processor:
    vendor: str = ""
    family: int = 0
    name: str = ""
    instructions: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceFacts:
    """Everything the policy needs to know, as plain values, so that tests can describe any machine."""

    platform: str = "linux"  # as sys.platform
    instructions: tuple[str, ...] = ()
    cores: int = 1  # physical cores that this process may use (affinity and cgroup quota)
    ranks: int = 1  # processes of one training on this machine, each with `cores`
    thread_limit: int = 0  # OMP_NUM_THREADS; 0 = not set
    vcache: bool = False
    gpu: Gpu | None = None
    gpu_problem: str = "no CUDA device was found"  # why gpu is None
    mps: bool = False
    macos: tuple[int, ...] = ()
    bf16_gain: tuple[float, float] | None = None  # as `speed.bf16_gain` measures it
    bf16_problem: str = ""  # why bf16 does not work where it should

    @property
    def threads(self) -> int:
        """Intra-op threads: the cores, or OMP_NUM_THREADS if less."""
        return min(self.cores, self.thread_limit or self.cores)


def facts(ranks: int = 1) -> DeviceFacts:
    """Read this machine; nothing is timed (`bf16_gain` is None).

    ranks: processes that this one will start, sharing the cores. ValueError for invalid numbers in the environment.
    """
    import torch

    ranks = max(ranks, requested("LOCAL_WORLD_SIZE"))
    gpu, gpu_problem = _gpu()
    cpu = processor()
    return DeviceFacts(
        platform=sys.platform,
        instructions=cpu.instructions,
        cores=max(1, cores() // ranks),
        ranks=ranks,
        thread_limit=requested("OMP_NUM_THREADS"),
        vcache=vcache(cpu.vendor, l3_caches()),
        gpu=gpu,
        gpu_problem=gpu_problem,
        mps=torch.backends.mps.is_available(),
        macos=tuple(int(part) for part in platform.mac_ver()[0].split(".") if part),
    )


def set_waiting_policy() -> None:
    """Let OpenMP threads spin briefly before sleeping, unless the user chose otherwise. Read once when torch is
    imported, so call it before. The default spins for milliseconds, which slows other programs; sleeping at once nearly
    doubles the time of an update on a quiet machine. Results are unchanged."""
    if not os.environ.keys() & set(WAITING):
        os.environ["GOMP_SPINCOUNT"] = "10000"


def requested(name: str) -> int:
    """A number of threads or ranks from the environment; 0 if unset, ValueError if invalid."""
    text = os.environ.get(name, "").strip()
    if text and not (text.isdecimal() and int(text)):
        raise ValueError(f"{name} is '{text}'; set it to one whole number above 0, such as {name}=2, or unset it")
    return int(text or 0)


def _gpu() -> tuple[Gpu | None, str]:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return None, f"this build of torch ({torch.__version__}) has no CUDA"
    if not torch.cuda.is_available():
        return None, "no CUDA device was found (driver, or CUDA_VISIBLE_DEVICES?)"
    try:
        torch.ones(2, device="cuda").sum().item()  # a build may lack kernels for this GPU
    except RuntimeError as error:
        return None, f"the CUDA device does not work: {str(error).splitlines()[0]}"
    about = torch.cuda.get_device_properties(0)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(about.name, (about.major, about.minor), bf16, about.total_memory), ""


def processor(cpuinfo: str | None = None) -> Processor:
    """Describe the processor from the text of /proc/cpuinfo (read if None)."""
    if cpuinfo is None and sys.platform == "darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string", "hw.optional.arm.FEAT_BF16"]
        shown = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split("\n")
        return Processor("Apple", name=shown[0], instructions=("bf16",) if "1" in shown else ())
    first: dict[str, str] = {}
    for line in (_read(Path("/proc/cpuinfo")) if cpuinfo is None else cpuinfo).splitlines():
        key, _, value = line.partition(":")
        first.setdefault(key.strip().lower(), value.strip())
    flags = (first.get("flags") or first.get("features", "")).split()
    return Processor(
        vendor=first.get("vendor_id", ""),
        family=int(first.get("cpu family", "0")),
        name=first.get("model name", platform.machine()),
        instructions=tuple(flag for flag in INSTRUCTIONS if flag in flags),
    )


def usable_processors() -> list[int]:
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return sorted(affinity(0))


def cores(tree: Path = CPU_TREE, cgroups: Path = CGROUP_TREE, processors: Iterable[int] | None = None) -> int:
    """Physical cores that this process may use, by affinity and cgroup quota."""
    logical = usable_processors() if processors is None else processors
    count = len({_read(tree / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in logical})
    limit = quota(cgroups)
    return max(1, min(count, int(limit))) if limit else count


def quota(cgroups: Path = CGROUP_TREE, membership: Path = CGROUP_MEMBERSHIP) -> float:
    """CPU quota of the cgroup (v1 or v2, and its ancestors); 0.0 = none."""
    quotas = []
    for folder in _groups(cgroups, membership, "cpu"):
        most, _, period = _read(folder / "cpu.max").partition(" ")
        if not period:
            most, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if most.isdigit() and period.isdigit():
            quotas.append(int(most) / int(period))
    return min(quotas, default=0.0)


def memory(cgroups: Path = CGROUP_TREE, membership: Path = CGROUP_MEMBERSHIP) -> int:
    """Bytes of memory that this process may use."""
    limits = [int(psutil.virtual_memory().total)]
    for folder in _groups(cgroups, membership, "memory"):
        texts = (_read(folder / file) for file in ("memory.max", "memory.limit_in_bytes"))
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits)


def _groups(cgroups: Path, membership: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroups and their ancestors; may be missing in containers."""
    folders: list[Path] = []
    for line in [*_read(membership).splitlines(), "0::/", f"1:{controller}:/"]:
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            root = cgroups / controller if names else cgroups
            folder = root / path.lstrip("/")
            folders += [folder, *(up for up in folder.parents if up.is_relative_to(root))]
    return folders


def l3_caches(tree: Path = CPU_TREE, processors: Iterable[int] | None = None) -> list[tuple[int, int]]:
    """(bytes, logical processors sharing it) of each L3 of the usable processors, largest first.

    lscpu prints the SUM over instances, which makes any EPYC look like V-Cache.
    """
    caches: dict[str, tuple[int, int]] = {}
    for number in usable_processors() if processors is None else processors:
        for folder in (tree / f"cpu{number}/cache").glob("index*"):
            size, shared = _read(folder / "size"), _read(folder / "shared_cpu_list")
            if _read(folder / "level") == "3" and size.endswith("K"):
                ranges = [part.split("-") for part in shared.split(",")]  # 0-2,8, say
                caches[shared] = int(size[:-1]) * 1024, sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
    return sorted(caches.values(), reverse=True)


def vcache(vendor: str, caches: list[tuple[int, int]]) -> bool:
    """Whether an AMD die with V-Cache is among the L3 instances."""
    low, high = VCACHE_BYTES
    return vendor == "AuthenticAMD" and any(low < size < high and n <= VCACHE_SHARERS for size, n in caches)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def versions() -> dict[str, str]:
    """Versions of everything that can change results: Python, packages, oneDNN and MKL, CUDA or ROCm build and driver.
    Missing ones are left out."""
    import torch
    from torch.utils import collect_env

    out: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            out[package] = metadata.version(package)
    for library, words in (("onednn", r"MKL-DNN v([\d.]+)"), ("mkl", r"Math Kernel Library Version (\S+)")):
        if found := re.search(words, torch.__config__.show()):
            out[library] = found[1]
    cudnn, cuda = torch.backends.cudnn.version(), torch.version.cuda
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
    out |= {
        "torch": torch.__version__,  # with the build's name
        "cuda": cuda,
        "hip": torch.version.hip,
        "cudnn": str(cudnn or ""),
        "nccl": ".".join(map(str, nccl)),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
    }
    return {package: version for package, version in out.items() if version}
