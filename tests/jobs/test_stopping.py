"""Ctrl-C and SIGTERM of every command, at its start and at work: one sentence, the signal's exit code, no traceback."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.stopping import ROOT, started, stop, stopped_by
from tests.waiting import wait_until

COMMANDS = ("generate", "evaluate", "calibrate", "profile", "compare_runs", "report", "harness", "bench")


DECODES_AFTER_S = 8.0
"""Of the processor: imports and a bundled model take half of it, so that it is in the middle of its rows."""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_as_soon_as_a_command_starts(name: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "lm_eval.py").write_text("import time\ntime.sleep(60)\n")  # as the harness, where it is installed
    with started(tmp_path, str(ROOT / "jobs" / f"{name}.py")) as process:
        # By itself Python has a handler for SIGINT, and none for SIGTERM.
        wait_until("it never has a handler", lambda: catches(process.pid, signal.SIGTERM), process, every_s=0.002)
        assert stop(process, number) == stopped_by(number)
    assert [path.name for path in tmp_path.iterdir()] == ["lm_eval.py"]


@pytest.mark.parametrize(("name", "number"), [("calibrate", signal.SIGINT), ("profile", signal.SIGINT)])
def test_a_signal_while_an_engine_decodes(name: str, number: int, tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path / "saved"), "--rows", "96", "--max-new-tokens", "512", "--device", "cpu"]
    with started(tmp_path, str(ROOT / "jobs" / f"{name}.py"), *flags) as process:
        wait_until("it never decodes", lambda: cpu_s(process.pid) > DECODES_AFTER_S, process)
        assert stop(process, number) == stopped_by(number)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("name", "runs"), [("compare_runs", 2), ("report", 1)])
def test_a_signal_while_a_storage_does_not_answer(name: str, runs: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as storage:
        storage.settimeout(60)
        url = f"http://127.0.0.1:{storage.getsockname()[1]}"
        keys = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        with started(tmp_path, str(ROOT / "jobs" / f"{name}.py"), *["s3://bucket/run"] * runs, **keys) as process:
            connection, _ = storage.accept()
            with connection:
                assert stop(process, signal.SIGINT) == stopped_by(signal.SIGINT)
