"""A command as a process that a signal ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 3.0
"""What ``ray job stop`` allows a job; on a quiet machine it takes a third of that."""


@contextlib.contextmanager
def started(folder: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Python of its own in a folder, which holds modules; killed where it still runs in the end."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    settings = keep | {"PYTHONPATH": f"{folder}:{ROOT}", "RAY_AUTH_MODE": "disabled"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=settings, text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(process: subprocess.Popen[str], number: int) -> str:
    """The last line that a command printed when it was stopped: in time, with the signal's code, without an error."""
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - sent < STOP_S
    assert process.returncode == 128 + number, (out, err)
    assert err == ""
    return out.splitlines()[-1]


def stopped_by(number: int) -> str:
    return f"Stopped by {signal.Signals(number).name}."
