"""The job as a cluster's user runs it: submitted to a real head with ``ray job submit``."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pyarrow.parquet as pq

from tests.cluster.head import BIN, Head
from tests.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
STARTING = ("Failed to connect", "Connection refused", "No available agent")
"""What a head that is not quite up says."""


def submit(head: Head, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Submit the main job from the repository's root and wait for its end; the head may still be starting."""
    command = [
        BIN / "ray", "job", "submit", "--address", head.jobs, *options, "--working-dir", ".", "--", "python",
        "jobs/generate.py", *arguments,
    ]  # fmt: skip
    for _ in range(30):
        run = subprocess.run(
            command, cwd=ROOT, env=head.environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        if not any(sign in run.stderr for sign in STARTING):
            break
        time.sleep(1)
    return run


def test_a_stopped_job_ends_in_time_and_goes_on_when_submitted_again(head: Head, tmp_path: Path) -> None:
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
    started = submit(head, *settings, options=options)
    assert started.returncode == 0, started.stdout + started.stderr
    wait_until("there are never two parts", lambda: len(list((output / "data").glob("train-*"))) >= 2)
    stop = [BIN / "ray", "job", "stop", "--address", head.jobs, name]
    stopped = subprocess.run(stop, env=head.environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert f"Job '{name}' was stopped" in stopped.stdout + stopped.stderr
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["state"], summary["sessions"][0]["exit_code"]) == ("interrupted", 143)
    assert not (output / ".lease").exists()  # given back: the job had the time to end by itself
    kept = {path: path.stat().st_mtime_ns for path in (output / "data").glob("train-*")}
    assert 2 <= len(kept) < 20

    run = submit(head, *settings)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"Resuming: {len(kept)} parts" in run.stdout
    assert pq.read_table(output / "data")["row_id"].to_pylist() == list(range(40))
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
