"""Parameters, time and memory of each preset's update: what the table of presets (notebooks/guides/presets.md) shows.

Run from the repository root: ``python tests/bench/bench_presets.py [preset ...]``. Each preset in a process of its own,
a few updates of its batch, of at most ROWS rows (a larger batch goes through the network in such pieces); memory is the
process's peak, torch included. The figures go to `tests/golden/presets.json`; then ``python tests/test_docs.py``.
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

ROWS = 256
LARGE_DATA = {"latin_full"}  # its squares alone take an hour to make
TARGET = Path(__file__).resolve().parents[1] / "golden" / "presets.json"


def measure(preset: str) -> dict[str, float]:
    """Figures of one preset, in this process."""
    import torch
    from cells import definitions

    from matrixlib.engine.memory import usage
    from matrixlib.hardware.runtime import resolve
    from matrixlib.hardware.speed import turns
    from matrixlib.tasks import get_task, load_config

    config = load_config(preset)
    runtime = resolve(config.runtime.model_copy(update={"device": "cpu"}), config.train, config.data)
    update = definitions("bench")["Update"](runtime, preset, {}, rows=min(config.train.batch_size, ROWS))
    seconds = turns({"": update}, 0.0)[""]
    model = get_task(config.task).task(config).build_model()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows_per_second": update.rows / seconds,
        "peak_mib": usage(torch.device("cpu"))["rss_peak_mib"],
    }


def main(names: list[str]) -> None:
    from cells import definitions

    from matrixlib import config

    record = json.loads(TARGET.read_text()) if TARGET.exists() else {"presets": {}}
    for name in names or [name for name in config.presets() if name not in LARGE_DATA]:
        done = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, text=True, check=True)
        record["presets"][name] = json.loads(done.stdout.splitlines()[-1])
        print(name, record["presets"][name], flush=True)
    record["machine"], record["date"] = (
        definitions("bench")["machine_name"]("cpu"),
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
    )
    TARGET.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2])))
    else:
        main(sys.argv[1:])
