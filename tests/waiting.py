"""Waiting for what happens in another process or thread, with the patience that a busy machine asks for."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_S = 300.0
"""How long a test waits for what takes seconds on a quiet machine."""


def wait_until(
    what: str, look: Callable[[], T], process: subprocess.Popen[Any] | None = None, every_s: float = 0.02
) -> T:
    """What ``look`` returns as soon as that is true.

    Fails and says ``what`` did not happen after ``PATIENCE_S``, or when ``process`` has ended before.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert process is None or process.poll() is None, (what, process.communicate())
        assert time.monotonic() < deadline, what
        time.sleep(every_s)
    return found
