"""Run the training notebook from the shell: names the run, prints its output, ends with the result.

``python -m matrixlib.runs.launch --preset quick`` executes notebooks/train.ipynb into reports/<run>/train.ipynb. Under
torchrun it trains without the notebook; with ``--ranks`` the notebook starts the ranks (`runs.ranks` both).
"""

import argparse
import contextlib
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from matrixlib import files, progress
from matrixlib.hardware import machine, runtime
from matrixlib.runs import record as records
from matrixlib.runs import report
from matrixlib.tasks import get_task, load_config

SIGNALS = {"KeyboardInterrupt": ("interrupted", signal.SIGINT), "Terminated": ("ended by SIGTERM", signal.SIGTERM)}
"""Error name that a signal ends a notebook with -> description, signal."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m matrixlib.runs.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="quick", help="a file in params/ (default: quick)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--steps", type=int, default=0, help="updates; 0 = as the preset says")
    name = "name of the run (torchrun takes --run for its own); empty = resume the newest incomplete, else start one"
    parser.add_argument("--run", "--name", dest="run", default="", help=name)
    parser.add_argument("--resume", action="store_true", help="resume the newest unfinished training, of any preset")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together, one for each GPU")
    parser.add_argument("--target-loss", type=float, default=0.0, help="stop at this full validation loss; 0 = off")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events")
    options = parser.parse_args(arguments)
    machine.set_waiting_policy()  # inherited by the kernel
    overrides = {"validation": {"target_loss": options.target_loss}} if options.target_loss else {}
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from matrixlib.runs import ranks

        return ranks.train(options.preset, options.run, overrides, options.device, options.steps)
    try:
        progress.interactive()  # refuses a bad MATRIXLIB_LIVE before the kernel starts
        runtime.check_environment()
        records.check_ranks(options.ranks)
        if options.resume:
            found = records.newest_unfinished()
            options.preset, options.run, overrides = found.record["preset"], found.name, found.record["requested"]
        requested = records.requested_config(options.preset, options.device, -1, options.steps, overrides)
        folder = records.run_folder(options.preset, options.run, requested)
        if record := records.stored_record(folder):  # refuse before the notebook of a finished run is replaced
            records.changes_on_resume(folder, requested, record)
        files.make_folder(folder)
    except ValueError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        return 2
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    print(f"run {folder.name}: notebooks/train.ipynb -> {shown / 'train.ipynb'}", flush=True)
    parameters = {name: getattr(options, name) for name in ("preset", "device", "steps", "ranks", "tensorboard")}
    try:
        with files.writing(folder):  # papermill, too
            reason = _execute(folder, parameters | {"run": folder.name, "overrides": overrides})
    except files.FolderError as problem:
        reason = f"FolderError: {problem}"
    if (folder / "summary.json").exists():  # it has made updates
        report.main([folder.name])  # replaces the run's page by the executed notebook
    for error, (words, number) in SIGNALS.items():
        if reason.startswith(error):
            print(f"{words}; rerun the same command to resume from the last checkpoint", file=sys.stderr)
            return 128 + number
    summary = files.read_json(folder / "summary.json")
    if summary.get("complete") and not reason:
        minutes, next_steps = summary["seconds"] / 60, get_task(load_config(options.preset).task).next_steps
        until = f"{minutes:.1f} min, until {progress.clock_time()}"
        print(f"{summary['positions']:,} positions in {until}; held-out: {summary['headline']}")
        print(f"report: {shown / 'report.html'}")
        print(f"next: open it in a browser; {next_steps.format(run=shown)}")
    if reason:
        print(reason, file=sys.stderr)
        print(f"failed; the notebook is kept at {shown / 'train.ipynb'}", file=sys.stderr)
    return 1 if reason else 0


def _execute(folder: Path, parameters: dict[str, Any]) -> str:
    """Run the notebook in a kernel, forwarding SIGTERM and Ctrl-C; returns why it failed, or ""."""
    import papermill
    from nbclient.exceptions import DeadKernelError

    received: list[int] = []

    def forward(number: int, frame: FrameType | None = None) -> None:
        received.append(number)
        children = psutil.Process().children()
        if not children or sys.platform == "win32":  # no kernel yet, or it ends with this process
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        papermill.execute_notebook(
            files.NOTEBOOKS / "train.ipynb",
            folder / "train.ipynb",
            parameters,
            kernel_name="python3",
            progress_bar=False,
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
            extra_arguments=["--log-level=ERROR"],  # ipykernel warns about unencrypted TCP on every start
        )
    except papermill.PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue}"
    except (KeyboardInterrupt, RuntimeError) as error:  # the kernel died
        if received or isinstance(error, KeyboardInterrupt):
            return "Terminated" if signal.SIGTERM in received[:1] else "KeyboardInterrupt"
        if isinstance(error, DeadKernelError):
            return "the notebook's kernel died (killed, or out of memory); rerun the same command to resume"
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return ""


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(main())
