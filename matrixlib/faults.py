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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from matrixlib import config as configuration
from matrixlib import run as runs
from matrixlib.data.loader import Loader, Tensors
from matrixlib.data.shards import BLOCK, Shard
from matrixlib.runtime import Runtime
from matrixlib.tasks.chess.records import LAYOUT

FILLER = "filler"
"""File that takes the room of the full disk."""


class Spoilt(Loader):
    """A loader that changes one of its batches. `now` holds the raw number of the batch handed out last."""

    def __init__(self, loader: Loader, at: int, change: Callable[[Tensors], object]) -> None:
        vars(self).update(vars(loader))
        self.at, self.change, self.now = at, change, [-1]

    def batches(self, start: int, stop: int | None = None) -> Iterator[Tensors]:
        """As the loader's."""
        with contextlib.closing(super().batches(start, stop)) as inner:  # type: ignore[type-var]
            for i, batch in enumerate(inner, start):
                self.now[0] = self.raw(i)
                if self.now[0] == self.at:
                    self.change(batch)
                yield batch


@dataclass(frozen=True)
class HighScale(Runtime):
    """A runtime with a loss scale that is too large at first, and doubled every `growth` updates."""

    growth: int = 10

    def grad_scaler(self) -> torch.amp.GradScaler:
        """On any device, as the trainer would use it on a GPU."""
        return torch.amp.GradScaler(self.device, init_scale=2.0**19, growth_interval=self.growth)


def spoil(current: runs.Run, at: int, change: Callable[[Tensors], object] = lambda batch: None) -> Spoilt:
    """Change batch `at` of a run that has not begun to train in this process."""
    current.training = Spoilt(current.training, at, change)
    return current.training


def nan_in_a_target(current: runs.Run, at: int) -> None:
    """The win-draw-loss of one position of the batch is NaN."""
    spoil(current, at, lambda batch: batch["wdl"][0].fill_(math.nan))


def inf_in_an_input(current: runs.Run, at: int) -> None:
    """One number of the planes is infinite; the packed positions could not hold it."""
    loader = spoil(current, at)

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and loader.now[0] == at:
            args[0].view(-1)[0] = math.inf

    current.model.register_forward_pre_hook(hook)


def no_policies(current: runs.Run, at: int) -> None:
    """No position of the batch has a policy target."""
    spoil(current, at, lambda batch: batch["policy_weight"].zero_())


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
    loader, once = spoil(current, at), iter([True])

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and loader.now[0] == at and next(once, False):
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
    spoil(current, at, lambda batch: multiprocessing.active_children()[0].kill())


def signalled(current: runs.Run, at: int, number: signal.Signals) -> None:
    """The process gets a signal, with every checkpoint written that was begun."""

    def strike(batch: Tensors) -> None:
        current.trainer.checkpoints.join()
        os.kill(os.getpid(), number)

    spoil(current, at, strike)


def full_disk(current: runs.Run, at: int) -> None:
    """Not a byte more can be written: to the file system of its own, or else by this process to any file."""
    root = configuration.reports_root()

    def fill(batch: Tensors) -> None:
        current.trainer.checkpoints.join()
        if not os.path.ismount(root):
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return
        with contextlib.suppress(OSError), (root / FILLER).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    spoil(current, at, fill)


def flip_bytes(folder: Path) -> None:
    """Flip every bit of 16 records in the middle of the shard's second block. ValueError where it has none."""
    path = folder / "train.npz"
    records = Shard(path, LAYOUT).arrays["records"][BLOCK + BLOCK // 2 :][:16].tobytes()
    if not records:
        raise ValueError(
            f"corrupt records need {2 * BLOCK:,} training positions, so that others can replace them"
        )
    whole = path.read_bytes()
    path.write_bytes(whole.replace(records, bytes(byte ^ 0xFF for byte in records), 1))


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
