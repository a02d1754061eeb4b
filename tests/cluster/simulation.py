"""A pool of simulated workers in virtual time: the real dispatcher and ledger, no processes."""

from __future__ import annotations

import heapq
import itertools
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.driver.dispatch import Dispatcher
from cluster.driver.events import Died, Done, Event, Examined, Failed, Progress, Ready, Room
from cluster.driver.ledger import Ledger, ListFeed, Work
from cluster.driver.roster import Live
from cluster.errors import UserError
from cluster.messages import Failure, Flight, Receipt, RowKey, ShardRecord, ShardTask, WorkerInfo, WorkerState
from specfold import DecodeStats

ROW_S = 0.01
LOAD_S = 5.0


@dataclass
class SimWorker:
    """A simulated process: its open shards are decoded one after another."""

    free_at: float
    shards: list[tuple[Work, ShardTask]] = field(default_factory=list)
    done: int = 0
    stuck: bool = False
    seen: WorkerState = field(default_factory=WorkerState)
    """The counters when its last shard was done."""

    def state(self, now: float) -> WorkerState:
        return replace(self.seen, pulse=int(now * 1000) if now < self.free_at else 0)


class SimPool:
    """Workers that take ``ROW_S`` a row.

    ``deadly`` rows end the process, ``sticky`` ones make it hang, ``raising`` ones make the engine raise.

    ``barren``: slots whose workers die at their first row. Rows that are alone are decoded first, as by a real worker.
    """

    def __init__(self, *, size: int = 2, rows_s: Callable[[int], float] = lambda row: ROW_S) -> None:
        self.now = 0.0
        self.size, self.rows_s = size, rows_s
        self.deadly: set[int] = set()
        self.sticky: set[int] = set()
        self.raising: set[int] = set()
        self.barren: set[int] = set()
        self.one_at_a_time = False
        """Nothing is beside a row in the engine."""
        self.failing = 0.0
        self.mute: set[str] = set()
        """Workers that never ask for work."""
        self.failure: Failure | None = None
        self.kind = "chip"
        self.workers: dict[str, SimWorker] = {}
        self.flights: dict[str, Flight] = {}
        self.blamed: dict[RowKey, tuple[str, str]] = {}
        self.killed: list[str] = []
        self.released: list[str] = []
        self._heap: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        """The next event, moving the clock to it, but by no more than ``timeout``."""
        until = self.now + (timeout or 0.0 if block else 0.0)
        if not self._heap or self._heap[0][0] > until:
            self.now = until
            raise queue.Empty
        self.now, _, event = heapq.heappop(self._heap)
        return event

    def at(self, delay: float, event: Event) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), event))

    def wanted(self) -> int:
        return self.size

    def spawn(self, worker: str) -> None:
        self.workers[worker] = SimWorker(self.now + LOAD_S)
        if self.failure:
            self.at(LOAD_S, Failed(worker, self.failure))
        else:
            self.at(LOAD_S, Ready(worker, WorkerInfo(self.kind, "node", "id", 1, {})))

    def invite(self, worker: str, assigned: int) -> None:
        if worker not in self.mute and not assigned:
            self.at(0.0, Room(worker))

    def submit(self, worker: str, work: Work, task: ShardTask) -> None:
        me = self.workers[worker]
        me.shards.append((work, task))
        start = max(me.free_at, self.now)
        rows = range(work.first_row, work.first_row + work.input_rows)
        blamed = {key.row_id for key in task.blamed}
        self.blamed |= task.blamed
        order = [key.row_id for key in task.alone] + [row for row in rows if RowKey(row, 0) not in task.alone]
        slot = int(worker.partition("-")[2].partition(".")[0])
        time = start
        for row in order:
            if row in blamed:
                continue
            if row in self.deadly | self.sticky | self.raising or slot in self.barren:
                is_alone = self.one_at_a_time or RowKey(row, 0) in task.alone
                together = [RowKey(row, 0)] if is_alone else [RowKey(r, 0) for r in rows]
                self.flights[worker] = Flight(together, me.done)
                me.stuck = row in self.sticky
                if row in self.raising:
                    self.at(time - self.now, Failed(worker, Failure("it raised")))
                elif me.stuck:
                    self.at(0.0, Room(worker))
                else:
                    self.at(time - self.now, Died(worker, "killed", by_rows=True))
                return
            time += self.rows_s(row)
            me.done += 1
        me.free_at = time
        record = ShardRecord(
            work.index, work.first_row, work.input_rows, 1, "", "id", failed={"x": len(blamed)} if blamed else {},
            finished={}, stats=DecodeStats(), worker=worker,
        )  # fmt: skip
        failed = round(me.done * self.failing)
        state = WorkerState(loading=False, rows_done=me.done, rows_failed=failed, busy_s=time, pulse=me.done)
        self.at(time - self.now, Done(worker, Receipt(record, state)))
        self.at(max(time - self.now - ROW_S, 0.0), Room(worker))

    def lend(self, loan: int, donor: str, helper: str, count: int) -> None:
        raise AssertionError("these workers' states tell of no row that waits")

    def restore(self, loan: int, donor: str) -> None:
        raise AssertionError

    def stop_helping(self, loan: int, helper: str) -> None:
        raise AssertionError

    def forget(self, work: Work) -> None:
        work.payload = None

    def ask(self, worker: str) -> None:
        me = self.workers[worker]
        if not me.stuck:
            self.at(0.001, Progress(worker, me.state(self.now)))

    def kill(self, worker: str) -> None:
        self.killed.append(worker)

    def release(self, worker: str) -> None:
        self.released.append(worker)

    def examine(self, worker: str) -> None:
        self.at(0.05, Examined(worker, self.flights.get(worker, Flight([], self.workers[worker].done))))


class SimHost:
    """Notes what the dispatcher tells."""

    identity = "id"

    def __init__(self) -> None:
        self.records: list[ShardRecord] = []
        self.said: list[str] = []
        self.lives: list[Live] = []
        self.refusal: str | None = None
        self.on_tick: Callable[[], None] = lambda: None

    def admit(self, info: WorkerInfo) -> str | None:
        return self.refusal

    def finished(self, record: ShardRecord) -> None:
        self.records.append(record)

    def observe(self, worker: str, state: WorkerState) -> None:
        pass

    def say(self, message: str) -> None:
        self.said.append(message)

    def tick(self, live: Live, wanted: int) -> None:
        self.lives.append(live)
        self.on_tick()


def simulate(pool: SimPool, host: SimHost, shards: Iterable[int], **settings: Any) -> dict[str, Any]:
    """Run shards of the given sizes; what came out."""
    sizes = list(shards)
    starts = itertools.accumulate(sizes, initial=0)
    works = [Work(i, start, size, None) for i, (start, size) in enumerate(zip(starts, sizes, strict=False))]
    options: dict[str, Any] = {"stall_s": 20.0} | settings
    dispatcher = Dispatcher(pool, Ledger(ListFeed(works)), host, pool, clock=lambda: pool.now, **options)
    error = None
    try:
        dispatcher.run()
    except UserError as caught:
        error = caught
    return {"error": error, "done": sorted(record.index for record in host.records), "seconds": pool.now}
