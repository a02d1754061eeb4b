"""A job of 512 workers and 10 million rows: the real driver logic, simulated workers, a simulated clock.

    python -m tests.cluster.simulate_scale --workers 512 --rows 10000000

What is real: the dispatcher, the ledger, the roster and the summary's tally. Each worker decodes ``batch`` rows at a
time and pulls the next when one is done; how long a row takes is drawn from a log-normal distribution. Prints
one line of JSON: the driver's processor time a row and how many rows a second that would feed, its memory at a tenth of
the run and at the end, and the workers' idle time, of which the tail is the part after nothing was left to hand out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.config import default_shard_rows
from cluster.driver.dispatch import Dispatcher
from cluster.driver.events import Done, Event, Helped, Progress, Ready, Returned, Room, Wake
from cluster.driver.ledger import Ledger, ListFeed, Work
from cluster.messages import Receipt, ShardRecord, ShardTask, WorkerInfo, WorkerState
from cluster.output.summary import Tally
from cluster.worker.worker import MAX_OPEN_SHARDS
from specfold import DecodeStats
from tests.cluster.simulation import SimHost, SimPool

MEAN_ROW_S, SIGMA, MOST = 2.0, 1.0, 10.0
"""A row's time in the engine: mean in seconds, spread of its logarithm (the 99th percentile is 6 times the mean), and
the longest as a multiple of the mean, for ``--max-new-tokens`` cuts rows."""
LOAD_S, HOP_S = 30.0, 0.005


@dataclass
class Slots:
    """A worker that decodes ``batch`` rows at a time: when each slot is free, and its open shards."""

    free: list[float]
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    """Rows that wait, as shard and seconds."""
    missing: dict[int, Work] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    done: int = 0
    busy_s: float = 0.0
    """Slot seconds with a row in them."""
    lent: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Rows on other workers, by loan."""
    helped: dict[int, int] = field(default_factory=dict)
    """Rows of a loan that are still to be done here; ``helped_done``: that are done."""
    helped_done: dict[int, int] = field(default_factory=dict)
    invited: bool = False
    ended: float = 0.0


