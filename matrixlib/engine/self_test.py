"""Self-test of a device and dtype when a run starts: one update compared with the CPU's in fp32."""

import copy
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from matrixlib.config import Config, GatingConfig
from matrixlib.engine import optim, rng
from matrixlib.engine.diagnostics import block_of
from matrixlib.engine.memory import first_line, fresh_model, out_of_memory
from matrixlib.engine.stats import Stats
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, Task, rows, slice_batch
from matrixlib.hardware.runtime import Runtime

ROWS = 8  # compared; enough for every term to have a target
MAX_OVERFLOWS = 20  # updates for fp16 to find its loss scale
WEIGHT_NOISE = 0.02  # added to fresh weights: a zero-initialised head gives the trunk no gradient to compare
TOLERANCE = {True: (2e-3, 0.05), False: (0.1, 0.6)}
"""fp32? -> largest relative difference of a loss and of a block's gradient (L2); faulty kernels differ by more."""
NEGLIGIBLE = 1e-4  # block gradients below this share of the largest are rounding noise


class LinearRows(TorchFunctionMode):
    """Context that records the largest number of rows a linear layer got, in `rows`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            self.rows = max(self.rows, args[0].numel() // max(1, args[0].shape[-1]))
        return func(*args, **(kwargs or {}))


def compare(task: Task, batch: Batch, runtime: Runtime, config: Config) -> tuple[str, int]:
    """Compare one update of a few rows of `batch` (host tensors) in `runtime` with the CPU's in fp32: (what is wrong,
    "" if nothing; rows of the largest linear layer's input per row of the batch). Errors of the CPU are raised."""
    part = slice_batch(batch, 0, min(ROWS, rows(batch)))
    unclipped = config.optim.model_copy(update={"clip_norm": math.inf})
    config = config.model_copy(update={"gating": GatingConfig(), "optim": unclipped})
    plain = replace(runtime, device="cpu", dtype="fp32", scaler=False, channels_last=False, compile="")
    streams = rng.capture(runtime.torch_device)
    try:
        network = fresh_model(task)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(WEIGHT_NOISE * torch.randn(parameter.shape, generator=generator))
        with LinearRows() as linear:
            expected = _update(task, copy.deepcopy(network), plain, config, [part])
        try:
            half = slice_batch(part, 0, -(-rows(part) // 2))  # some MPS faults need a previous pass of another size
            measured = _update(task, network, replace(runtime, compile=""), config, [half, part])
        except (RuntimeError, TypeError) as error:  # TypeError: a dtype that MPS lacks
            if out_of_memory(error):
                raise
            return first_line(error), 0
    finally:
        rng.restore(streams, runtime.torch_device)
    tolerance = TOLERANCE[runtime.dtype == "fp32" and not runtime.tf32]
    return _difference(*measured, *expected, *tolerance), -(-linear.rows // rows(part))


def _update(
    task: Task, network: nn.Module, runtime: Runtime, config: Config, batches: list[Batch]
) -> tuple[Stats, dict[str, Tensor]]:
    """The last of these updates, and each block's gradient before clipping, in float64 on the host."""
    step = Step(task, network, runtime, config, steps=1000)
    network.eval()
    for module in network.modules():
        if isinstance(module, nn.RNNBase):  # cuDNN computes its gradients in training mode alone
            module.dropout = 0.0
            module.train()
    weights = {name: tensor.clone() for name, tensor in optim.named_tensors(network).items()}
    for batch in batches:
        optim.load_tensors(network, weights)  # each from the same weights
        for _ in range(1 + MAX_OVERFLOWS):
            if not (stats := step(batch)).overflow:
                break
    blocks = defaultdict[str, list[Tensor]](list)
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            blocks[block_of(network, name)].append(parameter.grad.detach().cpu().double().flatten())
    return stats, {name: torch.cat(parts) for name, parts in blocks.items()}


def _difference(
    stats: Stats, gradients: dict[str, Tensor], wanted: Stats, right: dict[str, Tensor], loss: float, gradient: float
) -> str:
    """What differs between two updates of the same rows; loss, gradient: relative tolerances."""
    if not stats.finite:
        return stats.detail or "the loss scale fell without end"
    norms = {name: float(value.norm()) for name, value in right.items()}
    blocks = [name for name, norm in norms.items() if norm >= NEGLIGIBLE * max(norms.values())]
    errors = {name: float((gradients[name] - right[name]).norm()) / norms[name] for name in blocks}
    try:
        assert_close(stats.losses, wanted.losses, rtol=loss, atol=1e-3 * loss)
        assert_close(errors, dict.fromkeys(blocks, 0.0), rtol=0.0, atol=gradient)
    except AssertionError as error:
        return f"losses or gradients are not the CPU's: {' '.join(str(error).split())}"
    return ""
