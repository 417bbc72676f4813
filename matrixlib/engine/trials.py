"""What is tried on the device before a run, with updates of throwaway networks: one beside the CPU's, in the dtype that
the run is to have, and updates compiled beside updates that are not.
"""

import copy
import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from matrixlib.config import Config, GatingConfig, dump
from matrixlib.engine import optim, rng
from matrixlib.engine.diagnostics import block_of
from matrixlib.engine.memory import fresh_model, out_of_memory
from matrixlib.engine.stats import Stats
from matrixlib.engine.step import Step, throwaway
from matrixlib.engine.task import Batch, Task, active_terms, rows, slice_batch
from matrixlib.files import cache_root, read_json, write_json
from matrixlib.hardware import machine
from matrixlib.hardware.runtime import Runtime
from matrixlib.hardware.speed import seconds_of

ROWS = 8
"""Of an update that is compared: enough for every term to have a target."""
OVERFLOWS = 20
"""Updates in which fp16 may look for its loss scale."""
NOISE = 0.02
"""Added to fresh weights: heads begin at zero, and a network behind them would have no gradient to compare."""
AGREEMENT = {True: (2e-3, 0.999, 0.01), False: (0.1, 0.9, 0.25)}
"""fp32 or not -> relative difference of a loss at most, least cosine of a block's gradient with the CPU's, relative
difference of its norm at most. Far from what rounding does, and a faulty kernel is farther."""
TIMED = 5
"""Updates timed compiled and not, after those that warm up."""
MODE = "default"
"""Of torch.compile, where nobody named one: the others take minutes to compile, or memory of their own."""
GAIN = 1.05
"""How many times as fast compiled updates have to be."""
SHORTEST = 180.0
"""Seconds of updates in a run that tries it: at one and a half times the speed they win back a minute of compiling."""


class LinearRows(TorchFunctionMode):
    """Inside of it, `rows` is the most rows that the input of a linear layer has had."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            self.rows = max(self.rows, args[0].numel() // max(1, args[0].shape[-1]))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Comparison:
    """An update on a device beside the same on the CPU in fp32. problem: what is wrong with it, "" = nothing.
    linear_rows: of the largest linear layer's input for one row of the batch, of an update that is right.
    """

    problem: str
    linear_rows: int = 0


def compare(task: Task, batch: Batch, runtime: Runtime, config: Config) -> Comparison:
    """One update of a few rows of `batch` (host tensors) in `runtime` beside the same on the CPU in fp32.

    In eval mode, as dropout draws other numbers on each device; without the compiler. What fails on the CPU in fp32 too
    is no fault of the device and is raised. Random streams are afterwards as they were.
    """
    part = slice_batch(batch, 0, min(ROWS, rows(batch)))
    unclipped = config.optim.model_copy(update={"clip_norm": math.inf})
    config = config.model_copy(update={"gating": GatingConfig(), "optim": unclipped})
    plain = replace(runtime, device="cpu", dtype="fp32", scaler=False, channels_last=False, compile="")
    streams = rng.capture(runtime.torch_device)
    try:
        network = _rough(fresh_model(task))
        with LinearRows() as linear:
            expected = _update(task, copy.deepcopy(network), plain, config, [part])
        try:
            half = slice_batch(part, 0, -(-rows(part) // 2))  # some faults of mps follow a pass of another size alone
            measured = _update(task, network, replace(runtime, compile=""), config, [half, part])
        except (RuntimeError, TypeError) as error:  # TypeError: what mps says of a dtype that it lacks
            if out_of_memory(error):
                raise
            return Comparison((str(error) or repr(error)).splitlines()[0])
    finally:
        rng.restore(streams, runtime.torch_device)
    exact = runtime.dtype == "fp32" and not runtime.tf32
    return Comparison(difference(measured, expected, exact), -(-linear.rows // rows(part)))


@dataclass(frozen=True)
class Outcome:
    """Of one update. gradients: of each block, in float64 on the host, before clipping."""

    losses: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    detail: str = ""


def difference(measured: Outcome, expected: Outcome, exact: bool) -> str:
    """What is wrong with an update beside another of the same rows, in words; "" where they agree. exact: in fp32."""
    most, cosine, spread = AGREEMENT[exact]
    if measured.detail:
        return measured.detail
    for term, loss in expected.losses.items():
        if not abs(measured.losses.get(term, math.nan) - loss) <= most * max(abs(loss), 1e-3):
            return f"the loss of {term} is {measured.losses.get(term, math.nan):.4g} where the CPU has {loss:.4g}"
    norms = {name: float(gradient.norm()) for name, gradient in expected.gradients.items()}
    for name, gradient in expected.gradients.items():
        other = measured.gradients[name]
        norm = float(other.norm())
        if norms[name] < 1e-4 * max(norms.values()):
            continue  # all rounding
        if not abs(norm - norms[name]) <= spread * norms[name]:
            return f"the gradient of {name} has norm {norm:.4g} where the CPU's has {norms[name]:.4g}"
        angle = float(gradient @ other) / (norm * norms[name])
        if not angle >= cosine:
            return f"the gradient of {name} points elsewhere than the CPU's: cosine {angle:.4f}"
    return ""


def _rough(network: nn.Module) -> nn.Module:
    """The network with a little noise on its weights, from a stream of its own."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator))
    return network


