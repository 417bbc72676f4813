"""Independent parts of a job, computed in this process, in local processes, or on a Ray cluster."""

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from matrixlib import files
from matrixlib.data.loader import worker_context
from matrixlib.hardware import backend

Kind: TypeAlias = Literal["local", "ray"]
Part: TypeAlias = Callable[..., Any]
K = TypeVar("K")
MAX_RETRIES = 3  # of a part whose node is lost
POLL_SECONDS = 0.5
SAVE_SECONDS = 30.0  # for cancelled parts on a cluster to save and end
_shared: tuple[Any, ...] = ()  # in a worker process


class FleetError(ValueError):
    """Parts cannot be computed; says why and what to do."""


def compute(
    parts: Iterable[tuple[K, Part]],
    shared: Sequence[Any] = (),
    *,
    kind: Kind = "local",
    workers: int = 0,
    gpu: bool = False,
    log: Path | None = None,
) -> Generator[tuple[K, Any], None, None]:
    """Yield (key, result) of every part as it finishes; `parts` is consumed as workers become free. A part is a
    picklable function of plain data whose result does not depend on where it runs, and may be run again.

    shared: arguments of every part, pickled once, and sent to each node once. workers: processes; up to 1 this process
    computes. On a cluster, 0 means all its threads, or GPUs. gpu: one GPU a part. log: output of local processes.

    Closing the generator ends running parts: SIGTERM, on a cluster KeyboardInterrupt. Raises a part's exception;
    FleetError if a process was killed, or without Ray, a cluster or a node with enough resources.
    """
    if kind == "ray":
        yield from _on_ray(parts, shared, workers, gpu)
    elif workers > 1:
        yield from _in_processes(parts, shared, workers, log)
    else:
        for key, part in parts:
            yield key, part(*shared)


def _in_processes(
    parts: Iterable[tuple[K, Part]], shared: Sequence[Any], workers: int, log: Path | None
) -> Generator[tuple[K, Any], None, None]:
    context, others = worker_context(), set(multiprocessing.active_children())
    gpus, count = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), backend.device_count()
    gpus = gpus if len(gpus) == count else [str(number) for number in range(count)]
    arguments = (pickle.dumps(tuple(shared)), context.Value("i", 0), gpus, log)
    pool = ProcessPoolExecutor(workers, context, _begin, arguments)
    todo, running = iter(parts), dict[Future[Any], K]()
    try:
        while True:
            for key, part in itertools.islice(todo, workers - len(running)):
                running[pool.submit(_run, part)] = key
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise FleetError(
            "a process was killed, perhaps for want of memory; what was done is kept: start again to resume"
        ) from error
    finally:
        if running:
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
        pool.shutdown(cancel_futures=True)


def _begin(shared: bytes, started: Any, gpus: Sequence[str], log: Path | None) -> None:
    """Initialise a worker process with one GPU. started: number of workers so far. gpus: this machine's, as
    CUDA_VISIBLE_DEVICES takes them."""
    global _shared
    files.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if log is not None:
        sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    with started.get_lock():
        if len(gpus) > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[started.value % len(gpus)]
        started.value += 1
    _shared = pickle.loads(shared)  # noqa: S301 - from the parent


def _run(part: Part) -> Any:
    return part(*_shared)


def _on_ray(
    parts: Iterable[tuple[K, Part]], shared: Sequence[Any], workers: int, gpu: bool
) -> Generator[tuple[K, Any], None, None]:
    """As Ray tasks, which are retried when a node is lost; nodes may join later."""
    ray = _connect()
    todo, running = iter(parts), dict[Any, K]()
    try:
        handles, remote = [ray.put(value) for value in shared], ray.remote(_task)
        while True:
            found = [node["Resources"].get("GPU" if gpu else "CPU", 0) for node in ray.nodes() if node["Alive"]]
            nodes = [int(count) for count in found if count]
            # threads of a part: as many as fit all `workers`
            threads = 1 if gpu or not (workers and nodes) else max(1, min(nodes) // -(-workers // len(nodes)))
            room = sum(count // threads for count in nodes)
            room = min(room, workers or room)
            if not (room or running):
                raise FleetError(
                    f"no node of the Ray cluster has {'GPUs' if gpu else 'threads'} for this (`ray status` lists "
                    "them): let one join, and start again; what was done is kept"
                )
            task = remote.options(num_cpus=threads, num_gpus=int(gpu), max_retries=MAX_RETRIES)
            for key, part in itertools.islice(todo, max(0, room - len(running))):
                running[task.remote(part, str(files.reports_root().absolute()), *handles)] = key
            if not running:
                return
            for reference in ray.wait(list(running), timeout=POLL_SECONDS)[0]:
                yield running.pop(reference), _get(ray, reference)
    finally:
        for reference in running:
            ray.cancel(reference)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=SAVE_SECONDS)
        ray.shutdown()


def _connect() -> Any:
    try:
        import ray
    except ImportError as error:
        raise FleetError("fleet: ray needs Ray: pip install 'matrixlib[ray]'; fleet: local needs nothing") from error
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise FleetError(
            "fleet: ray found no Ray cluster: `ray start --head` begins one on this machine, and the line that it "
            "prints, on each of the others, lets them join"
        ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)  # restore: Ray's would keep trainings from saving
    return ray


def _task(part: Part, reports: str, *shared: Any) -> Any:
    os.environ["MATRIXLIB_REPORTS"] = reports
    return part(*shared)


def _get(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:500]
        raise FleetError(
            f"a part was lost {MAX_RETRIES + 1} times, perhaps it is what ends its nodes ({reason}); what was done is "
            "kept: start again to resume"
        ) from error
