"""What must survive: killed and stopped workers, rows that kill, disks that fill. Real processes and signals."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cluster.driver import check_job
from cluster.errors import UserError
from tests.cluster.fake_engine import GO, POISON, RAISE
from tests.cluster.jobs import JobFolder
from tests.cluster.processes import (
    assert_undisturbed,
    meanwhile,
    rows_finished,
    start_driver,
    wait_for_parts,
    worker_pids,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("local_ray")


def test_killed_workers_change_nothing(folder: JobFolder) -> None:
    def kill() -> None:
        os.kill(folder.holder(55), signal.SIGKILL)
        folder.let_go(55)
        os.kill(folder.holder(155), signal.SIGTERM)

    folder.hold(55, 155)
    with meanwhile(folder, kill):
        assert folder.run(folder.write_prompts(300), engine="held", shard_rows=10, workers=2) == 0
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
        stopped.append(folder.holder(35))
        os.kill(stopped[0], signal.SIGSTOP)

    folder.hold(35)
    with meanwhile(folder, stop):
        assert folder.run(folder.write_prompts(100), engine="held", shard_rows=10, stall_timeout=5) == 0
    assert_undisturbed(folder, 100)
    assert not Path(f"/proc/{stopped[0]}").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a quarter of a megabyte."""
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
    with pytest.raises(UserError, match=r"cannot be written: the file system is read-only\.") as caught:
        folder.run(folder.write_prompts(10))
    assert caught.value.exit_code == 2


def test_an_output_that_becomes_read_only_loses_nothing(folder: JobFolder, small_disk: Path, local_ray: str) -> None:
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    folder.output = small_disk / "out"
    prompts = folder.write_prompts(200)
    # A process of its own: it cannot give its lease back, which is free only once it is dead.
    folder.hold(55)
    driver = start_driver(folder, local_ray, prompts, "held", stall_timeout=PATIENCE_S)
    wait_for_parts(folder, 3, driver)
    while subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True).returncode:
        time.sleep(0.01)  # busy while a file is open for writing
    folder.let_go()
    out, err = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 1, (out, err)
    assert "cannot be written: the file system is read-only. Missing shards: " in err
    assert len(err.strip().splitlines()) == 1
    before = {path: path.read_bytes() for path in folder.parts}
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert folder.run(prompts, shard_rows=10) == 0
    assert_undisturbed(folder, 200)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert not folder.leftovers


def test_kills_at_random_moments_in_one_run_change_nothing(folder: JobFolder, request: pytest.FixtureRequest) -> None:
    """Five; twenty with ``--fault-minutes`` of one and more, which takes minutes."""
    kills = 20 if request.config.getoption("--fault-minutes") >= 1 else 5
    rows = 200 * kills
    chance = random.Random(20)
    killed: list[int] = []

    def kill_when_it_works(done: threading.Event) -> None:
        while len(killed) < kills and not done.is_set():
            # A worker that never finished a row is the other test's matter: three such deaths set its place aside.
            working = [pid for pid in worker_pids() if pid not in killed and rows_finished(pid)]
            if working:
                time.sleep(chance.uniform(0, 1.0))
                killed.append(chance.choice(working))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.02)
        (folder.root / GO).touch()

    done = threading.Event()
    killer = threading.Thread(target=kill_when_it_works, args=(done,))
    killer.start()
    try:
        # Each worker stands still after 40 rows until all kills are over.
        assert folder.run(folder.write_prompts(rows), engine="gated", shard_rows=10, workers=2) == 0
    finally:
        done.set()
        killer.join()
    assert len(killed) == kills
    assert_undisturbed(folder, rows)
    assert folder.summary()["rows"]["failed"] == 0
    assert folder.decoded - rows <= kills * 4 * 10  # four open shards a worker
    assert not folder.leftovers
    print(f"{kills} kills, {folder.decoded - rows} of {rows} rows decoded again")


def test_workers_that_run_out_of_memory_decode_fewer_rows_at_a_time(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    # Rows for seconds: what a worker says is heard while it works.
    assert folder.run(folder.write_prompts(240), engine="hungry", shard_rows=10, batch_size=8) == 0
    out = capsys.readouterr().out  # whichever worker came first, and the other one if rows were left for it
    assert re.search(r"worker-[01] ran out of memory and now decodes 2 rows at a time\.", out), out
    assert_undisturbed(folder, 240)


def test_places_that_never_finish_a_row_end_the_job_without_error_rows(folder: JobFolder) -> None:
    with pytest.raises(UserError, match=r"no worker is left that works: .* Missing shards: 0-3\.") as caught:
        folder.run(folder.write_prompts(40), engine="broken_gpus", shard_rows=10)
    assert caught.value.exit_code == 1
    assert not folder.parts
    assert folder.run(folder.write_prompts(40), shard_rows=10) == 0
    assert_undisturbed(folder, 40)


def test_a_damaged_part_is_made_again_and_a_foreign_one_refused(
    folder: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = folder.write_prompts(40)
    assert folder.run(prompts, shard_rows=10) == 0
    whole = folder.parts[1].read_bytes()
    folder.parts[1].write_bytes(whole[: len(whole) // 2])
    others = {path: path.stat().st_mtime_ns for path in folder.parts if path != folder.parts[1]}
    assert folder.run(prompts, shard_rows=10) == 0
    assert "Run again: data/train-0000001.parquet is not a whole Parquet file" in capsys.readouterr().out
    assert_undisturbed(folder, 40)
    assert all(path.stat().st_mtime_ns == before for path, before in others.items())

    other = JobFolder(folder.root / "other")
    assert other.run(prompts, shard_rows=10, seed=1) == 0
    shutil.copy(other.parts[2], folder.parts[2])
    before = {path: path.read_bytes() for path in folder.parts}
    with pytest.raises(UserError, match=r"train-0000002\.parquet was written by another run") as caught:
        folder.run(prompts, shard_rows=10)
    assert caught.value.exit_code == 2
    assert {path: path.read_bytes() for path in folder.parts} == before


@pytest.mark.parametrize("place", ["file", "file/out", "sealed/out"])
def test_a_place_that_can_be_no_output_is_a_mistake_of_the_command(folder: JobFolder, place: str) -> None:
    (folder.root / "file").write_text("mine")
    (folder.root / "sealed").mkdir(mode=0o555)
    prompts = folder.write_prompts(10)
    folder.output = folder.root / place
    if place.startswith("sealed") and os.access(folder.root / "sealed", os.W_OK):
        pytest.skip("root may write anywhere")
    for act in (folder.run, lambda prompts: check_job(folder.config(prompts))):
        with pytest.raises(
            UserError, match=rf"^{re.escape(str(folder.output))}\S* cannot be (read|written): "
        ) as caught:
            act(prompts)
        assert caught.value.exit_code == 2
    assert (folder.root / "file").read_text() == "mine"
    assert not os.listdir(folder.root / "sealed")


@pytest.mark.usefixtures("local_ray")
def test_a_bad_row_that_comes_first_is_not_taken_for_a_worker_that_never_works(folder: JobFolder) -> None:
    """One row at a time on one worker: each new process would meet it first and never finish a row."""
    settings: dict[str, Any] = {"batch_size": 1, "shard_rows": 20, "max_failed": 1.0}
    prompts = folder.write_prompts(20, {0: RAISE})
    assert folder.run(prompts, **settings) == 0
    assert_undisturbed(folder, 20, bad=(0,))
    kept = folder.steady()
    assert folder.run(prompts, retry_failed=True, **settings) == 0
    assert folder.steady().drop_columns("error") == kept.drop_columns("error")
