"""Data-parallel training by several processes under torchrun, each with its own rows.

Decisions use numbers that are equal everywhere: sums over ranks, or rank 0's. With `runtime.shard` (FSDP2) each rank
holds a part of every weight, gradient and optimizer state as DTensors; the rest of the engine only uses `full`,
`local_part`, `sharded_like` and `unsharded`.
"""

import contextlib
import datetime
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from matrixlib.config import Config
from matrixlib.engine.checkpoint import Checkpoint, CheckpointError, Checkpoints
from matrixlib.engine.heartbeat import process_lives
from matrixlib.engine.memory import out_of_memory
from matrixlib.hardware import backend
from matrixlib.hardware.runtime import Runtime

GRACE_SECONDS = 6.0  # to find out which rank does not answer
OPENING = datetime.timedelta(hours=4)  # while rank 0 opens a run; if it fails, the launcher ends the others
PROBLEMS = ("compiler", "memory")  # reasons to repeat an update, worst first
SHARDED_OPTIMISERS = ("adamw", "adam", "sgd", "rmsprop", "radam", "nadam")  # element-wise

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


class LostRank(ValueError):
    """A rank did not answer."""


@dataclass(frozen=True)
class Ranks:
    """This process among `size` ranks; with one, every method returns its argument. store: survives single ranks.
    timeout: seconds after which a silent rank counts as hung."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    store: dist.Store | None = None
    timeout: float = 0.0

    def __post_init__(self) -> None:
        if self.store is not None:  # for `_missing` of others
            self.store.set(f"process/{self.rank}", f"{os.getpid()} {platform.node()}")

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    def total(self, values: Mapping[str, Number]) -> dict[str, Number]:
        """Sums over ranks by name in float64; names are equal on every rank. Integers below 2**53 are exact."""
        if self.size == 1:
            return dict(values)
        names = sorted(values)
        numbers = torch.tensor([float(values[name]) for name in names], dtype=torch.float64)
        with self.collective():
            dist.all_reduce(numbers, group=self.group)
        sums = dict(zip(names, numbers.tolist(), strict=True))
        return {name: type(value)(sums[name]) for name, value in values.items()}

    def same(self, value: Value) -> Value:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        with self.collective():
            dist.broadcast_object_list(values, group_src=0, group=self.group, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, by rank; also a barrier."""
        values = [value] * self.size
        if self.size > 1:
            with self.collective():
                dist.all_gather_object(values, value, group=self.group)
        return values

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values into every rank's tensors."""
        if self.size > 1:
            with self.collective():
                for tensor in tensors:
                    dist.broadcast(tensor, group_src=0, group=self.group)

    def after_first(self, name: str) -> None:
        """Wait until rank 0 (which does not wait) calls this with the same name."""
        if self.store is not None and self.first:
            self.store.set(f"opened/{name}", "1")
        elif self.store is not None:
            self.store.wait([f"opened/{name}"], OPENING)

    @contextlib.contextmanager
    def collective(self, certain: bool = True) -> Iterator[None]:
        """Context in which a RuntimeError becomes a LostRank; not `certain`: only if a rank is missing."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or out_of_memory(error):
                raise
            missing = self._missing(time.monotonic() - began > self.timeout)
            if not (missing or certain):
                raise
            raise LostRank(
                f"{missing or 'a rank on another host'} of {self.size} does not answer: killed, out of memory, hung, "
                "or failed (see above); rerun the same command to resume from the newest checkpoint"
            ) from error

    def _missing(self, timed_out: bool) -> str:
        """The first lost rank, found by any rank: its process ended or, if `timed_out`, all others have arrived."""
        if self.store is None:
            return ""
        self.store.set(f"waiting/{self.rank}", "1")
        others = [rank for rank in range(self.size) if rank != self.rank]
        ends = time.monotonic() + GRACE_SECONDS
        while not self.store.check(["missing"]) and (now := time.monotonic()) < ends:
            processes = [self.store.get(f"process/{rank}").decode().split(" ", 1) for rank in others]
            missing = [r for r, (pid, host) in zip(others, processes, strict=True) if not process_lives(host, int(pid))]
            if timed_out and not missing and now > ends - GRACE_SECONDS / 2:
                missing = [rank for rank in others if not self.store.check([f"waiting/{rank}"])]
            if missing:
                self.store.set("missing", f"rank {', '.join(map(str, missing))}")
            time.sleep(0.1)
        return self.store.get("missing").decode() if self.store.check(["missing"]) else ""


def join(timeout: float) -> Ranks:
    """This process's rank under torchrun, else a single rank. A rank uses the GPU of its local number, if any."""
    if not dist.is_torchelastic_launched() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks()
    if missing := [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"TORCHELASTIC_RUN_ID needs {', '.join(missing)} beside it: start with torchrun, or unset it")
    local, gpus = int(os.environ["LOCAL_RANK"]), backend.device_count()
    if gpus:
        if local >= gpus:
            raise ValueError(f"rank {local} of this host has no GPU of its own: there are {gpus}; start fewer ranks")
        backend.set_device(local)
    limit = datetime.timedelta(seconds=timeout)
    shared, rank, size = next(dist.rendezvous("env://", timeout=limit))
    # torchrun's own store keeps what ranks wrote before a restart (https://github.com/pytorch/pytorch/issues/135712)
    store = dist.PrefixStore(f"matrixlib {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    if not dist.is_initialized():
        group = dist.PrefixStore("group", store)
        dist.init_process_group(backend.communication(), store=group, rank=rank, world_size=size, timeout=limit)
    return Ranks(rank, size, dist.group.WORLD, store, timeout)


def newest(ranks: Ranks, checkpoints: Checkpoints, before: int | None = None) -> Checkpoint | None:
    """`Checkpoints.newest`, equal on all ranks; CheckpointError if they differ."""
    checkpoint = checkpoints.newest(before)
    if len(set(steps := ranks.gather(checkpoint.step if checkpoint is not None else -1))) > 1:
        raise CheckpointError(f"ranks have read checkpoints of other updates than one another: {steps}")
    return checkpoint


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Modules whose statistics depend on the local rows; synchronised ones would need equal passes on every rank."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def check_shardable(config: Config, runtime: Runtime, size: int) -> None:
    """ValueError naming all options incompatible with `runtime.shard` on `size` ranks, before training starts."""
    wrong = {
        f"optim.optimiser {config.optim.optimiser}: take one of {', '.join(SHARDED_OPTIMISERS)}": (
            config.optim.optimiser not in SHARDED_OPTIMISERS
        ),
        "optim.swa: take ema_decay": bool(config.optim.swa),
        "optim.noise: set it to 0": bool(config.optim.noise),
        "gating.seconds: set it to 0, as all ranks have to make the same passes": bool(config.gating.seconds),
        "runtime.compile: set it to false": bool(config.runtime.compile),
        "fp16: set runtime.precision to bf16 or fp32": runtime.dtype == "fp16",
        "mps: set runtime.device to cpu or cuda": runtime.device == "mps",
        "train.steps auto: give a number": config.train.steps == "auto",
    }
    if any(wrong.values()):
        raise ValueError(f"runtime.shard does not go with {'; nor with '.join(text for text in wrong if wrong[text])}")
    _count_passes(config.train.batch_size, size, runtime.micro_batch)


def _count_passes(rows: int, size: int, micro_batch: int) -> int:
    count = math.ceil(math.ceil(rows / size) / micro_batch)
    if rows // size < count:
        raise ValueError(
            f"{rows} rows for {size} ranks in passes of {micro_batch}: with runtime.shard all ranks make as many "
            f"passes, so give a train.batch_size that is a multiple of {size}, or a larger train.micro_batch"
        )
    return count


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Any) -> Tensor:
    """The full tensor on every rank; collective."""
    return cast(Tensor, tensor.full_tensor() if is_sharded(tensor) else tensor)


