"""Parts on a real Ray cluster on this machine: killed nodes lose nothing, and nothing is left behind."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import hold, node_options, ray_cluster, square
from test_cycle import TINY

from matrixlib.files import utc_now
from matrixlib.runs import cycle
from matrixlib.runs.cycle_games import Generation, read_generations
from matrixlib.runs.fleet import FleetError, compute

NODES = 2
SMALL = TINY | {"generations": 1, "chunk": 4}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    pytest.importorskip("ray.cluster_utils", reason="`pip install 'matrixlib[ray]'`")
    with ray_cluster() as running:
        yield running


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """The cluster with all of its nodes: a test may kill some."""
    for _ in range(NODES - len(nodes.worker_nodes)):
        nodes.add_node(**node_options())
    return nodes


def written(path: Path) -> int:
    """The process that holds a part."""
    while not path.exists():
        time.sleep(0.02)
    return int(path.read_text())


def gone(pid: int) -> bool:
    """Whether a process ends, within a time that is long for that."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.mark.slow
def test_a_node_that_is_killed_gives_its_part_back(nodes: Any, tmp_path: Path) -> None:
    for _ in range(2):
        nodes.add_node(**node_options())
    parts: list[tuple[Any, Any]] = [("held", partial(hold, tmp_path)), *((n, partial(square, n)) for n in range(5))]
    with closing(compute(parts, [100], kind="ray")) as results:
        seen = dict([next(results)])
        above = {process.pid for process in psutil.Process(written(tmp_path / "pid")).parents()}
        (node,) = (node for node in nodes.worker_nodes if raylet(node) in above)
        nodes.remove_node(node, allow_graceful=False)
        seen |= dict(results)
    assert seen == {number: number**2 + 100 for number in range(5)} | {"held": "done"}
    assert gone(written(tmp_path / "pid"))


def contents(root: Path) -> dict[str, bytes]:
    """What a cycle leaves, but for times and durations."""
    patterns = ("c/shards/*/*.npz", "c/matches/*", "c-001/checkpoints/step_*/model.safetensors")
    return {str(path.relative_to(root)): path.read_bytes() for pattern in patterns for path in root.glob(pattern)}


@pytest.mark.soak
def test_a_cycle_is_byte_for_byte_that_of_one_machine_though_a_node_is_killed(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun = Generation.write, utc_now()
    left: list[int] = []

    def watched(generation: Generation, folder: Path, **changes: Any) -> Generation:
        if "chunks" in changes:
            left.append(len(cluster.worker_nodes))
            if "ray" in str(folder) and len(left) == 1:
                cluster.remove_node(max(cluster.worker_nodes, key=raylet), allow_graceful=False)
        return write(generation, folder, **changes)

    monkeypatch.setattr(Generation, "write", watched)
    for kind in ("ray", "local"):
        root = tmp_path / kind
        monkeypatch.setenv("MATRIXLIB_REPORTS", str(root))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            current = cycle.open_cycle("demo", "cpu", "c", SMALL | {"fleet": kind})
            Generation(number=1, begun=begun).write(root / "c")
            (generation,) = current.train()
        assert generation.decision is not None
    assert left[1:5] == [left[0] - 1] * 4, "it was killed amid self-play"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(contents(tmp_path / "ray")) == 6 + 3 + 2
    found = [read_generations(tmp_path / kind / "c")[1] for kind in ("ray", "local")]
    one, two = [(generation.match, generation.anchor, list(generation.chunks)) for generation in found]
    assert one == two


@pytest.mark.soak
def test_a_part_that_is_not_wanted_any_more_is_interrupted_and_signals_are_as_before(
    cluster: Any, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with closing(compute([("held", partial(hold, tmp_path)), ("done", partial(square, 2))], kind="ray")) as results:
        assert next(results) == ("done", 4)
        pid = written(tmp_path / "pid")
    assert gone(pid)
    assert signal.getsignal(signal.SIGTERM) is before, "trainings save at SIGTERM"


def test_without_a_cluster_it_says_how_to_begin_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(FleetError, match="`ray start --head` begins one"):
        next(compute([(0, print)], kind="ray"))
