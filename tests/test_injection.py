"""Fault injection: every fault is noticed, loses nothing and ends near the clean runs; and it can fail."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from matrixlib.runs import faults, injection, injection_job
from matrixlib.tasks import get_task

ROOT = Path(__file__).resolve().parents[1]
MESSAGES = {
    "nan_target": "no weight moved.*non-finite gradient.*value_head",
    "inf_input": "no weight moved.*not finite: loss of policy, value.*the input is already not finite",
    "no_policies": "no valid target of policy",
    "learning_rate": "rolled back to the checkpoint of update 12 .*batches 16 to .* are left out",
    "corrupt_records": "shard train.npz, block 1: .*fails its check.*its rows are replaced by others",
    "dead_worker": "workers were started again at batch ~, as one was gone .*fewer workers",
    "out_of_memory": "out of memory with a micro-batch of 64 .*repeated with 32",
    "overflow": "no weight moved: the loss scale was too large",
    "sigterm": "stopped after 16 updates; the same command or notebook goes on from the checkpoint of update 16",
    "kill": "went on from update 12",
    "full_disk": "No space left on device|File too large",
}
OF_LATIN = {
    "nan_target": "no weight moved.*not finite: loss of cell, constraint; first: the network .forward output",
    "inf_input": "no weight moved.*a non-finite gradient.*first: token .forward output",
    "no_policies": "no valid target of cell, constraint",
}
CASES = [("demo", "all"), ("demo", "full_disk"), ("latin_demo", "all")]
TrialsOf = Callable[..., injection.Trials]


@pytest.fixture(scope="module")
def trials_of(tmp_path_factory: pytest.TempPathFactory) -> TrialsOf:
    """Faults in runs of a preset at a tiny size, planted after 15 updates of 30; trained once."""

    @functools.cache
    def run(preset: str, names: str, seeds: int = 3) -> injection.Trials:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MATRIXLIB_REPORTS", str(tmp_path_factory.mktemp("reports")))
            if names == "full_disk":  # no file system can be mounted: the full disk is a limit; with all one is tried
                patch.setattr(faults.shutil, "which", lambda name: None)
            return injection.inject(preset, device="cpu", steps=30, faults=names, seeds=seeds)

    return run


@pytest.fixture
def trials(trials_of: TrialsOf) -> injection.Trials:
    """One that goes back over updates; nbval of faults.ipynb replays all of chess."""
    return trials_of("demo", "learning_rate", 2)


@pytest.mark.soak
@pytest.mark.parametrize("preset, names", CASES)
def test_each_fault_is_noticed_loses_nothing_and_ends_near_the_clean_runs(
    trials_of: TrialsOf, preset: str, names: str
) -> None:
    messages = MESSAGES | (OF_LATIN if preset == "latin_demo" else {})
    rows = {row.outcome.job.name: row for row in trials_of(preset, names).rows}
    assert list(rows) == (list(faults.FAULTS) if names == "all" else [names])
    for name, row in rows.items():
        assert row.problems == [], name
        assert row.outcome.losses == (), name
        assert any(re.search(messages[name], text) for text in row.messages), row.messages
        assert set(row.outcome.events) == {row.fault.notice}, f"{name}: and nothing else happened"


@pytest.mark.soak
@pytest.mark.parametrize("preset, names", CASES)
def test_the_clean_runs_differ_and_nothing_happens_to_them(trials_of: TrialsOf, preset: str, names: str) -> None:
    trials = trials_of(preset, names)
    assert trials.checks()[0][1:] == (True, "")
    assert len({outcome.loss for outcome in trials.clean}) == 3
    assert trials.rows[0].allowed == pytest.approx(2 * np.std([o.loss for o in trials.clean], ddof=1))
    assert not trials.clean[0].equals(trials.clean[1])
    assert trials.clean[0].equals(trials.clean[0])


@pytest.mark.soak
@pytest.mark.parametrize("preset, names", CASES)
def test_processes_end_as_their_faults_end_them(trials_of: TrialsOf, preset: str, names: str) -> None:
    exits = {row.outcome.job.name: row.outcome.exits for row in trials_of(preset, names).rows}
    expected = {"sigterm": (143, 0), "kill": (-9, 0), "full_disk": (1, 0)}
    assert exits == {name: expected.get(name, (0,)) for name in exits}


@pytest.mark.soak
def test_a_curriculum_goes_on_where_it_was(trials_of: TrialsOf) -> None:
    """The phase changes after 6 and 24 updates, whatever happened in the middle; every kill: test_kills.py."""
    trials = trials_of("latin_demo", "all")
    for outcome in (*trials.clean, *(row.outcome for row in trials.rows)):
        phases = [row.get("phase", 0) for row in outcome.rows]
        assert phases == [0] * 6 + [1] * 18 + [2] * 6, outcome.job.name


def test_table_messages_and_figure_hold_every_fault(trials: injection.Trials) -> None:
    known = faults.faults_of(get_task("chess"))
    titles = [known["learning_rate"].title]
    assert list(trials.table().index) == titles
    assert all(f"{title}:" in trials.messages() for title in titles)
    assert str(trials.folder) not in trials.messages()
    figure = trials.figure()
    panels = {axes.get_title().split(":")[0]: axes for axes in figure.axes}
    equal = " ".join(figure.get_suptitle().split())
    assert not [title for title in titles if (title in panels) == (title in equal)]
    rolled_back = panels[known["learning_rate"].title].lines
    crosses = {line.get_marker(): len(line.get_xdata()) for line in rolled_back}
    assert crosses["x"] >= 5, "the updates that were rolled back are shown"


def test_a_row_fails_when_it_should(trials: injection.Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself is tested: a tight limit, a loss, a difference in bits, a fault that nobody noticed."""
    row = trials.rows[0]
    assert "validation loss" in dataclasses.replace(row, allowed=0.0).problems[0]
    bits = dataclasses.replace(row.fault, like="bits")
    assert "not equal to the clean run" in dataclasses.replace(row, fault=bits).problems[0]
    monkeypatch.setattr(injection_job.Outcome, "device", "cuda")
    assert not dataclasses.replace(row, fault=bits).problems, "no equal bits are claimed of a GPU"
    blind = dataclasses.replace(row.fault, notice="overflows")
    assert "did not notice" in dataclasses.replace(row, fault=blind).problems[0]

    def losses(**changes: Any) -> str:
        return ", ".join(dataclasses.replace(row.outcome, **changes).losses)

    rows = row.outcome.rows
    assert "1 updates" in losses(rows=rows[:-1])
    assert "rows of the metrics" in losses(rows=rows[:5] + rows[6:])
    assert "a checkpoint" in losses(checkpoints=((24, False), (30, True)))
    assert "the last checkpoint" in losses(checkpoints=((24, True),))
    assert "the run itself" in losses(exits=(1, 1))
    assert not dataclasses.replace(row, outcome=dataclasses.replace(row.outcome, rows=())).near, "nan"


