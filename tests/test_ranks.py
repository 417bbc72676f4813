"""One network on several ranks: the same weights, the same decisions, nothing lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import toy_spec
import yaml
from rank_runs import member

from matrixlib.data.reader import LoaderError
from matrixlib.data.share import Share
from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoints
from matrixlib.runs import run as runs

SIZE = 3
TESTS = Path(__file__).parent
PRESET = {
    "task": "toy_spec:TASK",
    "train": {"steps": 60, "batch_size": 33, "statistics_interval": 50},
    "validation": {"interval": 40, "sample": 128},
    "checkpoint": {"interval": 10},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What ranks 0 and 1 of three report; rank 2 ends itself in the last check."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes are started by forkserver, which this system lacks")
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_runs"])
    processes = [context.Process(target=member, args=(rank, SIZE, folder)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    assert [process.exitcode for process in processes] == [0, 0, 1], logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-12), (False, 1e-5)])
def test_any_number_of_ranks_gives_the_same_weights(
    results: list[dict[str, Any]], double: bool, tolerance: float
) -> None:
    for size in (2, 3):
        assert 0 < results[0][f"equal {double} {size}"] < tolerance
        assert results[1][f"replica {double} {size}"], "gradients were to be summed during the backward pass"


def test_a_run_goes_on_with_another_number_of_ranks(results: list[dict[str, Any]]) -> None:
    assert results[0]["resumed"] < 1e-12


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(results: list[dict[str, Any]]) -> None:
    first, second = results
    assert first["poison 2 health"] == second["poison 2 health"] == first["poison 1 health"] == [1, 0]
    assert first["poison 2 weights"] == second["poison 2 weights"] == pytest.approx(first["poison 1 weights"], abs=1e-9)
    for size in (1, 2):
        (text,) = [text for text in first[f"poison {size} messages"] if "skipped" in text]
        assert "first: " in text, "the rank that met it names the module"


def test_all_ranks_roll_back_at_once(results: list[dict[str, Any]]) -> None:
    first, second = results
    assert first["ruin 2 health"] == second["ruin 2 health"] == first["ruin 1 health"] == [3, 1]
    assert first["ruin 2 weights"] == second["ruin 2 weights"] == pytest.approx(first["ruin 1 weights"], abs=1e-9)


def test_out_of_memory_on_one_rank_halves_the_micro_batch_of_all(results: list[dict[str, Any]]) -> None:
    for micro_batch, messages in (result["short"] for result in results):
        assert micro_batch == 2
        assert sum("out of memory" in text for text in messages) == 1
    assert results[0]["short distance"] < 1e-12


def test_a_signal_to_one_rank_ends_all_after_the_same_update(results: list[dict[str, Any]]) -> None:
    assert results[0]["told"] == [4, [4]]
    assert results[1]["told"] == [4, []]


def test_the_others_end_and_name_a_rank_that_is_gone(results: list[dict[str, Any]]) -> None:
    for text, step, seconds, _ in (result["lost"] for result in results):
        assert text.startswith("rank 2 of 3 does not answer")
        assert step == 7
        assert seconds < 30
    assert "goes on from the checkpoint of update 7" in results[0]["lost"][3][0], "rank 0 keeps what was whole"


def test_under_torchrun_a_rank_is_killed_and_the_restart_ends_with_the_weights_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_spec.sample(tmp_path / "data")
    (tmp_path / "reports").mkdir()
    preset = PRESET | {"data": {"source": str(tmp_path / "data"), "workers": 0}}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(preset), encoding="utf-8")
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path / "reports"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m matrixlib.runs.launch"
    command = [sys.executable, *words.split(), "--preset", str(tmp_path / "toy.yaml"), "--name", "two"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            kill_rank(launcher.pid, tmp_path / "reports" / "two", updates=12)
            assert launcher.wait(120) == 0, (tmp_path / "log").read_text()
        finally:
            launcher.terminate()
            launcher.wait()
    text = (tmp_path / "log").read_text()
    assert "rank 1 of 2 does not answer" in text
    assert "the checkpoint of update" in text, "rank 0 keeps what it has"
    one = runs.open_run(str(tmp_path / "toy.yaml"), run="one")
    for _ in one.train():
        pass
    one.close()
    first, second = (newest_weights(tmp_path / "reports" / name) for name in ("one", "two"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-4
    steps = [row["step"] for row in metrics.read(tmp_path / "reports" / "two" / "metrics.jsonl")]
    assert steps == list(range(1, 61)), "rank 0 alone writes"
    assert json.loads((tmp_path / "reports" / "two" / "summary.json").read_text())["complete"]


def kill_rank(launcher: int, folder: Path, updates: int) -> None:
    """SIGKILL to rank 1, once so many updates are done."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        ranks = [child for child in psutil.Process(launcher).children() if child.environ().get("RANK") == "1"]
        log = folder / "metrics.jsonl"
        if ranks and log.exists() and log.read_bytes().count(b"\n") >= updates:
            ranks[0].kill()
            return
        time.sleep(0.01)
    raise TimeoutError("the run made no updates")


def newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = Checkpoints(folder / "checkpoints", 2).newest()
    assert newest is not None
    return dict(newest.tensors["model"])


def test_of_1_to_1024_ranks_each_row_is_one_ranks() -> None:
    for size in range(1, 1025):
        for rows in (size, size + size // 2, 1500) if size % 100 == 0 else (size + size // 2,):
            batch = np.arange(rows)
            shares = [Share(rank, size).of(batch) for rank in range(size)]
            assert len(shares[-1]) + 1 >= len(shares[0]) > 0
            assert (np.bincount(np.concatenate(shares), minlength=rows) == 1).all(), f"{rows} rows, {size} ranks"


def test_a_row_gets_the_same_random_numbers_whoever_makes_it() -> None:
    def draw(stream: np.random.Generator, rows: int) -> list[np.ndarray]:
        return [
            stream.random(rows),
            stream.random((rows, 4), np.float32),
            stream.integers(10, size=rows),
            stream.integers(1, 2**63 - 1, rows),
            stream.normal(0, 0.1, (rows, 2)),
            stream.standard_normal(rows),
        ]

    whole = draw(np.random.default_rng(3), 10)
    for rank in range(3):
        share = Share(rank, 3)
        own = draw(share.stream(np.random.default_rng(3), 10), len(range(rank, 10, 3)))
        for one, other in zip(own, whole, strict=True):
            assert np.array_equal(one, other[rank::3])
    stream = Share(0, 3).stream(np.random.default_rng(3), 10)
    for wrong in (lambda: stream.random((2, 4)), lambda: stream.random(), lambda: stream.permutation(4)):
        with pytest.raises(LoaderError, match="prepare"):
            wrong()
