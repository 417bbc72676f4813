"""Benchmarks: measured, kept for each machine, compared with the last time.

    python -m matrixlib.bench [--only updates,loader] [--device cuda] [--compile] [--fail]

A record is `reports/bench/<machine>/<UTC time>.json`; machines are named by processor and cores or by their GPU.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from matrixlib import files
from matrixlib.bench.workloads import ON_GPU, workloads
from matrixlib.hardware import machine
from matrixlib.hardware.benchmark import Figure, Plan, make_plan
from matrixlib.runs.record import git_commit

TOLERANCE = 0.10
"""Slower by more than this share is a regression."""
BUSY = 0.5
"""Mean number of other busy processes in the minute before that is worth a word."""


def machine_name(device: str = "cpu") -> str:
    """Folder name of this machine: its GPU, or its processor's model and the cores that may be used."""
    facts = machine.facts()
    if device == "cuda" and facts.gpu:
        words = facts.gpu.name
    else:
        processor = machine.processor()
        family = f" family {processor.family}" if processor.family else ""
        words = f"{processor.name}{family} {facts.cores} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def measure(plan: Plan, names: Sequence[str] = (), tell: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """A record of what these workloads (all without any) measure; it is kept. Raises ValueError for unknown names.

    tell: called before each workload with what is measured.
    """
    available = workloads()
    if unknown := [name for name in names if name not in available]:
        raise ValueError(f"unknown benchmark {', '.join(map(str, unknown))}; there are {', '.join(available)}")
    record = head(plan) | {"figures": {}}
    for name in names or available:
        tell(f"measuring {name} ...")
        record["figures"][name] = [asdict(figure) for figure in available[name](plan)]
        keep(record)  # each time: what is measured is not lost where a later one fails
        if plan.compile:  # the next one's networks get the compiler's limit for themselves
            torch.compiler.reset()
    return record


def head(plan: Plan) -> dict[str, Any]:
    """The beginning of a record: what is measured, when and on what. Its `figures` are to come."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return {
        "machine": machine_name(plan.device),
        "started": files.utc_now(),
        "brief": plan.brief,
        "load": round(load, 2),
        "commit": git_commit(),
        "versions": machine.versions(),
        "runtime": plan.runtime.to_dict(),
    }


def keep(record: dict[str, Any]) -> Path:
    """Write a record beside the others of its machine, over what was written of it before; its path."""
    name = re.sub(r"[-:.]", "", record["started"])
    path = folder(record["machine"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, record)
    return path


def folder(name: str) -> Path:
    """Where the records of a machine lie."""
    return files.reports_root() / "bench" / name


def figures(record: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """(workload, figure) of everything in a record."""
    for name, rows in record["figures"].items():
        yield from ((name, Figure(**row)) for row in rows)


def last(record: dict[str, Any]) -> dict[tuple[str, str, str], tuple[str, Figure]]:
    """(workload, figure, unit) -> (time, figure): the newest that is older than the record, of the same machine and
    measured in the same way. Each figure for itself: the record before may have had a few workloads alone.
    """
    older = [files.read_json(path) for path in folder(record["machine"]).glob("*.json")]
    known: dict[tuple[str, str, str], tuple[str, Figure]] = {}
    for other in sorted(older, key=lambda other: str(other["started"])):
        if other["started"] < record["started"] and other["brief"] == record["brief"]:
            known |= {(name, f.name, f.unit): (other["started"], f) for name, f in figures(other)}
    return known


def table(record: dict[str, Any]) -> pd.DataFrame:
    """Every figure, named by workload and figure, with its limit and the share of it that is reached."""
    rows = {
        (name, figure.name): {
            "measured": figure.value,
            "unit": figure.unit,
            "limit": figure.limit,
            "reached": figure.share,
            "limited by": figure.of,
        }
        for name, figure in figures(record)
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def regressions(record: dict[str, Any], tolerance: float = TOLERANCE) -> tuple[list[str], str]:
    """(what takes longer than the last time on this machine by more than `tolerance`, all of it in words)."""
    known, slower, times, new = last(record), list[str](), set[str](), list[str]()
    for name, figure in figures(record):
        started, old = known.get((name, figure.name, figure.unit), ("", None))
        if old is None:
            new.append(f"{name} ({figure.name})")
            continue
        times.add(started)
        longer = (figure.value / old.value if figure.unit == "s" else old.value / figure.value) - 1
        if longer > tolerance:
            change = f"{_number(old.value)} -> {_number(figure.value)} {figure.unit}"
            slower.append(f"{name}: {figure.name} takes {longer:.0%} longer ({change})")
    if not times:
        return [], "first record of this machine: nothing to compare with"
    before = " and ".join(sorted(times))
    lines = [f"slower than on {before}:", *(f"  {line}" for line in slower)]
    if not slower:
        lines = [f"nothing over {tolerance:.0%} slower than on {before}"]
    if new:
        lines.append(f"not compared, as no older record has them: {', '.join(new)}")
    return slower, "\n".join(lines)


def text(record: dict[str, Any]) -> pd.DataFrame:
    """`table` for people."""
    shown = table(record)
    return pd.DataFrame(
        {
            "measured": shown["measured"].map(_number) + " " + shown["unit"],
            "limit": shown["limit"].map(_number, na_action="ignore").fillna(""),
            "reached": shown["reached"].map("{:.0%}".format, na_action="ignore").fillna(""),
            "limited by": shown["limited by"],
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 for a regression with --fail, 2 where something cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"of {', '.join(workloads())}; separated by commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of each group of figures")
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU, too: takes minutes")
    parser.add_argument("--fail", action="store_true", help="exit with 1 where something got slower")
    flags = parser.parse_args(arguments)
    names = [name for name in flags.only.split(",") if name]
    try:
        plan = make_plan(flags.device, flags.seconds, flags.compile)
        if plan.device == "cuda" and not names:
            names = list(ON_GPU)
        record = measure(plan, names, lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{record['machine']}, {record['started']}, torch {record['versions']['torch']}")
    if record["load"] > BUSY:
        print(f"{record['load']:.1f} other processes were busy as it began: the figures are too low")
    slower, words = regressions(record)
    print(f"\n{text(record).to_string()}\n\n{words}")
    return 1 if slower and flags.fail else 0


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.2f} million"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
