"""What must survive: killed and stopped workers, rows that kill, disks that fill. Real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.errors import UserError
from tests.cluster.fake_engine import POISON, RAISE
from tests.cluster.jobs import JobFolder, expected, keys

pytestmark = pytest.mark.usefixtures("local_ray")


def worker_pids() -> list[int]:
    """Processes of decoding workers on this machine, under this test's Ray."""
    found = subprocess.run(
        ["pgrep", "-f", "ray::(worker-|shard |WorkerActor)"], capture_output=True, text=True, check=False
    ).stdout
    return [int(pid) for pid in found.split()]


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_worker_changes_nothing(folder: JobFolder, number: int) -> None:
    killer = when(lambda: len(folder.parts) >= 2, lambda: kill_one(number))
    assert folder.run(folder.write_prompts(200), engine="slow", shard_rows=10, workers=2) == 0
    killer.join()
    assert_undisturbed(folder, 200)


def test_only_rows_that_kill_or_break_the_engine_are_blamed(folder: JobFolder) -> None:
    prompts = folder.write_prompts(40, {13: POISON, 25: RAISE})
    assert folder.run(prompts, engine="slow", shard_rows=20) == 0

    assert_undisturbed(folder, 40, bad=(13, 25))
    rows = folder.rows().to_pylist()
    assert rows[13]["error_kind"] == "worker_died"
    assert "died twice with this row alone" in rows[13]["error"]
    assert rows[25]["error_kind"] == "engine_error"
    assert "the fake engine was told to raise" in rows[25]["error"]


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
    assert all(path.name.startswith("train-") for path in folder.parts)

    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert folder.run(prompts, shard_rows=10) == 0
    assert_undisturbed(folder, 300)


def test_a_read_only_output_is_a_sentence(folder: JobFolder, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    folder.output = small_disk / "out"
    with pytest.raises(UserError, match=r"cannot be written: the file system is read-only\."):
        folder.run(folder.write_prompts(10))
