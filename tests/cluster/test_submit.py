"""The job as a cluster's user runs it: submitted to a real head with ``ray job submit``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STARTING = ("Failed to connect", "Connection refused", "No available agent")
"""What a head that is not quite up says."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("submit")


@pytest.fixture(scope="module")
def environment(home: Path) -> dict[str, str]:
    """A home of the test's own, and this interpreter first."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return keep | {"HOME": str(home), "RAY_AUTH_MODE": "disabled", "PATH": f"{BIN}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def head(home: Path, environment: dict[str, str]) -> Iterator[str]:
    """A head node with a dashboard; the address to which jobs are submitted."""
    # Every port of its own: another Ray on this machine may have the usual ones.
    port, dashboard, agent, agent_grpc, metrics, environments = free_ports(6)
    session = Path("/tmp") / f"ray-submit-{os.getpid()}"  # a socket's path may not be long
    command = [
        BIN / "ray", "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={environments}",
        "--num-gpus=0", f"--temp-dir={session}", "--disable-usage-stats", "--block",
    ]  # fmt: skip
    log = (home / "head.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
    yield f"http://127.0.0.1:{dashboard}"
    process.terminate()
    process.wait(30)
    shutil.rmtree(session, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def submit(
    head: str, environment: dict[str, str], *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Submit the main job from the repository's root and wait for its end; the head may still be starting."""
    command = [
        BIN / "ray", "job", "submit", "--address", head, *options, "--working-dir", ".", "--", "python",
        "jobs/generate.py", *arguments,
    ]  # fmt: skip
    for _ in range(30):
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        if not any(sign in run.stderr for sign in STARTING):
            break
        time.sleep(1)
    return run


def test_a_submitted_job_runs(head: str, environment: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "out"
    settings = ("--limit", "6", "--max-new-tokens", "24", "--workers", "1", "--shard-rows", "2")
    run = submit(head, environment, *settings, "--output", str(output))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Summary" in run.stdout
    table = pq.read_table(output / "data")
    assert table["row_id"].to_pylist() == list(range(6))
    assert set(table["finish_reason"].to_pylist()) <= {"stop", "length"}
    assert json.loads((output / "summary.json").read_text())["state"] == "done"


def test_a_stopped_job_ends_in_time_and_goes_on_when_submitted_again(
    head: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """``ray job stop`` gives SIGTERM and, three seconds later, SIGKILL."""
    output = tmp_path / "out"
    settings = (
        "--limit",
        "40",
        "--max-new-tokens",
        "24",
        "--workers",
        "1",
        "--shard-rows",
        "2",
        "--output",
        str(output),
    )
    name = f"stopped-{os.getpid()}"
    options = ("--no-wait", "--submission-id", name)
    started = submit(head, environment, *settings, options=options)
    assert started.returncode == 0, started.stdout + started.stderr
    deadline = time.monotonic() + 90
    while not (output / "data").is_dir() or len(list((output / "data").glob("train-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stop = [BIN / "ray", "job", "stop", "--address", head, name]
    stopped = subprocess.run(stop, env=environment, capture_output=True, text=True, timeout=60)
    assert f"Job '{name}' was stopped" in stopped.stdout + stopped.stderr
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["state"], summary["sessions"][0]["exit_code"]) == ("interrupted", 143)
    assert not (output / ".lease").exists()  # given back: the job had the time to end by itself
    kept = {path: path.stat().st_mtime_ns for path in (output / "data").glob("train-*")}
    assert 2 <= len(kept) < 20

    run = submit(head, environment, *settings)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Resuming: {len(kept)} parts" in run.stdout
    assert pq.read_table(output / "data")["row_id"].to_pylist() == list(range(40))
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
