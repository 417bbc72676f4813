"""Seconds and memory that a very long run costs whoever opens, resumes, draws, reports or browses it.

    python tests/bench/bench_long_run.py [--updates 1000000] [--folder FOLDER]

The log is made up, 1.2 kB a row as the quick preset writes it, with validations, statistics, warnings and a rollback.
Each task runs in a fresh process: seconds without its imports, and the most memory of the process beside that of one
that only imports. A folder that holds such a run already is used again.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BACK = 500  # updates from the last checkpoint to the crash
TERMS = ("policy", "value", "ssl_piece", "ssl_threat", "ssl_pin", "ssl_fork", "ssl_control")
PHASES = ("wait", "copy", "forward", "backward", "clip", "read", "optimiser", "average")


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Made-up rows of metrics.jsonl."""
    for step in range(1, count + 1):
        level = 1 + 3 * math.exp(-5 * step / count) + 0.05 * math.sin(step)
        row: dict[str, Any] = {"time": "2026-01-01T00:00:00.000Z", "step": step, "micro_step": step}
        row |= {"loss": level, "losses": dict.fromkeys(TERMS, level), "grad_norm": 0.3 * level}
        row |= {"metrics": {f"{term}/{name}": 1 / level for term in TERMS for name in ("accuracy", "entropy")}}
        row |= {"learning_rate": 0.001, "clip_share": 0.1, "verdict": "ok", "seconds": 0.16, "throughput": 800.0}
        row |= {"times": dict.fromkeys(PHASES, 0.02), "skipped": 0, "overflows": 0, "rollbacks": int(step > count // 2)}
        if step % 500 == 0:
            row["validation"] = {
                "kind": "full" if step % 1500 == 0 else "sample",
                "loss": level,
                "losses": row["losses"],
            }
            row["statistics"] = {"gradient_norm": {"median": 0.5, "p95": 0.9}, "dead_units": {"stem.relu": 0.0}}
            row["messages"] = ["2 items without a usable target of policy were skipped"]
        yield row


def make(folder: Path, count: int) -> None:
    """A run of `count` updates."""
    from matrixlib.engine.history import History
    from matrixlib.files import write_json

    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "metrics.jsonl"
    with log.open("w", encoding="utf-8") as file:
        history = History(log)
        for row in rows(count):
            file.write(json.dumps(row) + "\n")
            if row["step"] == 8192:
                file.flush()
                history = History(log)
            elif row["step"] > 8192:
                history.add(row)
        history.close()
    write_json(
        folder / "run.json", {"kind": "train", "started": "2026-01-01T00:00:00Z", "requested": {"task": "chess"}}
    )
    write_json(folder / "summary.json", {"complete": True, "steps": count})
    (folder / "config.yaml").write_text("task: chess\n")


def open_log(folder: Path) -> None:
    """Opened, as training does."""
    from matrixlib.engine.metrics import MetricsLog

    MetricsLog(folder / "metrics.jsonl").close()


def resume(folder: Path) -> None:
    """Cut back to the last checkpoint, and written on to where it was."""
    from matrixlib.engine import rows as metric_rows
    from matrixlib.engine.metrics import MetricsLog

    newest = metric_rows.last(folder / "metrics.jsonl")
    late = metric_rows.after(folder / "metrics.jsonl", newest["step"] - BACK)
    with MetricsLog(folder / "metrics.jsonl") as log:
        assert log.truncate_to(newest["step"] - BACK) == BACK
        for row in late:
            log.write(row)


def panel(folder: Path) -> None:
    """The curves of the panel of a resumed run."""
    from matrixlib.engine import history
    from matrixlib.runs import figures

    figures.png(figures.training_figure(history.read(folder / "metrics.jsonl")))


def report(folder: Path) -> None:
    """report.html and the index."""
    from matrixlib.runs import report as reports

    reports.write_report(folder)
    reports.write_index(folder.parent)


def browse(folder: Path) -> None:
    """The table and the curves of the browse notebook."""
    import os

    from matrixlib.runs import browse as browsing

    os.environ["MATRIXLIB_REPORTS"] = str(folder.parent)
    browsing.table([folder.name])
    browsing.curves_figure(folder.name)


def watch(folder: Path) -> None:
    """How the run stands."""
    from matrixlib.runs.watch import standing

    standing(folder)


TASKS: dict[str, Callable[[Path], None]] = {
    task.__name__: task for task in (open_log, resume, panel, report, browse, watch)
}


def measure(name: str, folder: Path) -> dict[str, float]:
    """One task in this process: seconds, those of the processor, peak MiB, and MiB after its imports."""

    before = _peak()
    start, busy = time.perf_counter(), time.process_time()
    TASKS[name](folder)
    seconds = {"seconds": time.perf_counter() - start, "processor": time.process_time() - busy}
    return {**seconds, "peak": _peak(), "imports": before}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(measure(options.task, options.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / "long"
        if not folder.exists():
            start = time.perf_counter()
            make(folder, options.updates)
            print(f"made up {options.updates:,} updates in {time.perf_counter() - start:.0f} s")
        for name in ("metrics.jsonl", "history.jsonl"):
            print(f"{name}: {(folder / name).stat().st_size / 1e6:,.1f} MB")
        for name, task in TASKS.items():
            command = [sys.executable, __file__, "--task", name, "--folder", str(folder)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures = json.loads(done.stdout)
            print(
                f"{name:9} {figures['seconds']:6.2f} s, {figures['processor']:5.2f} s of a processor   "
                f"peak {figures['peak']:6.0f} MiB, of which imports "
                f"{figures['imports']:4.0f}   {task.__doc__}",
                flush=True,
            )


if __name__ == "__main__":
    main()
