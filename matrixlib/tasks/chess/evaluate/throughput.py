"""Positions a second of `Net.predict`, by what evaluates and by batch, beside the limit of the matrix product."""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.loader import Loader
from matrixlib.hardware import speed
from matrixlib.tasks.chess.evaluate.net import INPUTS, Net
from matrixlib.tasks.chess.model import flops
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.stockfish.sample import unpack_sample

BATCH_SIZES = (1, 32, 256, 1024)


def measure(nets: Mapping[str, Net], sizes: Sequence[int] = BATCH_SIZES, seconds: float = 2.0) -> pd.DataFrame:
    """A row for each engine and number of `rows` evaluated at once: median `rate` in positions a second, and `limit`,
    what the matrix product alone would allow in the dtype with which the engine's name ends; nan for other names.
    seconds: of each row. All engines take turns, so that a change in the machine's speed meets them alike."""
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
    """What `Net.predict` takes, of held-out positions of the sample set."""
    loader = Loader(Catalogue(unpack_sample()).shards("validation"), LAYOUT, count, 0, net.task.prepare_plain)
    batch = next(iter(loader.sequential(count, sample=count)))
    return {name: batch[name].numpy() for name in INPUTS}


def table(speeds: pd.DataFrame) -> pd.DataFrame:
    """`measure` with a row for each engine and a column for each batch; last the limit and the best share of it."""
    rates = speeds.pivot_table(index="engine", columns="rows", values="rate", sort=False)
    limit = speeds.groupby("engine")["limit"].first()
    share = (rates.max(axis=1) / limit).round(2)
    rates.columns = [f"{rows:,} at once [1/s]" for rows in rates.columns]
    return rates.round().rename_axis(None).assign(**{"limit [1/s]": limit.round(), "share": share})
