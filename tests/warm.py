"""Processes that start in no time, forked from one that has imported what trainings and kernels import.

``python tests/warm.py`` compiles numba's functions before processes that begin at once would each take half a minute
for them.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

TESTS = os.path.dirname(os.path.abspath(__file__))
PRELOAD = ["matrixlib.runs.injection_job", "matrixlib.engine.trainer", "matrixlib.runs.report", "torch._dynamo"]
PRELOAD += ["matrixlib.tasks.chess.task", "matrixlib.runs.notebook", "matplotlib.figure", "ipykernel.kernelapp"]
PRELOAD += ["ipykernel.zmqshell", "matplotlib_inline", "pandas"]


@functools.cache
def context() -> Any:
    """Starts processes, in the environment of its first call; None where a system lacks forkserver."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return None
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return context


class Kernel:
    """A forked kernel, as far as jupyter_client asks for a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, argv: Sequence[str], env: dict[str, str], cwd: str | None) -> None:
        self.process = context().Process(target=serve, args=(argv, env, cwd or os.curdir), daemon=True)
        self.process.start()
        self.pid = self.process.pid
        while os.getpgid(self.pid) != self.pid:  # the client signals its group, which must not be ours
            time.sleep(0.001)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def launch_kernel(command: Sequence[str], *, env: dict[str, str], cwd: str | None = None, **_: Any) -> Kernel:
    """In place of `jupyter_client.launcher.launch_kernel`. command: `python -m ipykernel_launcher` with arguments."""
    return Kernel(command[command.index("ipykernel_launcher") + 1 :], env, cwd)


def serve(argv: Sequence[str], env: dict[str, str], cwd: str) -> None:
    """A kernel, in a process of its own that looks like one that was not forked."""
    from ipykernel.kernelapp import IPKernelApp

    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [path for path in sys.path if not path.startswith(TESTS)]  # a user's kernel has none of them
    multiprocessing.current_process().daemon = False  # it may have children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    IPKernelApp.launch_instance(argv=list(argv), parent_handle=os.getppid())


def _end_with_parent() -> None:
    """The kernel's own watch looks at the process that forked it, which lives as long as the kernel does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def compile_kernels() -> None:
    """What a training and a search call of numba's functions, into the cache that all processes read."""
    from matrixlib.bench.workloads import open_loader
    from matrixlib.hardware.benchmark import make_plan
    from matrixlib.tasks import get_task, load_config
    from matrixlib.tasks.chess.benchmarks import search

    for preset, task in (("demo", "chess"), ("latin_demo", "latin")):
        open_loader(load_config(preset, get_task(task).viewer_overrides), 64).batch(0)
    for _ in search(make_plan("cpu", 0.0, brief=True)):
        pass


if __name__ == "__main__":
    compile_kernels()
