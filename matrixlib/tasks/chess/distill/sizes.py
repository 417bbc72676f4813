"""Networks side by side: how large they are, in memory and as files, and how fast."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pandas as pd

from matrixlib.engine import onnx as files
from matrixlib.hardware import speed
from matrixlib.tasks.chess.evaluate import throughput
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.evaluate.onnx import export

ROWS = (1, 256)
"""Positions evaluated at once."""


def side_by_side(nets: Mapping[str, Net], onnx: bool = True, seconds: float = 1.0) -> pd.DataFrame:
    """A row for each network: parameters, positions a second alone and in batches; with `onnx` also MB as an ONNX file
    and with 8-bit weights.

    nan for a file that cannot be written: of a network that is no network of ours, or without the extra `onnx`.
    seconds: of the timed calls for each number of rows.
    """
    batches = {name: throughput.positions(net, max(ROWS)) for name, net in nets.items()}
    rows = {
        name: {"parameters": float(net.parameters), **(_megabytes(net) if onnx else {})} for name, net in nets.items()
    }
    for count in ROWS:
        parts = {name: {key: array[:count] for key, array in batch.items()} for name, batch in batches.items()}
        taken = speed.turns({name: partial(net.predict, parts[name]) for name, net in nets.items()}, seconds)
        for name, time in taken.items():
            rows[name][f"{count:,} at once [1/s]"] = round(count / time)
    return pd.DataFrame.from_dict(rows, orient="index").astype({"parameters": int})


def _megabytes(net: Net) -> dict[str, float]:
    """Sizes of its files in MB."""
    sizes = {"MB": float("nan"), "MB in 8 bits": float("nan")}
    if not files.installed() or net.task.history:
        return sizes
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "model.onnx", Path(folder) / "model.int8.onnx"
        export(net, whole)
        files.quantise(whole, small)
        return {name: path.stat().st_size / 1e6 for name, path in zip(sizes, (whole, small), strict=True)}
