"""A shard on a worker: which of its rows wait, and what is done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cluster.messages import RowKey
from specfold.request import Completion, Request


@dataclass
class OpenShard:
    """A shard being decoded: what waits, what is done."""

    index: int
    waiting: deque[Request]
    alone: deque[Request] = field(default_factory=deque)
    """Rows that must have the engine to themselves; they go first."""
    results: dict[RowKey, Completion] = field(default_factory=dict)
    missing: int = 0
    """Rows that have no result yet."""
    lends: bool = True
    """Rows that wait may be decoded by another worker."""
    staying: int = 0
    """So many of them, those in front, may not: they have been in an engine, or on another worker that may have ended
    because of them."""
    dropped: bool = False
    """Nobody wants its results any more."""

    def __post_init__(self) -> None:
        self.missing = len(self.waiting) + len(self.alone)

    def put_back(self, request: Request) -> None:
        """A row that has been in an engine, or on another worker, goes first, and stays."""
        self.waiting.appendleft(request)
        self.staying += 1
