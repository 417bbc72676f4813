"""Golden runs: what a training of chess, one of Latin squares and a cycle of self-play compute, to the last bit.

    python tests/golden_runs.py FOLDER            compute them in FOLDER and print them as JSON
    python tests/golden_runs.py FOLDER --record   and keep them as tests/golden/runs.json

Every library is held to the instructions that all x86-64 machines of the last ten years have, so that machines with
and without AVX-512 compute the same bits. Other versions of torch or numpy may round otherwise: the versions are kept.
"""

import hashlib
import itertools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden" / "runs.json"
INSTRUCTIONS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    "OMP_NUM_THREADS": "1",
}
SETTINGS = {
    "runtime": {"device": "cpu", "precision": "fp32", "threads": 1, "channels_last": False, "compile": False},
    "train": {"micro_batch": 64},
    "data": {"workers": 0, "prefetch": 2},
}
UPDATES = 200


def execute(folder: Path, updates: int = UPDATES) -> None:
    """Train and play in a process of its own, in an empty folder; with fewer updates of the trainings no game is
    played."""
    environment = {**os.environ, **INSTRUCTIONS, "MATRIXLIB_REPORTS": str(folder), "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, __file__, str(folder), "--inside", str(updates)]
    subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)


def compute(folder: Path) -> dict[str, Any]:
    """The golden runs, computed by this machine."""
    execute(folder)
    return {
        "versions": versions(),
        **{name: training(folder / name) for name in ("demo", "latin_demo")},
        "cycle": selfplay(folder),
    }


def versions() -> dict[str, str]:
    """What the bits depend on beside our own code."""
    import numpy
    import torch

    return {"machine": platform.machine(), "torch": torch.__version__, "numpy": numpy.__version__}


def run_all(updates: int) -> None:
    """Train and play in this process; what is looked at is what they leave on the disk."""
    from matrixlib.runs import cycle as cycles
    from matrixlib.runs import ending
    from matrixlib.runs import run as runs

    ending.UNDRAWN |= {"train", "cycle"}
    for preset in ("demo", "latin_demo"):
        run = runs.open_run(preset, "cpu", 0, preset, UPDATES, SETTINGS)
        for _ in itertools.islice(run.train(), updates if updates < UPDATES else None):  # the whole one with its end
            pass
        run.close()
    if updates < UPDATES:
        return
    played_out = {"adjudicate_plies": 0, "material": 0.0}  # as when the golden runs were recorded
    for _ in cycles.open_cycle("demo", "cpu", "cycle", {"network": SETTINGS, "selfplay": played_out}).train():
        pass


def training(folder: Path) -> dict[str, Any]:
    """Loss, its terms and gradient norm of each update, validations, held-out figures, and a digest of the weights."""
    rows = rows_of(folder)
    newest = max((folder / "checkpoints").glob("step_*"))
    weights = hashlib.sha256()
    for name in ("model", "ema"):
        raw = (newest / f"{name}.safetensors").read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        head = json.dumps(json.loads(raw[8:end])).encode()  # with spaces, as when the golden runs were recorded
        head += b" " * (-len(head) % 8)
        weights.update(len(head).to_bytes(8, "little") + head + raw[end:])
    evaluation = json.loads((folder / "summary.json").read_text())["evaluation"]
    return {
        "loss": [row["loss"] for row in rows],
        "gradient_norm": [row["grad_norm"] for row in rows],
        "terms": {term: digest([row["losses"][term] for row in rows]) for term in rows[0]["losses"]},
        "metrics": digest([row["metrics"] for row in rows]),
        "validation": [row["validation"]["loss"] for row in rows if row.get("validation")],
        "held_out": {name: figure for name, figure in evaluation.items() if name != "reliability"},
        "weights": weights.hexdigest(),
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, a row for each update."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def selfplay(folder: Path) -> dict[str, Any]:
    """Games of self-play without their ids, games of the matches, and what was learned of them."""
    import numpy as np

    out: dict[str, Any] = {"shards": {}, "matches": {}}
    for path in sorted((folder / "cycle" / "shards").rglob("*.npz")):
        with np.load(path) as members:
            records = members["records"]
            columns = {name: records[name] for name in records.dtype.names if name != "game"}
            columns["wdl"] = np.zeros_like(records["wdl"])  # unknown when the golden runs were recorded
            columns |= {name: members[name] for name in members if name.startswith("policy")}
            played = hashlib.sha256()
            for name in sorted(columns):
                played.update(name.encode() + np.ascontiguousarray(columns[name]).tobytes())
        out["shards"][path.stem] = {"positions": len(records), "sha256": played.hexdigest()}
    for path in sorted((folder / "cycle" / "matches").glob("*.pgn")):
        out["matches"][path.stem] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out | {"training": training(folder / "cycle-001")}


def digest(value: Any) -> str:
    """SHA-256 of JSON data; a float is written with all of its bits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def main() -> None:
    folder = Path(sys.argv[1])
    if "--inside" in sys.argv:
        run_all(int(sys.argv[-1]))
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(compute(folder), indent=1) + "\n"
    if "--record" in sys.argv:
        GOLDEN.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
