"""What a device can do: memory, events, random state, synchronising, pinning. The only module that knows the kinds.

A new accelerator whose torch module has the names of `torch.cuda` (as `torch.xpu` does) needs nothing here but its
place in `DISCRETE`; what it lacks is written down in the function that misses it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DISCRETE = ("cuda",)
"""Kinds with a memory of their own: host tensors are pinned for them, and events measure them."""
FUSED = ("cpu", "cuda", "mps")
"""Kinds with a fused AdamW kernel in torch 2.11 and later."""


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has done all that it was sent: else a clock sees launches alone."""
    import torch

    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


# Several devices of a kind


def device_count() -> int:
    """GPUs that this process sees; 0 without any."""
    import torch

    return torch.cuda.device_count()


def set_device(index: int) -> None:
    """Let this process compute on the GPU of this number unless it names another."""
    import torch

    torch.cuda.set_device(index)


def communication() -> str:
    """Backends of torch.distributed: gloo between hosts and, beside it, the GPUs' own (NCCL for CUDA)."""
    import torch
    import torch.distributed as dist

    if not device_count() or (accelerator := torch.accelerator.current_accelerator()) is None:
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"


# Memory


def memory(device: torch.device) -> dict[str, int]:
    """Bytes in use on `device`; {} for the CPU. Waits for nothing.

    allocated: in tensors. driver: as the driver counts it, with caches, contexts and, on CUDA, other processes.
    device_total: on MPS what Metal recommends as the most, which is less than the machine has. Discrete devices also
    have reserved (tensors and the allocator's cache) and allocated_peak (since `reset_peak_memory`).
    """
    import torch

    if device.type == "mps":
        return {
            "allocated": torch.mps.current_allocated_memory(),
            "driver": torch.mps.driver_allocated_memory(),
            "device_total": torch.mps.recommended_max_memory(),
        }
    if device.type not in DISCRETE:
        return {}
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    return {
        "allocated": module.memory_allocated(device),
        "allocated_peak": module.max_memory_allocated(device),
        "reserved": module.memory_reserved(device),
        "driver": total - free,
        "device_total": total,
    }


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak; nothing where the device counts none."""
    import torch

    if device.type in DISCRETE:
        torch.get_device_module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give the allocator's unused blocks back to the driver. The CPU's allocator keeps none."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def limit_memory(device: torch.device, fraction: float) -> None:
    """Let the allocator of an accelerator refuse more than `fraction` of the memory."""
    import torch

    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(fraction)
    else:  # an index, or None: torch refuses a device without one
        torch.get_device_module(device).set_per_process_memory_fraction(fraction, device.index)


def utilisation(device: torch.device) -> dict[str, float]:
    """`busy`: share of the last second or so in which the GPU computed, as its driver counts it; {} where nobody tells:
    not on CUDA, without the package nvidia-ml-py, or on a part of a GPU (MIG).
    """
    import torch

    if device.type != "cuda":
        return {}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        return {"busy": torch.cuda.utilization(device) / 100}
    except (nvml.NVMLError, RuntimeError):
        return {}


# Time


def timing_event(device: torch.device) -> Any:
    """An event whose `record`, `query` and `elapsed_time` (milliseconds) measure work on `device`; None where the
    host's clock has to do.
    """
    import torch

    return torch.get_device_module(device).Event(enable_timing=True) if device.type in DISCRETE else None


# Random state


def rng_state(device: torch.device) -> Tensor | None:
    """State (uint8, on the CPU) of the device's own random stream; None for the CPU. Waits for nothing."""
    import torch

    if device.type == "cpu":
        return None
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_device_module(device).get_rng_state(device)


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Inverse of `rng_state`; nothing for the CPU."""
    import torch

    if device.type == "mps":
        torch.mps.set_rng_state(state)
    elif device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state, device)


def replays_rng(device: torch.device) -> bool:
    """Whether torch's activation checkpointing replays the device's random stream: not that of MPS, without a word
    (pytorch issue 127676).
    """
    return device.type != "mps"


# Copies from the host


def pins(device: torch.device | str) -> bool:
    """Whether host tensors should lie in page-locked memory, so that their copies run beside the computation."""
    return str(device).partition(":")[0] in DISCRETE


def pin(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """(the tensors in page-locked memory, ""), or (as they are, why the system refuses)."""
    try:
        return {name: tensor.pin_memory() for name, tensor in tensors.items()}, ""
    except RuntimeError as error:
        return dict(tensors), str(error).splitlines()[0]


def copies_overlap(value: Tensor, device: torch.device) -> bool:
    """Whether copying `value` to `device` runs beside the computation. Elsewhere a tensor that has not arrived could be
    read.
    """
    return pins(device) and value.device.type == "cpu" and value.is_pinned()
