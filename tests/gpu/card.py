"""What the checks of a card share: its device, configurations, steps, batches. `make gpu` names it in MATRIXLIB_CARD.

Without it the device is the CPU and the checks are a dry run with tiny networks, which every test run makes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from matrixlib import config as configuration
from matrixlib.config import Config
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.engine.step import Step
from matrixlib.engine.task import Batch
from matrixlib.hardware import machine
from matrixlib.hardware import runtime as runtimes
from matrixlib.tasks import get_task, load_config

DEVICE = os.environ.get("MATRIXLIB_CARD", "cpu")
DRY = DEVICE == "cpu"
ROWS = 16  # of an update in the dry run
TINY: Mapping[str, Any] = {
    "model": {"channels": 16, "blocks": 1, "attention": {"every": 1, "heads": 2}, "value": {"hidden": 16}},
    "train": {"batch_size": ROWS},
    "data": {"limit": 512},
    "validation": {"limit": 128, "batch_size": 128},
}
"""Over the demo preset, in the dry run."""
NEVER = 10**6
QUIET: Mapping[str, Any] = {
    "train": {"statistics_interval": NEVER},
    "validation": {"interval": NEVER},
    "checkpoint": {"interval": NEVER},
}
"""A whole run that neither validates nor saves on its way."""
CALM: Mapping[str, Any] = {
    "model": {"droppath": 0.0, "dropout": 0.0},
    "optim": {"clip_norm": 1e9, "ema_decay": 0.0},
}
"""Nothing drawn at random on the device, whose stream is another one; gradients as they are."""


def overrides(*changes: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a preset on the card, without workers; `changes` over them, the later ones first."""
    plain = {"precision": "fp32", "channels_last": False} if DRY else {}
    runtime = {"device": DEVICE, "compile": False, **plain}
    own: dict[str, Any] = {"runtime": runtime, "data": {"workers": 0}, "gating": {"warmup_steps": 0}}
    return functools.reduce(configuration.merge, (own, *([TINY] if DRY else []), *changes))


def configured(preset: str, *changes: Mapping[str, Any]) -> Config:
    """A preset with `overrides`; in the dry run chess is the `TINY` network, whatever the preset."""
    if preset.startswith(("latin", "melee")):
        merged = overrides(*changes)
        return load_config(preset, {k: v for k, v in merged.items() if k != "model"} if DRY else merged)
    return load_config("demo" if DRY else preset, overrides(*changes))


def step_of(config: Config, model: Any = None) -> Step:
    """A step with a fresh network (or this one) in the runtime that the configuration names."""
    runtime = runtimes.resolve(config.runtime, config.train, config.data)
    runtime.apply()
    task = get_task(config.task).task(config)
    return Step(task, task.build_model() if model is None else model, runtime, config, 1000)


def batches_of(config: Config, count: int = 1) -> list[Batch]:
    """The first batches of its training, pinned for a card."""
    spec, pin = get_task(config.task), config.runtime.device == "cuda"
    shards = Catalogue(spec.folder(config)).shards("train")
    loader = Loader(shards, spec.layout, config.train.batch_size, config.seed, spec.task(config).prepare, pin=pin)
    return list(loader.batches(0, count))


def half_precision() -> str:
    """The half precision that the card computes in; on a CPU, slowly, in bf16."""
    return "bf16" if DRY or runtimes.native_bf16(machine.facts(), DEVICE) else "fp16"
