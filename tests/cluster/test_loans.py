"""The end of a job: rows that wait on one worker begin on another, and nothing is lost when one of the two ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.driver.dispatch import Dispatcher
from cluster.driver.events import Died, Event, Examined, Helped, Returned
from cluster.driver.ledger import Ledger, ListFeed
from cluster.driver.loans import plan_loans
from cluster.driver.pool import RayPool
from cluster.input.shards import RawShard
from cluster.messages import Failure, Flight, Help, Receipt, RowKey, ShardTask, WorkerState
from cluster.worker.loans import Loans
from cluster.worker.openshard import OpenShard
from cluster.worker.worker import Worker
from specfold import Completion, DecodeConfig, Request
from tests.cluster.fake_engine import FakeEngine, decode
from tests.cluster.jobs import JobFolder, prompt_ids
from tests.cluster.processes import assert_undisturbed, meanwhile
from tests.cluster.simulate_scale import SlotPool, TallyHost, simulate, works
from tests.cluster.test_decode import Events, loop, requests
from tests.cluster.test_worker import with_worker
from tests.waiting import PATIENCE_S, wait_until

Counts = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), max_size=5)


def finished(events: Events) -> object:
    """The next shard that a loop has finished."""
    return next(event for event in iter(events.next, None) if event != "room")


@given(Counts, Counts)
def test_plan_lends_what_waits_and_no_more_than_can_begin(waiting: dict[str, int], free: dict[str, int]) -> None:
    free = {name.upper(): rows for name, rows in free.items()}
    loans = plan_loans(waiting, free)
    lent = {name: sum(rows for donor, _, rows in loans if donor == name) for name in waiting}
    got = {name: sum(rows for _, helper, rows in loans if helper == name) for name in free}
    assert all(rows > 0 for _, _, rows in loans)
    assert all(lent[name] <= waiting[name] for name in waiting)
    assert all(got[name] <= free[name] for name in free)
    assert sum(got.values()) == min(sum(waiting.values()), sum(free.values()))


def test_few_rows_are_shared_evenly() -> None:
    loans = plan_loans({"worker-0": 10, "worker-1": 2}, {"worker-2": 8, "worker-3": 8, "worker-4": 8})
    got: dict[str, int] = {}
    for _, helper, rows in loans:
        got[helper] = got.get(helper, 0) + rows
    assert sorted(got.values()) == [4, 4, 4]


def test_two_shards_keep_many_workers_busy() -> None:
    """Rows enough for 8 batches on each of 16 workers, in two shards: 50 s, of which 20 may be the longest row's."""
    found = simulate(16, 2048, batch=16, shard_rows=1024)
    assert found["rows_done"] == 2048
    assert found["run_s"] < 60  # 132 s when no row moves


@pytest.mark.parametrize("victim", ["donor", "helper"])
def test_a_worker_that_dies_with_a_loan_costs_nothing_but_time(victim: str) -> None:
    pool, host = SlotPool(3, batch=4), TallyHost(300)
    killed: list[str] = []

    def kill_one() -> None:
        [(loan, donor)] = list(pool.donors.items())[:1] or [(None, "")]
        if loan is not None and not killed:
            helper = next(name for name, slots in pool.slots.items() if slots.helped.get(loan))
            killed.append(donor if victim == "donor" else helper)
            pool.at(0.0, Died(killed[0], "killed", by_rows=False))

    host.tick = lambda live, wanted: kill_one()  # type: ignore[method-assign]
    ledger = Ledger(ListFeed(works(300, 280)))
    dispatcher = Dispatcher(pool, ledger, host, pool, stall_s=120.0, clock=lambda: pool.now)
    dispatcher.run()
    assert killed
    assert host.tally.rows == 300
    assert not pool.killed  # nobody was taken for stuck
    assert dispatcher.live().unfinished_rows == 0


