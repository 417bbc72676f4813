"""Placing a network on its device, and torch.compile: code cache, CUDA-graph rules, graph breaks, doing without."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format
from torch.utils._python_dispatch import TorchDispatchMode

from matrixlib.engine.optim import unwrap
from matrixlib.files import cache_root
from matrixlib.hardware.runtime import Runtime

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
GRAPHS = frozenset({"reduce-overhead", "max-autotune"})  # CUDA graphs reuse output and gradient memory
ON_CPU = {"cpp_wrapper": True}  # calls kernels from C++; 256-bit vectors were as fast as 512-bit


class Watch(TorchDispatchMode):
    """Sees every operation. Unlike torch's own modes it does not import the compiler, which takes as long as torch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def place(model: nn.Module, runtime: Runtime) -> tuple[nn.Module, nn.Module]:
    """(plain module, module to train with): on the device, in its memory format, compiled where it pays. Evaluation and
    state dicts use the plain one: no `_orig_mod.` prefixes, no recompiling in eval mode."""
    plain = unwrap(model).to(runtime.torch_device)
    if runtime.channels_last:
        # conv kernels only: a channels-last attention bias silently disables CUDA's fused attention
        convert_conv2d_weight_memory_format(plain, torch.channels_last)
    if plain is not model or not runtime.compile:
        return plain, model
    return plain, compiled(plain, runtime.compile)


def code_cache() -> Path:
    """Folder of compiled code in our cache, as torch's default under /tmp is lost on reboot. A user's
    TORCHINDUCTOR_CACHE_DIR is kept, but not the one that importing torch._dynamo sets."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(FOLDER, "") in ("", default_cache_dir()):
        os.environ[FOLDER] = str(cache_root() / "compiled")
    return Path(os.environ[FOLDER])


def compiled(model: nn.Module, mode: str = "default", dynamic: bool | None = None) -> nn.Module:
    """torch.compile in one of its modes; on the CPU, training also gets `ON_CPU` options."""
    from torch._inductor import list_mode_options

    code_cache()
    on_cpu = next(model.parameters()).device.type == "cpu"
    options = list_mode_options(mode) | (ON_CPU if on_cpu and model.training else {})
    forward: Any = torch.compile(model, dynamic=dynamic, options=options or None)  # mode and options exclude each other
    return forward


def keep_gradients(mode: str, parameters: Sequence[Tensor]) -> None:
    """Call after a backward pass whose gradients are accumulated: CUDA graphs would overwrite `.grad`
    (https://github.com/pytorch/pytorch/issues/169545)."""
    if mode in GRAPHS:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def graph_breaks() -> str:
    """Reasons for graph breaks in this process; "" if none. TORCH_LOGS=graph_breaks shows where."""
    from torch._dynamo.utils import counters

    return "; ".join(" ".join(reason.split())[:100] for reason in counters["graph_break"])
