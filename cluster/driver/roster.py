"""The workers of a job by slot: who is up, what they have counted, and which slots work at all. Knows no Ray."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from cluster.messages import COUNTED, Flight, WorkerInfo, WorkerState

MAX_BARREN = 3
WAITING, LOADING, DECODING, IDLE, ENDING = STATES = ("waiting", "loading", "decoding", "idle", "ending")
"""What a worker may be at; waiting is for a place in the cluster."""


@dataclass
class Member:
    """A worker as the dispatcher sees it. Times are the dispatcher's clock."""

    slot: int
    asked: float
    """When it was last asked for progress."""
    heard: float
    """When it last answered."""
    moved: float
    """When its work last advanced."""
    info: WorkerInfo | None = None
    """None until its engine is up."""
    state: WorkerState = field(default_factory=WorkerState)
    answered: bool = False
    """Its process exists: it has answered at least once."""
    unanswered: bool = False
    """A question for progress is on its way."""
    assigned: int = 0
    """Shards given to it so far."""
    open: int = 0
    """Shards it has now."""
    lent: int = 0
    """Loans of its rows that are not back yet."""
    helping: int = 0
    """Loans of other workers' rows that it decodes now."""
    banked_rows: int = 0
    """Of its done rows those that no part of its own waits for any more; ``banked_failed``: of them, the failed."""
    banked_failed: int = 0
    idle_since: float | None = None
    dying: bool = False
    cause: str = ""
    kind: str = "worker_died"
    """Error kind of a row that is to blame."""

    def bank(self, rows: int, failed: int) -> None:
        self.banked_rows += rows
        self.banked_failed += failed

    @property
    def up(self) -> bool:
        return self.info is not None and not self.dying

    @property
    def working(self) -> bool:
        return self.open > 0 or self.helping > 0 or self.state.active_rows > 0

    @property
    def waits_for_others(self) -> bool:
        """All that it could do is on other workers: rows that it lent, or that it is lent and that have not come, or
        whose results the other has not taken yet."""
        return self.lent + self.helping > 0 and not (self.state.active_rows or self.state.waiting_rows)

    @property
    def free_rows(self) -> int:
        """Rows that could begin now if it had them."""
        return 0 if self.state.waiting_rows else max(self.state.batch_size - self.state.active_rows, 0)

    @property
    def doing(self) -> str:
        """One of ``STATES``."""
        if self.dying:
            return ENDING
        if self.info is None:
            return LOADING if self.answered else WAITING
        return DECODING if self.working else IDLE


@dataclass(frozen=True)
class WorkerLine:
    """A worker at a moment, for people."""

    doing: str
    """One of ``STATES``."""
    node: str
    """Empty until its engine is up."""
    state: WorkerState


@dataclass(frozen=True)
class Live:
    """Counters of a session; those of unfinished shards included."""

    unfinished_rows: int
    """Done rows of unpublished shards; ``unfinished_failed``: those of them that failed."""
    unfinished_failed: int
    rows: int
    failed: int
    output_tokens: int
    drafts_proposed: int
    drafts_accepted: int
    recomputed_rows: int
    foldable: int
    folded: int
    workers_up: int
    workers: dict[str, WorkerLine]
    """By name, in the order of their places."""


class Roster:
    """Slots and the workers in them. A slot in which three workers die without finishing a row is set aside."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.aside: dict[int, str] = {}
        """Slots that are not used any more, and why."""
        self._incarnations: Counter[int] = Counter()
        self._barren: Counter[int] = Counter()
        self._proven: set[int] = set()
        self._gone: Counter[str] = Counter()

    def free_slots(self, wanted: int) -> list[int]:
        taken = {member.slot for member in self.members.values()}
        return [slot for slot in range(wanted) if slot not in taken and slot not in self.aside]

    def enter(self, slot: int, now: float) -> str:
        """Name the next worker of a slot: ``worker-3``, then ``worker-3.2``."""
        self._incarnations[slot] += 1
        count = self._incarnations[slot]
        worker = f"worker-{slot}" if count == 1 else f"worker-{slot}.{count}"
        self.members[worker] = Member(slot, asked=now, heard=now, moved=now)
        return worker

    def leave(self, worker: str) -> Member:
        """Forget a worker but for its counters."""
        member = self.members.pop(worker)
        self._gone.update({name: getattr(member.state, name) for name in COUNTED})
        return member

    def prove(self, slot: int) -> None:
        """A worker in the slot has finished a row."""
        self._proven.add(slot)
        self._barren[slot] = 0

    def is_proven(self, slot: int) -> bool:
        return slot in self._proven

    def note_death(self, slot: int, flight: Flight, cause: str) -> bool:
        """Count a death; says whether the slot is set aside by it."""
        if flight.finished:
            self.prove(slot)
            return False
        self._barren[slot] += 1
        if self._barren[slot] < MAX_BARREN:
            return False
        self.aside[slot] = cause
        return True

    def is_only(self, member: Member) -> bool:
        """Whether no other slot works now."""
        return not any(other.up and other.slot != member.slot for other in self.members.values())

    def live(self) -> Live:
        members = self.members.values()
        alive = [m for m in members if not m.dying]  # what the others had done is lost with them
        return Live(
            unfinished_rows=sum(max(m.state.rows_done - m.banked_rows, 0) for m in alive),
            unfinished_failed=sum(max(m.state.rows_failed - m.banked_failed, 0) for m in alive),
            rows=self._sum("rows_done"),
            failed=self._sum("rows_failed"),
            output_tokens=self._sum("output_tokens"),
            drafts_proposed=self._sum("drafts_proposed"),
            drafts_accepted=self._sum("drafts_accepted"),
            recomputed_rows=self._sum("recomputed_rows"),
            foldable=self._sum("foldable"),
            folded=self._sum("folded"),
            workers_up=sum(m.up for m in members),
            workers={
                name: WorkerLine(m.doing, m.info.node if m.info else "", m.state)
                for name, m in sorted(self.members.items(), key=lambda item: item[1].slot)
            },
        )

    def _sum(self, name: str) -> int:
        return self._gone[name] + sum(getattr(m.state, name) for m in self.members.values())
