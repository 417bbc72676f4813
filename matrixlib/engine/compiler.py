"""A network on its device; torch.compile: where its code lies, what its modes ask of training, what breaks graphs."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import convert_conv2d_weight_memory_format

from matrixlib.engine.optim import unwrap
from matrixlib.files import cache_root
from matrixlib.hardware.runtime import Runtime

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
GRAPHS = frozenset({"reduce-overhead", "max-autotune"})  # CUDA graphs write results and gradients to the same memory
ON_CPU = {"cpp_wrapper": True}  # kernels are called from C++; half of AVX-512's vectors were as fast as whole ones


def place(model: nn.Module, runtime: Runtime) -> tuple[nn.Module, nn.Module]:
    """(plain module, module to train with): on the device, in its memory format, compiled where it pays. Evaluation and
    state dicts use the plain one: no `_orig_mod.` in names, no recompiling in eval mode.
    """
    plain = unwrap(model).to(runtime.torch_device)
    if runtime.channels_last:
        # kernels alone: an attention bias in this format keeps every fused attention of CUDA away, silently
        convert_conv2d_weight_memory_format(plain, torch.channels_last)
    if plain is not model or not runtime.compile:
        return plain, model
    return plain, compiled(plain, runtime.compile)


def keep_code() -> Path:
    """The folder of compiled code, among our other files, as a restart empties torch's under /tmp. The user's
    TORCHINDUCTOR_CACHE_DIR stands, but not torch's own, which an import of torch._dynamo sets."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(FOLDER, "") in ("", default_cache_dir()):
        os.environ[FOLDER] = str(cache_root() / "compiled")
    return Path(os.environ[FOLDER])


def compiled(model: nn.Module, mode: str = "default", dynamic: bool | None = None) -> nn.Module:
    """torch.compile in one of its modes; a network in training mode on the CPU also with the settings for that."""
    from torch._inductor import list_mode_options

    keep_code()
    on_cpu = next(model.parameters()).device.type == "cpu"
    options = list_mode_options(mode) | (ON_CPU if on_cpu and model.training else {})
    forward: Any = torch.compile(model, dynamic=dynamic, options=options or None)  # takes no mode beside options
    return forward


def begin_pass(mode: str) -> None:
    """To be called before each forward pass: what the last one has made may now be written over."""
    if mode in GRAPHS:
        torch.compiler.cudagraph_mark_step_begin()


def keep_gradients(mode: str, parameters: Sequence[Tensor]) -> None:
    """To be called after a backward pass whose gradients the next one adds to: a recorded graph writes over what it has
    lent as `.grad` (https://github.com/pytorch/pytorch/issues/169545)."""
    if mode in GRAPHS:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def graph_breaks() -> str:
    """Why graphs of this process were broken so far; "" where none was. TORCH_LOGS=graph_breaks shows the places."""
    from torch._dynamo.utils import counters

    return "; ".join(" ".join(reason.split())[:100] for reason in counters["graph_break"])
