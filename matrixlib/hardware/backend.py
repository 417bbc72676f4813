"""What a device can do: memory, events, random state, synchronising, pinning. The only module that knows the kinds.

A new accelerator whose torch module has the names of `torch.cuda` (as `torch.xpu` does) needs nothing here but its
place in `DISCRETE`; what it lacks is written down in the function that misses it. torch is imported inside functions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DISCRETE = ("cuda",)
"""Kinds with a memory of their own: host tensors are pinned for them, and events measure them."""
FUSED = ("cpu", "cuda", "mps")
"""Kinds with a fused AdamW kernel in torch 2.11 and later."""


def _module(device: torch.device) -> Any:
    """`torch.cuda`, `torch.mps`, ..."""
    import torch

    return getattr(torch, device.type)


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has done all that it was sent: else a clock sees launches alone."""
    import torch

    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


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


def memory(device: torch.device) -> dict[str, int]:
    """Bytes in use on `device`; {} for the CPU. Waits for nothing.

    allocated: in tensors. driver: as the driver counts it, with caches, contexts and, on CUDA, other processes.
    device_total: on MPS what Metal recommends as the most, which is less than the machine has. Discrete devices also
    have reserved (tensors and the allocator's cache) and allocated_peak (since `reset_peak_memory`).
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
    """Begin a new peak; nothing where the device counts none."""
    if device.type in DISCRETE:
        _module(device).reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give the allocator's unused blocks back to the driver. The CPU's allocator keeps none."""
    if device.type != "cpu":
        _module(device).empty_cache()


def limit_memory(device: torch.device, fraction: float) -> None:
    """Let the allocator of an accelerator refuse more than `fraction` of the memory."""
    where = [device.index] if device.type in DISCRETE else []  # an index, or None: torch refuses a device without one
    _module(device).set_per_process_memory_fraction(fraction, *where)


def utilisation(device: torch.device) -> dict[str, float]:
    """`busy`: share of the last second or so in which the GPU computed, as its driver counts it; {} where nobody tells:
    not on CUDA, without the package nvidia-ml-py, or on a part of a GPU (MIG).
    """
    if device.type != "cuda" or importlib.util.find_spec("pynvml") is None:
        return {}
    try:
        return {"busy": _module(device).utilization(device) / 100}
    except (importlib.import_module("pynvml").NVMLError, RuntimeError):
        return {}


def timing_event(device: torch.device) -> Any:
    """An event whose `record`, `query` and `elapsed_time` (milliseconds) measure work on `device`; None where the
    host's clock has to do.
    """
    return _module(device).Event(enable_timing=True) if device.type in DISCRETE else None


def rng_state(device: torch.device) -> Tensor | None:
    """State (uint8, on the CPU) of the device's own random stream; None for the CPU. Waits for nothing."""
    if device.type == "cpu":
        return None
    state: Tensor = _module(device).get_rng_state(*([device] if device.type in DISCRETE else []))
    return state


def set_rng_state(device: torch.device, state: Tensor) -> None:
    """Inverse of `rng_state`; nothing for the CPU."""
    if device.type != "cpu":
        _module(device).set_rng_state(state, *([device] if device.type in DISCRETE else []))


def replays_rng(device: torch.device) -> bool:
    """Whether torch's activation checkpointing replays the device's random stream: not that of MPS, without a word
    (pytorch issue 127676).
    """
    return device.type != "mps"


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
