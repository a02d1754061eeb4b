"""What a pool of workers tells the dispatcher. Knows no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.messages import Failure, Flight, Receipt, WorkerInfo, WorkerState


@dataclass(frozen=True)
class Ready:
    """The worker's engine is up."""

    worker: str
    info: WorkerInfo


@dataclass(frozen=True)
class Room:
    """The worker has room for so many more shards."""

    worker: str
    shards: int = 1


@dataclass(frozen=True)
class Done:
    """A part is published."""

    worker: str
    receipt: Receipt


@dataclass(frozen=True)
class Failed:
    """The worker lives but cannot go on."""

    worker: str
    failure: Failure


@dataclass(frozen=True)
class Died:
    """The worker's process is gone. ``by_rows``: what it decoded may be the cause."""

    worker: str
    cause: str
    by_rows: bool


@dataclass(frozen=True)
class Examined:
    """The flight recorder of a dead worker: the rows in its engine and how many it had finished.

    None if it cannot be read: the node is gone, or the engine never came up.
    """

    worker: str
    flight: Flight | None


@dataclass(frozen=True)
class Progress:
    """An answer to ``Pool.ask``."""

    worker: str
    state: WorkerState


@dataclass(frozen=True)
class Helped:
    """The worker has done with rows of another, or was told to leave it: how many it decoded, and how many failed."""

    worker: str
    rows: int
    failed: int


@dataclass(frozen=True)
class Returned:
    """Rows that the worker had lent are back, with their results. ``failed``: those of them that failed."""

    worker: str
    loan: int
    rows: int
    failed: int


@dataclass(frozen=True)
class Lapsed:
    """A loan of the worker came to nothing; why is told by other events, if one of the two has ended."""

    worker: str
    loan: int


@dataclass(frozen=True)
class Wake:
    """New input or a signal: look again."""


Event = Ready | Room | Done | Failed | Died | Examined | Progress | Helped | Returned | Lapsed | Wake
Post = Callable[[Event], None]
