"""Workers as Ray actors: started, fed, watched and ended. What happens to them arrives as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.driver.events import (
    Died,
    Done,
    Event,
    Examined,
    Failed,
    Helped,
    Lapsed,
    Post,
    Progress,
    Ready,
    Returned,
    Room,
)
from cluster.driver.ledger import Work
from cluster.input.shards import RawShard
from cluster.messages import Failure, Help, Receipt, ShardTask, WorkerInfo, WorkerPlan, WorkerState
from cluster.output.lease import birth
from cluster.worker.metrics import WorkerMetrics
from cluster.worker.recorder import recorder_path, take_flight
from cluster.worker.worker import Worker

_RETRY_S = 1.0
_METRICS_S = 1.0
_SMALL_BYTES = 50_000
"""Rows of a shard that travel within the call: the object store costs a millisecond, and Ray takes up to 100 kB."""
_NOT_BY_ROWS = ("SIGTERM", "node has died", "INTENDED", "preempt", "node was terminated")
"""Signs in Ray's report of a death that no row caused it."""


class WorkerActor(Worker):
    """A worker as Ray sees it: with its node's id and with metrics."""

    def __init__(self, name: str, plan: WorkerPlan) -> None:
        super().__init__(name, ray.get_runtime_context().get_node_id(), plan)
        self._metrics = WorkerMetrics(name, plan.output)

    async def start(self) -> WorkerInfo | Failure:
        info = await super().start()
        self._reporting = asyncio.create_task(self._report())
        return info

    async def _report(self) -> None:
        while True:
            self._metrics.update(await self.progress())
            await asyncio.sleep(_METRICS_S)


