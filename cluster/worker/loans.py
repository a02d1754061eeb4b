"""Rows of one worker that another decodes, at the end of a job when some have none left to start. Knows no Ray.

Ray lets a call overtake one that waits for its arguments, so a loan may be called off before it has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from cluster.messages import Failure, Help
from cluster.worker.decode import DecodeLoop
from cluster.worker.openshard import OpenShard
from specfold.request import ERROR, Completion, Request


class Loans:
    """The rows of this worker that others decode. Their shards stay here, and their parts are written here.

    A loan comes back once, with results or without; what comes later is ignored.
    """

    def __init__(self, decode: DecodeLoop) -> None:
        self._decode = decode
        self._lent: dict[int, list[tuple[OpenShard, Request]]] = {}
        self._called_off: set[int] = set()

    def lend(self, loan: int, count: int) -> list[Request]:
        """Up to ``count`` rows that have not begun; none if there are none any more."""
        if loan in self._called_off:
            return []
        self._lent[loan] = self._decode.lend(count)
        return [request for _, request in self._lent[loan]]

    def take_back(self, loan: int, completions: Sequence[Completion] | None) -> tuple[int, int]:
        """The results of a loan, or None: its rows wait here again, and stay. Returns rows done and failed by it."""
        rows = self._lent.pop(loan, [])
        if completions is None:
            self._called_off.add(loan)
            self._decode.restore(rows)
            return 0, 0
        if not rows:
            return 0, 0
        self._decode.settle(rows, completions)
        return len(rows), _num_failed(completions)


class Helping:
    """The rows of others that this worker decodes, a shard of its own for each loan.

    ``decoded(shard)`` returns once the engine has done with a shard, ``drop(shard)`` makes it return at once.
    """

    def __init__(
        self, decoded: Callable[[OpenShard], Awaitable[Failure | None]], drop: Callable[[OpenShard], None]
    ) -> None:
        self._decoded, self._drop = decoded, drop
        self._shards: dict[int, OpenShard] = {}
        self._called_off: set[int] = set()

    async def help(self, loan: int, requests: Sequence[Request]) -> tuple[Help, list[Completion] | None]:
        """Decode a loan's rows: how that went, and their results if all of them are there."""
        if loan in self._called_off:
            return Help(0, 0), None
        # Numbers below 0 stand beside the shards' own.
        shard = self._shards[loan] = OpenShard(-1 - loan, deque(requests), lends=False)
        failure = await self._decoded(shard)
        del self._shards[loan]
        done = list(shard.results.values())
        return Help(len(done), _num_failed(done), failure), None if shard.missing else done

    def stop(self, loan: int) -> None:
        """A loan's rows are wanted no more. Those that come late are not begun: their shard, which runs again, may be
        here by then."""
        self._called_off.add(loan)
        if loan in self._shards:
            self._drop(self._shards[loan])


def _num_failed(completions: Sequence[Completion]) -> int:
    return sum(completion.finish_reason == ERROR for completion in completions)
