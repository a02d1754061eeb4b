"""Memory of a process and all below it, as PSS: shared pages count once, whoever maps them."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.cluster.processes import descendants

_PSS = re.compile(rb"^Pss: +(\d+) kB", re.MULTILINE)
MIB = 1024 * 1024


class MemoryWatch:
    """Samples the memory of the processes that ``pids`` names until ``stop``."""

    def __init__(self, pids: Callable[[], list[int]], every_s: float = 0.5) -> None:
        self._pids, self._every_s = pids, every_s
        self.samples: list[tuple[float, int]] = []
        """Seconds since the start of the watch, and bytes of all processes together."""
        self.peak: Counter[str] = Counter()
        """Bytes at the peak, by the process's name."""
        self._stopped = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        return self.peak.total()

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            found = memory_by_name(self._pids())
            self.samples.append((time.monotonic() - self._began, found.total()))
            if found.total() > self.peak.total():
                self.peak = found


def family(pid: int) -> list[int]:
    """A process and all below it: of a driver that started Ray also Ray's own, with the object store, and workers."""
    return [pid, *descendants(pid)]


def memory_by_name(pids: list[int]) -> Counter[str]:
    """Bytes by the name of the process; those that are gone count nothing."""
    found: Counter[str] = Counter()
    for pid in pids:
        with contextlib.suppress(OSError):
            size = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
            found[name_of(pid)] += int(size[1]) * 1024 if size else 0
    return found


def name_of(pid: int) -> str:
    """What a process is in a Ray job: ``gcs_server``, ``raylet``, ``worker``, another ``ray::`` process, an agent."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if command.startswith("ray::"):
        return "worker" if re.match(r"ray::(WorkerActor|worker-|shard )", command) else "other Ray workers"
    for name in ("gcs_server", "raylet", "dashboard", "runtime_env", "agent", "monitor", "log_monitor"):
        if f"/{name}" in command.split(" -")[0] or f"{name}.py" in command or f"{name}/main" in command:
            return name
    return command.split()[0].rpartition("/")[2] if command.split() else "?"
