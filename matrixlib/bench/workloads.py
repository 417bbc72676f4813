"""What benchmarks measure: updates, options, scaling, data, checkpoints, start-up, and what the tasks add.

Each figure is a median of calls that take turns with the others of its group, after a warm-up, beside the limit that
this machine sets it, measured in the same minute.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.engine.optim import parameter_groups
from matrixlib.engine.step import Step
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.backend import synchronize
from matrixlib.hardware.benchmark import Figure, Plan, Workload
from matrixlib.hardware.speed import FEWEST, copy_rate, turns
from matrixlib.tasks import TASKS, changed, get_task, load_config

UPDATE_FLOPS = {"cpu": 1.3e12, "mps": 1.3e13, "cuda": 6e13}
"""Work of a timed update: seconds at most on a small CPU, and enough rows to fill a GPU."""
LARGE = "matrix0_53m"
FIRST_UPDATE_SECONDS = 120.0
END_SECONDS = 10.0


class Update:
    """Updates of one network, over and over with the same rows.

    rows: of an update; 0 = as much work as `UPDATE_FLOPS`, at most the preset's batch. foreach: the optimiser as many
    small operations instead of a fused one.
    """

    def __init__(
        self, plan: Plan, preset: str, changes: Mapping[str, Any], rows: int = 0, foreach: bool = False
    ) -> None:
        runtime = plan.runtime
        base = {
            "runtime": {
                "device": runtime.device,
                "precision": runtime.dtype,
                "threads": runtime.threads,
                "channels_last": runtime.channels_last,
                "compile": False,
            },
            "data": {"limit": 0, "workers": 0},
            "gating": {"warmup_steps": 0},
        }
        config = load_config(preset, configuration.merge(base, changes))
        spec = get_task(config.task)
        self.flops = spec.training_flops(config)
        self.rows = rows
        if not rows:
            fits = UPDATE_FLOPS[runtime.device] / self.flops if self.flops else config.train.batch_size
            self.rows = min(config.train.batch_size, 1 << (max(1, int(fits)).bit_length() - 1))
        config = changed(config, {"train": {"batch_size": self.rows}})
        task = spec.task(config)
        self.runtime = runtimes.resolve(config.runtime, config.train, config.data)
        self._batch = next(iter(open_loader(config, self.rows).batches(0, 1)))
        with torch.random.fork_rng(devices=[]):
            self._step = Step(task, task.build_model(), self.runtime, config, 1000)
        if foreach:
            groups = parameter_groups(self._step.model, config.optim.weight_decay)
            self._step.optimiser = torch.optim.AdamW(groups, foreach=True)

    def __call__(self) -> None:
        for text in self._step(self._batch).messages:  # less memory than thought, or no compiler
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        synchronize(self.runtime.device)


def updates(plan: Plan) -> Iterator[Figure]:
    """Positions a second of each preset's updates, in the runtime that the policy decides on."""
    presets = ["demo"] if plan.brief else [name for name in configuration.presets() if name != "latin_full"]
    yield from _rates(plan, {name: Update(plan, name, {}) for name in presets})


