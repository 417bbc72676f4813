"""One network on several ranks: the same weights, the same decisions, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch.distributed as dist
import toy_spec
import yaml
from rank_runs import alone_weights, member, results_of

from matrixlib.data.order import RankSlice
from matrixlib.engine import distributed, metrics
from matrixlib.engine.averages import BATCHES
from matrixlib.runs import run as runs

TESTS = Path(__file__).parent
PRESET = {
    "task": "toy_spec:TASK",
    "train": {"steps": 60, "batch_size": 33, "statistics_interval": 50},
    "validation": {"interval": 40, "sample": 128},
    "checkpoint": {"interval": 10},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False},
}
IN_PARTS = PRESET["runtime"] | {"shard": True}


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes that are started."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS), str(tmp_path)]))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> list[dict[str, Any]]:
    """What ranks 0 and 1 report of two, three or four; rank 2 ends itself in the last check of three, rank 0 in that of
    two."""
    return results_of(forkserver, member, tmp_path_factory.mktemp("ranks"), [1, 0, 1, 0])


def test_half_of_what_torchrun_sets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="TORCHELASTIC_RUN_ID needs LOCAL_RANK, MASTER_ADDR, MASTER_PORT beside it"):
        distributed.join(1)


def test_a_rank_that_is_gone_or_hangs_is_known_by_its_process_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what torch says of it, which other versions say otherwise."""
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 0.3)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def reason(process: int, timeout: float) -> str:
        store = dist.HashStore()
        ranks = distributed.Ranks(0, 2, None, store, timeout)
        store.set("process/1", f"{process} {platform.node()}")
        with pytest.raises((RuntimeError, distributed.LostRank)) as caught, ranks.collective(certain=False):
            raise RuntimeError("words of another torch")
        return str(caught.value)

    assert reason(ended.pid, 60.0).startswith("rank 1 of 2 does not answer: killed, ")
    assert reason(os.getpid(), -1.0).startswith("rank 1 of 2 does not answer: killed, "), "it has come nowhere in time"
    assert reason(os.getpid(), 60.0) == "words of another torch", "an error of this rank's own"


@pytest.mark.slow
@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-12), (False, 1e-5)])
def test_any_number_of_ranks_gives_the_same_weights(
    results: list[dict[str, Any]], double: bool, tolerance: float
) -> None:
    """One parameter without gradients is left alone; rows may leave a part out; a run goes on with another number."""
    first, second = results
    assert all(0 < first[f"equal {double} {size}"] < tolerance for size in (2, 3, 4))
    assert first["resumed"] < 1e-12
    assert first["branch 2"] == second["branch 2"] == pytest.approx(first["branch 1"], abs=1e-11)
    assert [first["idle 1"], first["idle 2"]] == [True, True]


def test_what_is_not_finite_on_one_rank_is_skipped_by_all(results: list[dict[str, Any]]) -> None:
    """And by all at once, where there are enough of them for a rollback."""
    first, second = results
    for name, health in {"poison": [1, 0], "ruin": [3, 1]}.items():
        assert first[f"{name} 2 health"] == second[f"{name} 2 health"] == first[f"{name} 1 health"] == health
        alone = pytest.approx(first[f"{name} 1"], abs=1e-9)
        assert first[f"{name} 2"] == second[f"{name} 2"] == alone
    for size in (1, 2):
        (text,) = [text for text in first[f"poison {size} messages"] if "skipped" in text]
        assert "first: " in text, "the rank that met it names the module"


@pytest.mark.parametrize("after", [0, 20])
def test_out_of_memory_on_one_rank_halves_the_micro_batch_of_all(results: list[dict[str, Any]], after: int) -> None:
    for micro_batch, messages in (result[f"short {after}"] for result in results):
        assert micro_batch == 2
        assert sum("out of memory" in text for text in messages) == 1
    assert results[0][f"short distance {after}"] < 1e-12


def test_phases_and_an_early_stop_come_at_once(results: list[dict[str, Any]]) -> None:
    first, second = results
    assert first["staged 2"] == second["staged 2"] == first["staged 1"]
    phases, stopped = first["staged 1"]
    assert (phases == sorted(phases), set(phases), len(phases)) == (True, {0, 1}, 8)
    assert stopped.startswith("no improvement")


