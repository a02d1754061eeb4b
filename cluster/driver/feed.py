"""The input as work for workers: read ahead by a thread, a bounded number of shards at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from cluster.driver.ledger import Work
from cluster.input.shards import RawShard
from cluster.output.resume import Survey

READ_AHEAD = 8


class InputFeed:
    """Shards that are still to be run. ``wake`` is called when one has arrived or the input has ended."""

    def __init__(self, shards: Iterator[RawShard], survey: Survey, wake: Callable[[], None]) -> None:
        self._shards, self._survey, self._wake = shards, survey, wake
        self._queue: queue.Queue[Work | Exception | None] = queue.Queue(READ_AHEAD)
        self._closed = threading.Event()
        self._next: Work | None = None
        self._ended = False
        self.num_shards = 0
        """Shards seen so far, those that need no work included."""
        self._thread = threading.Thread(target=self._read, name="input", daemon=True)
        self._thread.start()

    def take(self) -> Work | None:
        """The next shard; None if there is none at the moment. Raises what reading the input raised."""
        self._look()
        work, self._next = self._next, None
        return work

    @property
    def exhausted(self) -> bool:
        self._look()
        return self._ended and self._next is None

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _look(self) -> None:
        if self._next is not None or self._ended:
            return
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, Exception):
            raise item
        self._next, self._ended = item, item is None

    def _read(self) -> None:
        try:
            for raw in self._shards:
                self.num_shards = raw.index + 1
                if self._survey.needs(raw.index):
                    keep = raw.index in self._survey.retry
                    self._offer(Work(raw.index, raw.first_row, raw.num_rows, raw, keep))
                if self._closed.is_set():
                    return
            self._offer(None)
        except Exception as error:
            self._offer(error)

    def _offer(self, item: Work | Exception | None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.5)
            except queue.Full:
                continue
            self._wake()
            return
