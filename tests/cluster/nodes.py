"""A Ray cluster of several real raylets on this machine, whose nodes come and go."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray.cluster_utils import Cluster

from tests.cluster.processes import descendants

HEALTH = {"health_check_period_ms": 1000, "health_check_failure_threshold": 8}
"""A node that is gone is noticed after about eight seconds, not fifteen; one that is merely slow is not lost."""


class Nodes:
    """A head that decodes nothing, and nodes with places for workers."""

    def __init__(self) -> None:
        # A socket's path may not be long, hence no folder of pytest's.
        self.folder = f"/tmp/ray-nodes-{os.getpid()}"
        head = {
            "num_cpus": 0, "include_dashboard": False, "dashboard_port": 0, "_system_config": HEALTH,
            "temp_dir": self.folder,
        }  # fmt: skip
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: list[Any] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def count(self) -> int:
        return len(self._nodes)

    def add(self, num_cpus: int = 1) -> None:
        self._nodes.append(self._cluster.add_node(num_cpus=num_cpus, wait=False))

    def lose(self, which: int = 0) -> None:
        """The node's processes are gone at once, as when its power fails: raylet, agents and workers."""
        node = self._nodes.pop(which)
        raylet = node.all_processes["raylet"][0].process.pid
        for pid in [raylet, *descendants(raylet)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def some_nodes(count: int) -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