class SlotPool(SimPool):
    """Workers with slots. Nothing goes wrong here: ``SimPool`` has what can."""

    def __init__(self, size: int, batch: int, seed: int = 0) -> None:
        super().__init__(size=size)
        self._batch, self._random = batch, random.Random(seed)
        self.slots: dict[str, Slots] = {}
        self.in_flight = self.most_in_flight = 0
        self.loans = self.rows_lent = 0
        self.donors: dict[int, str] = {}
        self.handed_out_at = 0.0
        self.began: float | None = None

    def get(self, block: bool = True, timeout: float | None = None) -> Event:
        """The next event; a row that ends is none, and is dealt with on the way."""
        while True:
            event = super().get(block, timeout)
            if not isinstance(event, _RowEnded):
                return event
            self._end_row(event.worker, event.shard)

    def spawn(self, worker: str) -> None:
        self.slots[worker] = Slots([0.0] * self._batch)
        self.at(LOAD_S, Ready(worker, WorkerInfo("chip", "node", "id", 1, {})))

    def submit(self, worker: str, work: Work, task: ShardTask) -> None:
        me = self.slots[worker]
        self.began = self.now if self.began is None else self.began
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.handed_out_at = self.now
        me.missing[work.index], me.left[work.index] = work, work.input_rows
        draw, middle = self._random.lognormvariate, math.log(MEAN_ROW_S) - SIGMA**2 / 2
        rows = (min(draw(middle, SIGMA), MOST * MEAN_ROW_S) for _ in range(work.input_rows))
        me.waiting.extend((work.index, seconds) for seconds in rows)
        self._fill(worker, me)

    def invite(self, worker: str, assigned: int) -> None:
        self.slots[worker].invited = True
        self._answer(worker, self.slots[worker])

    def ask(self, worker: str) -> None:
        me = self.slots[worker]
        self.at(HOP_S, Progress(worker, self._state(me)))

    def _fill(self, worker: str, me: Slots) -> None:
        while me.waiting and me.free:
            me.free.pop()
            shard, seconds = me.waiting.popleft()
            me.busy_s += seconds
            self.at(seconds, _RowEnded(worker, shard))
        self._answer(worker, me)

    def lend(self, loan: int, donor: str, helper: str, count: int) -> None:
        me, other = self.slots[donor], self.slots[helper]
        lendable: list[tuple[int, float]] = []
        while me.waiting and me.waiting[-1][0] >= 0 and len(lendable) < count:
            lendable.append(me.waiting.pop())
        me.lent[loan] = lendable
        self.loans += 1
        self.rows_lent += len(lendable)
        if not lendable:
            self.at(HOP_S, Returned(donor, loan, 0, 0))
            return
        self.donors[loan] = donor
        other.helped[loan] = len(lendable)
        other.waiting.extend((-1 - loan, seconds) for _, seconds in lendable)
        self._fill(helper, other)

    def restore(self, loan: int, donor: str) -> None:
        me = self.slots[donor]
        me.waiting.extend(me.lent.pop(loan, ()))
        self._fill(donor, me)

    def stop_helping(self, loan: int, helper: str) -> None:
        me = self.slots[helper]
        me.waiting = deque(row for row in me.waiting if row[0] != -1 - loan)
        if me.helped.pop(loan, 0):
            self.at(HOP_S, Helped(helper, me.helped_done.pop(loan, 0), 0))

    def _end_row(self, worker: str, shard: int) -> None:
        me = self.slots[worker]
        me.free.append(self.now)
        me.ended = self.now
        if shard >= 0:
            me.done += 1
            self._count_off(worker, me, shard)
        elif -1 - shard in me.helped:
            me.done += 1
            self._end_helped_row(worker, me, -1 - shard)
        self._fill(worker, me)

    def _end_helped_row(self, worker: str, me: Slots, loan: int) -> None:
        me.helped[loan] -= 1
        me.helped_done[loan] = me.helped_done.get(loan, 0) + 1
        if not me.helped[loan]:
            del me.helped[loan]
            self.at(HOP_S, Helped(worker, me.helped_done.pop(loan), 0))
            donor = self.donors.pop(loan)
            rows = self.slots[donor].lent.pop(loan, [])
            self.at(2 * HOP_S, Returned(donor, loan, len(rows), 0))
            for shard, _ in rows:
                self._count_off(donor, self.slots[donor], shard)

    def _count_off(self, worker: str, me: Slots, shard: int) -> None:
        me.left[shard] -= 1
        if not me.left[shard]:
            del me.left[shard]
            self._publish(worker, me, me.missing.pop(shard))

    def _publish(self, worker: str, me: Slots, work: Work) -> None:
        self.in_flight -= 1
        stats = DecodeStats(output_tokens=work.input_rows * 100, denoise_forwards=work.input_rows * 40)
        record = ShardRecord(
            work.index, work.first_row, work.input_rows, 1, "digest", "id", failed={}, stats=stats, worker=worker,
            finished={"stop": work.input_rows}, started=self.now - 60, ended=self.now,
            slowest=[[work.first_row, 0, 9.0]] * 10, lengths={str(n): 1 for n in range(16, 64)},
        )  # fmt: skip
        self.at(3 * HOP_S, Done(worker, Receipt(record, self._state(me))))

    def _answer(self, worker: str, me: Slots) -> None:
        """``Room``, as a real worker says it: fewer than a batch wait and few shards are open."""
        if me.invited and len(me.waiting) < self._batch and len(me.left) < MAX_OPEN_SHARDS:
            me.invited = False
            self.at(HOP_S, Room(worker))

    def _state(self, me: Slots) -> WorkerState:
        active = self._batch - len(me.free)
        return WorkerState(False, len(me.left), len(me.waiting), active, me.done, pulse=me.done, batch_size=self._batch,
                           asked_batch_size=self._batch)  # fmt: skip


