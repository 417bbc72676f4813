"""Positions a second of a network, by what evaluates it and by batch, beside the limit of the machine's matrix product.

Measured through `Net.predict`: packed positions in, probabilities of the legal moves and the value out, on the host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matrixlib.bench.workloads import turns
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware import speed as rates

if TYPE_CHECKING:
    from matrixlib.tasks.chess.evaluate.net import Net

SIZES = (1, 32, 256, 1024)


@dataclass(frozen=True)
class Speed:
    """Of one engine with batches of `rows`: positions a second, and what the matrix product alone would allow.

    limit: from the matrix rate in the same dtype; 0 where that was not measured, as for 8 bits.
    """

    engine: str
    rows: int
    rate: float
    limit: float


def engines(net: Net, folder: Path, compiled: bool = True) -> dict[str, Net]:
    """The same network evaluated in every way there is, by name, which ends with the dtype.

    On the CPU also as ONNX files in `folder`, where the packages of the extra `onnx` are installed.
    """
    from matrixlib.tasks.chess.evaluate import onnx as export
    from matrixlib.tasks.chess.evaluate.net import Net

    plain = replace(net.runtime, dtype="fp32")
    found = {"torch fp32": plain, "torch bf16": replace(plain, dtype="bf16")}
    out = {name: Net(net.model, net.task, runtime) for name, runtime in found.items()}
    if compiled:
        serving = runtimes.serving(net.runtime.device, True)
        for name, runtime in found.items():
            out[name.replace("torch", "compiled")] = Net(net.model, net.task, runtime, serving)
    if net.runtime.device != "cpu" or not all(map(importlib.util.find_spec, export.PACKAGES)):
        return out
    export.export(net, folder / "model.onnx")
    export.quantise(folder / "model.onnx", folder / "model.int8.onnx")
    out["ONNX fp32"] = export.opened(net, folder / "model.onnx")
    out["ONNX int8"] = export.opened(net, folder / "model.int8.onnx")
    return out


def measure(nets: Mapping[str, Net], sizes: Sequence[int] = SIZES, seconds: float = 2.0) -> list[Speed]:
    """Median rates of each engine and size, in turns, so that a change in the machine's speed meets all alike.

    seconds: of each engine and size. The matrix rate is measured in the same minute.
    """
    from matrixlib.tasks.chess.model import forward_flops

    first = next(iter(nets.values()))
    runtime, work = first.runtime, forward_flops(first.task.config.model) / 1e9
    batch = positions(first, max(sizes))
    peak = {
        dtype: rates.matrix(runtime.device, dtype, runtime.threads)
        for dtype in {name.split()[-1] for name in nets} & {"fp32", "bf16", "fp16"}
    }
    found = []
    for rows in sizes:
        part = {name: array[:rows] for name, array in batch.items()}
        works = {name: partial(net.predict, part) for name, net in nets.items()}
        for name, taken in turns(works, seconds * len(nets)).items():
            found.append(Speed(name, rows, rows / taken, peak.get(name.split()[-1], 0) / work))
    return found


def positions(net: Net, count: int) -> dict[str, np.ndarray]:
    """What `Net.predict` takes, of held-out positions of the sample set."""
    from matrixlib.data.catalogue import Catalogue
    from matrixlib.data.loader import Loader
    from matrixlib.tasks.chess.records import LAYOUT
    from matrixlib.tasks.chess.sample_set import unpack_sample

    loader = Loader(Catalogue(unpack_sample()).shards("validation"), LAYOUT, count, 0, net.task.prepare_plain)
    batch = next(iter(loader.sequential(count, sample=count)))
    return {name: batch[name].numpy() for name in ("pieces", "state", "policy_index")}


def table(speeds: Sequence[Speed]) -> str:
    """A line for each engine, a column for each batch; last the limit and the best share of it."""
    sizes = list(dict.fromkeys(speed.rows for speed in speeds))
    lines = [f"{'positions/s':16}" + "".join(f"{rows:>10,}" for rows in sizes) + f"{'limit':>10}{'share':>7}"]
    for name in dict.fromkeys(speed.engine for speed in speeds):
        of = {speed.rows: speed for speed in speeds if speed.engine == name}
        limit = of[sizes[0]].limit
        share = f"{max(s.rate for s in of.values()) / limit:.0%}" if limit else "-"
        line = f"{name:16}" + "".join(f"{of[rows].rate:>10,.0f}" for rows in sizes)
        lines.append(line + f"{limit:>10,.0f}{share:>7}" if limit else line + f"{'-':>10}{share:>7}")
    return "\n".join(lines) + "\n"
