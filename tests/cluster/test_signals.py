"""Drivers that are interrupted or killed, and what the same command does afterwards. Real processes, one shared Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.jobs import JobFolder, expected, keys
from tests.cluster.processes import ROOT, descendants, start_driver, wait_for_parts
from tests.stopping import STOP_S, started, stop
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def start(folder: JobFolder, local_ray: str) -> Callable[..., subprocess.Popen[str]]:
    return partial(start_driver, folder, local_ray)


def test_interrupted_killed_and_resumed_gives_what_an_undisturbed_run_gives(
    folder: JobFolder, start: Callable[..., subprocess.Popen[str]]
) -> None:
    prompts = folder.write_prompts(300)
    for parts, number, code in ((3, signal.SIGTERM, 143), (6, signal.SIGKILL, -9)):
        driver = start(prompts, engine="gated")  # which stands still after 40 more rows
        wait_for_parts(folder, parts, driver)
        before = {path.name: path.stat().st_mtime_ns for path in folder.parts[:parts]}
        sent = time.monotonic()
        driver.send_signal(number)
        out, err = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == code, (out, err)
        assert time.monotonic() - sent < STOP_S
        assert {path.name: path.stat().st_mtime_ns for path in folder.parts if path.name in before} == before
        if number != signal.SIGKILL:
            assert "the same command goes on from here" in out
            assert folder.summary()["state"] == "interrupted"

    second = start(prompts)
    out, err = second.communicate(timeout=PATIENCE_S)
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
    first = start(prompts, engine="gated")
    wait_for_parts(folder, 1, first)
    second = start(prompts, engine="gated")
    _, err = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 2
    assert "another driver" in err
    assert str(folder.output) in err
    assert len(err.strip().splitlines()) == 1
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130


@pytest.mark.usefixtures("ray_home")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_ray_starts_is_a_sentence_and_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    """Ray has a handler of its own in place then, which exits with 15 and says nothing."""
    command = [sys.executable, "jobs/generate.py", "--output", str(tmp_path / "out"), "--workers", "1"]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # Ray's first process: ray.init is under way.
    wait_until("Ray does not start", lambda: descendants(driver.pid), driver, every_s=0.01)
    sent = time.monotonic()
    driver.send_signal(number)
    assert driver.wait(PATIENCE_S) == code
    assert time.monotonic() - sent < STOP_S
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert out == f"Stopped by {signal.Signals(number).name}; the same command goes on from here.\n"
    assert err == ""
    assert not (tmp_path / "out").exists()


def test_sigterm_is_heard_while_ray_hands_it_to_the_kernel(tmp_path: Path) -> None:
    code = """
import ctypes, os, signal, time
from cluster.driver import leave
from cluster.driver.signals import Interrupted, StopSignals
with StopSignals() as signals, signals.held():
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # the default, as Ray does where it ends
    time.sleep(0.5)
    print("ready", flush=True)
    try:
        while True:
            signals.check()
            time.sleep(0.01)
    except Interrupted as interrupted:
        signals.tell(interrupted.number)
        leave(interrupted.exit_code)
"""
    with started(tmp_path, "-c", code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert stop(process, signal.SIGTERM) == "Stopped by SIGTERM; the same command goes on from here."
