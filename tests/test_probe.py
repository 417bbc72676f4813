"""What the probe notebook shows."""

import json
from pathlib import Path

import pytest
import torch

from matrixlib.hardware import machine, probe
from matrixlib.hardware import runtime as runtimes


def test_the_probe_takes_no_arguments(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        probe.main(["--seconds", "3"])
    assert "unrecognized arguments: --seconds 3" in capsys.readouterr().err
    assert list(reports.iterdir()) == []


def test_the_probe_describes_this_machine_and_is_kept(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    result = probe.measure(seconds=0.1)
    probe.save(result)
    assert json.loads((reports / "probe" / "summary.json").read_text()) == json.loads(json.dumps(result))
    assert result["device"] == "cpu"
    assert result["measured"]["fp32"] > 0 < result["measured"]["copy"]
    assert result["facts"]["rates"]["matrix_fp32"] > 0
    assert {"versions", "mkl", "onednn"} <= set(result["environment"])
    versions = result["environment"]["versions"]
    assert versions["torch"] == torch.__version__
    suggestions = runtimes.suggest(machine.facts(), "cpu")
    versions |= {"cuda": "13.0", "cudnn": "91002", "nccl": "2.27.7", "driver": "580.65.06"}
    shown = probe.table(result)["this machine"]
    assert shown["versions"] == f"torch {torch.__version__}, cuda 13.0, cudnn 91002, nccl 2.27.7, driver 580.65.06"
    assert result["suggested"].keys() == suggestions.keys() == {"threads", "workers", "prefetch", "micro_batch"}
    for name, (value, _) in suggestions.items():
        assert shown[f"auto {name}"].startswith(f"{value} (")
