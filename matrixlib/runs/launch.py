"""Starts the training notebook as a run from the shell: names the run, shows its progress, ends with the result.

``python -m matrixlib.runs.launch --preset quick`` executes notebooks/train.ipynb through papermill into
reports/<run>/train.ipynb. The bar reads the run's metrics.jsonl, so it shows what the run itself knows.
Under torchrun it trains without the notebook, with every process that torchrun starts (`runs.ranks`); with ``--ranks``
the notebook starts them (`runs.ranks` too).
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from matrixlib import files, progress
from matrixlib.hardware import machine
from matrixlib.runs import run as runs
from matrixlib.runs import watch
from matrixlib.runs.start import write_base
from matrixlib.tasks import get_task, load_config

SIGNALS = {"KeyboardInterrupt": ("interrupted", signal.SIGINT), "Terminated": ("ended by SIGTERM", signal.SIGTERM)}
"""Name of the error that a signal ends a notebook with -> it in words, and the signal."""


def main(arguments: list[str] | None = None) -> int:
    """Run the notebook; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.runs.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="quick", help="a file in params/ (default: quick)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--steps", type=int, default=0, help="updates; 0 = as the preset says")
    parser.add_argument(
        "--run",
        "--name",
        dest="run",
        default="",
        help="name of the run (torchrun takes --run for its own); empty = resume the newest incomplete, else start one",
    )
    parser.add_argument(
        "--base",
        action="store_true",
        help="train nothing: only write the complete checkpoint of a fresh network, for `train.init` of others",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together, one for each GPU")
    parser.add_argument("--target-loss", type=float, default=0.0, help="stop at this full validation loss; 0 = off")
    options = parser.parse_args(arguments)
    machine.set_waiting_policy()  # the notebook's kernel has it from here
    if options.base:
        return _write_base(options.preset, options.device, options.run)
    overrides = {"validation": {"target_loss": options.target_loss}} if options.target_loss else {}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from matrixlib.runs import ranks

        return ranks.train(options.preset, options.run, overrides, options.device, options.steps)
    try:
        name = runs.name_run(options.preset, options.device, -1, options.run, options.steps, overrides)
        folder = files.reports_root() / name
        files.make_folder(folder)
    except ValueError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return 2
    print(f"run {name}: notebooks/train.ipynb -> {_relative(folder / 'train.ipynb')}", flush=True)
    parameters = {"preset": options.preset, "device": options.device, "run": name, "steps": options.steps}
    parameters |= {"overrides": overrides, "ranks": options.ranks}
    try:
        reason = _execute(folder, parameters)
    except KeyboardInterrupt:
        reason = "KeyboardInterrupt"
    _write_report(folder)
    for error, (words, number) in SIGNALS.items():
        if reason.startswith(error):
            print(f"{words}; the same command goes on from the last checkpoint", file=sys.stderr)
            return 128 + number
    summary = files.read_json(folder / "summary.json")
    if summary.get("complete"):
        _print_result(folder, summary, get_task(load_config(options.preset).task).next_steps)
    if reason:
        print(reason, file=sys.stderr)
        if not summary.get("complete") and (folder / "report.html").exists():
            print(f"curves and report: {_relative(folder / 'report.html')}", file=sys.stderr)
        print(f"failed; the notebook is kept at {_relative(folder / 'train.ipynb')}", file=sys.stderr)
    return 1 if reason else 0


def _write_base(preset: str, device: str, run: str) -> int:
    """Write the checkpoint of a network before any update; returns the exit code."""
    try:
        current = runs.open_run(preset, device, run=run, kind="base")
        path = write_base(current.trainer, current.name)
    except ValueError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return 2
    tensors = current.model.state_dict()
    print(f"{_relative(path)}: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} numbers")
    print(f"next: train from it with -p init {_relative(current.folder)}")
    current.close()
    return 0


def _write_report(folder: Path) -> None:
    """The executed notebook as a page, in place of the one that the run wrote as it ended."""
    from matrixlib.runs import report

    if not (folder / "summary.json").exists():  # not one update was begun
        return
    try:
        with files.writing(folder):
            report.write_report(folder)
            report.write_index(folder.parent)
    except files.FolderError as problem:
        print(problem, file=sys.stderr)


def _execute(folder: Path, parameters: dict[str, Any]) -> str:
    """Run the notebook; returns why it failed, or an empty string.

    papermill runs in this process: the kernel ends when its parent does, so a killed launcher leaves no orphan that
    goes on writing the run. SIGTERM and Ctrl-C go on to the kernel, which saves a checkpoint and ends the notebook.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError

    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        forward_signal(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, done), daemon=True)
    watcher.start()
    try:
        papermill.execute_notebook(
            files.NOTEBOOKS / "train.ipynb",
            folder / "train.ipynb",
            parameters,
            kernel_name="python3",
            progress_bar=False,
            extra_arguments=["--log-level=ERROR"],  # ipykernel warns about unencrypted TCP on every start
        )
    except papermill.PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    except RuntimeError as error:  # a DeadKernelError, or that of a kernel that died before it was ready
        if received:
            return "KeyboardInterrupt" if received[0] == signal.SIGINT else "Terminated"
        if isinstance(error, DeadKernelError):
            return "the notebook's kernel died (killed, or out of memory); the same command goes on"
        raise
    finally:
        done.set()
        watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    return ""


def forward_signal(number: int) -> None:
    """To the kernel; where there is none yet, the launcher itself ends. So it does on Windows, where none of these
    signals can be sent, and the kernel ends with it: what is lost is what came after the last checkpoint.
    """
    children = psutil.Process().children()
    if not children or sys.platform == "win32":
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def _watch(folder: Path, done: threading.Event) -> None:
    """Draw the bar until the notebook has ended."""
    with progress.text_bar(unit="update", dynamic_ncols=True, desc="starting") as bar:
        while not done.wait(0.5):
            show_progress(bar, folder)
        show_progress(bar, folder)


def show_progress(bar: Any, folder: Path) -> None:
    """Bring the bar to the newest row of metrics.jsonl; a resumed run's rate counts from where it resumed."""
    row = _last_row(folder / "metrics.jsonl")
    if row is None:
        return
    if bar.total is None:
        bar.reset(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["train"]["steps"])
        bar.initial = bar.n = row["step"]
    standing = watch.standing(folder)
    words = {"validating": "validating", "evaluating": "evaluating", "stalled": standing.text}
    bar.set_description_str(words.get(standing.word, "training"), refresh=False)
    bar.set_postfix_str(f"loss {row['loss']}"[:10] + f", {row['throughput']:,.0f} positions/s", refresh=False)
    bar.update(row["step"] - bar.n)
    bar.refresh()


def _last_row(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file; None before there is one."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65_536))
        lines = file.read().split(b"\n")
    return json.loads(lines[-2]) if len(lines) > 1 and lines[-2].endswith(b"}") else None


def _print_result(folder: Path, summary: dict[str, Any], next_steps: str) -> None:
    minutes, when = summary["seconds"] / 60, progress.clock_time()
    print(f"{summary['positions']:,} positions in {minutes:.1f} min, until {when}; held-out: {summary['headline']}")
    print(f"report: {_relative(folder / 'report.html')}")
    print(f"next: open it in a browser; {next_steps.format(run=_relative(folder))}")


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
