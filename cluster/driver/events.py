"""What a pool of workers tells the dispatcher, and what the dispatcher asks of a pool. Knows no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.driver.ledger import Work
from cluster.messages import Failure, Flight, Receipt, ShardTask, WorkerInfo, WorkerState


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
class Wake:
    """New input or a signal: look again."""


Event = Ready | Room | Done | Failed | Died | Examined | Progress | Wake
Post = Callable[[Event], None]


class Pool(Protocol):
    """Workers by name. Every call returns at once; answers come as events."""

    def spawn(self, worker: str) -> None:
        """Start a worker: ``Ready``, ``Failed`` or ``Died`` follows, perhaps after a wait for resources."""
        ...

    def submit(self, worker: str, work: Work, task: ShardTask) -> None:
        """Give a worker a shard: ``Done``, ``Failed`` or ``Died`` follows."""
        ...

    def invite(self, worker: str, assigned: int) -> None:
        """Ask a worker for ``Room``, which it has once all of its ``assigned`` shards have arrived."""
        ...

    def forget(self, work: Work) -> None:
        """The shard's rows are needed no longer."""
        ...

    def ask(self, worker: str) -> None:
        """Ask for ``Progress``."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker's process, also one that does not answer. No event follows."""
        ...

    def release(self, worker: str) -> None:
        """Let an idle worker go. No event follows."""
        ...

    def examine(self, worker: str) -> None:
        """Read a dead worker's flight recorder: ``Examined`` follows."""
        ...

    def wanted(self) -> int:
        """How many workers the cluster has room for now."""
        ...
