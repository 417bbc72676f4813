"""A fleet on a Ray cluster: on each node an actor with as many processes as the node has threads or GPUs.

Ray brings parts and results from node to node, and says when one is gone; processes are those of `runs.processes`.
"""

import math
import os
import signal
import statistics
import threading
import time
import warnings
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from matrixlib import files
from matrixlib.hardware import machine
from matrixlib.runs.processes import GRACE, LOOK, FleetError, Lost, Part, Processes

PATIENCE = 300.0
"""Seconds without any node before that is an error."""
LATE = 1.5
"""Times the median: what takes longer is computed on another node, too, where nothing else is to be done."""
LOSSES = 3
"""Nodes that may go away under one part: then it is held to be what ends them."""


class Node:
    """The actor of a node: its processes. threads: of each."""

    def __init__(self, slots: int, threads: int, log: Path | None, reports: str) -> None:
        os.environ.update(OMP_NUM_THREADS=str(threads), MATRIXLIB_REPORTS=reports)
        self._processes = Processes(slots, log)
        self._lock = threading.Lock()

    def facts(self) -> dict[str, str]:
        """What the last bits of a computation depend on."""
        return computing()

    def submit(self, key: Hashable, part: Part, *values: Any) -> list[tuple[Any, Any]]:
        with self._lock:  # of two calls at once
            self._processes.submit(key, part, *values)
        return []

    def collect(self) -> list[tuple[Any, Any]]:
        return self._processes.collect()

    def close(self) -> None:
        self._processes.close()


def computing() -> dict[str, str]:
    """Versions and instructions of this machine, on which the last bits of what it computes depend."""
    versions = {name: metadata.version(name) for name in ("matrixlib", "torch", "numpy")}
    return versions | {"instructions": " ".join(machine.processor().instructions)}


@dataclass
class _Job:
    part: Part
    handles: tuple[Any, ...]
    losses: int = 0


@dataclass(eq=False)
class _Member:
    """A node. up: since it has said what it computes with; running: when each of its parts began."""

    node: str
    host: str
    actor: Any
    slots: int
    up: bool = False
    running: dict[Hashable, float] = field(default_factory=dict)


