"""Training that is killed again and again ends with the bits of the run that was left alone."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from survivor import STEPS, survive

from matrixlib.engine import metrics
from matrixlib.engine.checkpoint import Checkpoints

CLOCKS = {"time", "seconds", "times", "throughput", "share_of_peak", "memory", "messages"}


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    kept = {k: without_clocks(v) if isinstance(v, dict) else v for k, v in row.items() if k not in CLOCKS}
    events = [event for event in kept.pop("events", []) if event != "waiting_for_data"]  # on a busy machine
    return kept | ({"events": events} if events else {})


def result(folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], Any]:
    """Every tensor of the last checkpoint, the metrics without clock times, and the curriculum's state."""
    newest = Checkpoints(folder / "run" / "checkpoints", 2).newest()
    assert newest is not None
    tensors = {f"{group}/{name}": t for group, members in newest.tensors.items() for name, t in members.items()}
    rows = [without_clocks(row) for row in metrics.read(folder / "run" / "metrics.jsonl")]
    return tensors, rows, newest.state.get("curriculum")


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("task", "kills", "compress"),
    [
        ("toy", 4, 0),
        ("latin", 2, 0),
        pytest.param("toy", 100, 0, marks=SOAK),
        pytest.param("toy", 30, 3, marks=SOAK),
        pytest.param("latin", 50, 3, marks=SOAK),
    ],
)
def test_killed_at_random_moments_every_resume_is_bit_equal(
    tmp_path: Path, forkserver: Any, task: str, kills: int, compress: int
) -> None:
    (tmp_path / "whole").mkdir()
    first = forkserver.Process(target=survive, args=(tmp_path / "whole", compress, task))
    started = time.perf_counter()
    first.start()
    first.join()
    alive = time.perf_counter() - started
    expected = result(tmp_path / "whole")
    assert [row["step"] for row in expected[1]] == list(range(1, STEPS[task] + 1))
    assert {row.get("phase", 0) for row in expected[1]} == {"toy": {0}, "latin": {0, 1, 2}}[task]
    assert [row["rollbacks"] for row in expected[1]][-1] == 1, "a rollback is part of what has to be resumed"
    stream, killed, in_a_write, round_ = random.Random(kills), 0, 0, 0
    while killed < kills:
        round_ += 1
        folder = tmp_path / f"round_{round_}"
        folder.mkdir()
        newest = 0
        while not (folder / "done").exists():
            process = forkserver.Process(target=survive, args=(folder, compress, task))
            process.start()
            process.join(stream.uniform(0.05, 0.25 * alive) if killed < kills else None)
            checkpoints = folder / "run" / "checkpoints"
            while killed % 2 and process.is_alive() and not any(checkpoints.glob("*.tmp")):
                pass  # every second one in the middle of a checkpoint's write
            if process.is_alive():
                process.kill()
                process.join()
                killed += 1
                in_a_write += any(checkpoints.glob("*.tmp"))
            else:
                assert process.exitcode == 0
            checkpoint = Checkpoints(checkpoints, 2).newest()
            step = checkpoint.step if checkpoint else 0
            assert step >= newest or step >= 90, "only the rollback goes back"
            newest = step
        tensors, rows, curriculum = result(folder)
        assert [name for name, t in tensors.items() if not torch.equal(t, expected[0][name])] == []
        assert rows == expected[1]
        assert curriculum == expected[2]
    print(f"{killed} kills, {in_a_write} in the middle of a write, {round_} runs")
    assert in_a_write
