"""A real Ray cluster on this machine, which also a busy one starts, and parts for it that import next to nothing."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

AGENTS = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port", "metrics_export_port")


def node_options(threads: int = 1) -> dict[str, int]:
    """Threads, and ports of a node's agents, which would have 15 seconds to find their own: on a busy machine they
    take longer, and nothing here needs them."""
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.create_server(("", 0))) for _ in AGENTS]
        ports = [one.getsockname()[1] for one in sockets]
    return {"num_cpus": threads, **dict(zip(AGENTS, ports, strict=True))}


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """A cluster whose head computes nothing, and to which nodes can be added (`node_options`); all know its address."""
    from ray._private.node import Node
    from ray.cluster_utils import Cluster

    start = Node.start_ray_processes

    def quick(node: Any) -> None:  # the one port of which a node is not told, but through this file
        port = node.dashboard_agent_listen_port
        Path(node.get_session_dir_path(), f"dashboard_agent_listen_port_{node.node_id}").write_text(str(port))
        start(node)

    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    # Ray's own workers give way to everything else, beside four processes of tests for minutes
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "PYTHONPATH": paths}
    before = signal.getsignal(signal.SIGTERM)  # each node puts one of its own into this process
    with mock.patch.object(Node, "start_ray_processes", quick), mock.patch.dict(os.environ, variables):
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False} | node_options(threads=0))
        try:
            os.environ["RAY_ADDRESS"] = cluster.address
            yield cluster
        finally:
            cluster.shutdown()
            signal.signal(signal.SIGTERM, before)


def square(number: int, *shared: int) -> int:
    return number**2 + sum(shared)


def hold(folder: Path, *shared: int) -> str:
    """The first time it takes longer than anybody waits."""
    first = folder / "pid"
    if first.exists():
        return "done"
    first.with_suffix(".tmp").write_text(str(os.getpid()))
    first.with_suffix(".tmp").rename(first)
    time.sleep(600)
    return "never"
