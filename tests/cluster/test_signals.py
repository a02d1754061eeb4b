"""Drivers that are interrupted or killed, and what the same command does afterwards. Real processes, one shared Ray."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import JobFolder, expected, keys

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import json, sys
from cluster.config import JobConfig
from cluster.driver import run_job
from cluster.errors import UserError
engine, settings = sys.argv[1], json.loads(sys.argv[2])
try:
    sys.exit(run_job(JobConfig(**settings), engine_factory="tests.cluster.fake_engine:" + engine))
except UserError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def start(folder: JobFolder, local_ray: str) -> Callable[..., subprocess.Popen[str]]:
    """Start a driver of its own on the tests' Ray."""

    def start(prompts: str, engine: str = "slow", **settings: Any) -> subprocess.Popen[str]:
        config = folder.config(prompts, shard_rows=10, ray_address=local_ray, **settings)
        values = json.dumps({name: getattr(config, name) for name in vars(config)})
        command = [sys.executable, "-c", DRIVER, engine, values]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def wait_for_parts(folder: JobFolder, count: int, driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(folder.parts) < count:
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupted_killed_and_resumed_gives_what_an_undisturbed_run_gives(
    folder: JobFolder, start: Callable[..., subprocess.Popen[str]]
) -> None:
    prompts = folder.write_prompts(300)
    for parts, number, code in ((3, signal.SIGTERM, 143), (8, signal.SIGKILL, -9)):
        driver = start(prompts)
        wait_for_parts(folder, parts, driver)
        before = {path.name: path.stat().st_mtime_ns for path in folder.parts[:parts]}
        sent = time.monotonic()
        driver.send_signal(number)
        out, err = driver.communicate(timeout=10)
        assert driver.returncode == code, (out, err)
        assert time.monotonic() - sent < 2.0
        assert {path.name: path.stat().st_mtime_ns for path in folder.parts if path.name in before} == before
        if number != signal.SIGKILL:
            assert "the same command goes on from here" in out
            assert folder.summary()["state"] == "interrupted"

    second = start(prompts)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, (out, err)
    table = folder.rows()
    assert keys(table) == [(row, 0) for row in range(300)]
    assert all(line.items() >= expected(line["row_id"]).items() for line in table.to_pylist())
    assert sorted(path.name for path in folder.output.iterdir()) == [
        "README.md", "data", "report.html", "run.json", "shards.parquet", "stats", "summary.json",
    ]  # fmt: skip
    assert not folder.leftovers


def test_a_second_driver_on_the_same_output_refuses(
    folder: JobFolder, start: Callable[..., subprocess.Popen[str]]
) -> None:
    prompts = folder.write_prompts(300)
    first = start(prompts, engine="slower")
    wait_for_parts(folder, 1, first)
    second = start(prompts, engine="slower")
    _, err = second.communicate(timeout=30)
    assert second.returncode == 2
    assert "another driver" in err
    assert str(folder.output) in err
    assert len(err.strip().splitlines()) == 1
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=10)
    assert first.returncode == 130
