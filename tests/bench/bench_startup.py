"""Seconds until something can be used: imports, `uciok`, and the first update of `papermill` on the quick preset.

    python tests/bench/bench_startup.py [--repeats 3]

Imports and uciok: medians in fresh processes. papermill starts with warm caches of Python and numba, and the
sample set unpacked; its run goes to a temporary folder and is ended at the first update. Its marks are read from
outside, to a tenth of a second: the run's folder is there once the notebook's first cells have run and the preset was
read, config.yaml once the data was checked and the number of updates timed, metrics.jsonl after the first update.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from matrixlib.bench.workloads import end

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = ("pass", "import matrixlib", "import numpy", "import torch", "from matrixlib.runs import run, notebook")


def seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def uciok(run: Path) -> float:
    """Until the engine has said what it is."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "matrixlib.tasks.chess.uci", "--checkpoint", str(run), "--device", "cpu"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        engine.stdin.write("uci\n")
        engine.stdin.flush()
        while engine.stdout.readline() != "uciok\n":
            pass
        taken = time.perf_counter() - start
        engine.stdin.write("quit\n")
        engine.stdin.close()
    return taken


def first_update(preset: str) -> dict[str, float]:
    """Marks of one run, in seconds from the start of papermill."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MATRIXLIB_REPORTS": folder}
        command = [sys.executable, "-m", "papermill", "notebooks/train.ipynb", f"{folder}/out.ipynb"]
        command += ["-p", "preset", preset, "-p", "run", "first", "--no-progress-bar"]
        marks: dict[str, Callable[[], bool]] = {
            "run folder": (Path(folder) / "first").is_dir,
            "configuration": (Path(folder) / "first" / "config.yaml").is_file,
            "first update": lambda: _lines(Path(folder) / "first" / "metrics.jsonl") > 0,
        }
        found: dict[str, float] = {}
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while len(found) < len(marks) and process.poll() is None:
                for name, there in marks.items():
                    if name not in found and there():
                        found[name] = time.perf_counter() - start
                time.sleep(0.05)
        finally:
            end(process)
    if len(found) < len(marks):
        raise SystemExit("train.ipynb made no update; run it alone to see why")
    return found


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    for code in IMPORTS:
        taken = [seconds([sys.executable, "-c", code]) for _ in range(1 + args.repeats)][1:]
        print(f"python -c '{code}'".ljust(52) + f"{statistics.median(taken):6.2f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_bytes((ROOT / "params" / "quick.yaml").read_bytes())
        taken = [uciok(Path(folder)) for _ in range(1 + args.repeats)][1:]
    print("matrixlib-uci: uciok".ljust(52) + f"{statistics.median(taken):6.2f} s", flush=True)
    runs = [first_update("quick") for _ in range(1 + args.repeats)][1:]
    for name in runs[0]:
        median = statistics.median(marks[name] for marks in runs)
        print(f"papermill train.ipynb -p preset quick: {name}".ljust(52) + f"{median:6.1f} s")


if __name__ == "__main__":
    main()
