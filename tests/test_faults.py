"""The faults of faults.ipynb: each is noticed, loses nothing and ends near the clean runs; and it can fail."""

import math
from typing import Any

import pytest
from cells import run_notebook

from matrixlib.runs.compare import read_result
from matrixlib.runs.notebook import ParameterError

SMALL = {"model": {"channels": 16, "blocks": 1}, "validation": {"limit": 256}}
SAYS = {
    "nan_target": "not finite: loss of",
    "inf_input": "a non-finite gradient",
    "no_policies": "no valid target of",
    "learning_rate": "rolled back to the checkpoint of update 12",
    "corrupt_records": "block 1 of 'records' fails its check",
    "dead_worker": "workers were started again at batch",
    "out_of_memory": "out of memory with a micro-batch of 64",
    "overflow": "no weight moved: the loss scale was too large",
    "sigterm": "stopped after 1",
    "kill": "went on from update 12",
    "full_disk": "File too large",
}
COUNTS = {"nan_target": "skipped", "inf_input": "skipped", "learning_rate": "rollbacks", "overflow": "overflows"}


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["demo", "latin_demo"])
def test_each_fault_is_noticed_loses_nothing_and_ends_near_the_clean_runs(reports: Any, preset: str) -> None:
    """nbval replays it of chess at fewer updates."""
    shown = run_notebook("faults", preset=preset, device="cpu", steps=30)
    assert not shown.failed, shown.text
    values = shown.values
    assert values["chosen"] == list(SAYS)
    exits = {"sigterm": [143, 0], "kill": [-9, 0], "full_disk": [1, 0]}
    for name in SAYS:
        rows, messages, _, missing = values["outcomes"][name]
        assert not missing
        assert any(SAYS[name] in text for text in messages if text not in values["usual"]), messages
        counted = {key for key in ("skipped", "overflows", "rollbacks") if rows[-1].get(key, 0)}
        assert counted == ({COUNTS[name]} if name in COUNTS else set()), f"{name}: and nothing else happened"
        assert values["exits"][name] == exits.get(name, [0])
        if preset == "latin_demo":  # whatever happened in the middle; every kill: test_kills.py
            assert [row.get("phase", 0) for row in rows] == [0] * 6 + [1] * 18 + [2] * 6
    assert len({values["loss"](name) for name in values["clean"]}) == 3
    assert not values["alike"]("clean_1", "equal bits")
    assert values["alike"]("clean_0", "equal bits")


@pytest.mark.slow
def test_a_run_beyond_the_clean_ones_fails_and_what_is_lost_is_seen(reports: Any) -> None:
    """Zero standard deviations are allowed to no run that has lost a batch."""
    shown = run_notebook(
        "faults", device="cpu", faults="learning_rate, no_policies", steps=20, seeds=2, deviations=0.0, overrides=SMALL
    )
    assert "no target in a batch (validation loss" in shown.failed
    assert "clean runs" not in shown.failed
    values = shown.values
    assert values["table"]["loss"].tolist() == ["OUTSIDE"] * 2
    assert values["table"]["noticed"].all()
    crosses = [line for axes in values["figure"].axes for line in axes.lines if line.get_marker() == "x"]
    assert max(len(line.get_xdata()) for line in crosses) >= 4, "the updates that were rolled back are shown"
    assert values["read"]("no_policies")[3] == []

    folder = values["folder"] / "no_policies"
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5] + lines[6:]))
    assert values["read"]("no_policies")[3] == ["updates, or rows of the metrics"]
    weights = next(max(folder.glob("checkpoints/step_*")).glob("model*"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights.parent.name in values["read"]("no_policies")[3][1]
    values["exits"]["learning_rate"] = [1, 1]
    assert values["read"]("learning_rate")[3] == ["the run itself"]
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    values["outcomes"]["no_policies"] = (read_result(folder).rows, [], {}, [])
    assert math.isnan(values["loss"]("no_policies"))
    assert not values["alike"]("no_policies", "float error")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"seeds": 1}, "2 seeds"),
        ({"steps": 10}, "20 steps"),
        ({"faults": "kill,sigtrem"}, "unknown fault 'sigtrem', did you mean 'sigterm'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_made(
    reports: Any, wrong: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ParameterError, match=reason):
        run_notebook("faults", **wrong)
    assert not list(reports.iterdir())
