"""Describe and measure this machine for people: what the probe notebook shows and stores.

The sizes it suggests come from the function that the policy itself uses.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from matrixlib import machine
from matrixlib.runtime import device_for, suggest

PACKAGES = ("matrixlib", "numpy", "numba", "safetensors", "pydantic", "chess", "papermill", "matplotlib")


def probe(seconds: float = 2.0) -> dict[str, Any]:
    """Describe and measure this machine; plain data for summary.json. Takes about `seconds` + 3.

    `measured` is in GFLOP/s ("copy": GB/s) on the device that `auto` takes; `suggested` is what `auto` uses;
    `facts.rates` is of one core, as the policy compares them.
    """
    facts = machine.facts()
    device, why = device_for(facts, os.environ.get("MATRIXLIB_DEVICE", "auto"))
    native = {"cuda": facts.gpu is not None and facts.gpu.bf16, "mps": True, "cpu": facts.bf16}[device]
    sizes = {name: {"value": value, "why": why} for name, (value, why) in suggest(facts, device).items()}
    return {
        "processor": asdict(machine.processor()),
        "l3": [{"bytes": size, "shared_by": sharers} for size, sharers in machine.l3_caches()],
        "facts": asdict(replace(facts, rates=machine.measure(facts.bf16))),
        "device": {"value": device, "why": why},
        "measured": speed(device, native, facts.threads, seconds),
        "suggested": sizes,
        "environment": environment(),
    }


def speed(device: str, bf16: bool, threads: int, seconds: float = 2.0) -> dict[str, float]:
    """What `device` does with all its cores: "fp32" (and "bf16" where asked) in GFLOP/s, "copy" in GB/s.

    The first two are matrix products, fp32 under torch's present TF32 setting. The copy is of 256 MiB within
    the device's memory; reading and writing both count.
    """
    import torch

    n = 2048 if device == "cpu" else 8192
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        machine.wait(device)

    kinds: dict[str, tuple[float, Callable[[], object]]] = {"fp32": machine.product(device, torch.float32, n)}
    if bf16:
        kinds["bf16"] = machine.product(device, torch.bfloat16, n)
    kinds["copy"] = (2.0 * source.numel() * source.element_size(), copy)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return {name: round(value, 1) for name, value in machine.best_rates(kinds, seconds).items()}
    finally:
        torch.set_num_threads(before)


def environment() -> dict[str, Any]:
    """Versions of everything that can change a result; None where a build lacks the part."""
    import torch

    nccl = None
    distributed = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    if distributed and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": nccl,
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "packages": versions,
        "torch_build": torch.__config__.show(),
    }
