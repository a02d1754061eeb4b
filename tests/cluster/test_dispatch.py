"""The driver's decisions, in virtual time: sharing work, replacing workers, blame, stalls, ends."""

from __future__ import annotations

import random

import pytest

from cluster.messages import Failure, RowKey
from tests.cluster.simulation import LOAD_S, ROW_S, SimHost, SimPool, simulate


def test_every_shard_is_run_once_and_the_work_is_shared() -> None:
    pool, host = SimPool(size=4), SimHost()
    result = simulate(pool, host, [100] * 40)
    assert result["done"] == list(range(40))
    assert {record.worker for record in host.records} == {f"worker-{i}" for i in range(4)}
    assert result["seconds"] == pytest.approx(LOAD_S + 40 * 100 * ROW_S / 4, rel=0.05)


def test_a_row_that_kills_costs_three_workers_and_only_itself() -> None:
    pool, host = SimPool(), SimHost()
    pool.deadly = {57}
    result = simulate(pool, host, [20] * 10)
    assert result["done"] == list(range(10))
    assert {record.index: record.failed for record in host.records if record.failed} == {2: {"x": 1}}
    assert sum("is gone" in line for line in host.said) == 3
    assert pool.blamed == {
        RowKey(57, 0): ("worker_died", "The worker process died twice with this row alone in the engine (killed).")
    }


def test_a_row_that_breaks_the_engine_is_told_apart() -> None:
    pool, host = SimPool(), SimHost()
    pool.raising = {57}
    result = simulate(pool, host, [20] * 10)
    assert result["done"] == list(range(10))
    assert pool.blamed == {
        RowKey(57, 0): ("engine_error", "The engine failed twice with this row alone in it (it raised).")
    }
    assert len(pool.killed) == 3


def test_a_row_that_hangs_is_found_by_the_clock() -> None:
    pool, host = SimPool(), SimHost()
    pool.sticky = {5}
    result = simulate(pool, host, [20] * 4)
    assert result["done"] == [0, 1, 2, 3]
    assert [record.failed for record in host.records if record.failed] == [{"x": 1}]
    assert len(pool.killed) == 3
    assert any("no progress for" in line for line in host.said)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_hangs_in_the_last_shard_is_found_too(workers: int) -> None:
    pool, host = SimPool(size=workers), SimHost()
    pool.sticky = {25}
    result = simulate(pool, host, [20, 20])
    assert result["done"] == [0, 1]
    assert set(pool.blamed) == {RowKey(25, 0)}


def test_a_worker_that_is_up_and_never_asks_for_work_is_replaced() -> None:
    pool, host = SimPool(size=1), SimHost()
    pool.mute = {"worker-0"}
    assert simulate(pool, host, [20, 20])["done"] == [0, 1]
    assert pool.killed == ["worker-0"]


def test_a_place_that_never_finishes_a_row_is_set_aside_and_blames_none() -> None:
    pool, host = SimPool(size=3), SimHost()
    pool.barren = {1}
    result = simulate(pool, host, [50] * 60)
    assert result["done"] == list(range(60))
    assert not any(record.failed for record in host.records)
    assert any("The place of worker-1.3 is not used any more" in line for line in host.said)


def test_no_place_that_works_ends_the_job_without_error_rows() -> None:
    pool, host = SimPool(), SimHost()
    pool.barren = {0, 1}
    result = simulate(pool, host, [20] * 4)
    assert result["error"].exit_code == 1
    assert "no worker is left that works: killed." in str(result["error"])
    assert result["done"] == []


def test_a_refused_kind_of_device_decodes_nothing() -> None:
    pool, host = SimPool(), SimHost()
    host.refusal = "it is another chip."
    result = simulate(pool, host, [20] * 4)
    assert (result["error"].exit_code, result["done"]) == (1, [])


def test_a_fatal_failure_ends_the_job_with_its_sentence() -> None:
    pool, host = SimPool(), SimHost()
    pool.failure = Failure("the model folder is broken.", fatal=True, exit_code=2)
    error = simulate(pool, host, [20])["error"]
    assert (str(error), error.exit_code) == ("the model folder is broken.", 2)


def test_the_job_stops_early_when_most_of_the_first_thousand_fail() -> None:
    for failing, stops in ((0.4, False), (0.6, True)):
        pool, host = SimPool(), SimHost()
        pool.failing = failing
        result = simulate(pool, host, [50] * 100)
        assert (result["error"] is not None) == stops
        if stops:
            assert "stopped early: 600 of the first 1,000 rows have failed" in str(result["error"])
            assert (result["error"].exit_code, len(result["done"])) == (1, 20)


def test_a_late_worker_takes_its_share() -> None:
    pool, host = SimPool(size=1), SimHost()
    pool.rows_s = lambda row: 0.05
    host.on_tick = lambda: setattr(pool, "size", 3 if pool.now > 20 else 1)
    result = simulate(pool, host, [20] * 100)
    assert result["done"] == list(range(100))
    assert {record.worker for record in host.records} == {"worker-0", "worker-1", "worker-2"}


def test_idle_workers_are_let_go_while_the_last_shard_runs() -> None:
    pool, host = SimPool(size=3), SimHost()
    result = simulate(pool, host, [10, 10, 10_000])
    assert result["done"] == [0, 1, 2]
    assert sorted(pool.released) == ["worker-0", "worker-1"]


def test_workers_that_find_no_place_are_reported() -> None:
    pool, host = SimPool(size=2), SimHost()
    spawn = pool.spawn

    def only_first(worker: str) -> None:
        if worker == "worker-0":
            spawn(worker)
        else:
            pool.workers[worker] = type(pool.workers["worker-0"])(0.0, stuck=True)

    pool.spawn = only_first  # type: ignore[method-assign]
    result = simulate(pool, host, [500] * 20)
    assert result["done"] == list(range(20))
    assert any("1 of 2 workers wait for a free GPU or CPU" in line for line in host.said)


@pytest.mark.parametrize("seed", range(5))
def test_random_deaths_lose_and_blame_nothing(seed: int) -> None:
    pool, host = SimPool(size=4, rows_s=lambda row: 0.05), SimHost()
    chance = random.Random(seed)
    submit = pool.submit

    def fragile(worker: str, work: object, task: object) -> None:
        if chance.random() < 0.1:
            pool.deadly = set(range(work.first_row, work.first_row + work.input_rows))  # type: ignore[attr-defined]
        submit(worker, work, task)  # type: ignore[arg-type]
        pool.deadly = set()

    pool.submit = fragile  # type: ignore[method-assign]
    result = simulate(pool, host, [30] * 80)
    assert result["done"] == list(range(80))
    assert not any(record.failed for record in host.records)


def test_512_workers_finish_together() -> None:
    pool, host = SimPool(size=512, rows_s=lambda row: 0.06), SimHost()
    result = simulate(pool, host, [200] * 1024)
    assert len(result["done"]) == 1024
    assert result["seconds"] == pytest.approx(LOAD_S + 2 * 200 * 0.06, rel=0.1)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("bad", [{0}, {2}, {5, 7, 8}])
def test_bad_rows_of_small_batches_end_no_job(workers: int, bad: set[int]) -> None:
    """Each process that gets a suspect first would die without having finished a row, like one on a broken GPU."""
    pool, host = SimPool(size=workers), SimHost()
    pool.raising, pool.one_at_a_time = bad, True
    found = simulate(pool, host, [20])
    assert (found["error"], found["done"]) == (None, [0])
    assert {key.row_id for key in pool.blamed} == bad
