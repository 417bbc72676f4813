"""Positions a second of a network, by what evaluates it and by batch, beside the limit of the machine's matrix product.

Measured through `Net.predict`: packed positions in, probabilities of the legal moves and the value out, on the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.hardware import speed
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.model import forward_flops
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.sample_set import unpack_sample

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


def measure(nets: Mapping[str, Net], sizes: Sequence[int] = SIZES, seconds: float = 2.0) -> list[Speed]:
    """Median rates of each engine (a name that ends with its dtype) and size, in turns, so that a change in the
    machine's speed meets all alike.

    seconds: of each engine and size. The matrix rate is measured in the same minute.
    """
    first = next(iter(nets.values()))
    runtime, work = first.runtime, forward_flops(first.model, first.task.input_planes) / 1e9
    batch = positions(first, max(sizes))
    peak = {
        dtype: speed.matrix_rate(runtime.device, dtype, runtime.threads)
        for dtype in {name.split()[-1] for name in nets} & {"fp32", "bf16", "fp16"}
    }
    speeds = []
    for rows in sizes:
        part = {name: array[:rows] for name, array in batch.items()}
        works = {name: partial(net.predict, part) for name, net in nets.items()}
        for name, taken in speed.turns(works, seconds * len(nets)).items():
            speeds.append(Speed(name, rows, rows / taken, peak.get(name.split()[-1], 0) / work))
    return speeds


def positions(net: Net, count: int) -> dict[str, np.ndarray]:
    """What `Net.predict` takes, of held-out positions of the sample set."""
    loader = Loader(Catalogue(unpack_sample()).shards("validation"), LAYOUT, count, 0, net.task.prepare_plain)
    batch = next(iter(loader.sequential(count, sample=count)))
    return {name: batch[name].numpy() for name in ("pieces", "state", "policy_index")}


def table(speeds: Sequence[Speed]) -> pd.DataFrame:
    """A row for each engine, a column for each batch; last the limit and the best share of it, where one is known."""
    frame = pd.DataFrame(speeds)
    rates = frame.pivot_table(index="engine", columns="rows", values="rate", sort=False).round()
    limit = frame.groupby("engine")["limit"].first().replace(0, float("nan"))
    share = (rates.max(axis=1) / limit).round(2)
    rates.columns = [f"{rows:,} at once [1/s]" for rows in rates.columns]
    return rates.rename_axis(None).assign(**{"limit [1/s]": limit.round(), "share": share})
