"""Updates of a preset to be timed: the same rows over and over, in the runtime that the policy decides on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from matrixlib import config as configuration
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.engine.step import Step
from matrixlib.hardware import backend, runtime
from matrixlib.tasks import changed, get_task, load_config

if TYPE_CHECKING:
    from matrixlib.hardware.runtime import Runtime

UPDATE_FLOPS = {"cpu": 1.3e12, "mps": 1.3e13, "cuda": 6e13}
"""Work of a timed update: seconds at most on a small CPU, and enough rows to fill a GPU."""


def chosen_runtime(device: str = "auto") -> Runtime:
    """What the policy decides on for `device`; sets torch's threads. Raises ValueError where the device is absent."""
    config = configuration.load_shared("quick", {"runtime": {"device": device}})
    chosen = runtime.resolve(config.runtime, config.train, config.data)
    chosen.apply()
    return chosen


class Update:
    """A call is one update of a fresh network of `preset`, finished on the device.

    chosen: its device, dtype, threads and memory format, unless `changes` say otherwise. rows: of an update; 0 = as
    much work as `UPDATE_FLOPS`, at most the preset's batch. flops: of a row, None where the task does not tell.
    """

    def __init__(self, chosen: Runtime, preset: str, changes: Mapping[str, Any], rows: int = 0) -> None:
        settings = {"device": chosen.device, "precision": chosen.dtype, "threads": chosen.threads, "compile": False}
        base = {"runtime": settings | {"channels_last": chosen.channels_last}}
        base |= {"data": {"limit": 0, "workers": 0}, "gating": {"warmup_steps": 0}}
        config = load_config(preset, configuration.merge(base, changes))
        spec = get_task(config.task)
        self.flops = spec.training_flops(config)
        fits = UPDATE_FLOPS[chosen.device] / self.flops if self.flops else config.train.batch_size
        self.rows = rows or min(config.train.batch_size, 1 << (max(1, int(fits)).bit_length() - 1))
        config = changed(config, {"train": {"batch_size": self.rows}})
        task = spec.task(config)
        self.runtime = runtime.resolve(config.runtime, config.train, config.data)
        self._batch = next(iter(open_loader(config, self.rows).batches(0, 1)))
        with torch.random.fork_rng(devices=[]):
            self.step = Step(task, task.build_model(), self.runtime, config, 1000)

    def __call__(self) -> None:
        for text in self.step(self._batch).messages:  # less memory than thought, or no compiler
            warnings.warn(str(text), RuntimeWarning, stacklevel=2)
        backend.synchronize(self.runtime.device)


def open_loader(config: configuration.Config, rows: int, workers: int = 0, pin: bool = False) -> Loader:
    """The training data of a configuration, `rows` a batch."""
    spec = get_task(config.task)
    shards = Catalogue(spec.folder(config)).shards("train")
    prepare = spec.task(config).prepare
    return Loader(shards, spec.layout, rows, config.seed, prepare, workers=workers, prefetch=2, pin=pin)
