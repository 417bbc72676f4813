"""What this machine is: facts for the policy in runtime.py, a description for people.

Reading never guesses from model names, and reports what this process may use rather than what the host has.
torch is imported inside functions.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which somebody has decided how threads wait."""
PACKAGES = (
    *("matrixlib", "torch", "triton", "numpy", "numba", "safetensors", "zstandard"),
    *("pydantic", "chess", "papermill", "matplotlib"),
)


@dataclass(frozen=True)
class Gpu:
    """What a CUDA (or ROCm) device says of itself; memory in bytes."""

    name: str
    capability: tuple[int, int]
    bf16: bool  # in hardware: Turing emulates it and would say yes
    memory: int


@dataclass(frozen=True)
class Processor:
    """The processor as the operating system describes it."""

    vendor: str = ""
    family: int = 0
    name: str = ""
    instructions: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceFacts:
    """All that the policy needs to know of a machine, as plain values: a test can make up any machine."""

    platform: str = "linux"  # as sys.platform
    instructions: tuple[str, ...] = ()
    cores: int = 1  # physical cores that this process may use (affinity and cgroup quota)
    ranks: int = 1  # processes that share this machine for one training, each with so many cores
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
        """Intra-op threads to use: the cores, unless the person's OMP_NUM_THREADS is less."""
        return min(self.cores, self.thread_limit or self.cores)


def facts(ranks: int = 1) -> DeviceFacts:
    """Read this machine; nothing is measured (`bf16_gain` is None).

    ranks: processes that this one is to start, which share the cores as those of torchrun do. Raises ValueError where
    the environment asks for a number of threads or ranks that is none.
    """
    import torch

    ranks = max(ranks, _requested("LOCAL_WORLD_SIZE"))
    gpu, gpu_problem = _gpu()
    cpu = processor()
    return DeviceFacts(
        platform=sys.platform,
        instructions=cpu.instructions,
        cores=max(1, cores() // ranks),
        ranks=ranks,
        thread_limit=_requested("OMP_NUM_THREADS"),
        vcache=vcache(cpu.vendor, l3_caches()),
        gpu=gpu,
        gpu_problem=gpu_problem,
        mps=torch.backends.mps.is_available(),
        macos=tuple(int(part) for part in platform.mac_ver()[0].split(".") if part),
    )


def set_waiting_policy() -> None:
    """Let threads wait for each other in a short loop before they sleep, unless somebody has decided.

    OpenMP's library reads it once, as torch is imported, so what comes before that calls it. By default it spins for
    milliseconds, which a busy program beside it pays for; sleeping at once takes nearly twice the time of an update on
    a quiet machine. Threads, and so all bits, stay.
    """
    if not os.environ.keys() & set(WAITING):
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _requested(name: str) -> int:
    """A number of the environment; 0 where it is not set."""
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
        torch.ones(2, device="cuda").sum().item()  # a build can lack the kernels of an old or a very new GPU
    except RuntimeError as error:
        return None, f"the CUDA device does not work: {str(error).splitlines()[0]}"
    about = torch.cuda.get_device_properties(0)
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(about.name, (about.major, about.minor), bf16, about.total_memory), ""


def processor(cpuinfo: str | None = None) -> Processor:
    """Describe the processor; `cpuinfo` is the text of /proc/cpuinfo (read where None)."""
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
    """Logical processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    return sorted(affinity(0))


def cores(tree: Path = CPU_TREE, cgroups: Path = CGROUP_TREE, processors: Iterable[int] | None = None) -> int:
    """Physical cores that this process may use: affinity without hyper-threads, and the cgroup's quota."""
    logical = usable_processors() if processors is None else processors
    count = len({_read(tree / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in logical})
    limit = quota(cgroups)
    return max(1, min(count, int(limit))) if limit else count


def quota(cgroups: Path = CGROUP_TREE, membership: Path = CGROUP_MEMBERSHIP) -> float:
    """Processors that the cgroup (version 1 or 2, or one above it) grants; 0.0 = no limit."""
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
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    for folder in _groups(cgroups, membership, "memory"):
        texts = (_read(folder / file) for file in ("memory.max", "memory.limit_in_bytes"))
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits)


def _groups(cgroups: Path, membership: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroups and of all above them; in a container the path is often not there."""
    folders: list[Path] = []
    for line in [*_read(membership).splitlines(), "0::/", f"1:{controller}:/"]:
        _, names, path = line.split(":", 2)
        if not names or controller in names.split(","):
            root = cgroups / controller if names else cgroups
            folder = root / path.lstrip("/")
            folders += [folder, *(up for up in folder.parents if up.is_relative_to(root))]
    return folders


def l3_caches(tree: Path = CPU_TREE, processors: Iterable[int] | None = None) -> list[tuple[int, int]]:
    """(bytes, logical processors sharing it) of each L3 instance below the usable processors, largest first.

    lscpu prints the SUM over all instances, which makes any EPYC look as if it had V-Cache.
    """
    caches: dict[str, tuple[int, int]] = {}
    for number in usable_processors() if processors is None else processors:
        for folder in (tree / f"cpu{number}/cache").glob("index*"):
            size, shared = _read(folder / "size"), _read(folder / "shared_cpu_list")
            if _read(folder / "level") == "3" and size.endswith("K"):
                ranges = [part.split("-") for part in shared.split(",")]  # such as 0-2,8
                caches[shared] = int(size[:-1]) * 1024, sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges)
    return sorted(caches.values(), reverse=True)


def vcache(vendor: str, caches: list[tuple[int, int]]) -> bool:
    """Whether an AMD die with stacked cache is among the L3 instances."""
    low, high = VCACHE_BYTES
    return vendor == "AuthenticAMD" and any(low < size < high and n <= VCACHE_SHARERS for size, n in caches)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def versions() -> dict[str, str]:
    """Versions of all that can change a result: Python, packages, and of CUDA or ROCm what this build has and the
    driver says. What is not there is left out.
    """
    import torch
    from torch.utils import collect_env

    out: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            out[package] = metadata.version(package)
    cudnn, cuda = torch.backends.cudnn.version(), torch.version.cuda
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
    out |= {
        "torch": torch.__version__,  # with the name of the build, which the package's metadata may lack
        "cuda": cuda,
        "hip": torch.version.hip,
        "cudnn": str(cudnn or ""),
        "nccl": ".".join(map(str, nccl)),
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if cuda else None,
    }
    return {package: version for package, version in out.items() if version}
