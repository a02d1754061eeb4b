"""A job at scale, in small: what bounds memory, what keeps workers busy, and how fast the driver is."""

from __future__ import annotations

import resource
import time
from itertools import count
from pathlib import Path

import pytest

from cluster.driver.feed import READ_AHEAD, InputFeed
from cluster.input.shards import RawShard
from cluster.messages import ShardTask
from cluster.output.resume import Survey
from cluster.worker.worker import MAX_OPEN_SHARDS, Worker
from tests.cluster.jobs import JobFolder
from tests.cluster.memory import MIB, MemoryWatch, family
from tests.cluster.processes import start_driver
from tests.cluster.simulate_scale import simulate
from tests.cluster.test_worker import with_worker


def test_workers_are_hardly_idle_where_few_rows_take_long() -> None:
    found = simulate(8, 50_000, batch=8)
    assert found["rows_done"] == 50_000
    assert found["idle_share"] < 0.015  # 0.007, of which nearly all is the tail; 0.022 when no row moved
    assert found["most_shards_in_flight"] <= 8 * MAX_OPEN_SHARDS


def test_the_driver_feeds_many_workers_with_time_to_spare() -> None:
    found = simulate(128, 50_000, batch=16, shard_rows=32)
    assert found["rows_done"] == 50_000
    assert found["driver_rows_per_s"] > 5 * found["needed_rows_per_s"]  # measured on busy cores: 120 times
    assert found["most_shards_in_flight"] <= 128 * MAX_OPEN_SHARDS


def test_an_input_without_end_is_read_only_a_little_ahead() -> None:
    read = []

    def endless() -> RawShard:
        for index in count():
            read.append(index)
            yield RawShard(index, index * 10, 10, "text", b"", "digest")

    feed = InputFeed(endless(), Survey(), lambda: None)  # type: ignore[arg-type]
    try:
        taken = []
        while len(taken) < 100:
            work = feed.take()
            taken += [work.index] if work else []
        time.sleep(0.2)
        assert taken == list(range(100))
        assert 100 <= len(read) <= 100 + READ_AHEAD + 2
        assert not feed.exhausted
    finally:
        feed.close()


@pytest.mark.parametrize(("engine", "rows", "ahead"), [("instant", 24, MAX_OPEN_SHARDS), ("slower", 8, 1)])
def test_only_a_fast_engine_gets_many_shards_at_a_time(folder: JobFolder, engine: str, rows: int, ahead: int) -> None:
    """Rows that lie about on one worker are missing on others when the input ends."""

    async def use(worker: Worker, raws: list[RawShard]) -> int:
        for raw in raws:
            await worker.run_shard(raw, ShardTask("id"))
        return await worker.room(len(raws))

    assert with_worker(folder, folder.write_prompts(rows), use, engine=engine, batch_size=2) == ahead


@pytest.fixture(scope="module")
def two_sizes(local_ray: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """For a small and a larger job: processor seconds of the driver, and its peak memory in MiB."""
    found = {}
    for rows in (3_000, 60_000):
        folder = JobFolder(Path(tmp_path_factory.mktemp("scale")) / str(rows))
        driver = start_driver(folder, local_ray, folder.write_prompts(rows), "echoing", shard_rows=256)
        watch = MemoryWatch(lambda pid=driver.pid: family(pid), every_s=0.1)  # type: ignore[misc]
        before = processor_s()
        _, errors = driver.communicate()
        watch.stop()
        assert driver.returncode == 0, errors
        assert folder.rows().num_rows == rows
        found[rows] = (processor_s() - before, watch.peak_bytes / MIB)
    return found


def processor_s() -> float:
    """Processor time of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_driver_needs_no_more_memory_for_more_rows(two_sizes: dict[int, tuple[float, float]]) -> None:
    small, large = (memory for _, memory in two_sizes.values())
    assert large - small < 35  # the larger input's rows alone would take over 60 MiB as objects


def test_a_row_costs_the_driver_little(two_sizes: dict[int, tuple[float, float]]) -> None:
    small, large = (seconds for seconds, _ in two_sizes.values())
    print(f"{(large - small) / 57_000 * 1e6:.1f} microseconds a row")
    assert (large - small) / 57_000 < 100e-6
