"""Rows that a worker lends to others at the end of a job, when some have nothing left to start. Knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.worker.decode import DecodeLoop
from cluster.worker.openshard import OpenShard
from specfold.request import ERROR, Completion, Request


class Loans:
    """The rows of one worker that others decode. Their shards stay with it, and it alone writes the parts.

    A loan comes back once, with results or without; what comes later is ignored.
    """

    def __init__(self, decode: DecodeLoop) -> None:
        self._decode = decode
        self._lent: dict[int, list[tuple[OpenShard, Request]]] = {}
        self._over: set[int] = set()
        """Loans that were called off: Ray may let that call overtake the one that lends."""

    def lend(self, loan: int, count: int) -> list[Request]:
        """Up to ``count`` rows that have not begun; none if there are none any more."""
        if loan in self._over:
            return []
        self._lent[loan] = self._decode.lend(count)
        return [request for _, request in self._lent[loan]]

    def take_back(self, loan: int, completions: Sequence[Completion] | None) -> tuple[int, int]:
        """The results of a loan, or None: its rows wait here again, and stay. Returns rows done and failed by it."""
        rows = self._lent.pop(loan, [])
        if completions is None:
            self._over.add(loan)
            self._decode.restore(rows)
            return 0, 0
        self._decode.settle(rows, completions)
        return len(rows), sum(done.finish_reason == ERROR for done in completions) if rows else 0
