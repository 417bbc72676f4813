"""What a device can do: memory, events, random state, synchronisation, pinning. No other module tells kinds apart.

An accelerator whose torch module is like `torch.cuda` (as `torch.xpu`) only needs an entry in `DISCRETE`; what it lacks
is noted in the function concerned. torch is imported inside functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DISCRETE = ("cuda",)  # kinds with their own memory: host tensors are pinned, and events time them
FUSED = ("cpu", "cuda", "mps")  # kinds with a fused AdamW kernel in torch 2.11 and later


def _module(device: torch.device) -> Any:
    """`torch.cuda`, `torch.mps`, ..."""
    import torch

    return getattr(torch, device.type)


def synchronize(device: torch.device | str) -> None:
    """Wait for all work on `device`; without it a clock times launches."""
    import torch

    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def device_count() -> int:
    """Visible GPUs; 0 without any."""
    import torch

    return torch.cuda.device_count()


def set_device(index: int) -> None:
    import torch

    torch.cuda.set_device(index)


def communication() -> str:
    """torch.distributed backends: gloo, and NCCL for CUDA."""
    import torch
    import torch.distributed as dist

    if not device_count() or (accelerator := torch.accelerator.current_accelerator()) is None:
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


def memory(device: torch.device) -> dict[str, int]:
    """Bytes in use on `device`; {} for the CPU. Does not synchronise.

    allocated: tensors. driver: by the driver, with caches, contexts and, on CUDA, other processes. device_total: on MPS
    Metal's recommended maximum, less than the machine's memory. Discrete devices also have reserved (tensors plus
    allocator cache) and allocated_peak (since `reset_peak_memory`).
    """
    if device.type == "cpu":
        return {}
    module = _module(device)
    if device.type not in DISCRETE:
        return {
            "allocated": module.current_allocated_memory(),
            "driver": module.driver_allocated_memory(),
            "device_total": module.recommended_max_memory(),
        }
    free, total = module.mem_get_info(device)
    return {
        "allocated": module.memory_allocated(device),
        "allocated_peak": module.max_memory_allocated(device),
        "reserved": module.memory_reserved(device),
        "driver": total - free,
        "device_total": total,
    }


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak, if the device tracks one."""
    if device.type in DISCRETE:
        _module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Return the allocator's unused blocks to the driver. The CPU has none."""
    if device.type != "cpu":
        _module(device).empty_cache()


def limit_memory(device: torch.device, fraction: float) -> None:
    """Limit an accelerator's allocator to `fraction` of the memory."""
    where = [device.index] if device.type in DISCRETE else []  # an index, or None: torch refuses a device without one
    _module(device).set_per_process_memory_fraction(fraction, *where)


def utilisation(device: torch.device) -> dict[str, float]:
    """`busy`: share of the last second that the GPU computed; {} without CUDA or nvidia-ml-py, or on a MIG slice."""
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return {}
    try:
        return {"busy": _module(device).utilization(device) / 100}
    except (importlib.import_module("pynvml").NVMLError, RuntimeError):
        return {}


def timing_event(device: torch.device) -> Any:
    """An event with `record`, `query` and `elapsed_time` (ms) on `device`; None where the host clock is used."""
    return _module(device).Event(enable_timing=True) if device.type in DISCRETE else None


def rng_state(device: torch.device) -> Tensor | None:
    """State (uint8, CPU) of the device's random stream; None for the CPU. Does not synchronise."""
    if device.type == "cpu":
        return None
    return _module(device).get_rng_state(*([device] if device.type in DISCRETE else []))


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Inverse of `rng_state`; no-op for the CPU."""
    if device.type != "cpu":
        _module(device).set_rng_state(state, *([device] if device.type in DISCRETE else []))


def replays_rng(device: torch.device) -> bool:
    """Whether activation checkpointing restores the random stream: silently not on MPS (pytorch issue 127676)."""
    return device.type != "mps"


def pins(device: torch.device | str) -> bool:
    """Whether host tensors should be pinned, for asynchronous copies."""
    return str(device).partition(":")[0] in DISCRETE


def pin(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """(pinned tensors, ""), or (the same tensors, why pinning failed)."""
    try:
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}, ""
    except RuntimeError as error:
        return dict(tensors), str(error).splitlines()[0]


def copies_overlap(value: Tensor, device: torch.device) -> bool:
    """Whether copying `value` to `device` may be asynchronous. Elsewhere unfinished copies could be read."""
    return pins(device) and value.device.type == "cpu" and value.is_pinned()
