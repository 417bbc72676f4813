"""heartbeat.json."""

import json
import os
import platform
from datetime import datetime
from pathlib import Path

import torch

from matrixlib.engine.heartbeat import Heartbeat


def test_written_at_its_interval_with_time_step_and_memory(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, 5.0, torch.device("cpu"), lambda: now[0])

    def read() -> dict[str, object]:
        return json.loads(path.read_text())

    heartbeat.beat(1, 0.25, "training")
    first = read()
    assert (first["step"], first["step_seconds"], first["phase"]) == (1, 0.25, "training")
    assert first["pid"] == os.getpid()
    assert (first["host"], first["interval"]) == (platform.node(), 5.0)
    assert 10 < first["rss_mib"] <= first["rss_peak_mib"] < 1e6
    assert datetime.fromisoformat(str(first["time"])).tzinfo is not None
    now[0] = 4.9
    heartbeat.beat(2, 0.25, "training")
    assert read()["step"] == 1
    heartbeat.beat(2, 0.25, "validation", force=True)
    assert read()["step"] == 2
    now[0] = 10.0
    heartbeat.beat(3, 0.25, "training")
    assert read()["step"] == 3
    assert [child.name for child in tmp_path.iterdir()] == ["heartbeat.json"]  # no temporary file is left
