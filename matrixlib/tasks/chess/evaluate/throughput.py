"""Inference throughput of `Net.predict` by backend and batch size, with the hardware limit."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.hardware import speed
from matrixlib.tasks.chess.evaluate.net import POSITION, Net
from matrixlib.tasks.chess.model import flops
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

BATCH_SIZES = (1, 32, 256, 1024)


def measure(nets: Mapping[str, Net], sizes: Sequence[int] = BATCH_SIZES, seconds: float = 2.0) -> pd.DataFrame:
    """A row per backend and batch size (`rows`): median `rate` in positions/s, and `limit`, the rate at the peak of
    matrix products in the dtype that ends the backend's name; nan for other names. seconds: per row. Backends are
    measured in turns, so that changes of the machine's speed affect all alike."""
    first = next(iter(nets.values()))
    batch = positions(first, max(sizes))
    dtypes = {name.split()[-1] for name in nets} & {"fp32", "bf16", "fp16"}
    peak = {dtype: speed.matrix_rate(first.runtime.device, dtype, first.runtime.threads) for dtype in dtypes}
    work = flops(first.model, first.task.input_planes) / 1e9 if peak else 1.0
    table = []
    for rows in sizes:
        part = {name: array[:rows] for name, array in batch.items()}
        works = {name: partial(net.predict, part) for name, net in nets.items()}
        for name, taken in speed.turns(works, seconds * len(nets)).items():
            table.append((name, rows, rows / taken, peak.get(name.split()[-1], np.nan) / work))
    return pd.DataFrame(table, columns=["engine", "rows", "rate", "limit"])


def positions(net: Net, count: int) -> dict[str, np.ndarray]:
    """Inputs of `Net.predict` for held-out positions of the sample set."""
    loader = Loader(Catalogue(unpack_sample()).shards("validation"), LAYOUT, count, 0, net.task.prepare_plain)
    batch = next(iter(loader.sequential(count, sample=count)))
    return {name: batch[name].numpy() for name in POSITION}


def table(speeds: pd.DataFrame) -> pd.DataFrame:
    """`measure` as a table: a row per backend, a column per batch size, the limit and the best share of it."""
    rates = speeds.pivot_table(index="engine", columns="rows", values="rate", sort=False)
    limit = speeds.groupby("engine")["limit"].first()
    share = (rates.max(axis=1) / limit).round(2)
    rates.columns = [f"{rows:,} at once [1/s]" for rows in rates.columns]
    return rates.round().rename_axis(None).assign(**{"limit [1/s]": limit.round(), "share": share})
