"""Faults that are planted on purpose in a run, from outside of the product.

In the batches that the loader hands out, by hooks on model and optimiser, in the bytes of the data set, by the
operating system. proof.py trains such runs and reads what happened.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader, Tensors
from matrixlib.data.shards import BLOCK, Layout, Shard
from matrixlib.hardware.runtime import Runtime
from matrixlib.runs import run as runs

FILLER = "filler"
"""File that takes the room of the full disk."""


@dataclass(frozen=True)
class HighScale(Runtime):
    """A runtime with a loss scale that is too large at first, and doubled every `growth` updates."""

    growth: int = 10

    def grad_scaler(self) -> torch.amp.GradScaler:
        """On any device, as the trainer would use it on a GPU."""
        return torch.amp.GradScaler(self.device, init_scale=2.0**19, growth_interval=self.growth)


def nothing(batch: Tensors) -> None:
    """Leave a batch as it is."""


def spoil(numbers: Container[int], change: Callable[[Tensors], object] = nothing) -> list[int]:
    """Change the batches with these raw numbers, of any loader of this process, in any phase.

    Returns the place where the raw number of the batch that was handed out last is kept.
    """
    now, batches = [-1], Loader.batches

    def changed(loader: Loader, start: int, stop: int | None = None) -> Iterator[Tensors]:
        with contextlib.closing(batches(loader, start, stop)) as inner:  # type: ignore[type-var]
            for i, batch in enumerate(inner, start):
                now[0] = loader.raw(i)
                if now[0] in numbers:
                    change(batch)
                yield batch

    Loader.batches = changed  # type: ignore[method-assign, assignment]
    return now


def nan_in_a_target(current: runs.Run, at: int) -> None:
    """The win-draw-loss of one position of the batch is NaN."""
    spoil([at], lambda batch: batch["wdl"][0].fill_(math.nan))


def nan_in_an_output(current: runs.Run, at: int) -> None:
    """What the network says of one row of the batch is NaN: for tasks whose targets are whole numbers."""
    now = spoil([at])
    current.model.register_forward_hook(spoil_output(math.nan, lambda: now[0] == at))


def inf_in_an_input(current: runs.Run, at: int) -> None:
    """One number of the planes is infinite; the packed positions could not hold it."""
    now = spoil([at])

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and now[0] == at:
            args[0].view(-1)[0] = math.inf

    current.model.register_forward_pre_hook(hook)


def inf_in_an_embedding(current: runs.Run, at: int) -> None:
    """What the network first makes of one row of its input is infinite: for tasks whose inputs are whole numbers."""
    now = spoil([at])
    first = next(module for module in current.model.modules() if isinstance(module, torch.nn.Embedding))
    first.register_forward_hook(spoil_output(math.inf, lambda: now[0] == at))


def spoil_output(value: float, when: Callable[[], bool]) -> Callable[..., None]:
    """A forward hook that puts a value over all that a module makes of its first row in training."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if module.training and when():
            output[0] = value  # in place, so that it is what is trained on

    return hook


def no_policies(current: runs.Run, at: int) -> None:
    """No position of the batch has a policy target."""
    spoil([at], lambda batch: batch["policy_weight"].zero_())


def no_hidden_cells(current: runs.Run, at: int) -> None:
    """No grid of the batch has a hidden cell, so there is nothing to learn from it."""
    spoil([at], lambda batch: batch["hidden"].zero_())


