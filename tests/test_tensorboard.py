"""TensorBoard events: what metrics.jsonl says, no update twice after a resume, and a clear word without the package."""

import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from planted import change_batches

from matrixlib.config import merge
from matrixlib.data.loader import Loader
from matrixlib.runs import run as runs
from matrixlib.runs import tensorboard

pytest.importorskip("tensorboardX")
TINY: dict[str, Any] = {
    "train": {"steps": 6, "batch_size": 16},
    "validation": {"interval": 3, "sample": 32, "limit": 64},
    "checkpoint": {"interval": 2},
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1},
}


def read(folder: Path) -> list[Any]:
    """Every event of the folder's files, by the framing of TFRecord: length, its CRC, the event, its CRC."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.glob("events.out.*")):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return events


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    values: dict[tuple[str, int], float] = {}
    for event in read(folder):
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                assert (value.tag, event.step) not in values, "an update twice"
                values[value.tag, event.step] = value.simple_value
    return values


def test_a_resumed_run_has_every_update_once(reports: Path) -> None:
    for _ in range(2):
        current = runs.open_run(run="r", overrides=merge(TINY, {"train": {"tensorboard": True}}))
        for stats in current.train():
            if stats.step == 3 and not current.resumed:
                break
        current.close()
    values, rows = scalars(reports / "r" / "events"), current.history()
    assert [step for name, step in sorted(values) if name == "loss"] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert values["loss", row["step"]] == pytest.approx(row["loss"], rel=1e-6)
        assert values["losses/policy", row["step"]] == pytest.approx(row["losses"]["policy"], rel=1e-6)
    assert tensorboard.main(["r"]) == 0
    assert scalars(reports / "r" / "events") == values


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_that_went_back_has_every_update_once(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "batches", Loader.batches)  # put back after the fault
    change_batches((3, 4), lambda batch: batch["wdl"].fill_(float("nan")))
    changes = {"health": {"skips": 2}, "train": {"tensorboard": True}}
    current = runs.open_run(run="r", overrides=merge(TINY, changes))
    stats = list(current.train())
    assert [s.step for s in stats if s.action == "rollback"] == [5]
    values = scalars(reports / "r" / "events")
    assert [step for name, step in sorted(values) if name == "loss"] == [1, 2, 3, 4, 5, 6]
    for row in current.history():
        assert values["loss", row["step"]] == pytest.approx(row["loss"], rel=1e-6)


def test_phases_and_warnings_are_text(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 2.0, "phase": 0},
        {"step": 2, "loss": 2.0, "phase": 0, "messages": ["look here"]},
        {"step": 3, "loss": 1.0, "phase": 1},
    ]
    tensorboard.Events(tmp_path, rows, {0: "size 3-5", 1: "size 3-8"}).close()
    values = [(event.step, value) for event in read(tmp_path / "events") for value in event.summary.value]
    texts = [(step, value.tensor.string_val[0].decode()) for step, value in values if value.HasField("tensor")]
    assert texts == [(1, "size 3-5"), (2, "look here"), (3, "size 3-8")]


def test_without_the_package_or_a_run_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tensorboard.main([str(tmp_path / "nothing")]) == tensorboard.main([]) == 1
    assert "no run at" in capsys.readouterr().err
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "mine").write_text("")
    (tmp_path / "metrics.jsonl").write_text("{\n{\n")
    assert tensorboard.main([str(tmp_path)]) == 1
    assert "expected a folder with run.json" in capsys.readouterr().err
    assert (tmp_path / "events" / "mine").exists(), "metrics.jsonl alone does not make a folder ours to empty"
    (tmp_path / "run.json").write_text("{}")
    assert tensorboard.main([str(tmp_path)]) == 1
    assert "metrics.jsonl" in capsys.readouterr().err, "a damaged log"
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'matrixlib\[tensorboard\]'"):
        tensorboard.Events(tmp_path, [])
