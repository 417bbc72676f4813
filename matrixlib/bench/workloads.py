"""What `bench.py` measures: updates, options, scaling, inference, data, search, checkpoints, start-up.

Each figure is a median of calls that take turns with the others of its group, after a warm-up, beside the limit that
this machine sets it, measured in the same minute. torch is imported inside functions.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware import speed as rates
from matrixlib.tasks import spec as subjects

if TYPE_CHECKING:
    from matrixlib.data.loader import Loader

LEAST, MOST = 3, 200
"""Calls of a figure."""
UPDATE_FLOPS = {"cpu": 1.3e12, "mps": 1.3e13, "cuda": 6e13}
"""Work of a timed update: seconds at most on a small CPU, and enough rows to fill a GPU."""
LARGE = "matrix0_53m"
FIRST_UPDATE_SECONDS = 120.0
END_SECONDS = 10.0


@dataclass(frozen=True)
class Figure:
    """One measured number. limit: what this machine could do at most, in the same unit, and `of` what that is; None
    where nothing sets one."""

    name: str
    value: float
    unit: str  # "s": less is better; anything else is a rate
    limit: float | None = None
    of: str = ""

    @property
    def share(self) -> float | None:
        """Share of the limit that is reached."""
        if not self.limit:
            return None
        return self.limit / self.value if self.unit == "s" else self.value / self.limit


@dataclass(frozen=True)
class Plan:
    """How to measure. seconds: of each group's turns. compile: also with torch.compile, which takes minutes on a CPU.
    brief: small networks and few figures, for a demo."""

    runtime: runtimes.Runtime
    seconds: float
    compile: bool = False
    brief: bool = False

    @property
    def device(self) -> str:
        return self.runtime.device

    def matrix(self, dtype: str = "") -> float:
        """FLOP a second of a matrix product."""
        seconds = 0.1 if self.brief else 0.5
        return 1e9 * rates.matrix(self.device, dtype or self.runtime.dtype, self.runtime.threads, seconds)


def plan(device: str = "auto", seconds: float = 6.0, compile: bool = False, brief: bool = False) -> Plan:
    """What the policy chooses for `device`; sets torch's threads. Raises ValueError where the device is absent."""
    settings = configuration.load("quick", {"runtime": {"device": device}})
    runtime = runtimes.resolve(settings.runtime, settings.train, settings.data)
    runtime.apply()
    return Plan(runtime, seconds, compile or runtime.device == "cuda", brief)


