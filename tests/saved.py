"""What a run has saved, for comparisons of runs: the tensors of its newest checkpoint, its metrics without clocks."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoint, Checkpoints

CLOCKS = frozenset({"time", "seconds", "times", "throughput", "share_of_peak", "memory"})


def newest(folder: Path) -> Checkpoint:
    """Of a run's folder."""
    found = Checkpoints(folder / "checkpoints", 2).newest()
    assert found is not None
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    """`<group>/<name>` -> tensor of the newest checkpoint."""
    groups = newest(folder).tensors
    return {f"{group}/{name}": tensor for group, named in groups.items() for name, tensor in named.items()}


def equal(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def assert_same(one: Path, two: Path) -> None:
    """The newest checkpoints of two runs have the same bits."""
    ours, theirs = tensors(one), tensors(two)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


def without(row: Mapping[str, Any], names: Container[str] = CLOCKS) -> dict[str, Any]:
    return {key: without(v, names) if isinstance(v, dict) else v for key, v in row.items() if key not in names}


def history(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without clock times."""
    return [without(row) for row in metrics.read(folder / "metrics.jsonl")]