def options(plan: Plan) -> Iterator[Figure]:
    """The same with one choice of the runtime turned, for a small and a large network."""
    runtime = plan.runtime
    turned: dict[str, dict[str, Any]] = {"as chosen": {}}
    turned["without channels_last" if runtime.channels_last else "channels_last"] = {
        "runtime": {"channels_last": not runtime.channels_last}
    }
    if runtime.dtype != "fp32":
        turned["fp32"] = {"runtime": {"precision": "fp32"}}
    if plan.compile:
        turned["compiled"] = {"runtime": {"compile": True}}
    for preset in ("demo",) if plan.brief else ("quick", LARGE):
        rows = Update(plan, preset, {}).rows
        works = {f"{preset}, {name}": Update(plan, preset, changes) for name, changes in turned.items()}
        if load_config(preset).optim.optimiser == "adamw":
            works[f"{preset}, optimiser not fused"] = Update(plan, preset, {}, foreach=True)
        pieces = {"train": {"micro_batch": max(1, rows // 4)}}
        works[f"{preset}, in four passes"] = Update(plan, preset, pieces)
        yield from _rates(plan, works)


def scaling(plan: Plan) -> Iterator[Figure]:
    """Positions a second against batch, width and depth of the quick preset's network."""
    sizes = (32, 128) if plan.brief else (16, 64, 256, 1024)
    yield from _rates(plan, {f"batch {n}": Update(plan, "quick", {}, rows=n) for n in sizes})
    if plan.brief:
        return
    for what, values in (("channels", (32, 64, 128, 256)), ("blocks", (2, 6, 12, 24))):
        works = {f"{what} {n}": Update(plan, "quick", {"model": {what: n}}, rows=128) for n in values}
        yield from _rates(plan, works)


def loader(plan: Plan) -> Iterator[Figure]:
    """Positions a second that the loader makes ready, by its number of worker processes."""
    config = load_config("quick")
    size = 1024
    bytes_a_row = sum(array.nbytes for array in open_loader(config, size).records(0).values()) / size
    limit, of = copy_rate() / bytes_a_row, "copying their bytes once"
    for workers in (0,) if plan.brief else (0, 1, 2, 4):
        if workers > max(1, os.cpu_count() or 1):
            break
        stream: Any = open_loader(config, size, workers).batches(0)
        rate = size * _batches_per_second(stream, 10 if plan.brief else 60, plan.seconds / 3)
        stream.close()
        yield Figure(f"{workers or 'no'} worker{'s' if workers != 1 else ''}", rate, "positions/s", limit, of)


def loader_rate(batch_size: int = 1024) -> dict[str, float]:
    """Rows a second that one process gathers and prepares for the demo preset, after a warm-up; and rows a batch."""
    stream = open_loader(load_config("demo"), batch_size).batches(0)
    return {"rows_per_second": batch_size * _batches_per_second(stream, 5, 0.1), "batch_size": batch_size}


def checkpoint(plan: Plan) -> Iterator[Figure]:
    """Seconds to save weights, their average and the optimiser's moments, durably."""
    preset = "demo" if plan.brief else LARGE
    config = load_config(preset)
    network = get_task(config.task).task(config).build_model()
    model = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    tensors = {"model": model}
    for kind in ("ema", "exp_avg", "exp_avg_sq"):
        tensors[kind] = {name: torch.ones_like(tensor) for name, tensor in model.items()}
    size = sum(tensor.nbytes for members in tensors.values() for tensor in members.values())
    data = np.ones(size, np.uint8)
    root = files.reports_root()  # on the disk where checkpoints lie
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        store = Checkpoints(Path(folder) / "checkpoints", 2)
        numbers = iter(range(10**6))

        def raw() -> None:
            with (Path(folder) / "raw").open("wb") as file:
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())

        def save() -> None:
            store.save(next(numbers), tensors, {}, wait=True)

        seconds = turns({"raw": raw, "save": save}, plan.seconds / 2)
    name = f"{preset}, {size / 1e6:,.0f} MB"
    yield Figure(name, seconds["save"], "s", seconds["raw"], "writing the bytes to one file")


def start(plan: Plan) -> Iterator[Figure]:
    """Seconds until Python has imported, and until the quick preset has made its first update in a notebook."""

    def imports(what: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", what], check=True)

    works = {"import matrixlib": imports("import matrixlib")}
    if not plan.brief:
        works["import torch"] = imports("import torch")
    seconds = turns({"": imports("pass")} | works, plan.seconds / 3)
    for name in works:
        yield Figure(name, seconds[name], "s", seconds[""], "python that does nothing")
    if not plan.brief:
        first = statistics.median(first_update(plan.device) for _ in range(2))
        limit = seconds["import torch"]
        yield Figure("first update of quick under papermill", first, "s", limit, "importing torch")


GENERAL: Sequence[Workload] = (updates, options, scaling, loader, checkpoint, start)


def workloads() -> dict[str, Workload]:
    """By name, in the order in which they run: the general ones, then those of the tasks."""
    named: dict[str, Workload] = {workload.__name__: workload for workload in GENERAL}
    for task in TASKS:
        named |= get_task(task).benchmarks()
    return named


ON_GPU: Sequence[str] = ("updates", "options", "scaling", "inference")


def first_update(device: str) -> float:
    """Seconds from starting papermill to the first line of metrics.jsonl."""
    notebook = files.NOTEBOOKS / "train.ipynb"
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "papermill", str(notebook), str(Path(folder) / "out.ipynb")]
        for name, value in {"preset": "quick", "device": device, "run": "first"}.items():
            words += ["-p", name, value]
        began = time.perf_counter()
        process = subprocess.Popen(
            words,
            env=os.environ | {"MATRIXLIB_REPORTS": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            metrics = Path(folder) / "first" / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None or time.perf_counter() - began > FIRST_UPDATE_SECONDS:
                    raise RuntimeError("train.ipynb made no update; run it alone to see why")
                time.sleep(0.02)
            return time.perf_counter() - began
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and what it has started, kernels in sessions of their own too, and wait until they are gone."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(family, timeout=END_SECONDS)


def _rates(plan: Plan, works: Mapping[str, Update]) -> Iterator[Figure]:
    """A figure for each update, beside what matrix products alone would allow in its dtype."""
    dtypes = {work.runtime.dtype for work in works.values() if work.flops}
    peak = {dtype: plan.matrix_rate(dtype) for dtype in dtypes}
    seconds = turns(works, plan.seconds * max(1.0, len(works) / 4))
    peak = {dtype: max(before, plan.matrix_rate(dtype)) for dtype, before in peak.items()}
    for name, work in works.items():
        dtype = work.runtime.dtype
        limit = peak[dtype] / work.flops if work.flops else None
        of = f"{dtype} products, {peak[dtype] / 1e9:,.0f} GFLOP/s" if limit else ""
        yield Figure(f"{name}, {work.rows} rows", work.rows / seconds[name], "positions/s", limit, of)


def _batches_per_second(stream: Iterator[Any], first: int, seconds: float) -> float:
    """Of a loader's stream; the first batches do not count: workers start, blocks are checked."""
    for _ in range(first):
        next(stream)
    batches, start = 0, time.perf_counter()
    while batches < FEWEST or time.perf_counter() - start < seconds:
        next(stream)
        batches += 1
    return batches / (time.perf_counter() - start)


def open_loader(config: configuration.Config, rows: int, workers: int = 0, pin: bool = False) -> Loader:
    """The training data of a configuration."""
    spec = get_task(config.task)
    shards = Catalogue(spec.folder(config)).shards("train")
    prepare = spec.task(config).prepare
    return Loader(shards, spec.layout, rows, config.seed, prepare, workers=workers, prefetch=2, pin=pin)
