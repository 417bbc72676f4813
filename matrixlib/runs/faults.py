"""Faults for injection into a run, from outside of the product.

In the batches that the loader hands out, by hooks on model and optimiser, in the bytes of the data set, by the
operating system. `injection.py` trains runs with them and reads what happened.
"""

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
from matrixlib.runs.run import Run
from matrixlib.tasks.spec import TaskSpec

FILLER = "filler"
"""File that takes the room of the full disk."""


@dataclass(frozen=True)
class HighScale(Runtime):
    """A runtime with a loss scale that is too large at first, and doubled every `growth` updates."""

    growth: int = 10

    def grad_scaler(self) -> torch.amp.GradScaler:
        """On any device, as the trainer would use it on a GPU."""
        return torch.amp.GradScaler(self.device, init_scale=2.0**19, growth_interval=self.growth)


def change_batches(
    numbers: Container[int], change: Callable[[Tensors], object] = lambda batch: None
) -> Callable[[], int]:
    """Change the batches with these raw numbers, of any loader of this process, in any phase.

    Returns what tells the raw number of the batch that was handed out last.
    """
    now, batches = [-1], Loader.batches

    def changing(loader: Loader, start: int, stop: int | None = None) -> Iterator[Tensors]:
        with contextlib.closing(batches(loader, start, stop)) as inner:  # type: ignore[type-var]
            for i, batch in enumerate(inner, start):
                now[0] = loader.unskipped_index(i)
                if now[0] in numbers:
                    change(batch)
                yield batch

    Loader.batches = changing  # type: ignore[method-assign, assignment]
    return lambda: now[0]


def spoil(current: Run, at: int, name: str) -> None:
    """The task's own fault of this name, in the batch or in what a module makes of it."""
    spoiler = current.spec.spoilers[name]
    number = change_batches([at], spoiler.batch or (lambda batch: None))
    if spoiler.hook is not None:
        spoiler.hook(current.model, lambda: number() == at)


def learning_rate_times_1000(current: Run, at: int) -> None:
    """Five updates of the optimiser in a row."""
    updates = itertools.count()

    def hook(optimiser: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if at <= next(updates) < at + 5:
            for group in optimiser.param_groups:
                group["lr"] *= 1000

    register_optimizer_step_pre_hook(hook)


def out_of_memory(current: Run, at: int) -> None:
    """The forward pass of one micro-batch finds no memory, once."""
    number, once = change_batches([at]), iter([True])

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and number() == at and next(once, False):
            raise torch.OutOfMemoryError("injected: out of memory")

    current.model.register_forward_pre_hook(hook)


def overflow(current: Run, at: int) -> None:
    """Gradients of half precision's range and a loss scale beyond it, at the start and whenever it has grown."""
    current.data.runtime = HighScale(**vars(current.runtime), growth=max(1, at // 2))
    for parameter in current.model.parameters():
        parameter.register_hook(in_half_precision)


def in_half_precision(gradient: torch.Tensor) -> torch.Tensor:
    """As half precision would hold it: infinite above 65,504."""
    return gradient.half().to(gradient.dtype)


def dead_worker(current: Run, at: int) -> None:
    """A worker of the loader is killed."""
    change_batches([at], lambda batch: multiprocessing.active_children()[0].kill())


def signalled(current: Run, at: int, number: signal.Signals) -> None:
    """The process gets a signal, with every checkpoint written that was begun."""

    def strike(batch: Tensors) -> None:
        current.trainer.checkpoints.join()
        os.kill(os.getpid(), number)

    change_batches([at], strike)


def full_disk(current: Run, at: int) -> None:
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

    change_batches([at], fill)


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
    plant(run, at): injects it, where it is not in the data. like: how the end compares with the clean run's:
    "bits", "float error", or "" where some updates are others. overrides: over the configuration of all.
    """

    title: str
    notice: str
    plant: Callable[[Run, int], None] = lambda current, at: None
    like: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)


FAULTS = {
    "nan_target": Fault("NaN in a target", "skipped", partial(spoil, name="nan_target")),
    "inf_input": Fault("Inf in an input", "skipped", partial(spoil, name="inf_input")),
    "no_policies": Fault("no target in a batch", "without a target", partial(spoil, name="no_policies")),
    "learning_rate": Fault("learning rate x 1000", "rollbacks", learning_rate_times_1000),
    "corrupt_records": Fault("corrupt records", "blocks replaced"),
    "dead_worker": Fault(
        "dead worker", "workers restarted", dead_worker, "bits", {"data": {"workers": 1, "prefetch": 2}}
    ),
    "out_of_memory": Fault("out of memory", "micro-batch halved", out_of_memory, "float error"),
    "overflow": Fault("fp16 overflow", "overflows", overflow),
    "sigterm": Fault("SIGTERM", "run restarted", partial(signalled, number=signal.SIGTERM), "bits"),
    "kill": Fault(
        "kill -9", "run restarted", partial(signalled, number=getattr(signal, "SIGKILL", signal.SIGTERM)), "bits"
    ),
    "full_disk": Fault("full disk", "run restarted", full_disk, "bits"),
}


def faults_of(spec: TaskSpec[Any]) -> dict[str, Fault]:
    """The faults for a task, with its own words where they are its own; without those that it does not have."""
    own = {name: spoiler.title for name, spoiler in spec.spoilers.items()}
    return {
        name: replace(fault, title=own.get(name, fault.title))
        for name, fault in FAULTS.items()
        if name in own or getattr(fault.plant, "func", None) is not spoil
    }


def parse_names(text: str, known: Mapping[str, Fault]) -> list[str]:
    """Names of faults: "all", or some with commas between. Raises ValueError for an unknown one, with the nearest."""
    names = list(known) if text.strip() == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no fault is named; give 'all' or some of: {', '.join(known)}")
    for name in names:
        if name not in known:
            near = configuration.nearest(name, list(known))
            raise ValueError(f"unknown fault '{name}'{near}; there are: {', '.join(known)}")
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