class RayFleet:
    """The nodes of the cluster that this machine belongs to, those that join later too.

    A part whose node goes away is computed by another, and so is one that is late when nothing else is left to do,
    unless there is a log (see `fleet.open_fleet`). Raises FleetError without Ray, a cluster or a node for it.
    """

    def __init__(self, workers: int, gpu: bool, log: Path | None) -> None:
        self._ray = _ray()
        self._workers, self._gpu, self._log = workers, gpu, log
        self._members: dict[str, _Member] = {}
        self._calls: dict[Any, _Member] = {}  # that nodes have not answered yet
        self._unfit: set[str] = set()  # nodes that could not begin
        self._why = ""  # a node was last left out
        self._jobs: dict[Hashable, _Job] = {}
        self._waiting: deque[Hashable] = deque()
        self._seconds: list[float] = []  # that parts took
        self._looked, self._working = -math.inf, time.monotonic()
        self._own = not self._ray.is_initialized()
        if self._own:
            with _same_signals():
                self._connect()
        try:
            while not self._up():
                self._hear()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        try:
            self._ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise FleetError(
                "fleet: ray found no Ray cluster: `ray start --head` begins one on this machine, and the line that it "
                "prints, on each of the others, lets them join"
            ) from error

    def _up(self) -> list[_Member]:
        return [member for member in self._members.values() if member.up]

    @property
    def slots(self) -> int:
        """At least one: what finds no node waits for one."""
        room = sum(member.slots for member in self._up())
        return max(1, min(room, self._workers or room))

    def share(self, value: Any) -> Any:
        return self._ray.put(value)

    def submit(self, key: Hashable, part: Part, *handles: Any) -> None:
        if not self._jobs:
            self._seconds.clear()
        self._jobs[key] = _Job(part, handles)
        self._waiting.append(key)
        self._assign()

    def collect(self) -> list[tuple[Any, Any]]:
        if self._log is None:
            self._repeat()
        return self._hear()

    def close(self) -> None:
        try:
            if self._log is not None and (calls := [member.actor.close.remote() for member in self._up()]):
                self._ray.wait(calls, num_returns=len(calls), timeout=GRACE + 5)
            for member in self._members.values():
                self._ray.kill(member.actor)
        finally:
            self._members.clear()
            if self._own:
                self._ray.shutdown()

    # Nodes

    def _look(self) -> None:
        """Take in nodes that are new, let go of those that are not there any more."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
        for name in self._members.keys() - alive.keys():
            self._lose(self._members[name], "it is gone")
        threads = self._threads([node["Resources"] for node in alive.values()])
        for name in alive.keys() - self._members.keys() - self._unfit:
            if slots := self._slots(alive[name]["Resources"], threads):
                self._join(alive[name], slots)
        if self._up():
            self._working = now
        elif now - self._working > PATIENCE:
            what = "GPUs" if self._gpu else "threads"
            raise FleetError(
                f"no node of the Ray cluster has {what} free for this (`ray status` lists them): let one join, or wait "
                f"for what others compute there, and start again; what was done is kept. {self._why}".strip()
            )

    def _slots(self, resources: Mapping[str, float], threads: int) -> int:
        return int(resources.get("GPU", 0)) if self._gpu else int(resources.get("CPU", 0)) // threads

    def _threads(self, nodes: list[Mapping[str, float]]) -> int:
        """Of each process: as many as still leave room for all workers."""
        cpus = [int(node.get("CPU", 0)) for node in nodes]
        counts = range(max(cpus, default=1), 1, -1) if self._workers and not self._gpu else ()
        return next((count for count in counts if sum(cpu // count for cpu in cpus) >= self._workers), 1)

    def _join(self, node: Mapping[str, Any], slots: int) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name, cpus = node["NodeID"], int(node["Resources"].get("CPU", 0))
        kind = self._ray.remote(Node).options(
            num_cpus=cpus,
            num_gpus=slots if self._gpu else 0,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
        )
        actor = kind.remote(slots, max(1, cpus // slots), self._log, str(files.reports_root().absolute()))
        self._members[name] = member = _Member(name, node["NodeManagerHostname"], actor, slots)
        self._calls[actor.facts.remote()] = member

    def _greet(self, member: _Member, facts: Mapping[str, str]) -> None:
        member.up = True
        other = [f"{key} {facts[key]}, here {value}" for key, value in computing().items() if facts[key] != value]
        if other:
            warnings.warn(
                f"node {member.host} computes by other means than this machine ({'; '.join(other)}): what comes from "
                "there may differ in its last bits",
                stacklevel=2,
            )

    def _lose(self, member: _Member, why: str) -> None:
        """Give back what a node was computing, alone."""
        del self._members[member.node]
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(member.actor)
        self._calls = {call: other for call, other in self._calls.items() if other is not member}
        elsewhere = {key for other in self._members.values() for key in other.running}
        for key in member.running.keys() & self._jobs.keys() - elsewhere:
            self._jobs[key].losses += 1
            self._waiting.appendleft(key)
        self._why = f"node {member.host} of the Ray cluster is left out: {why}"
        warnings.warn(self._why, stacklevel=2)

    # Parts

    def _free(self, key: Hashable = None) -> _Member | None:
        """The node with the most free slots, of those that do not compute this part; None where all are full."""
        members = [member for member in self._up() if key not in member.running]
        best = max(members, key=lambda member: member.slots - len(member.running), default=None)
        return best if best is not None and len(best.running) < best.slots else None

    def _assign(self) -> None:
        while self._waiting and (member := self._free()) is not None:
            self._send(self._waiting.popleft(), member)

    def _send(self, key: Hashable, member: _Member) -> None:
        job = self._jobs[key]
        member.running[key] = time.monotonic()
        self._calls[member.actor.submit.remote(key, job.part, *job.handles)] = member

    def _repeat(self) -> None:
        """Ask another node for the part that is under way longest, if it is late and nothing waits for the slot."""
        began = [(start, key) for member in self._members.values() for key, start in member.running.items()]
        keys = [key for _, key in began]
        alone = [(start, key) for start, key in began if key in self._jobs and keys.count(key) == 1]
        if self._waiting or not alone or not self._seconds:
            return
        start, key = min(alone, key=lambda pair: pair[0])
        late = time.monotonic() - start > LATE * statistics.median(self._seconds)
        if late and (member := self._free(key)) is not None:
            self._send(key, member)

    def _hear(self) -> list[tuple[Any, Any]]:
        """Results that nodes have, after a moment's wait for the first of them."""
        self._look()
        self._assign()
        for member in self._members.values():
            if member.running and member not in self._calls.values():
                self._calls[member.actor.collect.remote()] = member
        if not self._calls:
            time.sleep(LOOK)
            return []
        first, rest = self._ray.wait(list(self._calls), timeout=LOOK)
        more = self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if first and rest else []
        ended = [pair for call in [*first, *more] if call in self._calls for pair in self._answer(call)]
        for key in [key for key in self._waiting if self._jobs[key].losses >= LOSSES]:
            self._waiting.remove(key)
            del self._jobs[key]
            ended.append((key, Lost(f"was lost with its node, {LOSSES} times: perhaps it is what ends them")))
        return ended

    def _answer(self, call: Any) -> list[tuple[Any, Any]]:
        member = self._calls.pop(call)
        try:
            answer = self._ray.get(call)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
            if not member.up:
                self._unfit.add(member.node)
            self._lose(member, " ".join(str(error).split())[:500])
            return []
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        if not member.up:
            self._greet(member, answer)
            return []
        if any(isinstance(result, Lost) and result.interrupted for _, result in answer):
            self._lose(member, "its processes were interrupted")  # somebody takes the machine away
            return []
        ended = []
        for key, result in answer:
            began = member.running.pop(key)
            if self._jobs.pop(key, None) is not None:  # else it has been computed elsewhere meanwhile
                self._seconds.append(time.monotonic() - began)
                ended.append((key, result))
        return ended


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise FleetError("fleet: ray needs Ray: pip install 'matrixlib[ray]'; fleet: local needs nothing") from error
    return ray


@contextmanager
def _same_signals() -> Iterator[None]:
    """Ray puts a handler of SIGTERM in, which would keep trainings from saving at that signal."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
