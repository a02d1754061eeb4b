"""A worker without Ray: shards in, parts out, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import orjson
import pyarrow.parquet as pq
import pytest

from cluster.driver import DEFAULT_ENGINE
from cluster.input.schema import carried_schema
from cluster.input.shards import RawShard
from cluster.input.source import open_input
from cluster.messages import Failure, Receipt, RowKey, ShardTask, WorkerInfo, WorkerPlan
from cluster.models import resolve_model
from cluster.output.identity import resolve
from cluster.output.lease import LEASE
from cluster.output.sink import read_record
from cluster.output.storage import Store
from cluster.worker.worker import Worker
from specfold import DecodeStats, reference_models
from tests.cluster.fake_engine import MODULE, NAN, RAISE
from tests.cluster.jobs import JobFolder, expected

T = TypeVar("T")
Use = Callable[[Worker, list[RawShard]], Awaitable[T]]


def with_worker(folder: JobFolder, prompts: str, use: Use[T], engine: str = "instant", **settings: Any) -> T:
    """Start a worker of a job and use it with the job's shards of eight rows."""
    config = resolve(folder.config(prompts, **settings), "cpu", 8)
    source = open_input(config)
    plan = WorkerPlan(
        config, resolve_model(config.model), carried_schema(source, config), str(folder.output), f"{MODULE}:{engine}",
        "cpu", "token",
    )  # fmt: skip
    Store(str(folder.output)).write(LEASE, orjson.dumps({"token": "token"}))

    async def run() -> T:
        worker = Worker("worker-0", "node", plan)
        info = await worker.start()
        assert isinstance(info, WorkerInfo), info
        assert info.pid == os.getpid()
        result = await asyncio.wait_for(use(worker, list(source.shards(8))), 30)  # type: ignore[arg-type]
        await worker.drain()
        return result

    return asyncio.run(run())


def start(folder: JobFolder, prompts: str, **changes: Any) -> WorkerInfo | Failure:
    config = resolve(folder.config(prompts), "cpu", 8)
    plan = WorkerPlan(
        config, resolve_model(config.model), carried_schema(open_input(config), config), str(folder.output),
        f"{MODULE}:instant", "cpu", "token",
    )  # fmt: skip
    return asyncio.run(Worker("worker-0", "node", replace(plan, **changes)).start())


async def run_all(worker: Worker, raws: list[RawShard], audit: int = 0) -> list[Receipt | Failure]:
    return await asyncio.gather(*(worker.run_shard(raw, ShardTask("id", audit=audit)) for raw in raws))


def test_shards_run_together_and_each_gives_its_part(folder: JobFolder) -> None:
    receipts = with_worker(folder, folder.write_prompts(20, {9: NAN}), run_all, num_samples=2)
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    records = [receipt.record for receipt in receipts if isinstance(receipt, Receipt)]
    assert [(r.index, r.rows, r.failed) for r in records] == [(0, 16, {}), (1, 16, {"nan_logits": 2}), (2, 8, {})]
    assert [record.worker for record in records] == ["worker-0"] * 3
    assert records == [read_record(Store(str(folder.output)), index) for index in range(3)]
    tokens = sum(folder.rows()["num_output_tokens"].to_pylist())
    assert sum(record.stats.output_tokens for record in records) == tokens
    last = max(receipt.state.rows_done for receipt in receipts if isinstance(receipt, Receipt))
    assert last == 40


def test_room_is_there_when_all_shards_have_come_and_few_rows_wait(folder: JobFolder) -> None:
    async def use(worker: Worker, raws: list[RawShard]) -> list[bool]:
        early = asyncio.create_task(worker.room(1))
        await asyncio.sleep(0.05)
        seen = [early.done()]  # its shard has not come
        running = [asyncio.create_task(worker.run_shard(raw, ShardTask("id"))) for raw in raws]
        full = asyncio.create_task(worker.room(5))
        await asyncio.sleep(0.05)
        seen.append(full.done())  # five shards, four of them waiting
        folder.let_go()
        await asyncio.gather(*running)
        return [*seen, await full > 0, await early > 0]

    folder.hold(1)
    assert with_worker(folder, folder.write_prompts(40), use, engine="held", batch_size=2) == [False, False, True, True]


def test_failed_rows_are_decoded_again_and_the_others_kept(folder: JobFolder) -> None:
    prompts = folder.write_prompts(16, {3: NAN, 5: "broken", 9: NAN})
    before = with_worker(folder, prompts, run_all, engine="instant")
    kept = folder.steady().to_pylist()

    async def again(worker: Worker, raws: list[RawShard]) -> Receipt | Failure:
        return await worker.run_shard(raws[0], ShardTask("id", keep=True))

    receipt = with_worker(folder, prompts, again, engine="cured")
    assert isinstance(receipt, Receipt)
    assert isinstance(before[0], Receipt)
    now = folder.steady().to_pylist()
    assert now[3]["finish_reason"] == "stop"
    assert [row for row in now if row["row_id"] != 3] == [row for row in kept if row["row_id"] != 3]
    assert receipt.record.failed == {"invalid_json": 1}
    extra = DecodeStats(output_tokens=now[3]["num_output_tokens"])
    assert receipt.record.stats.output_tokens == before[0].record.stats.output_tokens + extra.output_tokens
    assert receipt.state.rows_done == 1


