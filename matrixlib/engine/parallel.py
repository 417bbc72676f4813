"""Several processes that train one network together: their ranks, and what they agree on.

torchrun starts them. Each makes the same updates from rows of its own, and decides on numbers that are the same
everywhere: sums over ranks, or what rank 0 says. So they all skip, roll back, stop and halve the micro-batch at once.
With one rank every method gives its argument back.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from matrixlib.engine.memory import out_of_memory
from matrixlib.engine.storage import Checkpoint, CheckpointError
from matrixlib.hardware import backend

if TYPE_CHECKING:
    from matrixlib.engine.checkpoint import Checkpoints

HEAD = 1024
"""Bytes of a first broadcast, which holds most of what is said; what is longer takes a second one."""
GRACE = 6.0
"""Seconds in which it is found out who does not answer."""
REASONS = (
    "killed, out of memory, hung, or ended by an error of its own (look above); the same command goes on from the "
    "newest checkpoint"
)
OPENING = datetime.timedelta(hours=4)
"""While rank 0 opens a run, with its trials, the others wait; the launcher ends them if it fails."""

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


class LostRank(ValueError):
    """A rank did not answer."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size` that train together. group: of all of them: gloo between hosts, NCCL between GPUs.
    store: where a rank leaves word when another is gone.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    store: dist.Store | None = None

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.rank == 0

    def total(self, values: Mapping[str, Number]) -> dict[str, Number]:
        """Sums over ranks by name, in float64; every rank has the same names. Integers below 2**53 stay exact."""
        if self.size == 1:
            return dict(values)
        names = sorted(values)
        numbers = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        with self.together():
            dist.all_reduce(numbers, group=self.group)
        sums = dict(zip(names, numbers.tolist(), strict=True))
        return {name: type(value)(sums[name]) for name, value in values.items()}

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.total({"": int(flag)})[""])

    def most(self, value: float) -> float:
        """The largest of all ranks."""
        return max(self.total({str(rank): value * (rank == self.rank) for rank in range(self.size)}).values())

    def same(self, value: Value) -> Value:
        """What rank 0 has, on all: JSON data, so tuples come as lists."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.first else b""
        head = torch.zeros(HEAD, dtype=torch.uint8)
        _put(head, len(text).to_bytes(8, "little") + text[: HEAD - 8])
        self._from_first(head)
        data = bytes(head.tolist())
        length = int.from_bytes(data[:8], "little")
        if length > HEAD - 8:
            whole = torch.zeros(length, dtype=torch.uint8)
            _put(whole, text)
            self._from_first(whole)
            data = bytes(8) + bytes(whole.tolist())
        result: Value = json.loads(data[8 : 8 + length])
        return result

    def texts(self, text: str) -> list[str]:
        """What each rank says, in their order."""
        if self.size == 1:
            return [text]
        data = text.encode()
        lengths = self.total({str(rank): len(data) if rank == self.rank else 0 for rank in range(self.size)})
        own = torch.zeros(max(1, *lengths.values()), dtype=torch.uint8)
        _put(own, data)
        parts = [torch.zeros_like(own) for _ in range(self.size)]
        with self.together():
            dist.all_gather(parts, own, group=self.group)
        return [bytes(part.tolist())[: lengths[str(rank)]].decode() for rank, part in enumerate(parts)]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into the tensors of all."""
        if self.size > 1:
            for tensor in tensors:
                self._from_first(tensor)

    def wait_for_first(self, name: str) -> None:
        """Ranks but the first wait here until it calls `go_on`, however long its trials take."""
        if self.store is not None and not self.first:
            self.store.wait([f"opened/{name}"], OPENING)

    def go_on(self, name: str) -> None:
        """Let the others go on."""
        if self.store is not None and self.first:
            self.store.set(f"opened/{name}", "1")

    def end_with_first(self) -> None:
        """Wait until rank 0 has come here: torchrun ends all as soon as one has ended, and rank 0 may still save."""
        self.go_on("the end")
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and the store with it
            self.wait_for_first("the end")

    def _from_first(self, tensor: Tensor) -> None:
        with self.together():
            dist.broadcast(tensor, group_src=0, group=self.group)

    @contextlib.contextmanager
    def together(self, working: bool = False) -> Iterator[None]:
        """Within it, an error of a collective operation is a LostRank. working: other errors may come, too."""
        try:
            yield
        except RuntimeError as error:
            other = working and not isinstance(error, dist.DistError) and "gloo" not in str(error)
            if other or out_of_memory(error):
                raise
            raise LostRank(self._words(error)) from error

    def _words(self, error: RuntimeError) -> str:
        text, words = str(error).splitlines()[0], list[str]()

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone with rank 0, which may have ended for another
                words.append(f"{self._silent(text)} of {self.size}")

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * GRACE)  # where rank 0 hangs, its store does too
        who = words[0] if words else f"rank 0 of {self.size}, or one before it,"
        return f"{who} does not answer: {REASONS} ({text[:200]})"

    def _silent(self, text: str) -> str:
        """The rank that was gone first, in words: the first that misses one tells the others, which miss it soon."""
        if self.store is None:
            return "a rank"
        self.store.set(f"there/{self.rank}", "1")
        late, ends = "imed out" in text, time.monotonic() + GRACE
        while not self.store.check(["gone"]) and time.monotonic() < ends:
            time.sleep(0.1)
            others = [rank for rank in range(self.size) if rank != self.rank]
            gone = [rank for rank in others if not _alive(self.store.get(f"process/{rank}").decode())]
            if late and not gone and time.monotonic() > ends - GRACE / 2:  # all others have waited as long as this one
                gone = [rank for rank in others if not self.store.check([f"there/{rank}"])]
            if gone:
                self.store.set("gone", f"rank {', '.join(map(str, gone))}")
        return self.store.get("gone").decode() if self.store.check(["gone"]) else "a rank on another host"

    def introduce(self) -> Ranks:
        """Tell the others which process this is; itself."""
        if self.store is not None:
            self.store.set(f"process/{self.rank}", f"{os.getpid()} {platform.node()}")
        return self


