"""Several processes that train one network together: their ranks, what they agree on, the sum of their gradients.

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
import time
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from matrixlib.engine.memory import out_of_memory
from matrixlib.engine.storage import Checkpoint, CheckpointError

if TYPE_CHECKING:
    from matrixlib.engine.checkpoint import Checkpoints

HEAD = 1024
"""Bytes of a first broadcast, which holds most of what is said; what is longer takes a second one."""
BUCKET = 25 * 2**20
"""Bytes of gradients that are summed at once, as DistributedDataParallel has it."""
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
        with self._together():
            dist.all_reduce(numbers, group=self.group)
        sums = dict(zip(names, numbers.tolist(), strict=True))
        return {name: type(value)(sums[name]) for name, value in values.items()}

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.total({"": int(flag)})[""])

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
        with self._together():
            dist.all_gather(parts, own, group=self.group)
        return [bytes(part.tolist())[: lengths[str(rank)]].decode() for rank, part in enumerate(parts)]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values into the tensors of all."""
        if self.size > 1:
            for tensor in tensors:
                self._from_first(tensor)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Sums of the gradients over ranks, in place, after a backward pass that knew of no other rank; whether every
        parameter has one. A parameter that has one on some rank gets one on all.
        """
        if self.size == 1:
            return False
        have = self.total({str(i): int(p.grad is not None) for i, p in enumerate(parameters)})
        used = [p for i, p in enumerate(parameters) if have[str(i)]]
        for p in used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for bucket in _buckets([p.grad for p in used if p.grad is not None]):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            with self._together():
                dist.all_reduce(flat, group=self.group)
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return len(used) == len(parameters)

    def worst(self, problem: str) -> str:
        """The worst problem of any rank: "compiler", "memory" or "", none."""
        kinds = ("compiler", "memory")
        count = self.total({kind: int(problem == kind) for kind in kinds})
        return next((kind for kind in kinds if count[kind]), "")

    def wait_for_first(self, name: str) -> None:
        """Ranks but the first wait here until it calls `go_on`, however long its trials take."""
        if self.store is not None and not self.first:
            self.store.wait([f"opened/{name}"], OPENING)

    def go_on(self, name: str) -> None:
        """Let the others go on."""
        if self.store is not None and self.first:
            self.store.set(f"opened/{name}", "1")

    def _from_first(self, tensor: Tensor) -> None:
        with self._together():
            dist.broadcast(tensor, group_src=0, group=self.group)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise self.lost(error) from error

    def lost(self, error: RuntimeError) -> LostRank:
        """The error that tells who does not answer."""
        return LostRank(self._words(error))

    def _words(self, error: RuntimeError) -> str:
        text = str(error).splitlines()[0]
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0, which may have ended for another
            return f"{self._silent(text)} of {self.size} does not answer: {REASONS} ({text[:200]})"
        return f"rank 0 of {self.size}, or one before it, does not answer: {REASONS} ({text[:200]})"

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


class Elsewhere(Exception):
    """Another rank has a `problem` with this update: it is repeated together."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class Summation:
    """Sums of gradients that are made while the last backward pass of an update goes on.

    whole: kinds of updates that gave every parameter a gradient. The others are summed after the pass: a replica waits
    for each parameter.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.whole: set[Hashable] = set()
        self._replica: Replica | None = None

    @contextlib.contextmanager
    def replica(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model for a pass that all ranks make together. Raises Elsewhere where one of them cannot."""
        if problem := self._ranks.worst(""):
            raise Elsewhere(problem)
        try:
            if self._replica is None or self._replica.module is not model:
                with warnings.catch_warnings():  # the name of `broadcast_buffers` is to change
                    warnings.simplefilter("ignore", FutureWarning)
                    self._replica = Replica(
                        model, process_group=self._ranks.group, broadcast_buffers=False, gradient_as_bucket_view=True
                    )
                self._replica.register_comm_hook(
                    self._ranks.group, lambda group, bucket: _summed(group, bucket)
                )  # unannotated
            yield self._replica
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error):  # the others wait in the middle of their sums
                raise ValueError(
                    f"out of memory in a pass that all ranks make together ({error!r:.200}); start "
                    "again, with a smaller train.micro_batch if it comes again"
                ) from error
            if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise self._ranks.lost(error) from error
            raise


class Replica(DistributedDataParallel):
    """One whose model's attributes can be read through it, as tasks do."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def launched() -> bool:
    """Whether torchrun has started this process as one of several."""
    return dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1


def join(timeout: float) -> Ranks:
    """This process's rank, where torchrun has started it; else the only one. timeout: seconds after which a rank that
    does not answer counts as hung. A rank has the GPU of its number on this host, where there is one.
    """
    if not launched():
        return Ranks()
    local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if there:
        if local >= there:
            raise ValueError(f"rank {local} of this host has no GPU of its own: there are {there}; start fewer ranks")
        torch.cuda.set_device(local)
    limit = datetime.timedelta(seconds=timeout)
    store, rank, size = _meet(limit)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if there else "gloo"
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
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


def norms_by_rank(model: nn.Module) -> list[nn.Module]:
    """Modules whose statistics come from the rows of a rank alone. Ranks may cut their rows into different numbers of
    passes, so no pass can wait for one of another rank.
    """
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def _summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of a replica: sums, as losses are divided by the counts of all ranks already."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one dtype that follow each other, up to `BUCKET` bytes at once."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        full = sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _put(tensor: Tensor, data: bytes) -> None:
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
