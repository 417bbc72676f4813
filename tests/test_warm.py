"""The kernels that notebooks are replayed in."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import warm

PROGRAM = """
import os, signal, sys
sys.path.insert(0, "tests")
import warm
warm.PRELOAD[:] = ["ipykernel.kernelapp"]
kernel = warm.Kernel(["-f", sys.argv[1]], dict(os.environ), None)
print(kernel.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not warm.FORKS, reason="needs a system that forks")
def test_a_kernel_ends_with_its_tests_even_when_they_are_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "connection.json")]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(done.stdout))
        deadline = time.monotonic() + 60
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