def learning_rate_times_1000(current: runs.Run, at: int) -> None:
    """Five updates of the optimiser in a row."""
    made = itertools.count()

    def hook(optimiser: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if at <= next(made) < at + 5:
            for group in optimiser.param_groups:
                group["lr"] *= 1000

    register_optimizer_step_pre_hook(hook)


def out_of_memory(current: runs.Run, at: int) -> None:
    """The forward pass of one micro-batch finds no memory, once."""
    now, once = spoil([at]), iter([True])

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and now[0] == at and next(once, False):
            raise torch.OutOfMemoryError("planted: out of memory")

    current.model.register_forward_pre_hook(hook)


def overflow(current: runs.Run, at: int) -> None:
    """Gradients of half precision's range and a loss scale beyond it, at the start and whenever it has grown."""
    current.runtime = HighScale(**vars(current.runtime), growth=max(1, at // 2))
    for parameter in current.model.parameters():
        parameter.register_hook(in_half_precision)


def in_half_precision(gradient: torch.Tensor) -> torch.Tensor:
    """As half precision would hold it: infinite above 65,504."""
    return gradient.half().to(gradient.dtype)


def dead_worker(current: runs.Run, at: int) -> None:
    """A worker of the loader is killed."""
    spoil([at], lambda batch: multiprocessing.active_children()[0].kill())


def signalled(current: runs.Run, at: int, number: signal.Signals) -> None:
    """The process gets a signal, with every checkpoint written that was begun."""

    def strike(batch: Tensors) -> None:
        current.trainer.checkpoints.join()
        os.kill(os.getpid(), number)

    spoil([at], strike)


def full_disk(current: runs.Run, at: int) -> None:
    """Not a byte more can be written: to the file system of its own, or else by this process to any file."""
    root = files.reports_root()

    def fill(batch: Tensors) -> None:
        current.trainer.checkpoints.join()
        if not os.path.ismount(root):
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return
        with contextlib.suppress(OSError), (root / FILLER).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    spoil([at], fill)


def flip_bytes(folder: Path, layout: Layout) -> None:
    """Flip every bit of 16 records in the middle of the second block of a training shard.

    ValueError where no shard has two blocks.
    """
    for row in Catalogue(folder).shards("train"):
        records = Shard(row.path, layout).arrays["records"]
        if len(records) >= 2 * BLOCK:
            break
    else:
        raise ValueError(
            f"corrupt records need {2 * BLOCK:,} training positions of one source, so that others can replace them"
        )
    whole = bytearray(row.path.read_bytes())
    size = records.dtype.itemsize
    start = whole.index(records.tobytes()) + (BLOCK + BLOCK // 2) * size
    whole[start : start + 16 * size] = bytes(byte ^ 0xFF for byte in whole[start : start + 16 * size])
    row.path.write_bytes(whole)


@dataclass(frozen=True)
class Fault:
    """title: in words. notice: what the run has to count or say (a key of `Outcome.happened`) for a pass.
    plant(run, at): plants it, where it is not in the data. like: how the end compares with the clean run's:
    "bits", "float error", or "" where some updates are others. overrides: over the configuration of all.
    """

    title: str
    notice: str
    plant: Callable[[runs.Run, int], None] = lambda current, at: None
    like: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)


FAULTS = {
    "nan_target": Fault("NaN in a target", "skipped", nan_in_a_target),
    "inf_input": Fault("Inf in an input", "skipped", inf_in_an_input),
    "no_policies": Fault("no policy in a batch", "without a target", no_policies),
    "learning_rate": Fault("learning rate x 1000", "rollbacks", learning_rate_times_1000),
    "corrupt_records": Fault("corrupt records", "blocks replaced"),
    "dead_worker": Fault(
        "dead worker", "workers restarted", dead_worker, "bits", {"data": {"workers": 1, "prefetch": 2}}
    ),
    "out_of_memory": Fault("out of memory", "micro-batch halved", out_of_memory, "float error"),
    "overflow": Fault("fp16 overflow", "overflows", overflow),
    "sigterm": Fault("SIGTERM", "run restarted", partial(signalled, number=signal.SIGTERM), "bits"),
    "kill": Fault(
        "kill -9",
        "run restarted",
        partial(signalled, number=getattr(signal, "SIGKILL", signal.SIGTERM)),
        "bits",
    ),
    "full_disk": Fault("full disk", "run restarted", full_disk, "bits"),
}

OF_LATIN = {
    "nan_target": Fault("NaN in an output", "skipped", nan_in_an_output),
    "inf_input": Fault("Inf in an embedding", "skipped", inf_in_an_embedding),
    "no_policies": Fault("no cell hidden", "without a target", no_hidden_cells),
}
"""The nearest thing for Latin squares, whose inputs and targets are whole numbers, and which have no policy."""


def faults_of(task: str) -> dict[str, Fault]:
    """The faults for a task ("chess", "latin"): the same names, and the same faults where these mean something."""
    return FAULTS | (OF_LATIN if task == "latin" else {})


def chosen(faults: str) -> list[str]:
    """Names of faults. Raises ValueError for an unknown one, with the nearest."""
    if faults.strip() == "all":
        return list(FAULTS)
    names = [name.strip() for name in faults.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no fault is chosen; give 'all' or some of: {', '.join(FAULTS)}")
    for name in names:
        if name not in FAULTS:
            near = configuration.nearest(name, list(FAULTS))
            raise ValueError(f"unknown fault '{name}'{near}; there are: {', '.join(FAULTS)}")
    return names


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path | None]:
    """A file system of its own of `size` bytes, or None where the machine mounts none for its users.

    It is mounted on `folder` in a name space that lasts as long as a waiting process does, and is reached through
    that process's root.
    """
    folder.mkdir()
    script = 'mount -t tmpfs -o size="$2" none "$1" && echo mounted && exec cat'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", str(folder), str(size)]
    if shutil.which("unshare") is None:
        yield None
        return
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert holder.stdin
    assert holder.stdout
    try:
        disk = Path(f"/proc/{holder.pid}/root{folder.resolve()}")
        yield disk if holder.stdout.readline() and os.access(disk, os.W_OK) else None
    finally:
        holder.stdin.close()
        holder.wait()
