"""What a teacher costs: an update with labels, with the teacher's outputs from the cache, and with the teacher asked.

Run from the repository root: ``python tests/bench/bench_distill.py [teacher] [preset]``, of a network (a run, or a file
such as maia-1900.pb.gz; without one, a random network of the preset `small`). Medians in turns, on 4,096 positions of
the sample set. Also what making the batch takes a loader worker, the bytes of a cached position, and how far a mirrored
row of the cache is from what the teacher says of the mirrored position.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from matrixlib.data.catalogue import Catalogue
from matrixlib.data.shards import Shard, write_shard
from matrixlib.engine.step import Step
from matrixlib.hardware import speed
from matrixlib.runs.run import Run, open_run
from matrixlib.tasks.chess.distill import losses
from matrixlib.tasks.chess.records import LAYOUT
from matrixlib.tasks.chess.sample_set import unpack_sample

ROWS = 4096
SECONDS = 20.0  # of all updates that are timed
UPDATES = 8  # batches that are gone through in turn


def data_set(folder: Path) -> Path:
    """A folder with some positions of the sample set."""
    batch = Shard(Catalogue(unpack_sample()).shards("train")[0].path, LAYOUT).gather(np.arange(ROWS))
    folder.mkdir()
    catalogue = Catalogue(folder)
    for split in ("train", "validation"):
        meta = {"source": "sample", "generator": "bench", "seed": 0, "split": split}
        catalogue.add(write_shard(folder / f"{split}.npz", LAYOUT, batch, meta), split, "sample")
    return folder


def opened(name: str, preset: str, folder: Path, **teacher: Any) -> Run:
    data = {"source": str(folder), "workers": 0, "limit": 0}
    return open_run(preset, "cpu", run=name, steps=1000, overrides={"data": data, "teacher": teacher})


def updates(run: Run) -> Any:
    """Something that makes one update each time it is called."""
    step = Step(run.task, run.task.build_model(), run.runtime, run.config, 1000, run.data.teacher)
    arrays = [run.data.training.batch(i) for i in range(UPDATES)]
    batches = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays]
    return lambda: step(batches[step.update % UPDATES])


def mirrored(run: Run) -> tuple[float, float]:
    """Mean KL in nats of cached rows to what the teacher says of their positions: of mirrored rows, and of others."""
    arrays = run.task.prepare(run.data.training.records(0), np.random.default_rng(0))
    plain = run.task.prepare_plain(run.data.training.records(0), np.random.default_rng(0))
    moved = torch.from_numpy((arrays["pieces"] != plain["pieces"]).any(1))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    asked, ones = run.data.teacher.ask(batch)["teacher_policy"], torch.ones(len(moved))  # type: ignore[union-attr]
    own, theirs = (losses.softened(p, batch["policy_index"], ones) for p in (batch["teacher_policy"], asked))
    kl = (theirs.exp() * (theirs - own)).sum(1)
    return float(kl[moved].mean()), float(kl[~moved].mean())


def main(teacher: str = "", preset: str = "quick") -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ["MATRIXLIB_REPORTS"] = name
        folder = data_set(Path(name) / "data")
        if not teacher:
            base = open_run("small", "cpu", run="base", steps=1000, overrides={"train": {"batch_size": 8}})
            base.trainer.save()
            base.trainer.checkpoints.join()
            base.close()
            teacher = "base"
        runs = {
            "labels": opened("labels", preset, folder),
            "teacher, from the cache": opened("cache", preset, folder, network=teacher, cache=True),
            "teacher, asked": opened("asked", preset, folder, network=teacher),
        }
        cached = runs["teacher, from the cache"]
        print(f"{preset}: updates of {cached.config.train.batch_size} positions, {cached.runtime.threads} threads")
        taken = speed.turns({name: updates(run) for name, run in runs.items()}, SECONDS)
        making = speed.turns({name: partial(run.data.training.batch, 3) for name, run in runs.items()}, SECONDS / 4)
        for name in runs:
            more = f"{taken[name] / taken['labels'] - 1:+7.1%}"
            print(f"{name:26} {1e3 * taken[name]:8.1f} ms an update {more}  batch made in {1e3 * making[name]:6.2f} ms")
        size = sum(path.stat().st_size for path in folder.glob("teacher-*/*.outputs")) / (2 * ROWS)
        print(f"{size:.1f} bytes a position in the cache")
        print("KL to the teacher asked: {:.4f} of mirrored rows, {:.4f} of others".format(*mirrored(cached)))
        for run in runs.values():
            run.close()


if __name__ == "__main__":
    main(*sys.argv[1:3])