def _update(task: Task, network: nn.Module, runtime: Runtime, config: Config, batches: list[Batch]) -> Outcome:
    """The last of these updates."""
    step = Step(task, network, runtime, config, steps=1000)
    network.eval()
    weights = {name: tensor.clone() for name, tensor in optim.named_tensors(network).items()}
    for batch in batches:
        optim.load_tensors(network, weights)  # each from the same weights
        stats = step(batch)
        for _ in range(OVERFLOWS):
            if not stats.overflow:
                break
            stats = step(batch)
    blocks: dict[str, list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.detach().cpu().double().flatten()
            blocks.setdefault(block_of(network, name), []).append(gradient)
    detail = "" if stats.finite else stats.detail or "the loss scale fell without end"
    return Outcome(stats.losses, {name: torch.cat(parts) for name, parts in blocks.items()}, detail)


@dataclass(frozen=True)
class Compiling:
    """Seconds of an update compiled and not. problem: why the compiled one cannot be used, "" = nothing."""

    plain: float
    compiled: float
    problem: str = ""


def choose_compile(task: Task, batch: Batch, runtime: Runtime, config: Config, card: str) -> tuple[str, str]:
    """(mode of torch.compile that pays for this network and `card`, why), by trying; "" = none.

    batch: of one update, host tensors. What was measured is kept for the next run of the same network, card, versions
    and rows, as compiled code is. A run that is too short to win back the time of compiling tries nothing.
    """
    kept = cache_root() / "compile" / f"{_key(task, runtime, config, card)}.json"
    try:
        known = Compiling(**read_json(kept))
    except (ValueError, TypeError):  # damaged, or not there: measured again
        known = None
    plain = known.plain if known else _timed(task, batch, replace(runtime, compile=""), config)[0]
    steps = config.train.steps
    seconds = 60 * config.train.minutes if steps == "auto" else steps * plain
    if seconds < SHORTEST:
        return "", f"{seconds:.0f} seconds of updates would not win back the time of compiling"
    if known is None:
        known = try_compiled(task, batch, runtime, config)
        if not known.problem:  # which may be mended by then
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, asdict(known))
    if known.problem:
        return "", f"tried on {card}: {known.problem}"
    gain = known.plain / known.compiled
    return MODE if gain >= GAIN else "", f"updates are {gain:.2f} times as fast compiled, tried on {card}"


def try_compiled(task: Task, batch: Batch, runtime: Runtime, config: Config) -> Compiling:
    """Updates of two throwaway networks with the same weights, one of them compiled."""
    plain, expected, _ = _timed(task, batch, replace(runtime, compile=""), config)
    compiled, stats, problem = _timed(task, batch, replace(runtime, compile=MODE), config)
    most, _, spread = AGREEMENT[runtime.dtype == "fp32"]
    for term, loss in ({} if problem else expected.losses).items():
        if not abs(stats.losses[term] - loss) <= most * max(abs(loss), 1e-3):
            problem = f"the compiled loss of {term} is {stats.losses[term]:.4g} where the plain one is {loss:.4g}"
    if not problem and not abs(stats.grad_norm - expected.grad_norm) <= spread * expected.grad_norm:
        problem = f"the compiled gradient has norm {stats.grad_norm:.4g}, the plain one {expected.grad_norm:.4g}"
    return Compiling(plain, compiled, problem)


def _timed(task: Task, batch: Batch, runtime: Runtime, config: Config) -> tuple[float, Stats, str]:
    """(median seconds of an update after two that warm up, the first one's stats, why it is not what was asked for)."""
    with throwaway(task, runtime, config) as step:
        first = step(batch)
        compiled = step.model is not optim.unwrap(step.model)
        count = 1 + TIMED if compiled or not runtime.compile else 0
        seconds = [seconds_of(lambda: step(batch), runtime.device) for _ in range(count)][1:]
        short = step.micro_batch < min(runtime.micro_batch, rows(batch))
    problem = ""
    if runtime.compile and not compiled:
        problem = first.messages[0]
    elif short:
        problem = "compiled updates need more memory"
    return statistics.median(seconds or [math.inf]), first, problem


def _key(task: Task, runtime: Runtime, config: Config, card: str) -> str:
    """What decides how fast an update is, compiled or not, as a file name."""
    sections = {name: dump(getattr(config, name)) for name in ("model", "loss") if hasattr(config, name)}
    versions = machine.versions()
    what = {
        "card": card,
        "versions": [versions.get(name) for name in ("torch", "triton", "cuda", "driver")],
        "task": [config.task, sorted(active_terms(task))],
        "rows": [config.train.batch_size, runtime.micro_batch],
        "runtime": [runtime.dtype, runtime.channels_last, runtime.tf32, runtime.benchmark],
        **sections,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
