"""The engine's one thread: rows of several open shards in, finished shards out. Knows nothing of Ray or of files.

Shards share the engine's slots, so that one long row holds back its own shard and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from cluster.messages import RowKey, WorkerState
from cluster.worker.counters import LiveCounters
from cluster.worker.openshard import OpenShard
from specfold.config import DecodeConfig
from specfold.request import Completion, Request

AHEAD_S = 1.0
"""Rows that wait should last this long, by the engine's pace so far: a shard takes its time to arrive and to be
prepared. An engine that takes a second for a batch needs no more than a batch to wait; one that decodes thousands of
rows a second stood still half of the time with so few."""


class EngineLike(Protocol):
    """What the loop needs of an engine."""

    def stream(
        self, requests: Iterator[Request | None], config: DecodeConfig, batch_size: int
    ) -> Iterator[Completion]: ...


class Log(Protocol):
    """Told of each row before the engine gets it and after it is done."""

    def admit(self, key: RowKey) -> None: ...

    def release(self, key: RowKey, *, finished: bool = True) -> None: ...


class DecodeLoop:
    """Feeds an engine from open shards, first come first served, until closed.

    When the engine runs out of memory its rows are decoded again, half as many at a time from then on.

    ``on_finished(shard)`` is called from the loop's thread when a shard's last row is done, ``on_room()`` when
    ``wanted_rows`` is no longer 0, ``on_failure(error)`` once if the engine raises; the loop has then ended.
    """

    def __init__(
        self,
        engine: EngineLike,
        config: DecodeConfig,
        batch_size: int,
        log: Log,
        *,
        on_finished: Callable[[OpenShard], None],
        on_room: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine, self._config, self._batch_size, self._log = engine, config, batch_size, log
        self._asked_batch_size = batch_size
        self._on_finished, self._on_room, self._on_failure = on_finished, on_room, on_failure
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._shards: list[OpenShard] = []
        self._active: dict[tuple[int, int], tuple[RowKey, OpenShard, Request]] = {}
        self._alone = False
        """The row in the engine is to be decoded alone."""
        self._lonely = 0
        """Rows that wait to be."""
        self._closed = False
        self._waiting = 0
        self._enough = batch_size
        """Rows that should wait."""
        self._counters = LiveCounters()
        self._pulse = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, shard: OpenShard) -> None:
        """Open a shard; its rows follow those that wait already. A shard with nothing to decode is finished at once."""
        if not shard.missing:
            self._on_finished(shard)
            return
        with self._changed:
            self._shards.append(shard)
            self._waiting += shard.missing
            self._lonely += len(shard.alone)
            _, busy_s = self._counters.read_seconds()
            pace = self._counters.read()["rows_done"] / busy_s if busy_s else 0.0
            self._enough = max(self._batch_size, int(AHEAD_S * pace))
            self._changed.notify()

    def close(self) -> None:
        """Let the loop end after the rows that it has."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the loop has ended and let go of the engine's memory."""
        self._thread.join()

    @property
    def waiting_rows(self) -> int:
        return self._waiting

    def wanted_rows(self, coming: int = 0) -> int:
        """Rows that should wait beside those that do, and ``coming`` ones that are being prepared."""
        return max(self._enough - self._waiting - coming, 0)

    def lend(self, count: int) -> list[tuple[OpenShard, Request]]:
        """Give away up to ``count`` waiting rows, those that would begin last, each with its shard.

        They come back by ``settle`` or ``restore``; until then their shards are not finished.
        """
        lent: list[tuple[OpenShard, Request]] = []
        with self._lock:
            for shard in reversed(self._shards):
                while shard.lends and len(shard.waiting) > shard.staying and len(lent) < count:
                    lent.append((shard, shard.waiting.pop()))
            self._waiting -= len(lent)
        return lent

    def restore(self, rows: Sequence[tuple[OpenShard, Request]]) -> None:
        """Rows that were lent wait here again, in front, and stay: they may be what went wrong."""
        with self._changed:
            for shard, request in rows:
                shard.put_back(request)
            self._waiting += len(rows)
            self._changed.notify()

    def settle(self, rows: Sequence[tuple[OpenShard, Request]], completions: Sequence[Completion]) -> None:
        """Enter the results of rows that were lent. They count where they were decoded."""
        done = {RowKey(completion.row_id, completion.sample_id): completion for completion in completions}
        for shard, request in rows:
            with self._lock:
                key = RowKey(request.row_id, request.sample_id)
                finished = self._enter(shard, key, done[key])
            if finished:
                self._on_finished(shard)

    def drop(self, shard: OpenShard) -> None:
        """Forget a shard: its waiting rows do not begin, and what comes of those in the engine is thrown away."""
        with self._lock:
            if shard in self._shards:
                shard.dropped = True
                self._shards.remove(shard)
                self._waiting -= len(shard.waiting)

    def count_failed(self, rows: int) -> None:
        """Add rows that failed before decoding to the live counters."""
        with self._changed:
            self._counters.add_failed(rows)

    def state(self) -> WorkerState:
        """Live counters; ``pulse`` grows with every step of an engine that counts its steps, else with every row."""
        with self._lock:
            idle_s, busy_s = self._counters.read_seconds()
            counts = dict(self._counters.read())
        return WorkerState(
            loading=False,
            waiting_rows=self._waiting,
            active_rows=len(self._active),
            idle_s=idle_s,
            busy_s=busy_s,
            batch_size=self._batch_size,
            asked_batch_size=self._asked_batch_size,
            pulse=self._pulse + int(getattr(self._engine, "num_steps", 0)),
            **counts,
        )

    def _run(self) -> None:
        try:
            while not self._stream():
                self._take_back()
                self._batch_size = max(self._batch_size // 2, 1)
        except BaseException as error:
            self._on_failure(error)

    def _stream(self) -> bool:
        """Decode until closed; False if memory ran out and fewer rows at a time may still go."""
        try:
            for completion in self._engine.stream(self._requests(), self._config, self._batch_size):
                self._finish(completion)
        except Exception as error:
            if self._batch_size > 1 and _is_out_of_memory(error):
                return False
            raise
        return True

    def _take_back(self) -> None:
        """Let the rows in the engine wait again, in front of the others."""
        with self._changed:
            for key, shard, request in reversed(self._active.values()):
                self._log.release(key, finished=False)
                if shard.dropped:
                    continue
                if self._alone:
                    shard.alone.appendleft(request)
                else:
                    shard.put_back(request)
                self._waiting += 1
            self._lonely += len(self._active) if self._alone else 0
            self._active.clear()
            self._alone = False

    def _requests(self) -> Iterator[Request | None]:
        """What the engine pulls from: a row, or None to go on with those it has; blocks when it has none."""
        while True:
            request = self._next()
            if request is None and not self._active:
                with self._changed:
                    while (request := self._next()) is None and not self._closed:
                        self._changed.wait()
                if request is None:
                    return
            self._pulse += 1
            yield request

    def _next(self) -> Request | None:
        """Take the next row, if one may join those in the engine. A row to be decoded alone waits until it is empty."""
        with self._lock:
            if self._alone or (self._lonely and self._active):
                return None
            if self._lonely:
                shard = next(s for s in self._shards if s.alone)
                self._alone, self._lonely = True, self._lonely - 1
                return self._admit(shard, shard.alone.popleft())
            for shard in self._shards:
                while shard.waiting:
                    request = shard.waiting.popleft()
                    shard.staying = max(shard.staying - 1, 0)
                    if not self._adopt(shard, request):
                        return self._admit(shard, request)
            return None

    def _adopt(self, shard: OpenShard, request: Request) -> bool:
        """Whether the engine has the row already, for a shard that was dropped: its result is this shard's then."""
        key = RowKey(request.row_id, request.sample_id)
        if key not in self._active:
            return False
        self._active[key] = key, shard, request
        self._one_less_waits()
        return True

    def _admit(self, shard: OpenShard, request: Request) -> Request:
        key = RowKey(request.row_id, request.sample_id)
        self._log.admit(key)
        self._active[key] = key, shard, request
        if not self._counters.busy:
            self._counters.switch(True)
        self._one_less_waits()
        return request

    def _one_less_waits(self) -> None:
        self._waiting -= 1
        if self._waiting == self._enough - 1:
            self._on_room()

    def _finish(self, completion: Completion) -> None:
        with self._lock:
            key, shard, _ = self._active.pop((completion.row_id, completion.sample_id))
            self._log.release(key)
            self._alone = False
            if not self._active and not self._waiting:
                self._counters.switch(False)
            if shard.dropped:
                return
            self._counters.add(completion)
            finished = self._enter(shard, key, completion)
        if finished:
            self._on_finished(shard)

    def _enter(self, shard: OpenShard, key: RowKey, completion: Completion) -> bool:
        """Note a row's result; says whether it was the shard's last."""
        shard.results[key] = completion
        shard.missing -= 1
        if not shard.missing:
            self._shards.remove(shard)
        return not shard.missing


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's own error, or torch's by its name: this module need not import torch."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
