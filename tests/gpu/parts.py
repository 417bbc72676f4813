"""What a part of the check is, and what the parts share: plans, configurations, steps, batches.

torch is imported inside functions: the list of the parts must be there before the wheels are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matrixlib.config import Config
    from matrixlib.engine.step import Step
    from matrixlib.engine.task import Batch
    from matrixlib.hardware.benchmark import Figure, Plan

    Work = Callable[[Plan], Iterator[Figure | str]]

DEVICES = ("cuda", "mps", "cpu")
SECONDS = 4.0
"""Of a group of figures on a card."""
BRIEF_SECONDS = 0.02
"""Of one in the dry run, whose figures say nothing."""
ROWS = 16
"""Of an update in the dry run."""
TINY: Mapping[str, Any] = {
    "model": {"channels": 16, "blocks": 1, "attention": {"every": 1, "heads": 2}, "value": {"hidden": 16}},
    "train": {"batch_size": ROWS},
    "data": {"limit": 512},
    "validation": {"limit": 128, "batch_size": 128},
}
"""Over the demo preset, in the dry run."""


class Skip(Exception):
    """What a part cannot do here, and why."""


@dataclass(frozen=True)
class Part:
    """One part. work: its function; yields figures (rates or seconds) and sentences, raises where something is wrong.
    skip: device -> why nothing of the part can be done on it. environment: variables that must be set before torch
    touches the device.
    """

    number: int
    module: str
    name: str
    title: str
    skip: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def work(self) -> Work:
        """Its function, which is imported here and not before."""
        import importlib

        work: Work = getattr(importlib.import_module(self.module), self.name)
        return work


def check_that(holds: bool, text: str) -> None:
    """Raises AssertionError saying `text` unless it holds; an `assert` would go with python's -O."""
    if not holds:
        raise AssertionError(text)


def make_plan(device: str) -> Plan:
    """How to measure on `device`: as the benchmarks do on a card; small and in fp32 on a CPU, where it is a dry run."""
    from matrixlib import config as configuration
    from matrixlib.hardware import benchmark
    from matrixlib.hardware import runtime as runtimes

    if device != "cpu":
        return benchmark.make_plan(device, SECONDS)
    settings = {"device": "cpu", "precision": "fp32", "channels_last": False, "compile": False}
    config = configuration.load_shared("demo", {"runtime": settings})
    runtime = runtimes.resolve(config.runtime, config.train, config.data)
    runtime.apply()
    return benchmark.Plan(runtime, BRIEF_SECONDS, brief=True)


def configured(plan: Plan, preset: str, *changes: Mapping[str, Any]) -> Config:
    """A preset in the plan's runtime, without workers and warm-up of gates; `changes` over it, the later ones first.

    In the dry run chess is the `TINY` network, whatever the preset.
    """
    from matrixlib import config as configuration
    from matrixlib.runs.record import runtime_settings
    from matrixlib.tasks import load_config

    base: dict[str, Any] = {
        "runtime": {**runtime_settings(plan.runtime), "compile": False},
        "data": {"workers": 0},
        "gating": {"warmup_steps": 0},
    }
    if plan.brief and not preset.startswith("latin"):
        preset, base = "demo", configuration.merge(base, TINY)
    for change in changes:
        base = configuration.merge(base, change)
    return load_config(preset, base)


def step_of(config: Config, model: Any = None) -> Step:
    """A step with a fresh network (or this one) in the runtime that the configuration names."""
    from matrixlib.engine.step import Step
    from matrixlib.hardware import runtime as runtimes
    from matrixlib.tasks import get_task

    runtime = runtimes.resolve(config.runtime, config.train, config.data)
    runtime.apply()
    task = get_task(config.task).task(config)
    return Step(task, task.build_model() if model is None else model, runtime, config, 1000)


def batches_of(config: Config, count: int = 1) -> list[Batch]:
    """The first batches of its training, pinned for a card."""
    from matrixlib.bench.workloads import open_loader

    loader = open_loader(config, config.train.batch_size, pin=config.runtime.device == "cuda")
    return list(loader.batches(0, count))


def run_overrides(plan: Plan, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a whole run in the plan's runtime that neither validates nor saves on its way."""
    from matrixlib import config as configuration
    from matrixlib.runs.record import runtime_settings

    never = 10**6
    base: dict[str, Any] = {
        "runtime": {**runtime_settings(plan.runtime), "compile": False},
        "data": {"workers": 0},
        "train": {"statistics_interval": never},
        "validation": {"interval": never},
        "checkpoint": {"interval": never},
    }
    if plan.brief:
        base = configuration.merge(base, TINY)
    for change in changes:
        base = configuration.merge(base, change)
    return base


PARTS = (
    Part(1, "parity", "parity", "one update beside the CPU's"),
    Part(2, "kernels", "host_reads", "no hidden synchronisation"),
    Part(3, "kernels", "attention_kernels", "which attention kernels run"),
    Part(4, "rates", "layouts", "layout x compile x cudnn.benchmark"),
    Part(5, "kernels", "idleness", "idle share, and the gap after the read"),
    Part(6, "survival", "half_precision", "fp16: overflows, NaN, the scale through a resume"),
    Part(7, "survival", "little_memory", "running out of memory, in the step and in the tuner"),
    Part(
        8,
        "survival",
        "resume",
        "a resumed run goes on with the same losses and streams",
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    ),
    Part(9, "survival", "saving", "a save beside training"),
    Part(10, "parity", "recomputation", "recomputation and chunks against none"),
    Part(11, "survival", "workers", "loader with workers beside training, a killed one"),
    Part(12, "parity", "compilation", "compiled: graphs, recompilations, the same losses"),
    Part(13, "rates", "inference", "inference, bf16 beside fp32"),
    Part(14, "kernels", "distant_logits", "attention's gradient with logits near -120 and a mask"),
    Part(15, "learning", "learning", "learns as the CPU does"),
    Part(16, "learning", "cycle", "the cycle killed and resumed, self-play"),
)
