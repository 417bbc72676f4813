"""A fleet on a real Ray cluster on this machine: killed and slow nodes, and nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
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

from matrixlib.data.catalogue import Catalogue
from matrixlib.files import utc_now
from matrixlib.runs import cycle, cycle_games, ray_fleet, sweep
from matrixlib.runs.cycle_games import Games
from matrixlib.runs.cycle_state import Generation, read_generations
from matrixlib.runs.fleet import gather, open_fleet
from matrixlib.runs.processes import FleetError
from matrixlib.runs.ray_fleet import RayFleet

NODES = 3
TINY: dict[str, Any] = {
    "games": 20,
    "chunk": 4,
    "selfplay": {"parallel": 4, "num_simulations": 4, "num_quick_simulations": 2, "plies": 8},
    "match": {"pairs": 3, "batch": 1, "num_simulations": 2, "plies": 8, "anchor_pairs": 2},
    "network": {
        "train": {"steps": 2, "batch_size": 16},
        "validation": {"interval": 2, "sample": 16},
        "checkpoint": {"interval": 2},
        "runtime": {"precision": "fp32", "threads": 1, "channels_last": False},
    },
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    pytest.importorskip("ray.cluster_utils", reason="`pip install 'matrixlib[ray]'`")
    with ray_cluster() as running:
        yield running


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """The cluster with all of its nodes: a test may kill some."""
    for _ in range(NODES - len(nodes.list_all_nodes())):
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
    victim = nodes.add_node(**node_options(threads=2))  # more than another has free, so the first part is this node's
    parts: dict[Any, Any] = {number: partial(square, number) for number in range(5)}
    with closing(open_fleet("ray", 0, False, tmp_path / "log")) as fleet:  # with a log nothing is computed twice
        while fleet.slots < len(nodes.list_all_nodes()) + 1:
            assert not fleet.collect()
        results = {}
        fleet.submit("held", partial(hold, tmp_path))
        above = {process.pid for process in psutil.Process(written(tmp_path / "pid")).parents()}
        assert raylet(victim) in above
        nodes.remove_node(victim, allow_graceful=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while "held" not in results:
                results |= dict(fleet.collect())
        assert any("is left out" in str(warning.message) for warning in told)
        results |= dict(gather(fleet, parts, 100))
    assert results == {number: number**2 + 100 for number in range(5)} | {"held": "done"}
    assert gone(written(tmp_path / "pid"))


@pytest.mark.soak
def test_a_slow_node_does_not_hold_up_the_rest_and_nothing_stays_behind(cluster: Any, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    parts: dict[Any, Any] = {"held": partial(hold, tmp_path)} | {n: partial(square, n) for n in range(4)}
    with closing(RayFleet(0, False, None)) as fleet:
        assert dict(gather(fleet, parts))["held"] == "done"
        pid = written(tmp_path / "pid")
        assert psutil.pid_exists(pid), "it is not waited for, and neither is its node"
        assert dict(gather(fleet, {"next": partial(square, 3)})) == {"next": 9}
    assert gone(pid)
    assert signal.getsignal(signal.SIGTERM) is before, "trainings save at SIGTERM"


def contents(root: Path) -> dict[str, bytes]:
    """What a cycle leaves, but for times and durations."""
    patterns = ("c/shards/*.npz", "c/matches/*", "c-001/checkpoints/step_*/model.safetensors")
    return {str(path.relative_to(root)): path.read_bytes() for pattern in patterns for path in root.glob(pattern)}


@pytest.mark.soak
def test_a_cycle_is_byte_for_byte_that_of_one_machine_though_a_node_is_killed(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, begun = cycle_games.keep, utc_now()
    left: list[int] = []

    def watched(catalogue: Catalogue, games: Games) -> None:
        keep(catalogue, games)
        left.append(len(cluster.worker_nodes))
        if "ray" in str(catalogue.folder) and len(left) == 1:
            cluster.remove_node(max(cluster.worker_nodes, key=raylet), allow_graceful=False)

    monkeypatch.setattr(cycle_games, "keep", watched)
    for kind in ("ray", "local"):
        root = tmp_path / kind
        monkeypatch.setenv("MATRIXLIB_REPORTS", str(root))
        (root / "c").mkdir(parents=True)
        Generation(number=1, begun=begun).write(root / "c")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            (generation,) = cycle.open_cycle("demo", "cpu", "c", TINY | {"fleet": kind}).train()
        assert generation.decision is not None
    assert left[1:5] == [left[0] - 1] * 4, "it was killed amid self-play"
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(contents(tmp_path / "ray")) == 6 + 5 + 1
    one, two = (read_generations(tmp_path / kind / "c")[1] for kind in ("ray", "local"))
    assert (one.match, one.anchor, list(one.chunks)) == (two.match, two.anchor, list(two.chunks))
    one, two = (Catalogue(tmp_path / kind / "c" / "shards").hash() for kind in ("ray", "local"))
    assert one == two


@pytest.mark.soak
def test_a_sweep_goes_on_where_a_node_was_killed(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is a run folder that all nodes see: another node resumes it."""
    monkeypatch.setenv("MATRIXLIB_REPORTS", str(tmp_path))
    options = {"space": {"optim.learning_rate": [0.001, 0.003, 0.01]}, "workers": NODES, "fleet": "ray"}
    current = sweep.open_sweep("demo", "cpu", "s", options)
    victim = max(cluster.worker_nodes, key=raylet)
    killed: list[int] = []

    def kill_amid(known: RayFleet) -> list[tuple[Any, Any]]:
        beats = list(tmp_path.glob("s-*/heartbeat.json"))
        if not killed and len(beats) == NODES:
            cluster.remove_node(victim, allow_graceful=False)
            killed.append(1)
        return collect(known)

    collect = RayFleet.collect
    monkeypatch.setattr(RayFleet, "collect", kill_amid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trials = list(current.train())
    assert killed
    assert sorted(trial.number for trial in trials) == [0, 1, 2]
    assert [result.trial.state for result in current.results()] == ["complete"] * 3


PROGRAM = """
from functools import partial
from pathlib import Path
from contextlib import closing
from matrixlib.runs.fleet import gather
from matrixlib.runs.ray_fleet import RayFleet
from ray_cluster import hold
with closing(RayFleet(0, False, None)) as fleet:
    list(gather(fleet, {0: partial(hold, Path("FOLDER"))}))
"""


@pytest.mark.soak
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_nothing_running(cluster: Any, tmp_path: Path, how: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.replace("FOLDER", str(tmp_path))])
    pid = written(tmp_path / "pid")
    actor = psutil.Process(pid).ppid()
    process.send_signal(how)
    assert process.wait(60) != 0
    assert gone(pid)
    assert gone(actor)


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(FleetError, match="`ray start --head` begins one"):
        RayFleet(0, False, None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetError, match=r"pip install 'matrixlib\[ray\]'"):
        ray_fleet.RayFleet(0, False, None)
