"""Training that is killed again and again ends with the bits of the run that was left alone."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from saved import assert_same, history, newest, without
from survivor import STEPS, survive

from matrixlib.engine.checkpoint import Checkpoints

SOAK = pytest.mark.soak


def rows(folder: Path) -> list[dict[str, Any]]:
    """Without messages, and without the event of a busy machine."""
    found = [without(row, {"messages"}) for row in history(folder)]
    for row in found:
        row["events"] = [event for event in row.get("events", []) if event != "waiting_for_data"]
    return found


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
    whole = tmp_path / "whole" / "run"
    expected = rows(whole)
    assert [row["step"] for row in expected] == list(range(1, STEPS[task] + 1))
    assert {row.get("phase", 0) for row in expected} == {"toy": {0}, "latin": {0, 1, 2}}[task]
    assert expected[-1]["rollbacks"] == 1, "a rollback is part of what has to be resumed"
    stream, killed, in_a_write, round_ = random.Random(kills), 0, 0, 0
    while killed < kills:
        round_ += 1
        folder = tmp_path / f"round_{round_}"
        folder.mkdir()
        reached = 0
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
            assert step >= reached or step >= 90, "only the rollback goes back"
            reached = step
        assert_same(folder / "run", whole)
        assert rows(folder / "run") == expected
        assert newest(folder / "run").state.get("curriculum") == newest(whole).state.get("curriculum")
    print(f"{killed} kills, {in_a_write} in the middle of a write, {round_} runs")
    assert in_a_write