def test_batch_norm_dropout_and_muon_keep_the_ranks_the_same(results: list[dict[str, Any]]) -> None:
    first, second = (result["mixed"] for result in results)
    assert first == second
    assert all(np.isfinite(values).all() for values in first.values())
    assert [result["judged"] for result in results] == [True, False], "rank 0 alone keeps a second network"


def test_rank_0_alone_makes_the_statistics_of_averaged_weights_and_all_are_judged_by_them(
    results: list[dict[str, Any]],
) -> None:
    (first, made), (second, own) = (result["swa"] for result in results)
    assert first == second
    assert (len(first), own) == (3, 10)
    assert made > 10
    assert (made - 10) % BATCHES == 0


def test_a_signal_to_one_rank_ends_all_after_the_same_update(results: list[dict[str, Any]]) -> None:
    assert results[0]["told"] == [4, [4]]
    assert results[1]["told"] == [4, []]


def test_the_others_end_and_name_a_rank_that_is_gone(results: list[dict[str, Any]]) -> None:
    losses = [("rank 2 of 3", result["lost"]) for result in results] + [("rank 0 of 2", results[1]["lost first"])]
    for who, (text, step, seconds, _) in losses:
        assert text.startswith(f"{who} does not answer")
        assert step == 7
        assert seconds < 30
    assert "resume from the checkpoint of update 7" in results[0]["lost"][3][0], "rank 0 keeps what was whole"


