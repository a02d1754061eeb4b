"""Which shard is where, and which rows are to blame for dead workers. Knows neither Ray nor time.

A death on a live node makes suspects of the rows that were in the engine. They run again singly, on one worker at a
time; a row that kills two processes while it is alone in the engine becomes an error row, and all others are cleared.
Only a death alone is evidence, and only on a worker that has finished a row before: a process can be killed from
outside, and a GPU can be broken. So that it can finish one, a few rows of the shard go before one that died alone: a
bad row that always came first would look like a worker that never finishes any. A row that has finished alone is
cleared of earlier deaths. Where such deaths have been seen, or other workers die between a row's own, somebody is
killing processes, and more deaths are asked for: twenty kills at random moments were enough to blame a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.messages import RowKey, ShardTask

MAX_KILLS, MORE_KILLS = 2, 3
"""Deaths alone that make a row guilty, and how many more are asked for at most where somebody kills processes."""
WITNESSES = 4
"""Rows that show whether a worker is sound: a few, as some may be of those that are not decoded."""
TIMES = "{times}"
"""Stands in a blamed row's message for the number of these deaths."""


@dataclass
class Work:
    """A shard to run. ``payload`` is its raw rows, or whatever stands for them once a pool has stored them."""

    index: int
    first_row: int
    input_rows: int
    payload: Any
    keep: bool = False
    audit: int = 0
    """Rows to audit in the part that is there; 0: run the shard."""
    alone: list[RowKey] = field(default_factory=list)
    blamed: dict[RowKey, tuple[str, str]] = field(default_factory=dict)
    """Error kind and message of rows that are given up."""
    died_on: int | None = None
    """Slot of the worker that last died with suspects of this shard."""

    def task(self, identity: str) -> ShardTask:
        return ShardTask(identity, self.keep, tuple(self.alone), dict(self.blamed), self.audit)


class Feed(Protocol):
    """Where new shards come from."""

    def take(self) -> Work | None:
        """The next shard; None if there is none at the moment."""
        ...

    @property
    def exhausted(self) -> bool: ...


