"""What the probe notebook shows."""

from __future__ import annotations

import json
from pathlib import Path

from matrixlib.hardware import probe as hardware


def test_the_policy_table_is_the_policy_for_named_machines() -> None:
    rows = {line[:15].strip(): line[15:].split() for line in hardware.policy_table().splitlines()}
    head = rows.pop("machine")
    assert set(rows) == set(hardware.MACHINES)
    found = {name: dict(zip(head, row, strict=True)) for name, row in rows.items()}
    assert (found["H200"]["dtype"], found["H200"]["scaler"]) == ("bf16", "no")
    assert (found["T4"]["dtype"], found["T4"]["scaler"]) == ("fp16", "yes"), "Turing only emulates bf16"
    assert (found["MacBook M3"]["device"], found["MacBook M3"]["dtype"]) == ("mps", "bf16")
    assert found["MacBook M3"]["scaler"] == "no"
    assert found["MacBook M3"]["channels_last"] == "no"
    assert found["older desktop"]["dtype"] == "fp32"


def test_the_probe_is_kept(reports: Path) -> None:
    found = hardware.measure(device="cpu", seconds=0.2)
    assert json.loads((reports / "probe" / "summary.json").read_text())["device"] == "cpu"
    assert found["measured"]["fp32"] > 1
    assert found["loader"]["rows_per_second"] > 1000
    text = hardware.report(found)
    for name, item in found["suggested"].items():
        assert f"{name} = {item['value']}" in text