@pytest.mark.soak
@pytest.mark.parametrize("preset", ["demo", "latin_demo"])
def test_more_updates_and_more_seeds(reports: Path, preset: str) -> None:
    slower = {"optim": {"learning_rate": 0.003}}  # at the demo's rate, runs of that length drift apart by themselves
    trials = injection.inject(preset, device="cpu", steps=400, seeds=5, overrides=slower)
    print(trials.table().to_string())
    assert {row.title: row.problems for row in trials.rows if row.problems} == {}
    assert trials.checks()[0][1]


@pytest.mark.parametrize("wrong", [{"seeds": 1}, {"steps": 10}, {"parallel": 0}])
def test_what_cannot_be_compared_is_refused(reports: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        injection.inject(**wrong)
    assert not list(reports.iterdir())


def test_messages_are_freed_of_what_differs_between_machines() -> None:
    job = injection_job.Job("kill", "demo", {}, Path("/there/faults/kill"), 20)
    text = "/proc/12/root/there/faults/kill/disk/run: update 26: loss 14044, gradient norm 1.5e+03, tower.0.conv, x 0.5"
    assert injection_job._plain(text, job) == "kill/disk/run: update 26: loss ~, gradient norm ~, tower.0.conv, x ~"


@pytest.mark.soak
def test_the_notebook_fails_with_a_row(reports: Path) -> None:
    """Zero standard deviations are allowed to no run that skipped an update. nbval replays the run that passes."""
    out = reports / "out.ipynb"
    command = [sys.executable, "-m", "papermill", "notebooks/faults.ipynb", str(out), "-k", "python3"]
    command += ["-p", "faults", "nan_target,no_policies", "-p", "steps", "20", "-p", "seeds", "2"]
    command += ["-p", "deviations", "0.0"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("JPY_")}
    variables |= {"MATRIXLIB_REPORTS": str(reports), "MATRIXLIB_DEVICE": "cpu", "MATRIXLIB_LIVE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, check=False)
    assert done.returncode != 0
    cells = nbformat.read(out, as_version=4).cells
    text = json.dumps([cell.get("outputs", []) for cell in cells])
    assert "2 clean runs and 2 with a fault, 20 updates each" in text
    for words in ("1 skipped", "1 without a target", "OUTSIDE", "VERDICT: FAIL", "VerdictFailed"):
        assert words in text
    assert "image/png" in text, "the curves are there to be looked at"