class Ledger:
    """The queue of shards and the book of deaths."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._again: deque[Work] = deque()
        self._suspected: deque[Work] = deque()
        self._out: dict[int, tuple[str, Work]] = {}
        self._held: dict[str, dict[int, Work]] = {}
        """The same by worker, for with hundreds of workers every question about one would look through all."""
        self._kills: dict[RowKey, list[tuple[int, bool]]] = {}
        """Deaths with a row alone in the engine, as numbers of deaths, and whether they are evidence."""
        self._deaths = self._from_outside = 0
        """Deaths with rows in the engine, and those that were later seen to be no row's doing."""

    @property
    def finished(self) -> bool:
        return self._feed.exhausted and not (self._again or self._suspected or self._out)

    @property
    def drained(self) -> bool:
        """No shard is left to hand out, though some may be running."""
        return self._feed.exhausted and not (self._again or self._suspected)

    @property
    def unfinished(self) -> list[int]:
        """Shards that are running or waiting to run again."""
        return sorted([*self._out, *(w.index for w in (*self._again, *self._suspected))])

    def running(self, worker: str) -> list[Work]:
        return list(self._held.get(worker, {}).values())

    def takes_turns(self, worker: str) -> bool:
        """Whether another worker may get a shard although this one has got none: because of suspects."""
        return bool(self._suspected) or self.has_suspects(worker)

    def has_suspects(self, worker: str) -> bool:
        """Whether a worker is decoding rows alone: what else it has may be lost with them."""
        return any(work.alone for work in self.running(worker))

    def take(self, worker: str, slot: int = 0, *, only: bool = True) -> Work | None:
        """The next shard for a worker that has room; None if there is none for it now.

        A worker with suspects gets nothing else until that shard is done: what runs beside them is lost with them.
        Suspects go to another slot than the one they died on, unless it is the ``only`` one that works.
        """
        if self.has_suspects(worker):
            return None
        if self._may_try_suspects(slot, only):
            work: Work | None = self._suspected.popleft()
        elif self._again:
            work = self._again.popleft()
        else:
            work = self._feed.take()
        if work is not None:
            self._out[work.index] = (worker, work)
            self._held.setdefault(worker, {})[work.index] = work
        return work

    def done(self, index: int) -> Work:
        """A shard's part is published."""
        worker, work = self._out.pop(index)
        del self._held[worker][index]
        self._clear(work.alone)
        return work

    def lost(
        self,
        worker: str,
        suspects: Collection[RowKey] = (),
        *,
        slot: int = 0,
        proven: bool = False,
        kind: str = "worker_died",
        cause: str = "",
    ) -> None:
        """A worker is gone: its shards run again.

        ``suspects``: rows in its engine, none if they are not to blame. ``proven``: the slot has finished a row before.
        """
        lone = next(iter(suspects)) if len(suspects) == 1 else None
        self._deaths += bool(suspects)
        held = sorted(self._held.pop(worker, {}).values(), key=lambda work: work.index)
        if lone:
            # A row that was lent and alone by chance: its own worker has not tried it yet.
            is_evidence = proven and any(_holds(work, lone) for work in held)
            self._kills.setdefault(lone, []).append((self._deaths, is_evidence))
        for work in held:
            del self._out[work.index]
            mine = sorted(key for key in suspects if _holds(work, key))
            self._clear(_passed(work, mine))
            if lone in mine and self._is_guilty(lone):
                times = sum(is_evidence for _, is_evidence in self._kills[lone])
                work.blamed[lone] = (kind, cause.replace(TIMES, "twice" if times == 2 else f"{times} times"))
            # The one that died alone goes last: the others can then show that the worker itself is sound.
            order = [key for key in work.alone if key not in mine] + mine
            if lone in mine and lone not in work.blamed:
                order = [key for key in _witnesses(work) if key not in order] + order
            work.alone = [key for key in order if key not in work.blamed]
            work.died_on = slot if mine else work.died_on
            (self._suspected if work.alone else self._again).append(work)

    def _is_guilty(self, row: RowKey) -> bool:
        deaths = self._kills.get(row, [])
        kills = [number for number, is_evidence in deaths if is_evidence]
        if not kills:
            return False
        own = sum(kills[0] <= number <= kills[-1] for number, _ in deaths)
        others = kills[-1] - kills[0] + 1 - own
        return len(kills) >= MAX_KILLS + min(others + self._from_outside, MORE_KILLS)

    def _clear(self, rows: Iterable[RowKey]) -> None:
        """Rows have finished alone."""
        for row in rows:
            self._from_outside += sum(is_evidence for _, is_evidence in self._kills.pop(row, ()))

    def _may_try_suspects(self, slot: int, only: bool) -> bool:
        if not self._suspected or any(work.alone for _, work in self._out.values()):
            return False
        return only or self._suspected[0].died_on != slot


class ListFeed:
    """A feed over an iterable that never waits."""

    def __init__(self, works: Iterable[Work]) -> None:
        self._works = iter(works)
        self._exhausted = False

    def take(self) -> Work | None:
        work = next(self._works, None)
        self._exhausted = work is None
        return work

    @property
    def exhausted(self) -> bool:
        return self._exhausted


def _passed(work: Work, in_engine: Collection[RowKey]) -> list[RowKey]:
    """Rows that finished alone before their process died, as those alone go first and in order: earlier deaths were
    not their doing."""
    if any(key not in work.alone for key in in_engine):
        return work.alone
    return work.alone[: min((work.alone.index(key) for key in in_engine), default=0)]


def _witnesses(work: Work) -> list[RowKey]:
    return [RowKey(work.first_row + i, 0) for i in range(min(WITNESSES, work.input_rows))]


def _holds(work: Work, key: RowKey) -> bool:
    return work.first_row <= key.row_id < work.first_row + work.input_rows