@contextlib.contextmanager
def torchrun(folder: Path, preset: str, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks that train the run "two"; what they print is in <folder>/log."""
    words = f"-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts {restarts}"
    command = [sys.executable, *words.split(), "-m", "matrixlib.runs.launch", "--preset", preset, "--name", "two"]
    with (folder / "log").open("ab") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    process.kill()
                launcher.kill()
                launcher.wait()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
def test_kills_of_random_ranks_lose_nothing(tmp_path: Path, reports: Path, part: int) -> None:
    """One kill, then fifty: restarts of torchrun end with the weights of one process."""
    steps, kills = (600, 10) if part else (60, 1)
    preset, draw, folder = toy_preset(tmp_path, steps=steps), random.Random(part), reports / "two"
    with torchrun(tmp_path, preset, restarts=kills) as launcher:
        for kill in range(kills):
            after = max(updates(folder), kill * steps // (kills + 2), 12)
            time.sleep(draw.random() / 2 if part else 0.0)
            signal_rank(launcher.pid, draw.randrange(2), signal.SIGKILL, folder, after)
        assert launcher.wait(600) == 0, (tmp_path / "log").read_text()[-4000:]
    text = (tmp_path / "log").read_text()
    assert "of 2 does not answer" in text
    assert part or "the checkpoint of update" in text, "rank 0 keeps what it has"
    one = runs.open_run(preset, run="one")
    for _ in one.train():
        pass
    first, second = (alone_weights(reports / name) for name in ("one", "two"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-3
    assert [row["step"] for row in metrics.read(folder / "metrics.jsonl")] == list(range(1, steps + 1))
    assert json.loads((folder / "summary.json").read_text())["complete"]


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_after_the_time_out(
    tmp_path: Path, reports: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    preset = toy_preset(tmp_path, steps=600, runtime=PRESET["runtime"] | {"rank_timeout": 15})
    with torchrun(tmp_path, preset, restarts=1) as launcher:
        signal_rank(launcher.pid, rank, signal.SIGSTOP, reports / "two", after=12)
        assert launcher.wait(400) == 0, (tmp_path / "log").read_text()[-4000:]
    assert f"rank {rank} of 2 does not answer" in (tmp_path / "log").read_text()
    assert json.loads((reports / "two" / "summary.json").read_text())["complete"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.soak
def test_ranks_that_a_notebook_started_save_at_an_interrupt_and_another_number_goes_on(
    tmp_path: Path, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = toy_preset(tmp_path, steps=200, runtime=IN_PARTS, model={"norm": "batch"})
    run = runs.open_run(preset, run="two", ranks=2)
    log = run.trainer.metrics
    assert "trained by 2 ranks, each with its own rows of every batch, and its part of the network" in run.describe()
    steps: list[int] = []

    def follow() -> None:
        for stats in run.train():
            steps.append(stats.step)
            if stats.step == 12:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        follow()
    assert steps == list(range(1, len(steps) + 1)), "each update is shown once"
    assert f"resume from the checkpoint of update {steps[-1]};" in " ".join(interrupt.value.__notes__)
    assert run.summary()["end"] == "interrupted"
    with pytest.raises(ValueError, match="closed file"):  # the ranks cut it back
        log.write({"step": 1})
    assert "batch normalisation: each rank uses its own rows" in (reports / "two" / "ranks.log").read_text()
    assert not ranks_of(psutil.Process())
    alone = runs.open_run(preset, run="two")
    assert [stats.step for stats in alone.train()] == list(range(steps[-1] + 1, 201)), "nothing is lost"


FAILING = """
import os
import toy_spec

class Failing(toy_spec.OwnTask):
    passes = 0

    def losses(self, model, batch, active):
        self.passes += model.training
        if os.environ.get("RANK") == "1" and self.passes > 20:
            raise ValueError("this rank has had enough")
        return super().losses(model, batch, active)

class FailingSpec(toy_spec.ToySpec):
    def task(self, config):
        return Failing(plane_weight=config.loss.plane, config=config)

TASK = FailingSpec()
"""


@pytest.mark.soak
def test_the_notebook_tells_why_a_rank_failed(tmp_path: Path, reports: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    preset = toy_preset(tmp_path, steps=3000, task="failing:TASK")
    command = [sys.executable, "-m", "matrixlib.runs.launch", "--preset", preset, "--run", "two", "--ranks", "2"]
    launcher = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
    assert launcher.returncode == 1
    assert "RunError: rank 1 of 2: ValueError: this rank has had" in launcher.stdout
    assert (reports / "two" / "train.ipynb").exists()
    assert not json.loads((reports / "two" / "summary.json").read_text())["complete"]


def toy_preset(folder: Path, steps: int = 60, **options: Any) -> str:
    """A preset file of the toy task with data of its own."""
    toy_spec.sample(folder / "data")
    preset = PRESET | {"data": {"source": str(folder / "data"), "workers": 0}, **options}
    preset["train"] = {**PRESET["train"], "steps": steps}
    (folder / "toy.yaml").write_text(yaml.safe_dump(preset), encoding="utf-8")
    return str(folder / "toy.yaml")


def ranks_of(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """The processes that torch's launcher has started below this one, by rank."""
    found = {}
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (rank := process.environ().get("RANK")) and process.parent().environ().get("RANK") is None:
                found[rank] = process
    return found


def updates(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def signal_rank(launcher: int, rank: int, number: signal.Signals, folder: Path, after: int) -> None:
    """To a rank, once the run has made more updates than `after`."""
    ends = time.monotonic() + 300
    while time.monotonic() < ends:
        if updates(folder) > after and (process := ranks_of(psutil.Process(launcher)).get(str(rank))):
            process.send_signal(number)
            return
        time.sleep(0.01)
    raise TimeoutError(f"no update after {after}")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_each_row_is_one_ranks(size: int) -> None:
    for rows in (size, size + size // 2, 1500):
        shares = [RankSlice(rank, size).rows(np.arange(rows)) for rank in range(size)]
        assert len(shares[-1]) + 1 >= len(shares[0]) > 0
        assert (np.bincount(np.concatenate(shares), minlength=rows) == 1).all()


def test_a_row_gets_the_same_random_numbers_whoever_makes_it() -> None:
    def draw(stream: np.random.Generator, rows: int) -> list[np.ndarray]:
        numbers = [stream.random(rows), stream.random((rows, 4), np.float32), stream.integers(10, size=rows)]
        return [*numbers, stream.normal(0, 0.1, (rows, 2)), stream.standard_normal(rows)]

    whole = draw(np.random.default_rng(3), 10)
    for rank in range(3):
        own = draw(RankSlice(rank, 3).stream(np.random.default_rng(3), 10), len(range(rank, 10, 3)))
        assert all(np.array_equal(one, other[rank::3]) for one, other in zip(own, whole, strict=True))
    stream = RankSlice(0, 3).stream(np.random.default_rng(3), 10)
    for wrong in (lambda: stream.random((2, 4)), lambda: stream.random(), lambda: stream.permutation(4)):
        with pytest.raises(ValueError, match="prepare"):
            wrong()
