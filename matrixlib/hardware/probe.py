"""What this machine can do: the probe notebook's measurements, and the policy for machines of all kinds."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.hardware import machine, speed
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.machine import DeviceFacts, Gpu, Rates

# Only ratios matter to the policy. Those of processors were measured, in GFLOP/s a core; those of Apple's GPUs are
# what is published of them: no units for bf16 before the M5.
_ZEN4 = Rates(183, 420, 160, 165, 300, 310)
_AMX = Rates(235, 1972, 190, 205, 480, 753)
_NO_BF16 = Rates(120, 0, 90, 95, 0, 0)
_M3, _M5 = Rates(1, 1, 1, 0, 1, 0), Rates(1, 2, 1, 0, 1.3, 0)
MACHINES: dict[str, DeviceFacts] = {
    "H200": DeviceFacts(cores=16, gpu=Gpu("NVIDIA H200", (9, 0), True, 141 * 10**9)),
    "H100": DeviceFacts(cores=16, gpu=Gpu("NVIDIA H100", (9, 0), True, 80 * 10**9)),
    "A100": DeviceFacts(cores=8, gpu=Gpu("NVIDIA A100", (8, 0), True, 40 * 10**9)),
    "T4": DeviceFacts(cores=4, gpu=Gpu("Tesla T4", (7, 5), False, 16 * 10**9)),
    "V100": DeviceFacts(cores=8, gpu=Gpu("Tesla V100", (7, 0), False, 16 * 10**9)),
    "MacBook M3": DeviceFacts(platform="darwin", cores=8, mps=True, macos=(15, 0), rates=_M3),
    "MacBook M5": DeviceFacts(platform="darwin", cores=10, mps=True, macos=(26, 0), rates=_M5),
    "Zen 4 laptop": DeviceFacts(cores=8, instructions=("avx512f", "avx512_bf16"), rates=_ZEN4),
    "Xeon with AMX": DeviceFacts(cores=2, instructions=("avx512_bf16", "amx_bf16"), rates=_AMX),
    "older desktop": DeviceFacts(cores=4, instructions=("avx2",), rates=_NO_BF16),
}
"""Machines by name for the policy table; the same rules as for the machine at hand."""
CHOICES = ("device", "dtype", "scaler", "tf32", "channels_last", "compile", "threads", "workers", "micro_batch")

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


def report(result: dict[str, Any]) -> str:
    """What `measure` returned, as text: machine, measured rates, what `auto` uses and why."""
    processor, facts, versions = result["processor"], result["facts"], result["environment"]["versions"]
    caches = ", ".join(f"{c['bytes'] / 2**20:.0f} MiB for {c['shared_by']} processors" for c in result["l3"])
    lines = [
        ("processor", f"{processor['name']} (family {processor['family']}), {facts['cores']} usable cores"),
        ("instructions", " ".join(facts["instructions"])),
        ("L3", f"{caches or 'not reported'}; V-Cache: {'yes' if facts['vcache'] else 'no'}"),
        ("memory", f"{facts['memory'] / 2**30:.1f} GiB usable"),
        ("GPU", facts["gpu"]["name"] if facts["gpu"] else facts["gpu_problem"]),
        ("FP8", "in hardware, and not used here" if result["fp8"] else "no"),
        ("versions", ", ".join(f"{name} {versions[name]}" for name in STACK if name in versions)),
        ("device", result["device"]),
    ]
    for name, rate in result["measured"].items():
        lines.append(("measured", f"{name}: {rate:,.1f} {'GB/s' if name == 'copy' else 'GFLOP/s'}"))
    for name, item in result["suggested"].items():
        lines.append(("auto", f"{name} = {item['value']} ({item['why']})"))
    return "\n".join(f"{name:12} {text}" for name, text in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m matrixlib.hardware.probe`: measure this machine, keep it, print it; 2 where a device is absent."""
    argparse.ArgumentParser(description="Measures what this machine can do.").parse_args(arguments)
    try:
        result = measure()
        save(result)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(report(result))
    return 0


def policy_table() -> pd.DataFrame:
    """What the policy decides for `MACHINES` with the preset `small`, a row each; the same on every machine.

    The last column is a fact, not a choice: whether the hardware multiplies FP8, which nothing here uses.
    """
    settings = configuration.load_shared("small")
    rows = {}
    for name, facts in MACHINES.items():
        runtime = runtimes.policy(facts, settings.runtime, settings.train, settings.data)
        fp8 = facts.gpu is not None and facts.gpu.fp8
        rows[name] = [runtimes.words(value) for value in (*(getattr(runtime, choice) for choice in CHOICES), fp8)]
    return pd.DataFrame.from_dict(rows, orient="index", columns=[*CHOICES, "FP8 units"])


if __name__ == "__main__":
    sys.exit(main())
