"""Starts the training notebook as a run from the shell: names the run, shows its progress, ends with the result.

``python -m matrixlib.launch --preset quick`` executes notebooks/train.ipynb through papermill into
reports/<run>/train.ipynb. The bar reads the run's metrics.jsonl, so it shows what the run itself knows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from matrixlib import config as configuration
from matrixlib import run as runs

NOTEBOOKS = configuration.PARAMS.parent / "notebooks"


def main(arguments: list[str] | None = None) -> int:
    """Run the notebook; returns papermill's exit code."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="quick", help="a file in params/ (default: quick)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--steps", type=int, default=0, help="updates; 0 = as the preset says")
    parser.add_argument(
        "--run", default="", help="name of the run; empty = resume the newest incomplete, else start one"
    )
    options = parser.parse_args(arguments)
    try:
        name = runs.name_run(options.preset, options.device, None, options.run, options.steps)
    except ValueError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    folder = configuration.reports_root() / name
    folder.mkdir(parents=True, exist_ok=True)
    print(f"run {name}: notebooks/train.ipynb -> {_shown(folder / 'train.ipynb')}", flush=True)
    code = _execute(folder, name, options)
    _closing(folder, code)
    return code


def _execute(folder: Path, name: str, options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "papermill", str(NOTEBOOKS / "train.ipynb"), str(folder / "train.ipynb")]
    command += [
        "-k",
        "python3",
        "--no-progress-bar",
        "-p",
        "preset",
        options.preset,
        "-p",
        "device",
        options.device,
    ]
    command += ["-p", "run", name, "-p", "steps", str(options.steps)]
    with (folder / "papermill.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            with tqdm(unit="update", dynamic_ncols=True, desc="starting") as bar:
                while process.poll() is None:
                    _show(bar, folder)
                    time.sleep(0.5)
                _show(bar, folder)
        except KeyboardInterrupt:  # the kernel gets it too: it saves a checkpoint first
            process.wait()
            raise
    return process.returncode


def _show(bar: Any, folder: Path) -> None:
    """Bring the bar to the newest row of metrics.jsonl; a resumed run's rate counts from where it resumed."""
    row = _last_row(folder / "metrics.jsonl")
    if row is None:
        return
    if bar.total is None:
        bar.reset(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["train"]["steps"])
        bar.initial = bar.n = row["step"]
        bar.set_description("training", refresh=False)
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


def _closing(folder: Path, code: int) -> None:
    """The last lines: result and report, or the reason of the failure."""
    summary = runs.read_json(folder / "summary.json")
    if code or not summary.get("complete"):
        tail = (folder / "papermill.log").read_text(encoding="utf-8").strip().splitlines()
        print(tail[-1] if tail else "papermill printed nothing", file=sys.stderr)
        print(
            f"failed (exit code {code}); the notebook is kept at {_shown(folder / 'train.ipynb')}",
            file=sys.stderr,
        )
        return
    figures, base = summary["evaluation"], summary["evaluation"].get("baselines", {})
    print(f"report: {_shown(folder / 'report.html')}")
    print(
        f"{summary['positions']:,} positions in {summary['seconds'] / 60:.1f} min; held-out: "
        f"top-1 {figures['top1']:.1%} (best capture {base['best_capture_top1']:.1%}, "
        f"uniform {base['uniform_top1']:.1%}), top-3 {figures['top3']:.1%}, KL {figures['policy_kl']:.2f}, "
        f"WDL {figures.get('wdl_accuracy', float('nan')):.1%}, value correlation {figures['value_correlation']:.2f}"
    )


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
