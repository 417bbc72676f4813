"""The way in from the shell: what it shows and its exit code; test_wheel.py trains with it to the end."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import papermill
import psutil
import pytest

from matrixlib import files
from matrixlib.engine import metrics
from matrixlib.runs import launch
from matrixlib.runs import run as runs

ROOT = Path(__file__).resolve().parents[1]


def test_a_failure_ends_with_its_reason_and_exit_code_1(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise papermill.PapermillExecutionError(1, 1, "", "RunError", "no healthy shard", [])

    monkeypatch.setattr(papermill, "execute_notebook", fail)
    assert launch.main(["--preset", "demo", "--run", "mine"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "RunError: no healthy shard" in lines
    assert lines[-1] == f"failed; the notebook is kept at {reports / 'mine' / 'train.ipynb'}"


def test_what_comes_next_is_of_the_task(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"complete": True, "seconds": 60.0, "positions": 640, "headline": "learned"}
    path = reports / "mine" / "summary.json"
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: path.write_text(json.dumps(summary)))
    assert launch.main(["--preset", "latin_demo", "--run", "mine"]) == 0
    assert "learned" in (reports / "mine" / "report.html").read_text()
    hint = "look into the network with eval.ipynb and browse.ipynb (make lab)"
    assert capsys.readouterr().out.endswith(f"next: open it in a browser; {hint}\n")


def started(ready: Callable[[subprocess.Popen[str]], bool]) -> subprocess.Popen[str]:
    """The shell command in a process of its own, once it is ready."""
    words = [sys.executable, "-m", "matrixlib.runs.launch", "--preset", "demo", "--run", "mine"]
    env = os.environ | {"MATRIXLIB_DEVICE": "cpu"}
    process = subprocess.Popen(words, env=env, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not ready(process):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def updates(reports: Path) -> int:
    """Those that stand in the metrics, whole."""
    path = reports / "mine" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "number, words",
    [
        (signal.SIGINT, "interrupted; rerun the same command to resume from the last checkpoint"),
        (signal.SIGTERM, "ended by SIGTERM"),
    ],
)
def test_what_a_signal_ends_says_how_and_loses_no_update(
    reports: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, words: str
) -> None:
    monkeypatch.setenv("MATRIXLIB_DEVICE", "cpu")
    process = started(lambda _: updates(reports) >= 13)
    process.send_signal(number)
    text = process.communicate()[1]
    assert process.returncode == 128 + number
    assert (words in text, "\r" in text) == (True, False)
    rows = updates(reports)
    assert [row["step"] for row in metrics.read(reports / "mine" / "metrics.jsonl")] == list(range(1, rows + 1))
    with closing(runs.open_run("demo", run="mine")) as again:
        assert again.trainer.step == rows >= 13, "it goes on where it was"


def test_where_no_signal_reaches_the_kernel_the_launcher_ends(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.sys, "platform", "win32")
    monkeypatch.setattr(launch.psutil, "Process", lambda: SimpleNamespace(children=lambda: ["the kernel"]))
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert launch.main(["--preset", "demo", "--run", "mine"]) == 130
    assert "interrupted; rerun the same command to resume" in capsys.readouterr().err


def test_sigterm_while_the_kernel_starts_ends_in_one_line(reports: Path) -> None:
    process = started(lambda process: bool(psutil.Process(process.pid).children()))
    process.terminate()
    text = process.communicate(timeout=120)[1]
    assert process.returncode == 143
    assert ("ended by SIGTERM" in text, "Traceback" in text) == (True, False)


def test_targets_of_the_specification_start_what_they_name(tmp_path: Path) -> None:
    def commands(*words: str) -> list[str]:
        (tmp_path / ".installed").touch()  # nothing is to be installed
        dry = ["make", "-n", "-o", str(tmp_path / ".installed"), f"VENV={tmp_path}", *words]
        shown = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [
            line.strip() for line in shown.replace("\\\n", " ").splitlines() if "python" in line or "papermill" in line
        ]

    quick = [f"{tmp_path}/bin/python -m matrixlib.runs.launch --preset quick"]
    assert commands("train") == commands("train-quick") == quick
    assert commands("train", "STEPS=7", "TARGET_LOSS=0.09") == [f"{quick[0]} --steps '7' --target-loss '0.09'"]
    assert commands("train-resume") == [f"{tmp_path}/bin/python -m matrixlib.runs.launch --resume"]
    (full,) = commands("train-full", "TARGET_LOSS=0.09")
    assert full.split()[1:] == ["-m", "matrixlib.runs.launch", "--preset", "small", "--target-loss", "'0.09'"]
    assert commands("train-full", "STEPS=7")[0].split()[-2:] == ["--steps", "'7'"]
    assert commands("train-full")[0].split()[-2:] == ["--preset", "small"]
    assert commands("hw-report") == [f"{tmp_path}/bin/python -m matrixlib.bench --hardware"]
    (data,) = commands("generate-data", "GAMES=7")
    assert "notebooks/sample.ipynb" in data
    assert "-p games '7'" in data
    (latin,) = commands("latin")
    assert "notebooks/latin.ipynb reports/latin/latin.ipynb -p preset latin_quick" in latin
    cycle, further = (shlex.split(commands("cycle", *words)[0])[2:] for words in ((), ("START=reports/mine/",)))
    assert cycle[:6] == ["reports/cycle-quick/cycle.ipynb", "-p", "preset", "quick", "-p", "cycle"]
    assert further[:4] == ["reports/cycle-further-mine/cycle.ipynb", "-p", "preset", "further"]
    assert (further[6], 'overrides: {start: "reports/mine/"}' in further) == ("cycle-further-mine", True)
    (hostile,) = commands("report", "RUN=a'; touch b; '")
    assert shlex.split(hostile)[-1] == "a'; touch b; '", "one word of the shell"


def test_options_reach_the_notebook(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "_execute", lambda folder, parameters: seen.append(parameters) or "")
    assert launch.main(["--preset", "demo", "--run", "mine", "--target-loss", "2.5", "--tensorboard"]) == 0
    assert seen[0]["overrides"] == {"validation": {"target_loss": 2.5}}
    assert seen[0]["tensorboard"]
    assert seen[0].keys() <= papermill.inspect_notebook(files.NOTEBOOKS / "train.ipynb").keys()


def test_resume_takes_the_newest_unfinished_training_of_any_preset(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(["--resume"]) == 2
    assert "no unfinished training to resume" in capsys.readouterr().err
    started = {"mine": {"overrides": {"optim": {"learning_rate": 0.002}}}, "cycles": {"kind": "cycle"}}
    for name, options in started.items():
        runs.open_run("demo", "cpu", run=name, steps=7, **options).close()  # type: ignore[arg-type]
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "_execute", lambda folder, parameters: seen.append(parameters) or "")
    assert launch.main(["--resume"]) == 0
    assert (seen[0]["preset"], seen[0]["run"], seen[0]["steps"]) == ("demo", "mine", 0)
    with closing(runs.open_run("demo", run="mine", overrides=seen[0]["overrides"])) as again:
        assert (again.resumed, again.steps, again.config.optim.learning_rate) == (True, 7, 0.002)


def test_a_disk_that_is_full_for_papermill_is_one_line(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(folder: Path, parameters: dict[str, Any]) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(launch, "_execute", full)
    assert launch.main(["--preset", "demo", "--run", "mine"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"FolderError: {reports / 'mine'} cannot be written: No space left on device. Make room")
    assert second.startswith("failed; the notebook is kept at ")


def test_what_cannot_begin_is_one_line_and_exit_code_2(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert launch.main(list(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "did you mean 'quick'" in refused("--preset", "quik")
    assert "validation.target_loss" in refused("--preset", "demo", "--target-loss", "-1")
    monkeypatch.setattr(launch, "_execute", lambda *_: pytest.fail("executed"))
    wrong = {"MATRIXLIB_LIVE": "2", "OMP_NUM_THREADS": "abc", "LOCAL_WORLD_SIZE": "0", "MATRIXLIB_DEVICE": "nonsense"}
    for name, value in wrong.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert f"{name} is '{value}'; " in refused("--preset", "demo")
    assert "RunError: ranks is 0: give the number" in refused("--preset", "demo", "--ranks", "0")
    assert list(reports.iterdir()) == []
    overrides = {"train": {"steps": 4, "batch_size": 16}, "validation": {"limit": 64}}
    for _ in runs.open_run("demo", "cpu", run="done", overrides=overrides).train():
        pass
    (reports / "done" / "train.ipynb").write_text("executed")
    before = {path: path.read_bytes() for path in (reports / "done").rglob("*") if path.is_file()}
    assert "started with other values (" in refused("--preset", "quick", "--run", "done")
    (reports / "theirs").mkdir()
    (reports / "theirs" / "cycle.yaml").touch()
    assert "'theirs' is that of a cycle" in refused("--preset", "demo", "--run", "theirs")
    assert {path: path.read_bytes() for path in (reports / "done").rglob("*") if path.is_file()} == before
    (reports / "file").write_text("")
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(reports / "file"))
    assert "file cannot be written" in refused("--preset", "demo")
