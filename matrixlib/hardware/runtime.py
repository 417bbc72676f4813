"""Device and precision policy: every machine-dependent choice, with its reason.

`policy` decides from plain numbers (read by machine.py), `resolve` does so for a run on this machine; backend.py knows
what a device can do. torch is imported inside functions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from matrixlib.config import Count, CountOrZero
from matrixlib.hardware import machine, speed
from matrixlib.hardware.machine import BF16_INSTRUCTIONS, DeviceFacts

if TYPE_CHECKING:
    import torch

    from matrixlib.config import DataConfig, RuntimeConfig, TrainConfig

BF16_PAYS = 1.3  # products measured 2.3 (Zen 4) and 8 (AMX) times as fast as in fp32, and 1.0 without units for it
AMPERE = (8, 0)  # compute capability
MICRO_BATCH = {"cpu": 256, "mps": 256, "cuda": 1024}
SMALL_GPU = 12 * 2**30  # bytes; below this a GPU gets the smaller micro-batch
LINEAR_ROWS = 32_768
"""Most rows of a linear layer's input on MPS. Above, after a pass of another size, gradients are a thousand times too
large while the loss is right: https://github.com/pytorch/pytorch/issues/177116."""
HOST_THREADS = 4  # beside a GPU
LOADER = (4, 4)  # workers and prefetch ahead of a GPU
LOADER_VCACHE = (8, 6)  # the V-Cache rule: a large L3 helps the loader, not the update
SERVING_SIZES: tuple[int, ...] = (16, 64, 128, 256, 512, 1024)  # rows of a batch without training
MEASURED = "on two cores of an EPYC"  # source of figures in reasons that are not measured at start
SLOW_CONVOLUTION = "convolution backward is up to 30 times slower with it on mps (pytorch issue 193349)"
REQUESTED = "asked for"  # reason of a user's choice
NO_MPS = "no Apple GPU was found"
SLOW_COMPILE = "training was 4.5 to 9 times slower compiled on mps (pytorch issue 192551)"