def test_lent_rows_come_back_with_results(tmp_path: Path) -> None:
    owner, events = loop(FakeEngine(), tmp_path / "owner")
    shard = OpenShard(0, requests(0, 6))
    owner.add(shard)
    loans = Loans(owner)
    lent = loans.lend(7, 4)
    assert [request.row_id for request in lent] == [5, 4, 3, 2]  # those that would begin last
    assert (owner.waiting_rows, shard.missing) == (2, 6)
    owner.start()
    wait_until("the rows that stayed are not done", lambda: shard.missing == 4)
    assert events.empty() or events.next() == "room"
    results = [decode(request, DecodeConfig()) for request in lent]
    assert loans.take_back(7, results) == (4, 0)
    assert events.next() is shard
    assert {key.row_id for key in shard.results} == set(range(6))
    assert loans.take_back(7, results) == (0, 0)  # once
    assert owner.state().rows_done == 2  # the others count where they were decoded
    owner.close()


def test_lent_rows_that_come_back_without_results_are_decoded_and_stay(tmp_path: Path) -> None:
    owner, events = loop(FakeEngine(), tmp_path / "owner")
    shard = OpenShard(0, requests(0, 6))
    owner.add(shard)
    loans = Loans(owner)
    lent = loans.lend(1, 2)
    loans.take_back(1, None)
    # The others may be lent: a helper that was lost does not leave a long shard to one worker.
    again = loans.lend(2, 6)
    assert [request.row_id for request in (*lent, *again)] == [5, 4, 3, 2, 1, 0]
    loans.take_back(2, None)
    assert loans.lend(3, 6) == []
    owner.start()
    assert finished(events) is shard
    assert len(shard.results) == 6
    owner.close()


