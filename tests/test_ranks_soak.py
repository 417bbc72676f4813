"""Ranks that are killed or hang, again and again: nothing is lost, and the one that does not answer is named."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from test_ranks import TESTS, newest_weights, ranks_of, toy_preset

from matrixlib.engine import metrics
from matrixlib.runs import run as runs

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]
PARTS, KILLS, STEPS = 5, 10, 600


@contextmanager
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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_fifty_kills_of_random_ranks_lose_nothing(
    tmp_path: Path, reports: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    preset, draw, folder = toy_preset(tmp_path, steps=STEPS), random.Random(part), reports / "two"
    with torchrun(tmp_path, preset, restarts=KILLS) as launcher:
        for kill in range(KILLS):
            after = max(updates(folder), kill * STEPS // (KILLS + 2))
            time.sleep(draw.random() / 2)
            signal_rank(launcher.pid, draw.randrange(2), signal.SIGKILL, folder, after)
        assert launcher.wait(600) == 0, (tmp_path / "log").read_text()[-4000:]
    one = runs.open_run(preset, run="one")
    for _ in one.train():
        pass
    first, second = (newest_weights(reports / name) for name in ("one", "two"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-3
    assert [row["step"] for row in metrics.read(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert json.loads((folder / "summary.json").read_text())["complete"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_after_the_time_out(
    tmp_path: Path, reports: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    runtime = {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False, "rank_timeout": 15}
    preset, folder = toy_preset(tmp_path, steps=STEPS, runtime=runtime), reports / "two"
    with torchrun(tmp_path, preset, restarts=1) as launcher:
        signal_rank(launcher.pid, rank, signal.SIGSTOP, folder, after=12)
        assert launcher.wait(400) == 0, (tmp_path / "log").read_text()[-4000:]
    text = (tmp_path / "log").read_text()
    assert f"rank {rank} of 2" in text
    assert "does not answer" in text
    assert json.loads((folder / "summary.json").read_text())["complete"]
