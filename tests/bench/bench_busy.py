"""Updates of `quick` alone and beside busy processes, with threads that wait asleep and in the library's own loops.

Run from the repository root: ``python tests/bench/bench_busy.py [--updates 60] [--busy 1]``. Two trainings of the same
seed take turns, so that a change in the machine's speed meets both alike. It prints both medians of each and their
ratio, what sleeping costs when the machine is quiet, and whether the weights are the same after as many updates.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, Any

PIECE, SETTLE = 12, 4
"""Updates that are timed in a turn, and those before them."""
OWN = {"GOMP_SPINCOUNT": "300000"}
"""What GNU's library does where nothing is set."""


def train() -> None:
    """In a process of its own: for each number read, that many updates; their seconds, or the weights' hash for 0."""
    from matrixlib.runs import run as runs

    run = runs.open_run("quick", steps=100_000)
    updates = run.train()
    next(updates)
    print("ready", flush=True)
    for line in sys.stdin:
        if count := int(line):
            print(json.dumps([next(updates).seconds for _ in range(count)]), flush=True)
        else:
            digest = hashlib.sha256()
            for tensor in run.model.state_dict().values():
                digest.update(tensor.numpy().tobytes())
            print(json.dumps(digest.hexdigest()), flush=True)
    updates.close()


class Training:
    """A process that trains when it is told to."""

    def __init__(self, environment: dict[str, str]) -> None:
        names = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", *OWN}
        variables = {name: value for name, value in os.environ.items() if name not in names} | environment
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--train"],
            env=variables | {"MATRIXLIB_REPORTS": self._folder.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._answers.readline() != "ready\n":
            raise RuntimeError("quick could not be trained here; run tests/bench/bench_busy.py --train to see why")
        self._process.send_signal(signal.SIGSTOP)
        self.updates = 0

    @property
    def _answers(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def ask(self, count: int) -> Any:
        """Seconds of so many updates; the weights' hash for 0. It does nothing, and looks at nothing, until then."""
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        self.updates += count
        self._process.send_signal(signal.SIGCONT)
        answer = json.loads(self._answers.readline())
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()
        self._folder.cleanup()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def spin() -> None:
    while True:
        pass


def medians(trainings: dict[str, Training], updates: int, others: int) -> dict[str, float]:
    """Name -> median seconds of an update beside so many busy processes, which are others in each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(-(-updates // PIECE)):
        for name in sorted(trainings, reverse=turn % 2 == 1):
            with busy(others):
                trainings[name].ask(SETTLE)
                seconds[name] += trainings[name].ask(PIECE)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60, help="that are timed")
    parser.add_argument("--busy", type=int, default=1, help="busy processes")
    options = parser.parse_args(arguments)
    trainings = {"asleep": Training({}), "the library's own": Training(OWN)}
    quiet = medians(trainings, options.updates, 0)
    beside = medians(trainings, options.updates, options.busy)
    for name in trainings:
        alone, crowded = 1000 * quiet[name], 1000 * beside[name]
        print(f"{name:18} alone {alone:6.1f} ms, beside {crowded:7.1f} ms: {crowded / alone:.2f} times")
    ours, own = (quiet[name] for name in trainings)
    print(f"sleeping costs {ours / own - 1:+.1%} when the machine is quiet")
    most = max(training.updates for training in trainings.values())
    hashes = set()
    for training in trainings.values():
        if training.updates < most:
            training.ask(most - training.updates)
        hashes.add(training.ask(0))
        training.close()
    print(f"after {most} updates the weights are {'the same, bit for bit' if len(hashes) == 1 else 'NOT THE SAME'}")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["--train"] else main(sys.argv[1:])
