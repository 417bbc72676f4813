"""Positions per second of a network by what evaluates it (torch, compiled, ONNX, 8 bits) and by batch.

    python tests/bench/bench_inference.py [--device auto] [--seconds 3] [--no-compiled]

Through `Net.predict`, from packed positions to probabilities on the host; random weights, held-out positions, medians
of calls in turns. "limit" is the measured matrix rate over the network's operations, "share" the best rate over it.
"""

import argparse
import tempfile
import time
from pathlib import Path

from matrixlib.hardware.runtime import resolve
from matrixlib.tasks import load_config
from matrixlib.tasks.chess.evaluate import onnx
from matrixlib.tasks.chess.evaluate import throughput as inference
from matrixlib.tasks.chess.evaluate.net import Net
from matrixlib.tasks.chess.task import ChessTask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each engine and batch")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    for preset, sizes in (("quick", inference.SIZES), ("matrix0_53m", (32,))):
        settings = load_config(preset, {"runtime": {"device": args.device, "compile": False}})
        runtime, task = resolve(settings.runtime, settings.train, settings.data), ChessTask(settings)
        runtime.apply()
        net = Net(task.build_model(), task, runtime)
        print(f"{preset}: {net.parameters:,} parameters, {net.runtime.device}, {net.runtime.threads} threads")
        print("\n".join(net.serving.reasons))
        with tempfile.TemporaryDirectory() as folder:
            # Compiling the large network takes minutes and tells nothing else.
            nets = onnx.engines(net, Path(folder), args.compiled and preset == "quick")
            start = time.perf_counter()
            for name, asked in nets.items():
                if name.startswith("compiled"):
                    for rows in sizes:
                        asked.predict(inference.positions(asked, rows))
            if args.compiled and preset == "quick":
                print(f"compiling for {len(sizes)} sizes and two dtypes: {time.perf_counter() - start:.0f} s")
            print(inference.table(inference.measure(nets, sizes, args.seconds)).to_string(), flush=True)


if __name__ == "__main__":
    main()
