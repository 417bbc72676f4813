"""A network in evaluation mode, for searches, matches and figures of any game."""

import copy
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import nn

from matrixlib.engine.compiler import compiled, place
from matrixlib.engine.memory import out_of_memory
from matrixlib.engine.task import Batch, to_device
from matrixlib.hardware import backend
from matrixlib.hardware import runtime as runtimes

RECOMPILES = 64  # compiled graphs kept per function; torch's default of 8 would run the ninth uncompiled
MOST_BESIDE = 4  # batches evaluated at once for one search
WORKER_ROWS = 128  # most rows that a worker evaluates at once: on one core of an EPYC as fast as 256


class GameTask(Protocol):
    """What a task adds so that its networks can evaluate game positions."""

    def inputs(self, states: np.ndarray, moves: np.ndarray, offsets: np.ndarray) -> dict[str, np.ndarray]:
        """Inputs of `predict` for states (B,) with legal moves (K,) at offsets (B + 1,); includes `policy_index` (B,
        L): those moves in order, padded with -1."""

    def predict(self, model: nn.Module, batch: Batch, heads: frozenset[str] = ...) -> dict[str, torch.Tensor]:
        """`policy` (B, L): log-probabilities of `policy_index`; `value` (B,): expected result in [-1, 1]."""


class Network:
    """A network in evaluation mode with its task's encoding. serving: batch splitting, padding and compilation."""

    sha256: str = ""  # of the file that its weights are from; empty where they are from none
    updates: int = 0  # of its training; 0 where unknown
    lesson: Mapping[str, Any] = {}  # record of its teacher (`engine.task.Teacher`); empty without one

    def __init__(
        self, model: nn.Module, task: GameTask, runtime: runtimes.Runtime, serving: runtimes.Serving | None = None
    ) -> None:
        self.model = place(model, runtime)[0].requires_grad_(False).eval()
        self._modules = list(self.model.modules())  # walking them anew takes a tenth of a position's time
        self.task, self.runtime, self.serving = task, runtime, serving or runtimes.serving(runtime.device)
        self._compiled = compiled(self.model, dynamic=False) if self.serving.compile else None
        self._tried: set[int] = set()  # batch sizes already compiled
        self._rows = self.serving.sizes[-1]  # most of a part
        self._divisible = runtime.device == "cpu" and not self.serving.fill  # whether threads can evaluate parts
        # onnxruntime has its own threads, which share each operation well
        self._own_threads: Callable[[int], nn.Module] | None = getattr(self.model, "with_threads", None)
        self._pool: ThreadPoolExecutor | None = None  # evaluates parts of a batch
        self.workers = 0  # see `with_workers`
        self.executor: ThreadPoolExecutor | None = None  # evaluates whole batches, `beside` at once: see `with_threads`
        self.beside = 1

    @property
    def training(self) -> bool:
        return any(module.training for module in self._modules)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def with_threads(self, threads: int) -> Self:
        """The same network (it shares the weights) for one search on so many CPU threads, `beside` of whose batches
        `executor` evaluates at once.

        Torch's own threads wait for each other in every operation, which is many times slower if another program holds
        a core. A network on a GPU or a compiled one evaluates one batch at a time.
        """
        other = copy.copy(self)
        if self.runtime.device == "cpu":
            other.beside = min(threads, MOST_BESIDE) if self._divisible else 1
            each = threads // other.beside
            other.model = self._own_threads(each) if self._own_threads else self.model
            other.executor = _pool(other.beside, each)
        return other

    def with_workers(self) -> Self:
        """The same network (it shares the weights) for searches in `workers` threads, whose batches are evaluated
        beside each other, each on one thread: the same bits whatever their number. 0 where one search at a time is
        better (a GPU, a compiled network)."""
        other = copy.copy(self)
        if self._divisible:
            other.model = self._own_threads(1) if self._own_threads else self.model
            other.workers, other._rows = self.runtime.threads, WORKER_ROWS
            other._pool = _pool(other.workers, 1)
        return other

    def predict(self, batch: dict[str, np.ndarray], heads: frozenset[str] = frozenset()) -> dict[str, np.ndarray]:
        """The task's `predict` on a batch of `inputs` (one row or more); results on the host in fp32."""
        assert not self.training, "the network must be in eval mode"
        rows = self._rows
        cuts = [{n: a[i : i + rows] for n, a in batch.items()} for i in range(0, len(batch["policy_index"]), rows)]
        parts = list((self._pool.map if self._pool else map)(partial(self._part, heads=heads), cuts))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _part(self, batch: dict[str, np.ndarray], heads: frozenset[str]) -> dict[str, np.ndarray]:
        """One device batch, padded with copies of its last row; one host read."""
        count = len(batch["policy_index"])
        if self.serving.fill:
            size = next(size for size in self.serving.sizes if size >= count)
            rows = np.minimum(np.arange(size), count - 1)
            batch = {name: array[rows] for name, array in batch.items()}
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        if backend.pins(self.runtime.device):
            tensors, _ = backend.pin(tensors)
        tensors = to_device(tensors, self.runtime.torch_device)
        with torch.inference_mode(), self.runtime.autocast():
            out = self._predict(tensors, heads)
            flat = torch.cat([tensor.float().reshape(len(tensor), -1) for tensor in out.values()], dim=1)
        whole, column, parts = flat.cpu().numpy()[:count], 0, {}
        for name, tensor in out.items():
            width = tensor.numel() // len(tensor)
            parts[name] = whole[:, column : column + width].reshape(count, *tensor.shape[1:])
            column += width
        return parts

    def _predict(self, tensors: dict[str, torch.Tensor], heads: frozenset[str]) -> dict[str, torch.Tensor]:
        """The task's `predict`, compiled if enabled and working; never for SSL heads."""
        if self._compiled is None or heads:
            return self.task.predict(self.model, tensors, heads)
        from torch._dynamo import config as dynamo
        from torch._dynamo.exc import FailOnRecompileLimitHit

        size = len(tensors["policy_index"])
        try:
            with dynamo.patch(recompile_limit=RECOMPILES, fail_on_recompile_limit_hit=True):
                out = self.task.predict(self._compiled, tensors)
            self._tried.add(size)
            return out
        except (RuntimeError, FailOnRecompileLimitHit) as error:
            if isinstance(error, RuntimeError) and (size in self._tried or out_of_memory(error)):
                raise
            reason = " ".join(str(error.__cause__ or error).split())[:200]
        warnings.warn(f"torch.compile failed, continuing without it: {reason}", RuntimeWarning, stacklevel=2)
        self._compiled = None
        return self.task.predict(self.model, tensors, heads)


def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """Workers with so many of torch's threads each, while all other threads keep theirs: torch sets a number for the
    caller and for every thread that has not asked for it yet."""
    before, started = torch.get_num_threads(), threading.Barrier(workers)

    def start() -> None:
        torch.set_num_threads(threads)
        torch.get_num_threads()
        started.wait()

    pool = ThreadPoolExecutor(workers, "network", start)
    list(pool.map(lambda _: None, range(workers)))
    torch.set_num_threads(before)
    return pool
