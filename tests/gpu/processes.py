"""One part in a process of its own: whatever becomes of it, there is a result.

The processes are forked from a server that has imported torch and has not touched the device.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from parts import Part, Skip, make_plan

PRELOAD = (
    "processes",
    "matrixlib.bench.report",
    "matrixlib.engine.trainer",
    "matrixlib.runs.report",
    "matrixlib.tasks.chess.evaluate.net",
    "matrixlib.tasks.chess.task",
    "matrixlib.tasks.latin.task",
    "torch._dynamo",
    "torch.profiler",
)
LIMIT = 480.0
"""Seconds of a part; longer is a hang."""
RESULT, LOG = "result.json", "log.txt"
END_SECONDS = 10.0
LINES = 20


def run_part(part: Part, device: str, folder: Path, limit: float = LIMIT) -> dict[str, Any]:
    """The result of a part in `folder`: part, title, verdict (ok, failed, skipped), reason, seconds, figures, facts,
    head (the beginning of a record of benchmarks) and log, its last lines.
    """
    folder.mkdir(parents=True)
    base = {"part": part.number, "title": part.title, "figures": [], "facts": [], "head": {}, "log": ""}
    if reason := part.skip.get(device):
        return {**base, "verdict": "skipped", "reason": reason, "seconds": 0.0}
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(list(PRELOAD))
    began = time.monotonic()
    process = context.Process(target=work, args=(part, device, str(folder)))
    process.start()
    process.join(limit)
    late = process.is_alive()
    end(process)
    seconds = round(time.monotonic() - began, 1)
    path, log = folder / RESULT, folder / LOG
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:] if log.exists() else []
    base |= {"seconds": seconds, "log": "\n".join(said)}
    if path.exists() and not late:
        return {**base, **json.loads(path.read_text(encoding="utf-8"))}
    reason = f"no end after {limit:.0f} s" if late else ending(process.exitcode or 0)
    reason += f"; it last said: {said[-1][:200]}" if said else ""
    return {**base, "verdict": "failed", "reason": reason}


def ending(code: int) -> str:
    """How a process ended that left no result, in words."""
    if code >= 0:
        return f"ended with code {code} and no result"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"killed by {name}" + (", as the system does where memory runs out" if name == "SIGKILL" else "")


def end(process: Any) -> None:
    """End a part's process and all that it has started."""
    family = []
    if process.is_alive():
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    process.join()
    for child in family:
        if child.is_running():
            child.kill()
    psutil.wait_procs(family, timeout=END_SECONDS)


def work(part: Part, device: str, folder: str) -> None:
    """What the process of a part does: it leaves one line of JSON, and what it says in a log."""
    from matrixlib.bench import report
    from matrixlib.files import end_with_parent, write_text

    os.environ.update(part.environment)
    os.environ["MATRIXLIB_REPORTS"] = str(Path(folder) / "reports")
    log = os.open(Path(folder) / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    end_with_parent()
    warnings.simplefilter("ignore", UserWarning)  # a run shows its messages as such; the parts read them
    result: dict[str, Any] = {"verdict": "ok", "reason": "", "figures": [], "facts": [], "head": {}}
    try:
        function = part.work()
        plan = make_plan(device)
        result["head"] = report.head(plan)
        for item in function(plan):
            if isinstance(item, str):
                result["facts"].append(item)
            else:
                result["figures"].append(asdict(item))
    except Skip as reason:
        result |= {"verdict": "skipped", "reason": str(reason)}
    except Exception as error:  # noqa: BLE001 - it is the result; the log has where it came from
        traceback.print_exc()
        text = " ".join(str(error).split()) or "no message"
        result |= {
            "verdict": "failed",
            "reason": text if type(error) is AssertionError else f"{type(error).__name__}: {text}",
        }
    write_text(Path(folder) / RESULT, line(result))


def line(result: Mapping[str, Any]) -> str:
    """One line of JSON."""
    from matrixlib.files import plain

    return json.dumps(plain(result, "result"), allow_nan=False) + "\n"
