"""Seconds that saving a checkpoint takes, beside the disk's own write rate measured in the same run.

Run from the repository root: ``python tests/bench/bench_checkpoint.py [folder]``. About 0.85 GB: 53 million
parameters, their average and the optimiser's two moments, as float32. Medians, and the least (on a
busy machine it says more); the methods take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from matrixlib.engine import storage
from matrixlib.engine.checkpoint import Checkpoints

LAYERS, SHAPE = 57, (320, 320, 3, 3)  # convolutions; 52.5 million parameters
REPEATS = 3


def made() -> storage.Tensors:
    """Weights and what training leaves beside them: an average close to them, moments of small numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(SHAPE, generator=generator) * scale

    model = {f"blocks.{i}.weight": draw(0.02) for i in range(LAYERS)}
    moments = {f"{name}.exp_avg": draw(1e-4) for name in model}
    moments |= {f"{name}.exp_avg_sq": draw(1e-4).square() for name in model}
    return {
        "model": model,
        "ema": {name: tensor + draw(1e-4) for name, tensor in model.items()},
        "optimiser": moments,
    }


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def raw_write(file: Path, tensors: storage.Tensors) -> None:
    """The same bytes to one file, with fsync and nothing else."""
    with file.open("wb") as handle:
        for members in tensors.values():
            for tensor in members.values():
                handle.write(tensor.view(-1).view(torch.uint8).numpy().data)
        handle.flush()
        os.fsync(handle.fileno())
    file.unlink()


def main(folder: str | None = None) -> None:
    tensors = made()
    torch.set_num_threads(1)  # copies are bound by memory; on a busy machine more threads wait for each other
    size = sum(tensor.nbytes for members in tensors.values() for tensor in members.values())
    print(f"{size / 1e9:.2f} GB of tensors; median and least of {REPEATS}")
    seconds: dict[str, list[float]] = {}
    written: dict[int, int] = {}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        stores = {level: Checkpoints(Path(name) / f"zstd{level}", 2, level) for level in (0, 1, 3)}
        buffers = storage.host_copies(tensors, {})
        for repeat in range(REPEATS):

            def note(what: str, work: Callable[[], object]) -> None:
                seconds.setdefault(what, []).append(timed(work))

            note("disk alone: write and fsync", lambda: raw_write(Path(name) / "raw", tensors))
            note("copy into fresh memory", lambda: storage.host_copies(tensors, {}))
            note("copy into the buffers", lambda: storage.host_copies(tensors, buffers))
            for level, store in stores.items():
                kind = f"zstd {level}" if level else "plain"
                first = " (first)" if repeat == 0 else ""
                note(f"{kind}: save() returns{first}", lambda: store.save(2 * repeat, tensors, {}))  # noqa: B023
                note(f"{kind}: join() after it", store.join)
                note(
                    f"{kind}: save(wait=True)",
                    lambda: store.save(2 * repeat + 1, tensors, {}, wait=True),  # noqa: B023
                )
                newest = store.folder / f"step_{2 * repeat + 1:08d}"
                written[level] = sum(file.stat().st_size for file in newest.iterdir())
                note(f"{kind}: load", lambda: store.load(newest))  # noqa: B023
    for what, values in sorted(seconds.items()):
        middle = statistics.median(values)
        print(f"{what:32} {middle:7.3f} s {min(values):7.3f} s  {size / middle / 1e9:6.2f} GB/s")
    for level, count in written.items():
        print(f"{f'zstd {level}' if level else 'plain':32} {count / 1e9:7.3f} GB on disk, {count / size:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
