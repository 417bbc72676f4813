"""A network that is cut over ranks: each keeps a part of every weight, of its gradient and of the optimiser's state.

torch's FSDP2 gathers weights as a pass comes to them and sums gradients into the parts, so passes are collective
operations, and all ranks make as many of them. Between passes a weight is a DTensor. Of this the rest of the engine
knows `full`, `like` and `whole`; with a network that is not cut they do nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from matrixlib.config import Config
from matrixlib.engine.parallel import Ranks, norms_by_rank
from matrixlib.hardware.runtime import Runtime

if TYPE_CHECKING:
    from matrixlib.engine.plan import UpdatePlan

OPTIMISERS = ("adamw", "adam", "sgd", "rmsprop", "radam", "nadam")
"""Those that move each number by itself, so that they need no whole matrix."""


def refuse(config: Config, runtime: Runtime, size: int) -> None:
    """ValueError naming all options that do not go with `runtime.shard` on `size` ranks, before anything is trained."""
    wrong = {
        f"optim.optimiser {config.optim.optimiser}: take {', '.join(OPTIMISERS[:-1])} or {OPTIMISERS[-1]}": (
            config.optim.optimiser not in OPTIMISERS
        ),
        "optim.swa: take ema_decay": bool(config.optim.swa),
        "optim.noise: set it to 0": bool(config.optim.noise),
        "gating.seconds: set it to 0, as all ranks have to make the same passes": bool(config.gating.seconds),
        "runtime.compile: set it to false": bool(config.runtime.compile),
        "fp16: set runtime.precision to bf16 or fp32": runtime.dtype == "fp16",
        "mps: set runtime.device to cpu or cuda": runtime.device == "mps",
        "train.steps auto: give a number, as nothing is tried of a network that may not fit on one device": (
            config.train.steps == "auto"
        ),
    }
    if any(wrong.values()):
        raise ValueError(f"runtime.shard does not go with {'; nor with '.join(text for text in wrong if wrong[text])}")
    count_passes(config.train.batch_size, size, runtime.micro_batch)


def count_passes(rows: int, size: int, micro_batch: int) -> int:
    """Passes of an update of so many rows: as many as the rank with the most rows needs. ValueError where one has fewer
    rows than that.
    """
    count = math.ceil(math.ceil(rows / size) / micro_batch)
    if rows // size < count:
        raise ValueError(
            f"{rows} rows for {size} ranks in passes of {micro_batch}: with runtime.shard all ranks make as many "
            f"passes, so give a train.batch_size that is a multiple of {size}, or a larger one than {size} and a "
            "train.micro_batch above 1"
        )
    return count


def is_cut(tensor: Tensor) -> bool:
    """Whether its parts lie on ranks."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """A tensor whose parts lie on ranks, which all ask for it, whole."""
    whole_of: Any = getattr(tensor, "full_tensor", None)
    result: Tensor = whole_of() if whole_of is not None else tensor
    return result


def own_part(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    part_of: Any = getattr(tensor, "to_local", None)
    result: Tensor = part_of() if part_of is not None else tensor
    return result


def like(tensor: Tensor, target: Tensor) -> Tensor:
    """A whole tensor, which each rank has, cut as `target` is."""
    if not is_cut(target) or is_cut(tensor):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    there = tensor.to(target.device)
    return distribute_tensor(there, target.device_mesh, target.placements, src_data_rank=None)


def gathered(tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Groups of tensors, whole and on the host, to rank 0; all ranks ask for them, and the others get empty groups."""
    out: dict[str, dict[str, Tensor]] = {}
    with ranks.together():
        for group, members in tensors.items():
            out[group] = {}
            for name in sorted(members):  # the order may be another on each rank: a checkpoint is read in any
                value = full(members[name])  # one at a time: together they may not fit on the device
                if ranks.first:
                    out[group][name] = value.cpu()
    return out


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """All weights are gathered inside the context, which all ranks enter: passes in it wait for no other rank. What is
    done to the weights in it is lost.
    """
    if not hasattr(model, "unshard"):
        yield
        return
    root, parts = _parts(model)
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


def _parts(model: nn.Module) -> tuple[Any, list[Any]]:
    """(the network, it and what is gathered by itself), as FSDP's modules."""
    return model, [module for module in model.modules() if hasattr(module, "unshard")]


class Shards:
    """The gradients of a network that it cuts over the ranks, in the place of `Buckets`.

    What the network's `parts()` names is gathered when a pass comes to it, forward and backward, and let go of; all
    else, without that method everything, is there during the whole pass. Under bf16 these parts are gathered in it,
    unless they have a batch norm, and their gradients are summed in fp32. They are summed after each pass: what several
    passes add up to would be as large as the whole network.
    """

    early = 0

    def __init__(self, ranks: Ranks, model: nn.Module, config: Config, runtime: Runtime) -> None:
        """The weights are rank 0's. ValueError where the network or its options do not go with this."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        refuse(config, runtime, ranks.size)
        assert ranks.group is not None
        ranks.broadcast(model.state_dict().values())
        mesh = DeviceMesh.from_group(ranks.group, runtime.device)
        plain = low = MixedPrecisionPolicy()
        if runtime.dtype == "bf16":  # inputs are left to autocast
            low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for part in getattr(model, "parts", list)():
            fully_shard(part, mesh=mesh, mp_policy=plain if norms_by_rank(part) else low)
        fully_shard(model, mesh=mesh)
        self._ranks, self._given = ranks, set[str]()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for part in _parts(model)[1]:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
        with ranks.together(), whole(model):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self._take, name))

    def begin(self) -> None:
        """Before the first pass of an update."""
        self._given = set()

    def passes(self, plan: UpdatePlan, micro_batch: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the rows of each pass."""
        rows, size = plan.totals[""], self._ranks.size
        count, own = count_passes(rows, size, micro_batch), len(range(self._ranks.rank, rows, size))
        for number in range(count):
            yield own * number // count, own * (number + 1) // count

    def last_pass(self) -> contextlib.AbstractContextManager[None]:
        """Around the last pass, which is as the others are."""
        return contextlib.nullcontext()

    def finish(self, problem: str) -> str:
        """After the last pass, which has summed the gradients: "", and a gradient is None where no rank has given one.
        ValueError where memory has run out: the others wait in the middle of a pass, so it cannot be repeated.
        """
        if problem:
            raise ValueError(
                f"rank {self._ranks.rank} of {self._ranks.size} ran out of memory. With runtime.shard the micro-batch "
                "is not halved by itself: go on with a smaller train.micro_batch, or with more ranks"
            )
        counts = self._ranks.total({name: int(name in self._given) for name in self._parameters})
        for name, parameter in self._parameters.items():
            if not counts[name]:
                parameter.grad = None
        return ""

    def _take(self, name: str, parameter: Tensor) -> None:
        self._given.add(name)
