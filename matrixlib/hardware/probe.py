"""What this machine can do: the probe notebook's measurements and tables, and where they are kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from matrixlib import config as configuration
from matrixlib import files
from matrixlib.files import write_json
from matrixlib.hardware import runtime as runtimes
from matrixlib.hardware.machine import DeviceFacts, Gpu, Rates

# Rates in GFLOP/s measured on one core pair each; only their ratios matter to the policy.
_ZEN4 = Rates(183, 420, 160, 165, 300, 310)
_AMX = Rates(235, 1972, 190, 205, 480, 753)
_NO_BF16 = Rates(120, 0, 90, 95, 0, 0)
MACHINES: dict[str, DeviceFacts] = {
    "H200": DeviceFacts(cores=16, gpu=Gpu("NVIDIA H200", (9, 0), True, 141 * 10**9)),
    "A100": DeviceFacts(cores=8, gpu=Gpu("NVIDIA A100", (8, 0), True, 40 * 10**9)),
    "T4": DeviceFacts(cores=4, gpu=Gpu("Tesla T4", (7, 5), False, 16 * 10**9)),
    "MacBook M3": DeviceFacts(platform="darwin", cores=8, mps=True, macos=(15, 0)),
    "Zen 4 laptop": DeviceFacts(cores=8, instructions=("avx512f", "avx512_bf16"), rates=_ZEN4),
    "Xeon with AMX": DeviceFacts(cores=2, instructions=("avx512_bf16", "amx_bf16"), rates=_AMX),
    "older desktop": DeviceFacts(cores=4, instructions=("avx2",), rates=_NO_BF16),
}
"""Machines by name for the policy table; the same rules as for the machine at hand."""


def folder() -> Path:
    """Where the probe's summary.json lies."""
    return files.reports_root() / "probe"


def measure(device: str = "auto", seconds: float = 2.0) -> dict[str, Any]:
    """What `runtime.probe` finds and the loader's rate; kept in reports/probe/summary.json."""
    found = runtimes.probe(seconds, device)
    found["loader"] = _loader_rate()
    folder().mkdir(parents=True, exist_ok=True)
    write_json(folder() / "summary.json", found)
    return found


def report(found: dict[str, Any]) -> str:
    """What `measure` found, as text: machine, measured rates, what `auto` uses and why."""
    processor, facts = found["processor"], found["facts"]
    caches = ", ".join(f"{c['bytes'] / 2**20:.0f} MiB for {c['shared_by']} processors" for c in found["l3"])
    lines = [
        f"processor    {processor['name']} (family {processor['family']}), {facts['cores']} usable cores",
        f"instructions {' '.join(facts['instructions'])}",
        f"L3           {caches or 'not reported'}; V-Cache: {'yes' if facts['vcache'] else 'no'}",
        f"memory       {facts['memory'] / 2**30:.1f} GiB usable",
        f"GPU          {facts['gpu']['name'] if facts['gpu'] else facts['gpu_problem']}",
        f"torch        {found['environment'].get('torch', 'not installed')}",
        f"device       {found['device']}",
        *(
            f"measured     {name}: {rate:,.1f} {'GB/s' if name == 'copy' else 'GFLOP/s'}"
            for name, rate in found["measured"].items()
        ),
        *(
            f"auto         {name} = {item['value']} ({item['why']})"
            for name, item in found["suggested"].items()
        ),
    ]
    return "\n".join(lines)


def loader_report(found: dict[str, Any]) -> str:
    """One line on the loader's rate."""
    loader = found["loader"]
    rate = f"{loader['rows_per_second']:,.0f} positions/s in one process"
    return f"loader       {rate}, batches of {loader['batch_size']}\n"


def policy_table(preset: str = "small") -> str:
    """What the policy chooses for the machines of `MACHINES` with a preset; the same on every machine."""
    settings = configuration.load(preset)
    names = ("device", "dtype", "scaler", "channels_last", "compile", "threads", "workers", "micro_batch")
    lines = [f"{'machine':15}" + "".join(f"  {name}" for name in names)]
    for machine, facts in MACHINES.items():
        chosen = runtimes.policy(facts, settings.runtime, settings.train, settings.data)
        cells = (f"{_word(getattr(chosen, name)):>{len(name) + 2}}" for name in names)
        lines.append(f"{machine:15}" + "".join(cells))
    return "\n".join(lines) + "\n"


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _loader_rate(batch_size: int = 1024, batches: int = 20) -> dict[str, float]:
    """Rows per second that one process gathers and prepares, after a warm-up."""
    from matrixlib.data.catalogue import Catalogue
    from matrixlib.data.loader import Loader
    from matrixlib.tasks.chess.records import LAYOUT
    from matrixlib.tasks.chess.sample_set import unpack_sample
    from matrixlib.tasks.chess.task import ChessTask

    settings = configuration.load("demo")
    assert isinstance(settings, configuration.ChessConfig)
    rows = Catalogue(unpack_sample()).shards("train")
    loader = Loader(rows, LAYOUT, batch_size, settings.seed, ChessTask(settings).prepare)
    for i in range(5):
        loader.batch(i)
    started = time.perf_counter()
    for i in range(5, 5 + batches):
        loader.batch(i)
    return {
        "rows_per_second": batch_size * batches / (time.perf_counter() - started),
        "batch_size": batch_size,
    }
