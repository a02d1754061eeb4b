"""What must survive: killed and stopped workers, rows that kill, disks that fill. Real processes and signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cluster.errors import UserError
from tests.cluster.fake_engine import POISON
from tests.cluster.jobs import JobFolder, expected, keys

pytestmark = pytest.mark.usefixtures("local_ray")


def worker_pids() -> list[int]:
    """Processes of decoding workers that descend from this one: its Ray's, and no other job's."""
    parents = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return sorted(pid for pid in parents if is_ours(pid, parents) and is_worker(pid))


def is_ours(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def is_worker(pid: int) -> bool:
    """Ray names a process after its actor or the call that it runs."""
    with contextlib.suppress(OSError):
        return re.match(rb"ray::(WorkerActor|worker-|shard )", Path(f"/proc/{pid}/cmdline").read_bytes()) is not None
    return False


def when(condition: Callable[[], bool], action: Callable[[], None], timeout_s: float = 60.0) -> threading.Thread:
    """Do something to the job as soon as a condition holds."""

    def watch() -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def assert_undisturbed(folder: JobFolder, count: int, bad: tuple[int, ...] = ()) -> None:
    """Every row once and in order, each as the engine decodes it; ``bad`` ones are errors."""
    table = folder.rows()
    assert keys(table) == [(row, 0) for row in range(count)]
    for line in table.to_pylist():
        if line["row_id"] in bad:
            assert line["finish_reason"] == "error"
        else:
            assert line.items() >= expected(line["row_id"]).items()


def kill_one(number: int) -> None:
    os.kill(worker_pids()[0], number)


def test_killed_workers_change_nothing(folder: JobFolder) -> None:
    first = when(lambda: len(folder.parts) >= 2, lambda: kill_one(signal.SIGKILL))
    second = when(lambda: len(folder.parts) >= 6, lambda: kill_one(signal.SIGTERM))
    assert folder.run(folder.write_prompts(300), engine="slow", shard_rows=10, workers=2) == 0
    first.join()
    second.join()
    assert_undisturbed(folder, 300)
    assert not folder.leftovers
    assert len(folder.summary()["workers"]) >= 3


def test_only_the_row_that_kills_is_blamed(folder: JobFolder) -> None:
    prompts = folder.write_prompts(40, {13: POISON})
    assert folder.run(prompts, engine="slow", shard_rows=20) == 0

    assert_undisturbed(folder, 40, bad=(13,))
    row = folder.rows().to_pylist()[13]
    assert row["error_kind"] == "worker_died"
    assert "died twice with this row alone" in row["error"]


def test_a_stopped_worker_is_replaced(folder: JobFolder) -> None:
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(worker_pids()[0])
        os.kill(stopped[0], signal.SIGSTOP)

    thread = when(lambda: len(folder.parts) >= 2, stop)
    assert folder.run(folder.write_prompts(100), engine="slow", shard_rows=10, stall_timeout=2) == 0
    thread.join()
    assert_undisturbed(folder, 100)
    assert not Path(f"/proc/{stopped[0]}").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of half a megabyte."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting is not allowed here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_a_sentence_and_room_is_all_it_takes(folder: JobFolder, small_disk: Path) -> None:
    folder.output = small_disk / "out"
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 150_000)
    prompts = folder.write_prompts(300)
    with pytest.raises(UserError, match=r"cannot be written: no space is left on the device\.") as caught:
        folder.run(prompts, shard_rows=10)
    assert caught.value.exit_code == 1
    assert all(pq.read_metadata(path).num_rows == 10 for path in folder.parts)

    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert folder.run(prompts, shard_rows=10) == 0
    assert_undisturbed(folder, 300)


def test_a_read_only_output_is_a_sentence(folder: JobFolder, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    folder.output = small_disk / "out"
    with pytest.raises(UserError, match=r"cannot be written: the file system is read-only\."):
        folder.run(folder.write_prompts(10))
