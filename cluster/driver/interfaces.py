"""What the dispatcher asks of a pool of workers and of the driver around it: a simulation stands in for both."""

from __future__ import annotations

from typing import Protocol

from cluster.driver.events import Event
from cluster.driver.ledger import Work
from cluster.driver.roster import Live
from cluster.messages import ShardRecord, ShardTask, WorkerInfo, WorkerState


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

    def lend(self, loan: int, donor: str, helper: str, count: int) -> None:
        """Let a worker decode up to ``count`` rows that wait on another.

        ``Helped``, if that can still be told, and then ``Returned`` or ``Lapsed`` follow.
        """
        ...

    def restore(self, loan: int, donor: str) -> None:
        """The rows of a loan wait on the donor again, if they are not back yet."""
        ...

    def stop_helping(self, loan: int, helper: str) -> None:
        """The rows of a loan are wanted no more."""
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


class Host(Protocol):
    """What the dispatcher leaves to the driver."""

    @property
    def identity(self) -> str:
        """Hash for the footers; known once a worker is admitted."""
        ...

    def admit(self, info: WorkerInfo) -> str | None:
        """Say why a worker may not take part, if so. The first one decides the run's device kind."""
        ...

    def finished(self, record: ShardRecord) -> None:
        """A part is published."""
        ...

    def observe(self, worker: str, state: WorkerState) -> None:
        """A worker's latest counters."""
        ...

    def say(self, message: str) -> None: ...

    def tick(self, live: Live, wanted: int) -> None:
        """Called a few times a second: show progress, and raise what must end the job."""
        ...


class Events(Protocol):
    """A queue of events; ``queue.SimpleQueue`` is one."""

    def get(self, block: bool = True, timeout: float | None = None) -> Event: ...