@dataclass(frozen=True)
class _RowEnded(Wake):
    worker: str
    shard: int


class TallyHost(SimHost):
    """Keeps of a part what a real driver keeps, no more; notes the process's memory along the way."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tally, self._rows, self.memory = Tally(), rows, {}
        self.tally_s = 0.0

    def finished(self, record: ShardRecord) -> None:
        self.tally.add(record, fresh=True)
        tenth = self.tally.rows * 10 // self._rows
        if tenth not in self.memory:
            self.memory[tenth] = resident_mib()

    def observe(self, worker: str, state: WorkerState) -> None:
        self.tally.observe(worker, state)

    def tick(self, live: Any, wanted: int) -> None:
        pass


def works(rows: int, shard_rows: int) -> Iterator[Work]:
    """Shards, made as they are asked for. Their rows are left out: a real driver has those in Ray's object store."""
    for index, first in enumerate(range(0, rows, shard_rows)):
        yield Work(index, first, min(shard_rows, rows - first), None)


def resident_mib() -> float:
    found = re.search(r"Pss: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
    return round(int(found[1]) / 1024, 1) if found else 0.0


def simulate(
    workers: int, rows: int, *, batch: int = 32, shard_rows: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Run the job; what it was like for the driver and for the workers."""
    size = shard_rows or default_shard_rows(rows)
    pool, host = SlotPool(workers, batch, seed), TallyHost(rows)
    ledger = Ledger(ListFeed(works(rows, size)))
    dispatcher = Dispatcher(pool, ledger, host, pool, stall_s=1e9, clock=lambda: pool.now)
    spent = _Stopwatch(dispatcher, pool)
    dispatcher.run()
    assert pool.began is not None
    slots = list(pool.slots.values())
    run_s = pool.now - pool.began
    whole = run_s * batch * len(slots)
    idle = 1 - sum(me.busy_s for me in slots) / whole
    after = [max(pool.now - max(me.ended, pool.handed_out_at), 0.0) for me in slots]
    return {
        "workers": workers, "rows": rows, "shard_rows": size, "batch": batch, "run_s": round(run_s),
        "rows_done": host.tally.rows, "idle_share": round(idle, 4),
        "tail_s": round(pool.now - pool.handed_out_at, 1),
        "workers_done_before_end_s": round(sum(after) / len(after), 1),
        "driver_us_a_row": round(spent.seconds / rows * 1e6, 2),
        "driver_rows_per_s": round(rows / spent.seconds), "needed_rows_per_s": round(rows / run_s),
        "loans": pool.loans, "rows_lent": pool.rows_lent,
        "most_shards_in_flight": pool.most_in_flight, "driver_mib": host.memory,
    }  # fmt: skip


class _Stopwatch:
    """Processor time of the driver's own work: what is spent in its calls, without what these spend in the pool."""

    def __init__(self, dispatcher: Dispatcher, pool: SlotPool) -> None:
        self.seconds = 0.0
        for name in ("_handle", "_tick"):
            setattr(dispatcher, name, self._timed(getattr(dispatcher, name), 1))
        for name in ("submit", "invite", "ask", "spawn", "lend"):
            setattr(pool, name, self._timed(getattr(pool, name), -1))

    def _timed(self, call: Any, sign: int) -> Any:
        def run(*args: Any) -> Any:
            before = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += sign * (time.thread_time() - before)

        return run


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--shard-rows", type=int)
    args = parser.parse_args(argv)
    before = time.monotonic()
    found = simulate(args.workers, args.rows, batch=args.batch, shard_rows=args.shard_rows)
    print(json.dumps(found | {"wall_s": round(time.monotonic() - before), "cores": os.cpu_count()}))


if __name__ == "__main__":
    main(sys.argv[1:])
