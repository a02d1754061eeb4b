"""The tail of a job: rows that wait on one worker begin on another that has none left. Knows no Ray.

A shard stays with its worker, which alone writes the part; helpers send results back to it. Rows that have begun do
not move, nor do shards from worker to worker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cluster.driver.interfaces import Pool
from cluster.driver.roster import Member, Roster

LEAST_FREE = 1 / 8
"""Of a batch: with fewer free places a worker is not helped to more rows, as every loan is three calls."""


@dataclass(frozen=True)
class Loan:
    donor: str
    helper: str


class LoanBook:
    """Starts loans, and keeps which are out so that none outlives one of its two workers."""

    def __init__(self, pool: Pool, roster: Roster) -> None:
        self._pool, self._roster = pool, roster
        self._numbers = itertools.count()
        self._out: dict[int, Loan] = {}

    def lend_out(self, has_suspects: Callable[[str], bool], now: float) -> None:
        """Give workers with free places the rows that wait on others, but none to a worker that may be about to end.

        What the workers last told is up to a second old: a loan may turn out smaller than it was meant to be.
        """
        members = {name: member for name, member in self._roster.members.items() if member.up}
        waiting = {name: m.state.waiting_rows for name, m in members.items() if m.open and m.state.waiting_rows}
        free = {
            name: m.free_rows
            for name, m in members.items()
            if m.free_rows >= max(1, math.ceil(LEAST_FREE * m.state.batch_size)) and not has_suspects(name)
        }
        for donor, helper, rows in plan_loans(waiting, free):
            self._begin(donor, helper, rows, now)

    def returned(self, number: int, rows: int, failed: int) -> None:
        """Results are back, for the donor to publish though it has not counted them."""
        loan = self._end(number)
        if loan is not None and loan.donor in self._roster.members:
            self._roster.members[loan.donor].bank(-rows, -failed)

    def lapsed(self, number: int) -> None:
        """The rows go back to where they came from."""
        loan = self._end(number)
        if loan is not None:
            self._undo(number, loan)

    def forget(self, worker: str) -> None:
        """A worker is gone. The rows that it had lent run again with its shards, and those lent to it go back."""
        for number, loan in list(self._out.items()):
            if worker in (loan.donor, loan.helper):
                self._end(number)
                self._undo(number, loan)

    def _begin(self, donor: str, helper: str, rows: int, now: float) -> None:
        number = next(self._numbers)
        self._out[number] = Loan(donor, helper)
        lending, helping = self._roster.members[donor], self._roster.members[helper]
        helping.moved = helping.moved if helping.working else now
        lending.lent, helping.helping = lending.lent + 1, helping.helping + 1
        _expect(lending, -rows)  # until it is heard again
        _expect(helping, rows)
        self._pool.lend(number, donor, helper, rows)

    def _end(self, number: int) -> Loan | None:
        loan = self._out.pop(number, None)
        if loan is not None:
            if donor := self._roster.members.get(loan.donor):
                donor.lent -= 1
            if helper := self._roster.members.get(loan.helper):
                helper.helping -= 1
        return loan

    def _undo(self, number: int, loan: Loan) -> None:
        """Tell whichever of the two is there; also one that is about to end may still hear it."""
        if loan.donor in self._roster.members:
            self._pool.restore(number, loan.donor)
        if loan.helper in self._roster.members:
            self._pool.stop_helping(number, loan.helper)


def plan_loans(waiting: Mapping[str, int], free: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Who lends how many rows to whom, from the rows that wait on workers and the free places of others.

    A helper gets no more than can begin there at once. If they are too few for all, every helper gets about as many.
    """
    loans = []
    left = dict(waiting)
    total = sum(left.values())
    helpers = sorted(free, key=lambda name: free[name])  # so that the next ones get what one has no place for
    for i, helper in enumerate(helpers):
        wanted = min(free[helper], math.ceil(total / (len(helpers) - i)))
        while wanted > 0:
            donor = max(left, key=lambda name: left[name])
            rows = min(wanted, left[donor])
            left[donor] -= rows
            total, wanted = total - rows, wanted - rows
            loans.append((donor, helper, rows))
            if not left[donor]:
                del left[donor]
        if not left:
            break
    return loans


def _expect(member: Member, rows: int) -> None:
    member.state = replace(member.state, waiting_rows=max(member.state.waiting_rows + rows, 0))
