"""The driver's loop: shards to workers that have room, dead workers replaced, hanging ones killed.

Knows no Ray and no storage: a pool runs the workers and a ledger keeps the shards, so that a simulation can drive it.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator

from cluster.driver.events import (
    Died,
    Done,
    Event,
    Examined,
    Failed,
    Helped,
    Lapsed,
    Progress,
    Ready,
    Returned,
    Room,
    Wake,
)
from cluster.driver.interfaces import Events, Host, Pool
from cluster.driver.ledger import TIMES, Ledger
from cluster.driver.loans import LoanBook
from cluster.driver.roster import MAX_BARREN, Live, Member, Roster
from cluster.errors import UserError
from cluster.messages import Failure, Flight, Receipt, WorkerInfo, WorkerState
from cluster.words import count

TICK_S, ASK_S, SIZE_S, PENDING_S, RELEASE_S = 0.25, 1.0, 10.0, 30.0, 30.0
EARLY_ROWS = 1000
_MAX_EVENTS = 1000
_BLAME = {
    "worker_died": "The worker process died {times} with this row alone in the engine ({cause}).",
    "engine_error": "The engine failed {times} with this row alone in it ({cause}).",
}


class Dispatcher:
    """Runs until every shard is done. Raises ``UserError`` when the job cannot go on."""

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        host: Host,
        events: Events,
        *,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._ledger, self._host, self._events = pool, ledger, host, events
        self._stall_s, self._clock = stall_s, clock
        self._roster = Roster()
        self._loans = LoanBook(pool, self._roster)
        self._lends = True
        self._hungry: dict[str, int] = {}
        """Workers with room for so many shards, in the order in which they said so."""
        self._wanted = 0
        self._early = True
        self._ticked = self._sized = float("-inf")
        self._told = clock()

    def run(self) -> None:
        while not self._ledger.finished:
            now = self._clock()
            if now - self._ticked >= TICK_S:
                self._ticked = now
                self._tick(now)
            for event in self._wait():
                self._handle(event)

    def go_on(self, ledger: Ledger) -> None:
        """Run the shards of another ledger on the workers that are there, or on new ones where there are none."""
        self._ledger = ledger
        self._early = False  # that the first rows fail was a question of the run
        self._lends = False  # these rows are few, and not every worker may have turned to these settings yet
        self._ticked = self._sized = float("-inf")
        self._hand_out()
        self.run()

    def live(self) -> Live:
        """Counters of this session so far."""
        return self._roster.live()

    def _wait(self) -> Iterator[Event]:
        """The events that are there, after at most a tick."""
        try:
            yield self._events.get(timeout=TICK_S)
            for _ in range(_MAX_EVENTS):
                yield self._events.get(block=False)
        except queue.Empty:
            return

    def _handle(self, event: Event) -> None:
        if isinstance(event, Wake):
            self._ticked = float("-inf")
            self._hand_out()
            return
        member = self._roster.members.get(event.worker)
        if member is None or (member.dying and not isinstance(event, Examined | Returned | Lapsed)):
            return
        match event:
            case Progress():
                member.unanswered, member.answered = False, True
                self._hear(event.worker, member, event.state)
            case Room():
                self._hungry[event.worker] = event.shards
                self._hand_out()
            case Done():
                self._done(event.worker, member, event.receipt)
            case Ready():
                self._ready(event.worker, member, event.info)
            case Failed():
                self._failed(event.worker, member, event.failure)
            case Died():
                self._died(event.worker, member, event.cause, by_rows=event.by_rows)
            case Examined():
                self._bury(event.worker, event.flight)
            case Helped():
                # They count where they were decoded, and are published where they belong.
                member.bank(event.rows, event.failed)
            case Returned():
                self._loans.returned(event.loan, event.rows, event.failed)
            case Lapsed():
                self._loans.lapsed(event.loan)

    def _ready(self, worker: str, member: Member, info: WorkerInfo) -> None:
        refusal = self._host.admit(info)
        if refusal:
            self._host.say(f"{worker} on {info.node} is not used: {refusal}")
            self._roster.aside[member.slot] = refusal
            self._pool.kill(worker)
            self._leave(worker)
            self._fill()
            return
        member.info, member.answered = info, True
        member.heard = member.moved = self._clock()
        self._pool.invite(worker, 0)

    def _done(self, worker: str, member: Member, receipt: Receipt) -> None:
        self._pool.forget(self._ledger.done(receipt.record.index))
        self._roster.prove(member.slot)
        member.open -= 1
        member.bank(receipt.record.rows, receipt.record.num_failed)
        self._hear(worker, member, receipt.state)
        self._host.finished(receipt.record)
        self._hand_out()

    def _hear(self, worker: str, member: Member, state: WorkerState) -> None:
        now = self._clock()
        if state.pulse != member.state.pulse or self._awaits_work(worker, member):
            member.moved = now
        # It may have happened before the worker was first heard.
        if state.batch_size < (member.state.batch_size or state.asked_batch_size):
            self._host.say(f"{worker} ran out of memory and now decodes {count(state.batch_size, 'row')} at a time.")
        member.heard, member.state = now, state
        self._host.observe(worker, state)

    def _failed(self, worker: str, member: Member, failure: Failure) -> None:
        if failure.fatal:
            raise UserError(failure.message, failure.exit_code)
        self._pool.kill(worker)
        member.kind = "engine_error"
        self._died(worker, member, failure.message, by_rows=failure.by_rows)

    def _died(self, worker: str, member: Member, cause: str, *, by_rows: bool) -> None:
        member.dying, member.cause = True, cause
        self._hungry.pop(worker, None)
        if not by_rows:
            self._bury(worker, None)
        elif member.info is None:
            self._bury(worker, Flight([], 0))
        else:
            self._pool.examine(worker)

    def _bury(self, worker: str, flight: Flight | None) -> None:
        """Take a dead worker off the books. Its shards run again; without a flight nothing counts against it."""
        member = self._leave(worker)
        running = [work.index for work in self._ledger.running(worker)]
        again = f"shards to run again: {', '.join(map(str, running))}" if running else "it had no shard"
        self._host.say(f"{worker} is gone ({member.cause.rstrip('.')}); {again}.")
        if flight and self._roster.note_death(member.slot, flight, member.cause):
            self._host.say(
                f"The place of {worker} is not used any more: {MAX_BARREN} workers ended there without a finished row."
            )
        self._ledger.lost(
            worker,
            flight.rows if flight else (),
            slot=member.slot,
            proven=self._roster.is_proven(member.slot),
            kind=member.kind,
            cause=_BLAME[member.kind].format(times=TIMES, cause=member.cause.rstrip(".")),
        )
        self._fill()
        self._hand_out()

    def _leave(self, worker: str) -> Member:
        self._hungry.pop(worker, None)
        member = self._roster.leave(worker)
        self._loans.forget(worker)
        return member

    def _hand_out(self) -> None:
        """Give shards to the workers that have room."""
        turn = deque(self._hungry)
        while turn and not self._ledger.drained:
            worker = turn.popleft()
            if self._feed_one(worker):
                turn.append(worker)
            elif worker in self._hungry and not self._ledger.takes_turns(worker):
                return  # nothing for this one is nothing for the others

    def _feed_one(self, worker: str) -> bool:
        """Give a worker with room one shard, if there is one for it; says whether it has room for more."""
        member = self._roster.members[worker]
        work = self._ledger.take(worker, member.slot, only=self._roster.is_only(member))
        if work is None:
            return False
        member.moved = member.moved if member.open else self._clock()
        member.assigned, member.open = member.assigned + 1, member.open + 1
        self._pool.submit(worker, work, work.task(self._host.identity))
        self._hungry[worker] -= 1
        if self._hungry[worker]:
            return True
        del self._hungry[worker]
        self._pool.invite(worker, member.assigned)
        return False

    def _fill(self) -> None:
        """Start a worker in every free slot while there is something to hand out."""
        if self._ledger.drained:
            return
        free = self._roster.free_slots(self._wanted)
        if not self._roster.members and not free:
            reasons = "; ".join(sorted({reason.rstrip(".") for reason in self._roster.aside.values()}))
            raise UserError(f"no worker is left that works: {reasons}.", 1)
        for slot in free:
            self._pool.spawn(self._roster.enter(slot, self._clock()))

    def _tick(self, now: float) -> None:
        if now - self._sized >= SIZE_S:
            self._sized = now
            self._wanted = self._pool.wanted()
            self._fill()
        for worker, member in list(self._roster.members.items()):
            if not member.dying:
                self._watch(worker, member, now)
        self._report_pending(now)
        if self._lends and self._ledger.drained:
            self._loans.lend_out(self._ledger.has_suspects, now)
        live = self._roster.live()
        self._stop_early(live)
        self._host.tick(live, self._wanted)

    def _watch(self, worker: str, member: Member, now: float) -> None:
        """Ask for progress, kill what hangs, release what has nothing left to do."""
        if not member.unanswered and now - member.asked >= ASK_S:
            member.asked, member.unanswered = now, True
            self._pool.ask(worker)
        silent = now - member.heard
        stuck = now - member.moved if member.up and not self._awaits_work(worker, member) else 0.0
        if member.answered and max(silent, stuck) > self._stall_s:
            self._pool.kill(worker)
            self._died(worker, member, f"no progress for {max(silent, stuck):.0f} s", by_rows=True)
            return
        if member.working or not self._ledger.drained or not member.up:
            member.idle_since = None
        elif member.idle_since is None:
            member.idle_since = now
        elif now - member.idle_since > RELEASE_S:
            self._pool.release(worker)
            self._leave(worker)

    def _awaits_work(self, worker: str, member: Member) -> bool:
        """Whether it is right that nothing moves. A worker that is up and neither works nor asks for work is stuck."""
        return (worker in self._hungry and not member.working) or member.waits_for_others

    def _report_pending(self, now: float) -> None:
        pending = sum(not member.answered for member in self._roster.members.values())
        if not pending:
            self._told = now
        elif now - self._told >= PENDING_S:
            self._told = now
            self._host.say(f"{pending} of {self._wanted} workers wait for a free GPU or CPU of the cluster.")

    def _stop_early(self, live: Live) -> None:
        """Stop if over half of the first thousand rows have failed: the rest would hardly do better."""
        if self._early and live.rows >= EARLY_ROWS:
            self._early = False
            if 2 * live.failed > live.rows:
                raise UserError(
                    f"stopped early: {live.failed:,} of the first {live.rows:,} rows have failed; their errors are in "
                    "the output. Mend the cause and run the same command again.",
                    1,
                )