class Held(FakeEngine):
    """Stands still with two rows until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: deque[Request] = deque()
        self.go = False

    def stream(self, requests, config, batch_size):  # type: ignore[no-untyped-def]
        for request in requests:
            if request is not None:
                self.inside.append(request)
            if len(self.inside) == 2:
                wait_until("it is never let go", lambda: self.go)
            while self.go and self.inside:
                yield decode(self.inside.popleft(), config)


def test_a_row_of_a_dropped_shard_that_is_in_the_engine_is_not_decoded_twice(tmp_path: Path) -> None:
    """The owner of rows died, and its shard came to the worker that was helping it."""
    engine = Held()
    helper, events = loop(engine, tmp_path / "helper")
    lent = OpenShard(-1, requests(2, 4))
    helper.add(lent)
    helper.start()
    wait_until("the rows do not begin", lambda: len(engine.inside) == 2)
    helper.drop(lent)
    shard = OpenShard(0, requests(0, 6))
    helper.add(shard)
    engine.go = True
    assert finished(events) is shard
    assert {key: done.token_ids for key, done in shard.results.items()} == {
        RowKey(row, 0): decode(Request([row, 3], row), DecodeConfig()).token_ids for row in range(6)
    }
    state: WorkerState = helper.state()
    assert (state.rows_done, state.waiting_rows, state.active_rows) == (6, 0, 0)
    helper.close()


@pytest.mark.usefixtures("local_ray")
def test_an_owner_and_then_a_helper_are_killed_while_rows_are_lent(folder: JobFolder) -> None:
    """One shard of 110 rows beside one of 10; rows of the long one go to whoever has none left, the last ones first."""
    early, late, later = 20, 100, 95
    killed: list[int] = []

    def kill() -> None:
        killed.append(folder.holder(early))
        assert folder.holder(late) != killed[0]  # it stands with rows of the other one
        os.kill(killed[0], signal.SIGKILL)
        folder.let_go(late)
        killed.append(folder.holder(later))
        assert killed[1] != folder.holder(early)
        os.kill(killed[1], signal.SIGKILL)

    folder.hold(early, late, later)
    prompts, settings = folder.write_prompts(120), {"shard_rows": 110, "workers": 2, "batch_size": 4}
    with meanwhile(folder, kill):
        assert folder.run(prompts, engine="held", stall_timeout=PATIENCE_S, **settings) == 0
    assert len(set(killed)) == 2
    assert_undisturbed(folder, 120)
    assert folder.summary()["rows"]["failed"] == 0
    assert not folder.leftovers


def test_results_of_a_loan_that_failed_count_as_failed(tmp_path: Path) -> None:
    owner, _ = loop(FakeEngine(), tmp_path / "owner")
    owner.add(OpenShard(0, requests(0, 2)))
    loans = Loans(owner)
    [request] = loans.lend(1, 1)
    failed = Completion(request.row_id, 0, [], "", "error", error="it broke", error_kind="nan_logits")
    assert loans.take_back(1, [failed]) == (1, 1)


def test_a_loan_that_is_called_off_before_it_comes_is_never_lent(tmp_path: Path) -> None:
    owner, _ = loop(FakeEngine(), tmp_path / "owner")
    owner.add(OpenShard(0, requests(0, 3)))
    loans = Loans(owner)
    loans.take_back(1, None)
    assert loans.lend(1, 3) == []
    assert owner.waiting_rows == 3


def test_a_shard_whose_rows_come_late_as_a_loan_that_was_called_off_is_finished(folder: JobFolder) -> None:
    """Its owner died while the rows were on their way to a helper, which then got the shard itself."""

    async def use(worker: Worker, raws: list[RawShard]) -> tuple[Receipt | Failure, Help, list[Completion] | None]:
        await worker.stop_helping(3)
        running = asyncio.create_task(worker.run_shard(raws[0], ShardTask("id")))
        while not (await worker.progress()).active_rows:
            await asyncio.sleep(0.005)
        help, results = await worker.help(3, [Request(prompt_ids(row), row) for row in range(8)])
        return await running, help, results

    receipt, help, results = with_worker(folder, folder.write_prompts(8), use, engine="slow", batch_size=16)
    assert isinstance(receipt, Receipt)
    assert (help, results) == (Help(0, 0), None)
    assert_undisturbed(folder, 8)


class StandingStill(SlotPool):
    """The worker that lends first is stopped: nothing more is heard of it, and it takes a while to clear away."""

    def __init__(self, stage: str) -> None:
        super().__init__(2, batch=4)
        self.stage, self.stopped = stage, ""

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        while True:
            event = super().get(block, timeout)
            if getattr(event, "worker", None) != self.stopped or isinstance(event, Examined):
                return event

    def lend(self, loan: int, donor: str, helper: str, count: int) -> None:
        is_first, self.stopped = not self.stopped, self.stopped or donor
        if donor != self.stopped or (is_first and self.stage == "results"):
            super().lend(loan, donor, helper, count)

    def examine(self, worker: str) -> None:
        self.at(10.0, Examined(worker, Flight([], 1)))


@pytest.mark.parametrize("stage", ["rows", "results"])
def test_a_helper_that_waits_for_a_worker_that_stands_still_is_not_taken_for_stuck(stage: str) -> None:
    """The owner is stopped before it hands the rows over, or before it takes the results."""
    pool, host = StandingStill(stage), TallyHost(300)
    ledger = Ledger(ListFeed(works(300, 300)))
    Dispatcher(pool, ledger, host, pool, stall_s=20.0, clock=lambda: pool.now).run()
    assert host.tally.rows == 300
    assert pool.stopped
    assert pool.killed == [pool.stopped]


class Calls:
    """An actor's handle; the answer to each call is given by the test."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Future[Any]]] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(*_: Any, returns: int = 1) -> Any:
            futures = self.answers[method] = [Future() for _ in range(returns)]
            refs = [SimpleNamespace(future=lambda future=future: future) for future in futures]
            return refs if returns > 1 else refs[0]

        def options(name: str, num_returns: int = 1) -> Any:
            return SimpleNamespace(remote=partial(remote, returns=num_returns))

        return SimpleNamespace(options=options)


def test_rows_of_a_loan_count_somewhere_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count with the helper until they count with the owner: the live count does not fall in between."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    pool, events, owner, helper = RayPool.__new__(RayPool), [], Calls(), Calls()
    pool._actors, pool._post = {"owner": owner, "helper": helper}, events.append  # type: ignore[dict-item]
    pool.lend(0, "owner", "helper", 2)
    helper.answers["help"][0].set_result(Help(2, 1))
    assert not events
    owner.answers["take_back"][0].set_result((2, 1))
    assert events == [Helped("helper", 2, 1), Returned("owner", 0, 2, 1)]