def test_kept_rows_that_show_that_a_worker_is_sound_are_not_written(folder: JobFolder) -> None:
    prompts = folder.write_prompts(8, {3: NAN})
    with_worker(folder, prompts, run_all, engine="instant")
    kept = folder.steady().to_pylist()

    async def again(worker: Worker, raws: list[RawShard]) -> Receipt | Failure:
        task = ShardTask("id", keep=True, alone=(RowKey(0, 0), RowKey(1, 0), RowKey(3, 0)))
        return await worker.run_shard(raws[0], task)

    receipt = with_worker(folder, prompts, again, engine="cured")
    assert isinstance(receipt, Receipt)
    now = folder.steady().to_pylist()
    assert [row["row_id"] for row in now if row != kept[row["row_id"]]] == [3]
    assert receipt.record.stats.output_tokens == sum(row["num_output_tokens"] for row in now)
    assert receipt.state.rows_done == 3


def test_a_damaged_part_is_decoded_whole_instead_of_kept(folder: JobFolder) -> None:
    prompts = folder.write_prompts(8, {3: NAN})

    async def twice(worker: Worker, raws: list[RawShard]) -> Receipt | Failure:
        await run_all(worker, raws)
        folder.parts[0].write_bytes(b"torn")
        return await worker.run_shard(raws[0], ShardTask("id", keep=True))

    assert isinstance(with_worker(folder, prompts, twice), Receipt)
    assert pq.read_table(folder.parts[0]).num_rows == 8


def test_rows_that_are_given_up_are_error_rows(folder: JobFolder) -> None:
    async def use(worker: Worker, raws: list[RawShard]) -> Receipt | Failure:
        alone = (RowKey(4, 0), RowKey(2, 0))
        blamed = {RowKey(6, 0): ("worker_died", "The worker process died twice.")}
        return await worker.run_shard(raws[0], ShardTask("id", alone=alone, blamed=blamed))

    assert isinstance(with_worker(folder, folder.write_prompts(8, {6: RAISE}), use), Receipt)
    for line in folder.rows().to_pylist():
        if line["row_id"] == 6:
            assert (line["error_kind"], line["error"]) == ("worker_died", "The worker process died twice.")
        else:
            assert line.items() >= expected(line["row_id"]).items()


def test_an_engine_that_raises_gives_every_open_shard_back(folder: JobFolder) -> None:
    answers = with_worker(folder, folder.write_prompts(24, {2: RAISE}), run_all, engine="slow")
    assert answers == [Failure("RuntimeError: the fake engine was told to raise.")] * 3
    assert not folder.parts


def test_an_output_that_the_worker_does_not_share_is_a_sentence(folder: JobFolder) -> None:
    failure = start(folder, folder.write_prompts(1))
    assert isinstance(failure, Failure)
    assert failure.fatal
    assert "does not see the driver's files in" in failure.message
    assert "--output must be a folder or URL that every node shares" in failure.message


def test_a_model_that_cannot_be_read_is_a_sentence(folder: JobFolder) -> None:
    prompts = folder.write_prompts(1)
    Store(str(folder.output)).write(LEASE, orjson.dumps({"token": "token"}))
    failure = start(folder, prompts, engine_factory=DEFAULT_ENGINE)
    assert isinstance(failure, Failure)
    assert (failure.fatal, failure.exit_code) == (True, 2)
    assert str(folder.model) in failure.message


def test_weights_that_are_cut_short_are_a_sentence(folder: JobFolder) -> None:
    bundled = reference_models.path("fast_dllm_v2")
    for file in bundled.iterdir():
        data = file.read_bytes()
        (folder.model / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    Store(str(folder.output)).write(LEASE, orjson.dumps({"token": "token"}))
    failure = start(folder, folder.write_prompts(1), engine_factory=DEFAULT_ENGINE)
    assert isinstance(failure, Failure)
    assert (failure.fatal, failure.exit_code) == (True, 2)
    assert "model.safetensors is damaged or cut short" in failure.message


@pytest.mark.parametrize("gone", ["tests.cluster.fake_engine:nothing"])
def test_an_engine_that_cannot_be_made_may_work_elsewhere(folder: JobFolder, gone: str) -> None:
    Store(str(folder.output)).write(LEASE, orjson.dumps({"token": "token"}))
    failure = start(folder, folder.write_prompts(1), engine_factory=gone)
    assert isinstance(failure, Failure)
    assert not failure.fatal
