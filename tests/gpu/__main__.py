"""Is this card right, and how fast is it? Sixteen parts, each in a process of its own; a table at the end.

    make gpu [DEVICE=cuda] [PART=3] [WHEELS=folder]
    python tests/gpu [--device cuda] [--part 3,5] [--wheels folder]

Nothing needs to be installed: packages that are missing are taken from a folder of wheels. `--device cpu` is a dry run
of all that a CPU can do, with tiny networks. A record is kept in reports/bench/<card>/, as of the benchmarks. The exit
code is 1 where a part failed, 2 where the check cannot begin.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parts import DEVICES, PARTS
from wheels import ROOT, add_path, missing, unpack


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python tests/gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=DEVICES)
    parser.add_argument("--part", default="", help="numbers of parts, separated by commas; all without any")
    parser.add_argument("--wheels", default="", help="folder of wheels of packages that are missing here")
    flags = parser.parse_args(arguments)
    numbers = {int(word) for word in flags.part.split(",") if word.strip().isdigit()}
    parts = [part for part in PARTS if not numbers or part.number in numbers]
    if flags.part and len(parts) != len(flags.part.split(",")):
        return refuse(f"--part {flags.part}: there are parts 1 to {len(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="matrixlib-gpu-") as folder:
        add_path(ROOT, Path(__file__).parent)
        if flags.wheels:
            try:
                names = unpack(Path(flags.wheels).expanduser(), Path(folder) / "wheels")
            except (ValueError, OSError) as error:
                return refuse(str(error))
            print(f"from wheels: {', '.join(names) or 'nothing, as all of them are here already'}")
        if lacking := missing():
            return refuse(
                f"not installed here: {', '.join(lacking)}; give WHEELS=<folder> with their wheels and those of what "
                f"they need, made elsewhere with `pip wheel --wheel-dir <folder> {' '.join(lacking)}`"
            )
        from processes import run_part

        from matrixlib.hardware import machine
        from matrixlib.hardware.runtime import select_device

        try:
            select_device(machine.facts(), flags.device)
        except ValueError as error:
            return refuse(f"{error}; DEVICE=cpu makes a dry run")
        results = []
        for part in parts:
            print(f"{part.number:2}  {part.title} ...", flush=True)
            result = run_part(part, flags.device, Path(folder) / f"part_{part.number:02d}")
            results.append(result)
            keep(results)
            print(f"    {result['verdict']} after {result['seconds']:.0f} s. {result['reason']}".rstrip(), flush=True)
            for fact in result["facts"]:
                print(f"    {fact}", flush=True)
            if result["verdict"] == "failed":
                print(result["log"], flush=True)
    show(results)
    return 1 if any(result["verdict"] == "failed" for result in results) else 0


def refuse(text: str) -> int:
    """Say why the check cannot begin."""
    print(text, file=sys.stderr)
    return 2


def record_of(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The record of these results, in the form of the benchmarks'; {} where no part got as far as the device."""
    head = next((dict(result["head"]) for result in results if result["head"]), {})
    if not head:
        return {}
    figures = {f"{result['part']} {result['title']}": result["figures"] for result in results if result["figures"]}
    parts = [
        {key: value for key, value in result.items() if key not in ("figures", "head", "log")} for result in results
    ]
    return {**head, "figures": figures, "parts": parts}


def keep(results: Sequence[Mapping[str, Any]]) -> None:
    """Write the record, each time again: what is known is not lost where a later part takes the machine with it."""
    from matrixlib.bench import report

    if record := record_of(results):
        report.keep(record)


def show(results: Sequence[Mapping[str, Any]]) -> None:
    """The tables of the end."""
    import pandas as pd

    from matrixlib.bench import report

    rows = [
        {
            "part": f"{result['part']} {result['title']}",
            "verdict": result["verdict"],
            "seconds": f"{result['seconds']:.0f}",
            "why": result["reason"][:100],
        }
        for result in results
    ]
    record = record_of(results)
    print(f"\n{record.get('machine', '')}\n{pd.DataFrame(rows).set_index('part').to_string()}")
    if record.get("figures"):
        print(f"\n{report.table(record).to_string()}\n\n{report.regressions(record)[1]}")


if __name__ == "__main__":
    sys.exit(main())
