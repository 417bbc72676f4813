"""Gradients of several ranks, which are summed while the backward pass that makes the last of them goes on.

torch's DistributedDataParallel does that too, but waits for every parameter of every rank: where one runs out of memory
in the middle of a pass, or has rows that leave a parameter out, the others wait for good. Here each rank sends every
bucket in the end, whatever became of its pass, and then all agree on what to do.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from matrixlib.engine.parallel import Ranks
from matrixlib.engine.plan import UpdatePlan
from matrixlib.engine.task import rows

SIZE = 25 * 2**20
"""Bytes of gradients that are sent at once: what DistributedDataParallel takes."""
PROBLEMS = ("compiler", "memory")
"""Why an update is to be repeated, the worst first."""


class Buckets:
    """The gradients of some parameters, as views of flat buffers that all passes of an update add to.

    With one rank it does nothing: gradients are then whatever the passes make. early: buckets of the last update that
    were sent before its backward pass was over.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
        self._ranks, self._parameters = ranks, parameters if ranks.size > 1 else ()
        self._members = list(_parts(reversed(self._parameters)))  # a backward pass begins with the last ones
        self._flat = [torch.zeros(sum(p.numel() for p in part)).to(part[0]) for part in self._members]
        self._given = set[nn.Parameter]()
        self._lacking: list[set[nn.Parameter]] = []
        self._sent: list[dist.Work] = []
        self._open = False
        self.early = 0
        for number, part in enumerate(self._members):
            for parameter in part:
                parameter.register_post_accumulate_grad_hook(partial(self._take, number))

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first pass of an update: gradients of 0, in the buckets."""
        self._given, self._sent, self.early = set(), [], 0
        self._lacking = [set(part) for part in self._members]
        for flat, part in zip(self._flat, self._members, strict=True):
            flat.zero_()
            offset = 0
            for parameter in part:  # in its own memory format, which the optimiser expects
                parameter.grad = flat.as_strided(parameter.size(), parameter.stride(), offset)
                offset += parameter.numel()

    def passes(self, plan: UpdatePlan, micro_batch: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the rows of each pass."""
        size = rows(plan.batch)
        return ((start, min(start + micro_batch, size)) for start in range(0, size, micro_batch))

    @contextlib.contextmanager
    def last_pass(self) -> Iterator[None]:
        """Within it, a bucket is sent as soon as it is whole, in their order."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
            self.early = len(self._sent)

    def finish(self, problem: str) -> str:
        """After the last pass, or what there was of it: the worst problem of any rank. Where there is none, "", the
        gradients are sums over ranks, and None where no rank has given one.
        """
        if self._ranks.size == 1:
            return problem
        self._lacking = [set() for _ in self._members]
        self._send()
        with self._ranks.together():
            for work in self._sent:
                work.wait()
        flags = {str(i): int(p in self._given) for i, p in enumerate(self._parameters)}
        counts = self._ranks.total(flags | {name: int(name == problem) for name in PROBLEMS})
        for i, parameter in enumerate(self._parameters):
            if not counts[str(i)]:
                parameter.grad = None
        return next((name for name in PROBLEMS if counts[name]), "")

    def _take(self, number: int, parameter: Tensor) -> None:
        """A pass has added to the gradient of a parameter in bucket `number`."""
        assert isinstance(parameter, nn.Parameter)
        self._given.add(parameter)
        if self._open:
            assert number >= len(self._sent), "a gradient came after its bucket was sent"
            self._lacking[number].discard(parameter)
            self._send()

    def _send(self) -> None:
        """Send the next buckets that are whole. The order is the same on all ranks, so they meet."""
        while len(self._sent) < len(self._flat) and not self._lacking[len(self._sent)]:
            with self._ranks.together():
                work = dist.all_reduce(self._flat[len(self._sent)], group=self._ranks.group, async_op=True)
            assert work is not None, "this process is in the group"
            self._sent.append(work)


def _parts(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Those of one dtype and device that follow each other, up to `SIZE` bytes of them."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(p.nbytes for p in part) + parameter.nbytes > SIZE
        if part and (full or (parameter.dtype, parameter.device) != (part[0].dtype, part[0].device)):
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part