class RayPool:
    """One actor per worker, never restarted by Ray: a new one might not be what the dispatcher thinks it is.

    ``resources`` are the options that place an actor (``num_cpus``, ``num_gpus``). Answers come from Ray's threads.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        post: Post,
        *,
        resources: dict[str, float],
        runtime_env: dict[str, Any],
        count: Callable[[], int],
    ) -> None:
        self._plan, self._post, self._count = ray.put(plan), post, count
        self._token = plan.token
        self._resources, self._runtime_env = resources, runtime_env
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._infos: dict[str, WorkerInfo] = {}
        self._namespace = f"specfold-{plan.token}"

    def wanted(self) -> int:
        return self._count()

    def spawn(self, worker: str) -> None:
        actor_class: Any = ray.remote(WorkerActor)
        actor = actor_class.options(
            name=worker,
            namespace=self._namespace,
            max_restarts=0,
            max_task_retries=0,
            runtime_env=self._runtime_env,
            **self._resources,
        ).remote(worker, self._plan)
        self._actors[worker] = actor
        self._watch(worker, actor.start.options(name=f"{worker} load").remote(), partial(self._started, worker))

    def submit(self, worker: str, work: Work, task: ShardTask) -> None:
        if not isinstance(work.payload, ray.ObjectRef) and not _is_small(work.payload):
            work.payload = ray.put(work.payload)
        actor = self._actors[worker]
        ref: Any = actor.run_shard.options(name=f"shard {work.index}").remote(work.payload, task)
        self._watch(worker, ref, partial(_finished, worker))

    def invite(self, worker: str, assigned: int) -> None:
        ref: Any = self._actors[worker].room.options(name=f"{worker} room").remote(assigned)
        self._watch(worker, ref, lambda shards: Room(worker, shards) if shards else None)

    def lend(self, loan: int, donor: str, helper: str, count: int) -> None:
        """The rows and their results go from worker to worker, not through the driver.

        Each step begins when the one before is over: a call whose arguments are not there yet would wait on the worker.
        That one of the two has ended is found out by the calls that watch over it.
        """
        owner, other = self._actors[donor], self._actors[helper]
        rows: Any = owner.lend.options(name=f"lend to {helper}").remote(loan, count)
        outcome, results = other.help.options(name=f"help {donor}", num_returns=2).remote(loan, rows)

        def give_back(future: Future[Any]) -> None:
            help = None if future.exception() else future.result()
            if not isinstance(help, Help) or not ray.is_initialized():
                self._post(Lapsed(donor, loan))
                return
            if help.failure is not None:
                self._post(Failed(helper, help.failure))
            back: Any = owner.take_back.options(name=f"take back from {helper}").remote(loan, results)
            back.future().add_done_callback(partial(tell, help))

        def tell(help: Help, future: Future[Any]) -> None:
            answer = None if future.exception() else future.result()
            # Both at once: in between the rows would count nowhere.
            self._post(Helped(helper, help.rows, help.failed))
            self._post(Lapsed(donor, loan) if answer is None else Returned(donor, loan, *answer))

        outcome.future().add_done_callback(give_back)

    def restore(self, loan: int, donor: str) -> None:
        if actor := self._actors.get(donor):
            actor.take_back.options(name="take back").remote(loan, None)

    def stop_helping(self, loan: int, helper: str) -> None:
        if actor := self._actors.get(helper):
            actor.stop_helping.options(name="stop helping").remote(loan)

    def forget(self, work: Work) -> None:
        work.payload = None

    def ask(self, worker: str) -> None:
        ref: Any = self._actors[worker].progress.options(name=f"{worker} progress").remote()
        self._watch(worker, ref, partial(_answered, worker))

    def release(self, worker: str) -> None:
        actor = self._actors.pop(worker)
        actor.drain.remote()
        actor.__ray_terminate__.remote()

    def kill(self, worker: str) -> None:
        """End the actor, and its process by signal: a stopped process does not hear what Ray asks of it."""
        actor = self._actors.pop(worker)
        ray.kill(actor)
        info = self._infos.get(worker)
        if info:
            self._on_node(info, f"end {worker}", end_process, info.pid, info.born)

    def examine(self, worker: str) -> None:
        self._actors.pop(worker, None)
        ref = self._on_node(self._infos[worker], f"examine {worker}", take_flight, recorder_path(self._token, worker))

        def tell(future: Future[Any]) -> None:
            error = future.exception()
            self._post(Examined(worker, None if error else future.result()))

        ref.future().add_done_callback(tell)

    def close(self) -> None:
        """End all actors without waiting."""
        for worker in list(self._actors):
            ray.kill(self._actors.pop(worker))

    def _on_node(self, info: WorkerInfo, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the worker's node, or nowhere."""
        task: Any = ray.remote(call)
        place = NodeAffinitySchedulingStrategy(info.node_id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": place, "runtime_env": self._runtime_env}
        return task.options(name=name, **options).remote(*args)

    def _started(self, worker: str, answer: Any) -> Event | None:
        if isinstance(answer, WorkerInfo):
            self._infos[worker] = answer
            return Ready(worker, answer)
        return Failed(worker, answer) if isinstance(answer, Failure) else None

    def _watch(self, worker: str, ref: Any, to_event: Callable[[Any], Event | None]) -> None:
        """Post the event of a call's answer, or how the call failed. A call cut off by SIGTERM answers None."""

        def tell(future: Future[Any]) -> None:
            error = future.exception()
            event = to_event(future.result()) if error is None else None
            if event is not None:
                self._post(event)
            elif worker in self._actors:
                self._explain(worker, error)

        ref.future().add_done_callback(tell)

    def _explain(self, worker: str, error: BaseException | None) -> None:
        if error is None or isinstance(error, ActorUnavailableError):
            # Not yet known what happened; Ray reports a lost connection before it knows of a death.
            timer = threading.Timer(_RETRY_S, self._probe, (worker,))
            timer.daemon = True
            timer.start()
        elif isinstance(error, RayTaskError | RuntimeEnvSetupError) or _never_lived(error):
            self._post(Failed(worker, Failure(f"{worker} failed: {_last_error(error)}", fatal=True)))
        else:
            self._post(Died(worker, _cause(error), by_rows=_may_be_by_rows(error)))

    def _probe(self, worker: str) -> None:
        """Ask a worker that lost a call whether it lives. If it does, it is ended all the same: who knows its state."""
        actor = self._actors.get(worker)
        if actor is None or not ray.is_initialized():
            return

        def tell(future: Future[Any]) -> None:
            error = future.exception()
            if error is None and isinstance(future.result(), WorkerState):
                self._post(Failed(worker, Failure("the connection to it was lost", by_rows=False)))
            elif worker in self._actors:
                self._explain(worker, error)

        actor.progress.remote().future().add_done_callback(tell)


def _is_small(raw: RawShard) -> bool:
    return isinstance(raw.payload, bytes) and len(raw.payload) <= _SMALL_BYTES


def end_process(pid: int, born: str | None) -> None:
    """SIGKILL a worker's process on this node, if the number is still its own."""
    if birth(pid) == born:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _finished(worker: str, answer: Any) -> Event | None:
    if isinstance(answer, Receipt):
        return Done(worker, answer)
    return Failed(worker, answer) if isinstance(answer, Failure) else None


def _answered(worker: str, answer: Any) -> Event | None:
    return Progress(worker, answer) if isinstance(answer, WorkerState) else None


def _may_be_by_rows(error: BaseException) -> bool:
    if not isinstance(error, RayActorError):
        return False
    text = str(error)
    return not getattr(error, "preempted", False) and not any(sign in text for sign in _NOT_BY_ROWS)


def _cause(error: BaseException) -> str:
    """The informative part of Ray's long report."""
    text = " ".join(str(error).split())
    if "SIGTERM" in text:
        return "ended by SIGTERM"
    if "node has died" in text:
        return "its node is gone"
    _, found, detail = text.partition("Worker exit detail: ")
    return detail.split(". Some common causes")[0] if found else text[:300]


def _never_lived(error: BaseException) -> bool:
    """Whether the actor's class could not even be made there, which no other worker would do better."""
    return any(sign in str(error) for sign in ("creation task", "failed to import on the worker"))


def _last_error(error: BaseException) -> str:
    """The last line of a report that names an exception, else its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b: ", line)]
    return (named or lines or [type(error).__name__])[-1].rstrip(".") + "."
