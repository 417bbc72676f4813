"""Benchmarks: measured, kept for each machine, compared with the last time.

    python -m matrixlib.bench [--only updates,loader] [--device cuda] [--compile] [--fail] [--markdown]

A record is `reports/bench/<machine>/<UTC time>.json`; machines are named by processor and cores or by their GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matrixlib import files
from matrixlib.bench import workloads
from matrixlib.bench.workloads import WORKLOADS, Figure, Plan
from matrixlib.files import read_json, write_json
from matrixlib.hardware import machine
from matrixlib.runs.run import git_commit, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

TOLERANCE = 0.10
"""Slower by more than this share is a regression."""
LOADER = "loader workers"
BUSY = 0.5
"""Mean number of other busy processes in the minute before that is worth a word."""
TITLES = {
    "updates": "Training, each preset",
    "options": "One choice turned",
    "scaling": "Scaling of the quick preset",
    "inference": "Inference",
    "targets": "Self-supervised targets, one core",
    "loader": "Loader",
    "search": "Search, one core, free evaluator",
    "checkpoint": "Saving a checkpoint",
    "start": "Start-up",
}


def machine_name(device: str = "cpu") -> str:
    """Folder name of this machine: its GPU, or its processor's model and the cores that may be used."""
    facts = machine.facts()
    if device == "cuda" and facts.gpu:
        words = facts.gpu.name
    else:
        found = machine.processor()
        family = f" family {found.family}" if found.family else ""
        words = f"{found.name}{family} {facts.cores} cores"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def measure(
    plan: Plan, names: Sequence[str] = (), say: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """A record of what these workloads (all without any) measure; it is kept. Raises ValueError for unknown names.

    say: told before each workload what is measured.
    """
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise ValueError(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    import torch

    started = datetime.datetime.now(datetime.UTC)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    record: dict[str, Any] = {
        "machine": machine_name(plan.device),
        "started": f"{started:%Y-%m-%dT%H:%M:%SZ}",
        "brief": plan.brief,
        "load": round(load, 2),
        "commit": git_commit(),
        "versions": versions(),
        "runtime": plan.runtime.to_dict(),
        "figures": {},
    }
    target = folder(record["machine"]) / f"{started:%Y%m%dT%H%M%S%fZ}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in names or WORKLOADS:
        say(f"measuring {name} ...")
        record["figures"][name] = [asdict(figure) for figure in WORKLOADS[name](plan)]
        write_json(target, record)  # each time: what is measured is not lost where a later one fails
        if plan.compile:  # the next one's networks get the compiler's limit for themselves
            torch.compiler.reset()
    return record


def folder(name: str) -> Path:
    """Where the records of a machine lie."""
    return files.reports_root() / "bench" / name


def last(record: dict[str, Any]) -> dict[tuple[str, str, str], tuple[str, Figure]]:
    """(workload, figure, unit) -> (time, figure): the newest that is older than the record, of the same machine and
    measured in the same way. Each figure for itself: the record before may have had a few workloads alone.
    """
    older = [read_json(path) for path in folder(record["machine"]).glob("*.json")]
    known: dict[tuple[str, str, str], tuple[str, Figure]] = {}
    for found in sorted(older, key=lambda found: str(found["started"])):
        if found["started"] < record["started"] and found["brief"] == record["brief"]:
            for name, rows in found["figures"].items():
                known |= {(name, row["name"], row["unit"]): (found["started"], Figure(**row)) for row in rows}
    return known


def verdict(record: dict[str, Any], tolerance: float = TOLERANCE) -> tuple[list[str], str]:
    """(what takes longer than the last time on this machine by more than `tolerance`, all of it in words)."""
    known = last(record)
    slower, times, new = [], set(), []
    for name, rows in record["figures"].items():
        missing = []
        for figure in (Figure(**row) for row in rows):
            if (name, figure.name, figure.unit) not in known:
                missing.append(figure.name)
                continue
            started, old = known[name, figure.name, figure.unit]
            times.add(started)
            longer = figure.value / old.value if figure.unit == "s" else old.value / figure.value
            if longer > 1 + tolerance:
                change = f"{_number(old.value)} -> {_number(figure.value)} {figure.unit}"
                slower.append(f"{name}: {figure.name} takes {longer - 1:.0%} longer ({change})")
        if missing:
            new.append(name if len(missing) == len(rows) else f"{name} ({'; '.join(missing)})")
    if not times:
        return [], "first record of this machine: nothing to compare with"
    before = " and ".join(sorted(times))
    lines = [f"slower than on {before}:", *(f"  {line}" for line in slower)]
    if not slower:
        lines = [f"nothing over {tolerance:.0%} slower than on {before}"]
    if new:
        lines.append(f"not compared, as no older record has them: {', '.join(new)}")
    return slower, "\n".join(lines)


def table(record: dict[str, Any], markdown: bool = False) -> str:
    """Every figure with its limit and its share of it, a section for each workload."""
    parts = []
    for name, rows in record["figures"].items():
        lines = [["", "measured", "limit", "reached", "limited by"]]
        for figure in (Figure(**row) for row in rows):
            limit = _number(figure.limit) if figure.limit else ""
            share = f"{figure.share:.0%}" if figure.share is not None else ""
            lines.append([figure.name, f"{_number(figure.value)} {figure.unit}", limit, share, figure.of])
        parts.append(f"{TITLES[name]}\n\n{_laid_out(lines, markdown)}")
    return "\n\n".join(parts)


def scaling_figure(record: dict[str, Any]) -> Plot:
    """Positions a second and the limit of each against batch, channels and blocks, and the loader's against workers."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    curves: dict[str, list[tuple[int, Figure]]] = {}
    for row in (*record["figures"].get("scaling", ()), *record["figures"].get("loader", ())):
        figure = Figure(**row)
        swept = re.match(r"(batch|channels|blocks) (\d+)", figure.name)
        what = swept[1] if swept else LOADER
        count = swept[2] if swept else figure.name.split()[0].replace("no", "0")
        curves.setdefault(what, []).append((int(count), figure))
    canvas = Canvas(figsize=(3.2 * max(1, len(curves)), 3), layout="constrained")
    for axes, (what, points) in zip(
        canvas.subplots(1, max(1, len(curves)), squeeze=False)[0], curves.items(), strict=False
    ):
        x = [at for at, _ in points]
        axes.plot(x, [figure.value for _, figure in points], "o-", label="measured")
        if what != LOADER:
            axes.plot(
                x, [figure.limit or float("nan") for _, figure in points], "--", label="matrix products alone"
            )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.minorticks_off()
        axes.set_xticks(x, [f"{at:,}" for at in x])
        axes.set_ylim(bottom=None if what != LOADER else 0)
        axes.set_xlabel(what)
        axes.set_ylabel("positions/s")
        axes.legend(fontsize=8, frameon=False)
    return canvas


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 for a regression with --fail, 2 where something cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help=f"of {', '.join(WORKLOADS)}; separated by commas")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of each group of figures")
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU, too: takes minutes")
    parser.add_argument("--fail", action="store_true", help="exit with 1 where something got slower")
    parser.add_argument("--markdown", action="store_true", help="tables as the README has them")
    given = parser.parse_args(arguments)
    names = [name for name in given.only.split(",") if name]
    try:
        chosen = workloads.plan(given.device, given.seconds, given.compile)
        if chosen.device == "cuda" and not names:
            names = list(workloads.ON_GPU)
        record = measure(chosen, names, lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{record['machine']}, {record['started']}, torch {record['versions']['torch']}")
    if record["load"] > BUSY:
        print(f"{record['load']:.1f} other processes were busy as it began: the figures are too low")
    print()
    print(table(record, given.markdown) + "\n")
    slower, words = verdict(record)
    print(words)
    return 1 if slower and given.fail else 0


def _laid_out(rows: Sequence[Sequence[str]], markdown: bool) -> str:
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (True, False, False, False, True)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if start else cell.rjust(width)
            for cell, width, start in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    )


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.2f} million"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