def local_part(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    return cast(Tensor, tensor.to_local() if is_sharded(tensor) else tensor)


def sharded_like(tensor: Tensor, target: Any) -> Tensor:
    """A full tensor (equal on every rank) sharded like `target`."""
    if not is_sharded(target) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    there = tensor.to(target.device)
    return distribute_tensor(there, target.device_mesh, target.placements, src_data_rank=None)


def gather_full(tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Groups of full tensors on rank 0's host, empty groups on others; collective."""
    out: dict[str, dict[str, Tensor]] = {}
    with ranks.collective():
        for group, members in tensors.items():
            out[group] = {}
            for name in sorted(members):  # ranks may differ in order; collectives must not
                value = full(members[name])  # one at a time, to bound device memory
                if ranks.first:
                    out[group][name] = value.cpu()
    return out


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Context with all weights gathered, collective; changes to them are lost."""
    if not hasattr(model, "unshard"):
        yield
        return
    root: Any = model
    parts = _fsdp_modules(model)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not root, recurse=False)  # the backward pass begins with the root


def _fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "unshard")]


class Reducer:
    """Sums gradients over ranks.

    Without sharding: one all-reduce after the last pass, once all ranks agree on the outcome (one may run out of memory
    or skip a parameter, where DistributedDataParallel would hang). With `runtime.shard`: the modules of the network's
    `parts()` are gathered when used, in bf16 under bf16 but for a BatchNorm's, and gradients reduced in fp32.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, config: Config, runtime: Runtime) -> None:
        """Broadcasts rank 0's weights. ValueError if the network or its options do not support `runtime.shard`."""
        self._ranks, self._given = ranks, set[str]()
        self._sharded = config.runtime.shard and ranks.size > 1
        if self._sharded:
            check_shardable(config, runtime, ranks.size)
        ranks.broadcast(model.state_dict().values())
        if self._sharded:
            self._shard(model, runtime)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _shard(self, model: nn.Module, runtime: Runtime) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert self._ranks.group is not None
        mesh = DeviceMesh.from_group(self._ranks.group, runtime.device)
        plain = low = MixedPrecisionPolicy()
        if runtime.dtype == "bf16":  # inputs are left to autocast
            low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for part in getattr(model, "parts", list)():
            fully_shard(part, mesh=mesh, mp_policy=plain if batch_norms(part) else low)
        fully_shard(model, mesh=mesh)
        for part in _fsdp_modules(model):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
        with self._ranks.collective(), unsharded(model):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._given.add(name))

    def passes(self, rows: int, total: int, micro_batch: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of each pass over this rank's rows. total: rows of all ranks."""
        self._given = set()
        if self._sharded:
            count = _count_passes(total, self._ranks.size, micro_batch)
            return ((rows * number // count, rows * (number + 1) // count) for number in range(count))
        return ((start, min(start + micro_batch, rows)) for start in range(0, rows, micro_batch))

    @torch.no_grad()
    def finish(self, problem: str) -> str:
        """After the last pass: the worst problem of any rank. If "", gradients are sums over ranks, None where no rank
        has one. ValueError if memory ran out with `runtime.shard`, as other ranks wait inside a pass."""
        if self._ranks.size == 1:
            return problem
        if self._sharded and problem:
            raise ValueError(
                f"rank {self._ranks.rank} of {self._ranks.size} ran out of memory. With runtime.shard the micro-batch "
                "is not halved by itself: go on with a smaller train.micro_batch, or with more ranks"
            )
        given = self._given or {name for name, p in self._parameters.items() if p.grad is not None}
        flags = {f" {name}": int(name == problem) for name in PROBLEMS}
        counts = self._ranks.total(flags | {name: int(name in given) for name in self._parameters})
        if worst := next((name for name in PROBLEMS if counts[f" {name}"]), ""):
            return worst
        gradients = []
        for name, parameter in self._parameters.items():
            if not counts[name]:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        if self._sharded:  # already reduced by its passes
            return ""
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with self._ranks.collective():
            dist.all_reduce(flat, group=self._ranks.group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        return ""