@dataclass(frozen=True)
class Runtime:
    """All choices of one run; stored with it and reused on resume, as results depend on them bit by bit."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # stored data

    device: str  # cpu, cuda or mps
    dtype: Literal["fp32", "bf16", "fp16"]  # of autocast (fp32: off); parameters and optimiser state are always fp32
    scaler: bool
    tf32: bool
    channels_last: bool
    compile: str  # mode of torch.compile, "" = not compiled
    threads: Count
    workers: CountOrZero
    prefetch: Count
    micro_batch: Count
    reasons: Mapping[str, str] = field(default_factory=dict)  # choice -> why
    requested: tuple[str, ...] = ()  # the user's choices, never replaced silently
    ranks: Count = 1  # processes on the machine when threads and workers were chosen

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of every forward pass, in training and evaluation."""
        import torch

        dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]
        return torch.autocast(self.device, dtype=dtype, enabled=dtype is not None)

    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """A new loss scaler (one a run; its state is saved) for fp16 on CUDA, else None."""
        import torch

        # torch silently accepts an enabled GradScaler("mps") or ("cpu")
        assert not self.scaler or self.device == "cuda"
        return torch.amp.GradScaler("cuda") if self.scaler else None

    def apply(self) -> None:
        """Set torch's threads and TF32; the only place that does.

        TF32 by torch's older interface: mixed with `fp32_precision`, reads (torch.compile's, too) raise RuntimeError.
        """
        import torch

        torch.set_num_threads(self.threads)
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = self.tf32  # torch's default is True, even in fp32

    def with_choice(self, name: str, value: Any, why: str) -> Runtime:
        """A copy with another value of one choice, no longer the user's, and its reason."""
        others = tuple(other for other in self.requested if other != name)
        return replace(self, **{name: value}, reasons={**self.reasons, name: why}, requested=others)

    def table(self) -> str:
        """Plain text: a line for each choice with its reason."""
        return "\n".join(f"{f'{name} {words(getattr(self, name))}':22}{why}" for name, why in self.reasons.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON or YAML; from_dict(to_dict()) is equal."""
        return {**asdict(self), "requested": list(self.requested)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Runtime:
        """Inverse of to_dict. ValueError for missing or unknown keys and invalid values."""
        try:
            return TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            name, problem = first["loc"][0], first["msg"]
            raise ValueError(f"the stored runtime's {name}: {problem}; restore it, or start a new run") from None


@dataclass(frozen=True)
class Serving:
    """How a trained network is evaluated.

    sizes: batch sizes, ascending; larger batches are split. fill: pad to the next size. compile: policy and value.
    """

    sizes: tuple[int, ...]
    fill: bool
    compile: bool


def serving(device: str, compile: bool | str = "auto") -> Serving:
    """How a network is evaluated on a device. `auto` never compiles: 0.9 to 1.0 times as fast on two cores of an EPYC,
    after seconds for each size; not measured on a GPU."""
    # larger batches reallocate on every call: 1.4 times slower on two cores of an EPYC
    sizes = tuple(size for size in SERVING_SIZES if device != "cpu" or size <= 256)
    compiled = compile is True
    return Serving(sizes, fill=device != "cpu" or compiled, compile=compiled)  # new sizes cost time


def resolve(runtime: RuntimeConfig, train: TrainConfig, data: DataConfig, ranks: int = 1) -> Runtime:
    """Decide for this machine. $MATRIXLIB_DEVICE replaces `device: auto`. ranks: processes that this one will start.

    Times bf16 for a third of a second on CPUs and MPS that support it if precision is `auto`. ValueError if a device or
    dtype that `runtime` names cannot work here.
    """
    forced = forced_device() if runtime.device == "auto" else ""
    runtime = runtime.model_copy(update={"device": forced}) if forced else runtime
    facts = machine.facts(ranks)
    device, why = select_device(facts, runtime.device)
    if runtime.precision == "auto" and device != "cuda" and native_bf16(facts, device):
        try:
            facts = replace(facts, bf16_gain=speed.bf16_gain(device))
        except (RuntimeError, TypeError) as error:  # TypeError: a dtype that MPS lacks
            facts = replace(facts, bf16_problem=str(error).split("\n")[0])
    resolved = policy(facts, runtime, train, data)
    reasons = {**resolved.reasons, "device": f"{why} by MATRIXLIB_DEVICE"}
    return replace(resolved, reasons=reasons) if forced else resolved


def forced_device() -> str:
    """$MATRIXLIB_DEVICE, "" if unset; ValueError if it names no device."""
    forced = os.environ.get("MATRIXLIB_DEVICE", "")
    if forced and forced not in ("auto", *MICRO_BATCH):
        raise ValueError(f"MATRIXLIB_DEVICE is '{forced}'; use auto, {', '.join(MICRO_BATCH)}, or unset it")
    return forced


def check_environment() -> None:
    """ValueError for a variable that `resolve` would refuse; for entry points, before torch is imported."""
    forced_device()
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        machine.requested(name)


def reuse(stored: Mapping[str, Any], facts: DeviceFacts | None = None, ranks: int = 1) -> Runtime:
    """The runtime of a run to resume. ValueError if its device is missing.

    Threads and workers that the user did not set are chosen again for another number of processes (`ranks`).
    """
    runtime, facts = Runtime.from_dict(stored), facts or machine.facts(ranks)
    try:
        select_device(facts, runtime.device)
    except ValueError as error:
        raise ValueError(f"this run began on '{runtime.device}' and resumes only there: {error}") from None
    if facts.ranks == runtime.ranks:
        return runtime
    for name, choice in suggest(facts, runtime.device).items():
        if name != "micro_batch" and name not in runtime.requested:
            runtime = runtime.with_choice(name, *choice)
    return replace(runtime, ranks=facts.ranks)


def policy(facts: DeviceFacts, runtime: RuntimeConfig, train: TrainConfig, data: DataConfig) -> Runtime:
    """Decide from numbers alone; pure. Every choice has a sentence in `reasons`.

    ValueError if a device or dtype that `runtime` names cannot work on such a machine.
    """
    device, _ = found = select_device(facts, runtime.device)
    dtype, why = _dtype(facts, device, runtime.precision)
    scaler = "fp16 loses small gradients unless the loss is scaled", f"{dtype} has the exponents of fp32"
    tf32 = device == "cuda" and facts.gpu is not None and facts.gpu.capability >= AMPERE and runtime.precision != "fp32"
    suggested = suggest(facts, device)
    choices: dict[str, tuple[Any, str]] = {
        "device": found,
        "dtype": (dtype, why),
        "scaler": (dtype == "fp16", scaler[dtype != "fp16"]),
        "tf32": (tf32, "from Ampere on, for what autocast leaves in fp32, unless precision is fp32"),
        "channels_last": _channels_last(device, runtime.channels_last),
        "compile": compile_mode(device, runtime.compile),
        **suggested,
    }
    options: dict[str, Any] = {"device": runtime.device, "dtype": runtime.precision}
    options |= {"channels_last": runtime.channels_last, "compile": runtime.compile, "threads": runtime.threads}
    options |= {"workers": data.workers, "prefetch": data.prefetch, "micro_batch": train.micro_batch}
    requested = {name: value for name, value in options.items() if value != "auto"}
    choices |= {name: (value, REQUESTED) for name, value in requested.items() if name in suggested}
    if choices["threads"][0] > facts.cores:
        choices["threads"] = runtime.threads, f"{REQUESTED}; slower, as only {facts.cores} cores may be used"
    if choices["workers"][0] == 0 and data.prefetch == "auto":
        choices["prefetch"] = choices["prefetch"][0], "has no effect without workers"
    if choices["micro_batch"][0] > train.batch_size:
        choices["micro_batch"] = train.batch_size, "the whole update fits in one pass"
    return Runtime(
        **{name: value for name, (value, _) in choices.items()},
        reasons={name: why for name, (_, why) in choices.items()},
        requested=tuple(name for name in choices if name in requested),
        ranks=facts.ranks,
    )


def words(value: Any) -> Any:
    """A choice as text: yes or no for switches, no for a mode that is off."""
    return ("yes" if value else "no") if isinstance(value, bool) or value == "" else value


def suggest(facts: DeviceFacts, device: str) -> dict[str, tuple[int, str]]:
    """What `auto` means: threads, workers, prefetch, micro_batch -> (value, why). Not `batch_size`: it changes what is
    learned."""
    threads = f"cores that this process may use: {facts.cores}"
    if facts.threads < facts.cores:
        threads += f", limited by OMP_NUM_THREADS={facts.thread_limit}"
    count = facts.threads
    if device == "cuda" and count > HOST_THREADS:
        count, threads = HOST_THREADS, "the host's share of an update is small, and more threads make it slower"
    (most, ahead), extra = (LOADER_VCACHE, " (V-Cache rule)") if facts.vcache else (LOADER, "")
    workers = (1, "one process can prepare batches several times as fast as such a device trains on them")
    prefetch = (2, "updates made ahead by each worker")
    if facts.platform == "darwin":
        workers = (0, "loader processes can deadlock on macOS, and one core prepares enough")
    elif device == "cuda" and facts.cores > 1:
        workers = (min(most, facts.cores - 1), f"one core is left to feed the GPU{extra}")
        prefetch = (ahead, f"{prefetch[1]}{extra}")
    elif facts.cores <= 2:
        workers = (0, "the loader is far faster than the model, and would take one of so few cores")
    micro_batch = (MICRO_BATCH[device], "a start; a run on CUDA begins with all rows")
    if device == "cpu":
        micro_batch = (MICRO_BATCH[device], f"where more rows in one pass gain little: measured {MEASURED}")
    elif facts.gpu and device == "cuda" and facts.gpu.memory < SMALL_GPU:
        micro_batch = (MICRO_BATCH["cpu"], f"the GPU has only {facts.gpu.memory / 2**30:.0f} GiB")
    return {"threads": (count, threads), "workers": workers, "prefetch": prefetch, "micro_batch": micro_batch}


def select_device(facts: DeviceFacts, option: str) -> tuple[str, str]:
    """(device, why) for the option `device`. ValueError if that device is missing."""
    there = {"cuda": facts.gpu is not None, "mps": facts.mps, "cpu": True}
    here = [name for name, present in there.items() if present]
    about = {"mps": "Apple GPU", "cpu": f"{facts.gpu_problem}; {NO_MPS}"}
    if facts.gpu:
        about["cuda"] = f"{facts.gpu.name}, compute capability {'.'.join(map(str, facts.gpu.capability))}"
    if option == "auto":
        return here[0], about[here[0]]
    if option in here:
        return option, REQUESTED
    if option not in there:
        raise ValueError(f"device '{option}' is none; use auto, {', '.join(there)}")
    problem = f"{facts.gpu_problem} (for a CUDA build of torch see TORCH_INDEX in guides/hardware.md)"
    raise ValueError(
        f"device '{option}' was asked for, but {problem if option == 'cuda' else NO_MPS}; "
        f"use 'auto' or one that works here: {', '.join(here)}"
    )


def native_bf16(facts: DeviceFacts, device: str) -> bool:
    """Whether `device` multiplies bf16 in hardware, not by emulation."""
    if device == "cpu":
        return any(name in facts.instructions for name in BF16_INSTRUCTIONS)
    return facts.macos >= (14, 0) if device == "mps" else facts.gpu is not None and facts.gpu.bf16


def _dtype(facts: DeviceFacts, device: str, option: str) -> tuple[str, str]:
    """(autocast dtype, why); ValueError if the requested one cannot be trusted."""
    native = native_bf16(facts, device)
    if option == "fp16" and device != "cuda":
        raise ValueError(
            f"precision 'fp16' needs a loss scaler, which is trusted on CUDA alone; "
            f"on {device} use 'bf16', 'fp32' or 'auto'"
        )
    if option == "bf16" and not native:
        if device == "mps":
            raise ValueError("precision 'bf16' needs macOS 14 or newer on mps; use 'fp32' or 'auto'")
        return "bf16", f"{REQUESTED}; slow, as this hardware only emulates it"
    if option != "auto":
        return option, REQUESTED
    if device == "cuda":
        return ("bf16", "native on this GPU") if native else ("fp16", "this GPU has no native bf16")
    problem = f"bf16 does not work: {facts.bf16_problem}" if facts.bf16_problem else ""
    if not native:
        missing = f"the processor has none of {', '.join(BF16_INSTRUCTIONS)}"
        problem = "bf16 needs macOS 14 or newer" if device == "mps" else missing
    if problem or facts.bf16_gain is None:
        return "fp32", problem or "bf16 was not measured"
    product, convolution = facts.bf16_gain
    why = f"in bf16 a matrix product is {product:.1f} and a convolution {convolution:.1f} times as fast as in fp32"
    return "bf16" if product >= BF16_PAYS and convolution >= 1 else "fp32", why


def _channels_last(device: str, option: bool | str) -> tuple[bool, str]:
    if isinstance(option, bool):
        return option, f"{REQUESTED}; {SLOW_CONVOLUTION}" if option and device == "mps" else REQUESTED
    why = {
        "cpu": f"9 to 14 % more positions a second {MEASURED}",
        "cuda": "the layout of tensor cores",
        "mps": SLOW_CONVOLUTION,
    }
    return device != "mps", why[device]


def compile_mode(device: str, option: bool | str) -> tuple[str, str]:
    """(mode of torch.compile, "" = none, why) for the option."""
    if option != "auto":
        mode = {True: "default", False: ""}[option] if isinstance(option, bool) else option
        return mode, f"{REQUESTED}; {SLOW_COMPILE}" if mode and device == "mps" else REQUESTED
    why = {
        "mps": SLOW_COMPILE,
        "cpu": f"training ran 0.8 to 1.0 times as fast compiled {MEASURED}; oneDNN makes the convolutions in any case",
        "cuda": "saves launches on a GPU; where the compiler fails the first update goes on without it",
    }
    return "default" if device == "cuda" else "", why[device]