def _alive(process: str) -> bool:
    """Whether a process, "<pid> <host>", is there; True of one on another host."""
    pid, host = process.split(" ", 1)
    if host != platform.node():
        return True
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launched() -> bool:
    """Whether torchrun has started this process as one of several."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(timeout: float) -> Ranks:
    """This process's rank, where torchrun has started it; else the only one. timeout: seconds after which a rank that
    does not answer counts as hung. A rank has the GPU of its number on this host, where there is one.
    """
    if not launched():
        return Ranks()
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"TORCHELASTIC_RUN_ID needs {', '.join(missing)} beside it: start with torchrun, or unset it")
    local, there = int(os.environ["LOCAL_RANK"]), backend.device_count()
    if there:
        if local >= there:
            raise ValueError(f"rank {local} of this host has no GPU of its own: there are {there}; start fewer ranks")
        backend.set_device(local)
    limit = datetime.timedelta(seconds=timeout)
    store, rank, size = _meet(limit)
    if not dist.is_initialized():
        channels = "cpu:gloo,cuda:nccl" if there else "gloo"
        dist.init_process_group(
            channels, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
        )
    return Ranks(rank, size, dist.group.WORLD, store).introduce()


def _meet(limit: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """(store of rank 0's, rank, size). torchrun's own store keeps what ranks wrote before a restart, addresses that
    nobody answers at among it (https://github.com/pytorch/pytorch/issues/135712).
    """
    shared, rank, size = next(dist.rendezvous("env://", timeout=limit))
    host, ends = os.environ["MASTER_ADDR"], time.monotonic() + limit.total_seconds()
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        shared.set("matrixlib", str(store.port))
        return store, rank, size
    while True:
        port = int(shared.get("matrixlib"))  # maybe that of a rank 0 before the restart, where nobody listens
        try:
            wait = datetime.timedelta(seconds=2)
            store = dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)
        except dist.DistNetworkError:
            if time.monotonic() > ends:
                raise
        else:
            store.set_timeout(limit)
            return store, rank, size


def newest(ranks: Ranks, checkpoints: Checkpoints, before: int | None = None) -> Checkpoint | None:
    """As `Checkpoints.newest`: the one that rank 0 has found whole, on all. CheckpointError where one cannot."""
    checkpoint = checkpoints.newest(before) if ranks.first else None
    step = ranks.same(checkpoint.step if checkpoint is not None else None)
    if ranks.first or step is None:
        return checkpoint
    checkpoint = checkpoints.newest(step)
    if checkpoint is None or checkpoint.step != step:
        raise CheckpointError(f"rank {ranks.rank} cannot read the checkpoint of update {step}, which rank 0 has read")
    return checkpoint


def norms_by_rank(model: nn.Module) -> list[_BatchNorm]:
    """Modules whose statistics come from the rows of a rank alone. Ranks may cut their rows into different numbers of
    passes, so no pass can wait for one of another rank.
    """
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _put(tensor: Tensor, data: bytes) -> None:
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