def turns(works: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of a call by name; calls take turns for `seconds` in all, `LEAST` of each at least, after one of
    each that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    end = time.perf_counter() + seconds
    for count in range(1, MOST + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
        if count >= LEAST and time.perf_counter() > end:
            break
    return {name: statistics.median(values) for name, values in taken.items()}


class Update:
    """Updates of one network, over and over with the same rows.

    rows: of an update; 0 = as much work as `UPDATE_FLOPS`, at most the preset's batch. foreach: the optimiser as many
    small operations instead of a fused one.
    """

    def __init__(
        self, chosen: Plan, preset: str, changes: Mapping[str, Any], rows: int = 0, foreach: bool = False
    ) -> None:
        import torch

        from matrixlib.engine.optim import parameter_groups
        from matrixlib.engine.step import make_step

        runtime = chosen.runtime
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
        config = configuration.load(preset, configuration.merge(base, changes))
        subject = subjects.of(config)
        self.flops = subject.training_flops()
        self.rows = rows
        if not rows:
            fits = UPDATE_FLOPS[runtime.device] / self.flops if self.flops else config.train.batch_size
            self.rows = min(config.train.batch_size, 1 << (max(1, int(fits)).bit_length() - 1))
        config = configuration.parse(
            configuration.merge(configuration.dump(config), {"train": {"batch_size": self.rows}})
        )
        self.runtime = runtimes.resolve(config.runtime, config.train, config.data)
        self._batch = next(iter(_loader(config, subject).batches(0, 1)))
        with torch.random.fork_rng(devices=[]):
            self._step = make_step(subject.task, subject.task.build_model(), self.runtime, config, 1000)
        if foreach:
            groups = parameter_groups(self._step.model, config.optim.weight_decay)
            self._step.optimiser = torch.optim.AdamW(groups, foreach=True)

    def __call__(self) -> None:
        for text in self._step(self._batch).messages:  # less memory than thought, or no compiler
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        _wait(self.runtime.device)


def updates(chosen: Plan) -> Iterator[Figure]:
    """Positions a second of each preset's updates, in the runtime that the policy chooses."""
    names = (
        ("demo",) if chosen.brief else tuple(name for name in configuration.presets() if name != "latin_full")
    )
    yield from _rates(chosen, {name: Update(chosen, name, {}) for name in names})


def options(chosen: Plan) -> Iterator[Figure]:
    """The same with one choice of the runtime turned, for a small and a large network."""
    runtime = chosen.runtime
    turned: dict[str, dict[str, Any]] = {"as chosen": {}}
    turned["without channels_last" if runtime.channels_last else "channels_last"] = {
        "runtime": {"channels_last": not runtime.channels_last}
    }
    if runtime.dtype != "fp32":
        turned["fp32"] = {"runtime": {"precision": "fp32"}}
    if chosen.compile:
        turned["compiled"] = {"runtime": {"compile": True}}
    for preset in ("demo",) if chosen.brief else ("quick", LARGE):
        rows = Update(chosen, preset, {}).rows
        works = {f"{preset}, {name}": Update(chosen, preset, changes) for name, changes in turned.items()}
        works[f"{preset}, optimiser not fused"] = Update(chosen, preset, {}, foreach=True)
        pieces = {"train": {"micro_batch": max(1, rows // 4)}}
        works[f"{preset}, in four passes"] = Update(chosen, preset, pieces)
        yield from _rates(chosen, works)


def scaling(chosen: Plan) -> Iterator[Figure]:
    """Positions a second against batch, width and depth of the quick preset's network."""
    sizes = (32, 128) if chosen.brief else (16, 64, 256, 1024)
    yield from _rates(chosen, {f"batch {n}": Update(chosen, "quick", {}, rows=n) for n in sizes})
    if chosen.brief:
        return
    for what, values in (("channels", (32, 64, 128, 256)), ("blocks", (2, 6, 12, 24))):
        works = {f"{what} {n}": Update(chosen, "quick", {"model": {what: n}}, rows=128) for n in values}
        yield from _rates(chosen, works)


def inference(chosen: Plan) -> Iterator[Figure]:
    """Positions a second that a network evaluates for searches and matches, by what evaluates it and by batch."""
    from matrixlib.tasks.chess.evaluate import onnx
    from matrixlib.tasks.chess.evaluate import throughput as inference
    from matrixlib.tasks.chess.evaluate.net import Net
    from matrixlib.tasks.chess.task import ChessTask

    presets = (
        {"demo": (1, 16)}
        if chosen.brief
        else {"quick": inference.SIZES, LARGE: (32,) if chosen.device == "cpu" else (256, 1024)}
    )
    for preset, sizes in presets.items():
        task = ChessTask(_chess(preset))
        net = Net(task.build_model(), task, chosen.runtime)
        with tempfile.TemporaryDirectory() as folder:
            nets = {f"torch {chosen.runtime.dtype}": net}
            if preset == "quick":  # for the large one that takes minutes: see tests/bench/bench_inference.py
                nets = onnx.engines(net, Path(folder), chosen.compile)
            for speed in inference.measure(nets, sizes, chosen.seconds / 4):
                of = f"{speed.engine.split()[-1]} products" if speed.limit else ""
                name = f"{preset}, {speed.engine}, {speed.rows} at once"
                yield Figure(name, speed.rate, "positions/s", speed.limit or None, of)


def targets(chosen: Plan) -> Iterator[Figure]:
    """Positions a second whose self-supervised targets one core makes, all heads together."""
    from matrixlib.tasks.chess import ssl_targets as ssl

    config = _chess("quick")
    records = _loader(config, subjects.of(config), 32_768).records(0)["records"]
    seconds = turns({"targets": lambda: ssl.targets(records)}, chosen.seconds / 4)["targets"]
    moved = records["pieces"][0].nbytes + 40  # 40 bytes of maps come out
    limit = _copied() / moved
    yield Figure("all five heads", len(records) / seconds, "positions/s", limit, "copying their bytes once")


def loader(chosen: Plan) -> Iterator[Figure]:
    """Positions a second that the loader makes ready, by its number of worker processes."""
    config = _chess("quick")
    subject = subjects.of(config)
    size = 1024
    plain = _loader(config, subject, size)
    stored = plain.records(0)
    bytes_a_row = sum(array.nbytes for array in stored.values()) / size
    limit, of = _copied() / bytes_a_row, "copying their bytes once"
    for workers in (0,) if chosen.brief else (0, 1, 2, 4):
        if workers > max(1, os.cpu_count() or 1):
            break
        stream: Any = _loader(config, subject, size, workers).batches(0)
        for _ in range(10 if chosen.brief else 60):  # workers start, blocks are checked
            next(stream)
        batches, start = 0, time.perf_counter()
        while batches < LEAST or time.perf_counter() - start < chosen.seconds / 3:
            next(stream)
            batches += 1
        rate = batches * size / (time.perf_counter() - start)
        stream.close()
        yield Figure(f"{workers or 'no'} worker{'s' if workers != 1 else ''}", rate, "positions/s", limit, of)


def search(chosen: Plan) -> Iterator[Figure]:
    """Simulations a second of one core with an evaluator that costs nothing."""
    from matrixlib.play.game import uniform
    from matrixlib.play.search import Search, SearchOptions
    from matrixlib.tasks.chess.game import ChessGame

    config, game = _chess("quick"), ChessGame()
    trees = 64 if chosen.brief else 256
    states = _loader(config, subjects.of(config), 1024).records(0)["records"]
    states = states[np.isnan(game.terminal(states, np.diff(game.legal(states)[1])))][:trees]
    legal = turns({"legal": lambda: game.legal(states)}, chosen.seconds / 10)["legal"]
    simulations = 16 if chosen.brief else 200

    def searched(leaves: int) -> None:
        tree = Search(game, uniform, SearchOptions(leaves=leaves), len(states))
        for number in range(len(states)):
            tree.reset(number, states[number : number + 1])
        tree.run(simulations)

    for leaves in (1, 8):
        seconds = turns({"search": partial(searched, leaves)}, chosen.seconds / 3)["search"]
        name = f"{trees} trees, {leaves} {'leaf' if leaves == 1 else 'leaves'} of each at once"
        rate = simulations * len(states) / seconds
        yield Figure(name, rate, "simulations/s", len(states) / legal, "their legal moves alone")


def checkpoint(chosen: Plan) -> Iterator[Figure]:
    """Seconds to save weights, their average and the optimiser's moments, durably."""
    import torch

    from matrixlib.engine.checkpoint import Checkpoints
    from matrixlib.tasks.chess.task import ChessTask

    preset = "demo" if chosen.brief else LARGE
    model = {
        name: tensor.detach() for name, tensor in ChessTask(_chess(preset)).build_model().state_dict().items()
    }
    kinds = ("ema", "exp_avg", "exp_avg_sq")
    tensors = {"model": model} | {
        kind: {name: torch.ones_like(t) for name, t in model.items()} for kind in kinds
    }
    size = sum(tensor.nbytes for members in tensors.values() for tensor in members.values())
    data = np.ones(size, np.uint8)
    with tempfile.TemporaryDirectory(dir=_reports()) as folder:
        store = Checkpoints(Path(folder) / "checkpoints", 2)
        numbers = iter(range(10**6))

        def raw() -> None:
            with (Path(folder) / "raw").open("wb") as file:
                file.write(data.data)
                file.flush()
                os.fsync(file.fileno())

        def saved() -> None:
            store.save(next(numbers), tensors, {}, wait=True)

        seconds = turns({"raw": raw, "save": saved}, chosen.seconds / 2)
    yield Figure(
        f"{preset}, {size / 1e6:,.0f} MB",
        seconds["save"],
        "s",
        seconds["raw"],
        "writing the bytes to one file",
    )


def start(chosen: Plan) -> Iterator[Figure]:
    """Seconds until Python has imported, and until the quick preset has made its first update in a notebook."""

    def imports(what: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", what], check=True)

    works = {"import matrixlib": imports("import matrixlib")}
    if not chosen.brief:
        works["import torch"] = imports("import torch")
    seconds = turns({"": imports("pass")} | works, chosen.seconds / 3)
    for name in works:
        yield Figure(name, seconds[name], "s", seconds[""], "python that does nothing")
    if not chosen.brief:
        first = statistics.median(_first_update(chosen.device) for _ in range(2))
        limit = seconds["import torch"]
        yield Figure("first update of quick under papermill", first, "s", limit, "importing torch")


def _first_update(device: str) -> float:
    """Seconds from starting papermill to the first line of metrics.jsonl."""
    notebook = files.PARAMS.parent / "notebooks" / "train.ipynb"
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


def _rates(chosen: Plan, works: Mapping[str, Update]) -> Iterator[Figure]:
    """A figure for each update, beside what matrix products alone would allow in its dtype."""
    dtypes = {work.runtime.dtype for work in works.values() if work.flops}
    peak = {dtype: chosen.matrix(dtype) for dtype in dtypes}
    seconds = turns(works, chosen.seconds * max(1.0, len(works) / 4))
    peak = {dtype: max(before, chosen.matrix(dtype)) for dtype, before in peak.items()}
    for name, work in works.items():
        dtype = work.runtime.dtype
        limit = peak[dtype] / work.flops if work.flops else None
        of = f"{dtype} products, {peak[dtype] / 1e9:,.0f} GFLOP/s" if limit else ""
        yield Figure(f"{name}, {work.rows} rows", work.rows / seconds[name], "positions/s", limit, of)


def _loader(
    config: configuration.Config, subject: subjects.Subject, rows: int = 0, workers: int = 0
) -> Loader:
    from matrixlib.data.catalogue import Catalogue
    from matrixlib.data.loader import Loader

    return Loader(
        Catalogue(subject.folder()).shards("train"),
        subject.layout,
        rows or config.train.batch_size,
        config.seed,
        subject.task.prepare,
        workers=workers,
        prefetch=2,
    )


def _chess(preset: str) -> configuration.ChessConfig:
    config = configuration.load(preset)
    assert isinstance(config, configuration.ChessConfig)
    return config


def _copied() -> float:
    """Bytes a second that one core copies in memory."""
    source = np.ones(2**27, np.uint8)
    target = np.empty_like(source)
    return source.nbytes / turns({"copy": lambda: np.copyto(target, source)}, 0.2)["copy"]


def _reports() -> Path:
    """A folder on the disk where checkpoints lie."""
    root = files.reports_root()
    root.mkdir(parents=True, exist_ok=True)
    return root


def _wait(device: str) -> None:
    import torch

    if device != "cpu":
        torch.accelerator.synchronize()


Workload = Callable[[Plan], Iterator[Figure]]
WORKLOADS: Mapping[str, Workload] = {
    "updates": updates,
    "options": options,
    "scaling": scaling,
    "inference": inference,
    "targets": targets,
    "loader": loader,
    "search": search,
    "checkpoint": checkpoint,
    "start": start,
}
"""By name, in the order in which they run."""
ON_GPU: Sequence[str] = ("updates", "options", "scaling", "inference")
