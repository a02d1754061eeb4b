"""Drivers and workers as processes: started, found among this test's descendants, watched, and hit by signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.cluster.jobs import JobFolder, expected, keys
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RAY_SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
"""Environment of a Ray of the tests: it writes no token into a home folder, and its workers get as much of a busy
machine as other processes do (by itself Ray lets them wait for everybody)."""
DRIVER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the driver has handlers: no traceback of an import
from cluster.config import JobConfig
from cluster.driver import leave, run_job
from cluster.errors import UserError
engine, settings = sys.argv[1], json.loads(sys.argv[2])
settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
try:
    leave(run_job(JobConfig(**settings), engine_factory="tests.cluster.fake_engine:" + engine))
except UserError as error:
    print("error:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start_driver(
    folder: JobFolder,
    address: str,
    prompts: str,
    engine: str = "slow",
    environment: dict[str, str] | None = None,
    **settings: Any,
) -> subprocess.Popen[str]:
    """Start a driver of its own on the Ray at ``address``; ``environment``: this process's unless given."""
    config = folder.config(prompts, **({"shard_rows": 10, "ray_address": address} | settings))
    values = json.dumps({name: getattr(config, name) for name in vars(config)})
    command = [sys.executable, "-c", DRIVER, engine, values]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def wait_for_parts(folder: JobFolder, count: int, driver: subprocess.Popen[str]) -> None:
    wait_until(f"there are never {count} parts", lambda: len(folder.parts) >= count, driver)


def worker_pids() -> list[int]:
    """Processes of decoding workers that descend from this one: its Ray's, and no other job's."""
    return [pid for pid in descendants(os.getpid()) if is_worker(pid)]


def descendants(ancestor: int) -> list[int]:
    """Processes below another, in order."""
    parents = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])

    def is_below(pid: int) -> bool:
        while pid in parents and pid != ancestor:
            pid = parents[pid]
        return pid == ancestor

    return sorted(pid for pid in parents if pid != ancestor and is_below(pid))


def is_worker(pid: int) -> bool:
    """Ray names a process after its actor or the call that it runs."""
    with contextlib.suppress(OSError):
        return re.match(rb"ray::(WorkerActor|worker-|shard )", Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False


@contextlib.contextmanager
def meanwhile(folder: JobFolder, action: Callable[[], None]) -> Iterator[None]:
    """Do something to a job of the ``held`` engine that runs inside; then all of its rows are let go.

    A job that ends before is an error: what the action waits for is gone.
    """
    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(action)
        acting.add_done_callback(lambda _: folder.let_go())
        try:
            yield
        finally:
            folder.let_go()
        acting.result()


def rows_finished(pid: int) -> int:
    """Rows that a worker's process has finished, by its flight recorder; 0 while it loads and once it is gone."""
    with contextlib.suppress(OSError, struct.error):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if line.endswith(".rows"):
                return int(struct.unpack("<q", Path(line.split(maxsplit=5)[5]).read_bytes()[:8])[0])
    return 0


def assert_undisturbed(folder: JobFolder, count: int, bad: tuple[int, ...] = ()) -> None:
    """Every row once and in order, each as the engine decodes it; ``bad`` ones are errors."""
    assert_as_decoded(folder.rows(), count, bad)


def assert_as_decoded(table: pa.Table, count: int, bad: tuple[int, ...] = (), marked: tuple[int, ...] = ()) -> None:
    """The same of a table; the output of ``marked`` rows is not looked at."""
    assert keys(table) == [(row, 0) for row in range(count)]
    for line in table.to_pylist():
        if line["row_id"] in bad:
            assert line["finish_reason"] == "error"
        elif line["row_id"] not in marked:
            assert line.items() >= expected(line["row_id"]).items()
