"""The weights of a training that are judged and exported: averaged ones where it keeps an average, with statistics of
batch norms that fit them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from matrixlib.engine import distributed, optim, rng
from matrixlib.engine.averages import Average
from matrixlib.engine.distributed import batch_norms
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch, Source, rows, slice_batch, to_device
from matrixlib.engine.validation import evaluating

BATCHES = 16
"""Training batches that the statistics are made of: 2,048 positions of the default presets, in about the time of five
updates."""


class EvalWeights:
    """The weights by which a step's training is judged. source: of every method, the training batches of the phase in
    force. The first of them are made once and kept on the host.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._model = step, optim.unwrap(step.model)
        self._norms = [norm for norm in batch_norms(self._model) if norm.running_mean is not None]
        self._source: Source | None = None
        self._batches: list[Batch] = []

    @contextmanager
    def applied(self, source: Source) -> Iterator[None]:
        """It stands in the step's model inside the context, on every rank the same; the exact raw weights after it."""
        average = self._step.ema
        if average is None:
            with distributed.unsharded(self._model):
                yield
            return
        self.renew(source)
        with average.applied(self._model), distributed.unsharded(self._model):
            if average.lacks_statistics:
                self._step.ranks.broadcast(self._statistics().values())
            yield

    def network(self, source: Source) -> nn.Module | None:
        """A copy of the model with these weights, frozen, in eval mode. All ranks ask for it, rank 0 alone gets it."""
        self.renew(source)
        average, step = self._step.ema, self._step
        tensors = average.state_dict() if average is not None else {}
        if step.sharded:
            tensors = distributed.gather_full({"": tensors or optim.named_tensors(self._model)}, step.ranks)[""]
        if not step.ranks.first:
            return None
        model = step.task.build_model().to(step.runtime.torch_device) if step.sharded else copy.deepcopy(self._model)
        if tensors:
            optim.load_tensors(model, tensors, "average")
        return model.requires_grad_(False).eval()

    def renew(self, source: Source) -> None:
        """On rank 0, make the statistics of batch norms anew, where the average has changed since or `source` is
        another. Nothing else moves: no weight, no gradient, no random stream, no batch of the training.
        """
        average = self._step.ema
        if average is None or not (average.lacks_statistics and average.averages and self._norms):
            return
        if not self._step.ranks.first:  # `applied` gives them to all
            return
        if source is not self._source:
            self._source, self._batches = source, list(source.batches(0, BATCHES))
        elif average.statistics:
            return
        device = self._step.runtime.torch_device
        streams = rng.capture(device)
        try:
            rng.restore(rng.seeded(self._step.config.seed, device), device)  # a task may draw in its losses
            average.statistics = self._made(average)
        finally:
            rng.restore(streams, device)

    def _made(self, average: Average) -> dict[str, Tensor]:
        """Means over passes of as many rows as in training. Dropout is off, as it is where the network is used."""
        step = self._step
        momenta = [(norm, norm.momentum, norm.training) for norm in self._norms]
        with average.applied(self._model), evaluating(self._model):
            try:
                for norm in self._norms:
                    norm.reset_running_stats()
                    norm.momentum, norm.training = None, True
                for batch in self._batches:
                    for start in range(0, rows(batch), step.micro_batch):
                        self._pass(slice_batch(batch, start, start + step.micro_batch))
                return {name: value.clone() for name, value in self._statistics().items()}
            finally:
                for norm, momentum, training in momenta:
                    norm.momentum, norm.training = momentum, training

    def _pass(self, part: Batch) -> None:
        """Take in some rows; not those of a bad batch, whose update was skipped too."""
        step, buffers = self._step, list(self._statistics().values())
        before = [buffer.clone() for buffer in buffers]
        with step.runtime.autocast():
            step.task.losses(self._model, step.taught(to_device(part, step.runtime.torch_device)), step.active)
        if not torch.stack([buffer.isfinite().all() for buffer in buffers]).all():
            optim.copy_tensors(buffers, before)

    def _statistics(self) -> dict[str, Tensor]:
        names = {norm: name for name, norm in self._model.named_modules()}
        return {f"{names[norm]}.{key}": value for norm in self._norms for key, value in norm.named_buffers()}
