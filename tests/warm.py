"""Processes that start in no time, forked from one that has imported what trainings and kernels import.

``python tests/warm.py`` compiles numba's functions and the tests, before processes that begin at once would each take
half a minute and ten seconds for them.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

with suppress(ImportError):  # no system without POSIX has it
    from multiprocessing import forkserver

TESTS = os.path.dirname(os.path.abspath(__file__))
PRELOAD = ["matrixlib.runs.start", "matrixlib.engine.trainer", "matrixlib.runs.report", "torch._dynamo"]
PRELOAD += ["matrixlib.tasks.chess.task", "matrixlib.runs.notebook", "matplotlib.figure", "ipykernel.kernelapp"]
PRELOAD += ["ipykernel.zmqshell", "matplotlib_inline", "pandas", "compiled"]
FORKS = "forkserver" in multiprocessing.get_all_start_methods()


@functools.cache
def context() -> Any:
    """Starts processes, in the environment of its first call, where a system `FORKS`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), TESTS]))
    with mock.patch.dict(os.environ, PYTHONPATH=paths):
        forkserver.ensure_running()
    return context


def spare_time() -> None:
    """From now on this process measures once what the machine computes in a second, not as each run begins; parses a
    preset once; and forces no file to the disk, which takes 5 to 10 ms each time: no test cuts the power.
    """
    from matrixlib import config
    from matrixlib.hardware import speed

    for name in ("bf16_gain", "matrix_rate"):
        setattr(speed, name, functools.cache(getattr(speed, name)))
    parsed = functools.cache(config.read_yaml)
    config.read_yaml = lambda text, name: copy.deepcopy(parsed(text, name))
    os.fsync = os.fstat


class Kernel:
    """A forked kernel, as far as jupyter_client asks for a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, argv: Sequence[str], env: dict[str, str], cwd: str | None) -> None:
        server = context()
        arguments = (argv, env, cwd or os.curdir, forkserver._forkserver._forkserver_address)
        self.process = server.Process(target=serve, args=arguments, daemon=True)
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


def serve(argv: Sequence[str], env: dict[str, str], cwd: str, server: str) -> None:
    """A kernel, in a process that looks like one that was not forked; its own processes come from `server`, too, as a
    new one would import everything again."""
    from ipykernel.kernelapp import IPKernelApp

    if sys.version_info < (3, 14):  # from then on it asks for a key
        forkserver._forkserver._forkserver_address = server
        forkserver._forkserver.ensure_running = lambda: None
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    _as_started(env, cwd)
    spare_time()
    multiprocessing.current_process().daemon = False  # it may have children
    threading.Thread(target=_end_with_parent, daemon=True).start()
    IPKernelApp.launch_instance(argv=list(argv), parent_handle=os.getppid())


def run(*words: str | Path, sent: bytes = b"", cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """`python` with these words, of which the first is a script or `-m`, and this input: forked, where a system can."""
    command = list(map(str, words))
    if not FORKS:
        return subprocess.run([sys.executable, *command], input=sent, capture_output=True, cwd=cwd, check=False)
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("in", "out", "err")]
        streams[0].write_bytes(sent)
        process = context().Process(target=_run, args=(command, dict(os.environ), str(cwd or Path.cwd()), streams))
        process.start()
        process.join()
        return subprocess.CompletedProcess(command, process.exitcode, *(path.read_bytes() for path in streams[1:]))


def _run(command: list[str], env: dict[str, str], cwd: str, streams: list[Path]) -> None:
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
    sys.stdin = os.fdopen(0, closefd=False)
    _as_started(env, cwd)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def _as_started(env: dict[str, str], cwd: str) -> None:
    """In a forked process: the environment, folder and paths of one that a user starts."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [path for path in sys.path if not path.startswith(TESTS)]


def _end_with_parent() -> None:
    """The kernel's own watch looks at the process that forked it, which lives as long as the kernel does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def compile_kernels() -> None:
    """What a training and a search call of numba's functions, into the cache that all processes read, or from it."""
    from matrixlib.data.catalogue import Catalogue
    from matrixlib.data.loader import Loader
    from matrixlib.play.game import uniform
    from matrixlib.play.search import Search, SearchOptions
    from matrixlib.tasks import get_task, load_config
    from matrixlib.tasks.chess.game import ChessGame

    every_head = {"model": {"ssl": ["piece", "threat", "pin", "fork", "control"]}}
    for preset, changes in (("demo", every_head), ("latin_demo", {})):
        config = load_config(preset, changes)
        spec = get_task(config.task)
        Loader(Catalogue(spec.folder(config)).shards("train"), spec.layout, 64, 0, spec.task(config).prepare).batch(0)
    tree = Search(ChessGame(), uniform, SearchOptions(), 1)
    tree.reset(0, ChessGame().initial(1))
    tree.run(4)


if __name__ == "__main__":
    collecting = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", TESTS]
    with subprocess.Popen(collecting, stdout=subprocess.DEVNULL):  # writes the tests down as pytest changes them
        compile_kernels()
