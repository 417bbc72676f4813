"""What this machine can do: the probe notebook's measurements."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from matrixlib import files
from matrixlib.hardware import machine, speed
from matrixlib.hardware import runtime as runtimes

STACK = ("torch", "cuda", "hip", "cudnn", "nccl", "driver", "triton")
"""Versions to look at first where one machine gives another result than the next."""


def folder() -> Path:
    """Where the probe's summary.json lies."""
    return files.reports_root() / "probe"


def measure(device: str = "auto", seconds: float = 2.0) -> dict[str, Any]:
    """Describe and measure this machine; plain data for summary.json. Takes about `seconds` + 2.

    `measured` is in GFLOP/s ("copy": GB/s) on `device`; `suggested` is what `auto` uses there;
    `facts.rates` is of one core, as the policy compares them. Raises ValueError where `device` is absent.
    """
    facts = machine.facts()
    option = os.environ.get("MATRIXLIB_DEVICE", "auto") if device == "auto" else device
    selected, _ = runtimes.select_device(facts, option)
    native = runtimes.native_bf16(facts, selected)
    suggestions = runtimes.suggest(facts, selected)
    return {
        "processor": asdict(machine.processor()),
        "l3": [{"bytes": size, "shared_by": sharers} for size, sharers in machine.l3_caches()],
        "facts": asdict(replace(facts, rates=speed.rates("cpu", facts.bf16))),
        "fp8": facts.gpu is not None and facts.gpu.fp8,
        "device": selected,
        "measured": speed.device_rates(selected, native, facts.threads, seconds),
        "suggested": {name: {"value": value, "why": why} for name, (value, why) in suggestions.items()},
        "environment": machine.environment(),
    }


def save(result: dict[str, Any]) -> None:
    """Keep what was measured in reports/probe/summary.json."""
    files.make_folder(folder())
    with files.writing(folder()):
        files.write_json(folder() / "summary.json", result)


def table(result: dict[str, Any]) -> pd.DataFrame:
    """What `measure` returned: machine, measured rates, what `auto` uses and why."""
    processor, facts, versions = result["processor"], result["facts"], result["environment"]["versions"]
    caches = ", ".join(f"{c['bytes'] / 2**20:.0f} MiB for {c['shared_by']} processors" for c in result["l3"])
    rows = {
        "processor": f"{processor['name']} (family {processor['family']}), {facts['cores']} usable cores",
        "instructions": " ".join(facts["instructions"]),
        "L3": f"{caches or 'not reported'}; V-Cache: {'yes' if facts['vcache'] else 'no'}",
        "memory": f"{facts['memory'] / 2**30:.1f} GiB usable",
        "GPU": facts["gpu"]["name"] if facts["gpu"] else facts["gpu_problem"],
        "FP8": "in hardware, and not used here" if result["fp8"] else "no",
        "versions": ", ".join(f"{name} {versions[name]}" for name in STACK if name in versions),
        "device": result["device"],
    }
    for name, rate in result["measured"].items():
        rows[f"measured {name}"] = f"{rate:,.1f} {'GB/s' if name == 'copy' else 'GFLOP/s'}"
    for name, item in result["suggested"].items():
        rows[f"auto {name}"] = f"{item['value']} ({item['why']})"
    return pd.DataFrame.from_dict(rows, orient="index", columns=["this machine"])


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m matrixlib.hardware.probe`: measure this machine, keep it, print it; 2 where a device is absent."""
    argparse.ArgumentParser(description="Measures what this machine can do.").parse_args(arguments)
    try:
        result = measure()
        save(result)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(result).to_string(header=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
