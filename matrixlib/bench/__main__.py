"""Benchmark this machine: execute bench.ipynb, or probe.ipynb, and print its outputs.

The notebook is kept in `reports/bench/`, with a record for each machine.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import nbformat
import papermill

from matrixlib import files
from matrixlib.hardware import machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if the notebook's verdict fails, 2 if something cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m matrixlib.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", action="store_true", help="only what the machine is, can do and uses")
    parser.add_argument("--only", default="", help="workloads, separated by commas, such as updates,loader")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--network", default="", help="Lc0's weights (.pb.gz), for a search with Lc0 beside it")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of each group of figures")
    parser.add_argument("--compile", action="store_true", help="torch.compile on a CPU, too: takes minutes")
    parser.add_argument("--fail", action="store_true", help="exit with 1 where something got slower")
    flags = parser.parse_args(arguments)
    if flags.hardware:
        return show("probe", {"device": flags.device})
    only = {"only": [name for name in flags.only.split(",") if name], "brief": False}
    names = ("device", "seconds", "compile", "fail", "network")
    return show("bench", {name: getattr(flags, name) for name in names} | only)


def show(name: str, parameters: dict[str, Any]) -> int:
    """Execute a notebook and print its tables and texts."""
    path = files.reports_root() / name / f"{name}.ipynb"
    machine.set_waiting_policy()  # for the notebook's kernel
    problem = None
    try:
        files.make_folder(path.parent)
        quiet = ["--log-level=ERROR"]  # ipykernel warns about unencrypted TCP on every start
        source = files.NOTEBOOKS / path.name
        with files.writing(path.parent):
            papermill.execute_notebook(source, path, parameters, kernel_name="python3", extra_arguments=quiet)
    except files.FolderError as error:
        print(error, file=sys.stderr)
        return 2
    except papermill.PapermillExecutionError as error:
        problem = error
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if text := output.get("text") or ("" if "image/png" in data else data.get("text/plain")):
                print(f"{text.rstrip()}\n")
    if problem is None:
        return 0
    print(f"{problem.ename}: {problem.evalue}", file=sys.stderr)
    return 1 if problem.ename == "VerdictFailed" else 2


if __name__ == "__main__":
    sys.exit(main())
