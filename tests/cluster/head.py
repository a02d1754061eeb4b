"""A Ray head as a cluster's user meets it: a process of its own, with a dashboard, metrics, and an environment."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.processes import RAY_SETTINGS
from tests.waiting import wait_until

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Head:
    """A running head node."""

    address: str
    """Where drivers of their own connect."""
    jobs: str
    """Where jobs are submitted; the dashboard."""
    metrics: str
    """What Prometheus would scrape."""
    environment: dict[str, str]
    """Of the node, and so of its workers; commands against it need it, too."""

    def scrape(self) -> str:
        """The node's metrics now; none while the agent that serves them is starting."""
        try:
            with urllib.request.urlopen(self.metrics, timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.URLError:
            return ""


@contextmanager
def running_head(home: Path, **variables: str) -> Iterator[Head]:
    """Start a head of four CPUs with ``home`` as its home folder; it may need a moment yet when this returns."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
    environment = keep | {
        "HOME": str(home), **RAY_SETTINGS, "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_metrics_report_interval_ms": "500", **variables,
    }  # fmt: skip
    # Every port of its own: another Ray on this machine may have the usual ones.
    port, dashboard, agent, agent_grpc, metrics, environments = free_ports(6)
    session = Path("/tmp") / f"ray-head-{os.getpid()}"  # a socket's path may not be long
    command = [
        BIN / "ray", "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=4",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={environments}",
        "--num-gpus=0", f"--temp-dir={session}", "--disable-usage-stats", "--block",
    ]  # fmt: skip
    with (home / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
    try:
        _wait_for(port, process)
        yield Head(
            f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{metrics}/metrics", environment
        )
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(session, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    def listens() -> bool:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        return False

    wait_until("the head does not come up", listens, process)
